"""Removes superseded commits and leftovers after each commit. `retention` decides what stays."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from elastic_ddp.checkpoint.confirmed_read import check_answers
from elastic_ddp.checkpoint.manifest import (
    Commit,
    attempt_of,
    committed_steps,
    manifest_key,
    parse_set_aside,
    step_of_attempt,
)
from elastic_ddp.checkpoint.metrics import Measurement, measurements
from elastic_ddp.checkpoint.reader import read_manifest
from elastic_ddp.checkpoint.record import different_runs
from elastic_ddp.checkpoint.retention import Retention, kept, removable
from elastic_ddp.errors import CheckpointError, StorageError, shorten
from elastic_ddp.storage.folder import Upload
from elastic_ddp.storage.local import is_temporary
from elastic_ddp.storage.storage import CLOCK_PREFIX, Storage

_log = logging.getLogger(__name__)

ORPHAN_AGE_S = 24 * 3600.0
"""An attempt without a manifest is removed after this long without a write: a worker writes an object in minutes."""
_FAILING_S = 60.0
"""After removals have failed for this long, the storage is considered unavailable."""


class Housekeeping:
    """Removes what a run does not keep, commit after commit, for one saver."""

    def __init__(self, retention: Retention) -> None:
        self._retention = retention
        self._known: dict[int, tuple[str, Measurement | None]] = {}
        """Complete commits by step: the folder of the attempt, and the value of the metric. Their manifests are not
        read again, as the number of kept commits may grow with the run."""
        self._doubtful: set[int] = set()
        """Steps whose commit could not be read, was bad, or belongs to another run. They stay."""

    def tidy(self, storage: Storage, newest: Commit, fence: Callable[[], None], is_current: Callable[[], bool]) -> None:
        """Removes what is not kept now that `newest` is complete. For the arguments see `CheckpointStore.complete`.

        Raises:
            StorageError: the storage failed; the next call removes the rest.
            Exception: what the fence raises.
        """
        uploads = unfinished_uploads(storage)
        sizes = storage.sizes()
        # After the listing: if this saver may still commit, and its generation is running, the listing has nothing of
        # later generations. So attempts of earlier steps without a manifest are dead: every rank ends one save before
        # it begins the next. A worker that has left may still be writing one; before it commits, it checks that its
        # objects are there. Attempts of this step and later ones, from before a restore, are removed by their age.
        fence()
        if not is_current():
            return
        steps = [step for step in committed_steps(sizes) if step <= newest.step]
        self._doubtful.discard(newest.step)
        read = self._read_newest(storage, newest, steps, sizes)
        older = self._older(storage, newest, steps, read, sizes)
        self._known = {commit.step: self._entry(commit) for commit in read} | older
        measured = {step: measurement for step, (_, measurement) in self._known.items()}
        staying = kept(steps, measured, self._retention) | self._doubtful
        keys = [*sizes, *(upload.key for upload in uploads if attempt_of(upload.key) is not None)]
        removal = removable(keys, staying, read, newest=newest.step, dead_before=newest.step)
        fence()  # reading manifests may have taken long
        if not is_current():
            return
        # After the fence: a worker that has left may have committed since the listing.
        dead, orphans = (without_manifest(storage, folders, steps) for folders in (removal.dead, removal.orphans))
        abort_uploads(ORPHAN_AGE_S, storage, uploads, dead)
        try:
            remove(storage, removal.manifests, [*dead, *clock_folders(sizes)])
        finally:
            remove(storage, [], older_than(ORPHAN_AGE_S, storage, orphans))

    def _read_newest(
        self, storage: Storage, newest: Commit, steps: Iterable[int], sizes: Mapping[str, int]
    ) -> list[Commit]:
        """Returns the newest complete commits, `retention.last` of them.

        It reads the newest one, too: a commit that the storage has lost must not displace good ones.
        """
        read: list[Commit] = []
        for step in steps:
            if len(read) < self._retention.last:
                commit = self._complete(storage, newest, step, sizes)
                read += [commit] if commit is not None else []
        if not read:
            raise StorageError(f"neither {newest.key} nor an earlier commit can be read")
        return read

    def _older(
        self,
        storage: Storage,
        newest: Commit,
        steps: Iterable[int],
        read: Collection[Commit],
        sizes: Mapping[str, int],
    ) -> dict[int, tuple[str, Measurement | None]]:
        """Returns the complete commits before those, if any of them may stay."""
        if not self._retention.keeps_older:
            return {}
        older = {}
        only = only_attempts(sizes)
        oldest = min(commit.step for commit in read)
        for step in steps:
            if step < oldest:
                if step in self._known and self._known[step][0] == only.get(step):
                    older[step] = self._known[step]
                elif (commit := self._complete(storage, newest, step, sizes)) is not None:
                    older[step] = self._entry(commit)
        return older

    def _complete(self, storage: Storage, newest: Commit, step: int, sizes: Mapping[str, int]) -> Commit | None:
        """Returns the commit of a step if it is complete and of the same run as the newest."""
        if step in self._doubtful:
            return None
        try:
            commit = complete_commit(storage, step, sizes)
            if names := different_runs(newest.record, commit.record):
                raise CheckpointError(f"{commit.key} belongs to another run (different {shorten(names, 5)})")
            return commit
        except StorageError as error:
            if not isinstance(error, CheckpointError):
                check_answers(storage, manifest_key(step))
            _log.warning("step %d and all attempts at it stay: %s", step, error)
            self._doubtful.add(step)
        except FileNotFoundError:
            pass
        return None

    def _entry(self, commit: Commit) -> tuple[str, Measurement | None]:
        return commit.prefix, measurements(commit.record).get(self._retention.metric or "")


def complete_commit(storage: Storage, step: int, sizes: Mapping[str, int]) -> Commit:
    """Returns the commit of a step, and checks that it is complete.

    Args:
        sizes: sizes of the objects by key, as listed before. Missing ones are listed again: a listing may be stale, on
            network mounts in particular.

    Raises:
        CheckpointError: the commit is not complete.
        FileNotFoundError: there is none.
        StorageError: its manifest cannot be read.
    """
    key = manifest_key(step)
    try:
        commit = read_manifest(storage, key)
    except CheckpointError:
        commit = read_manifest(storage, key)  # bits flip in transit, and mounts can be stale
    try:
        commit.check_present(sizes)
    except CheckpointError:
        commit.check_present(storage.sizes(commit.prefix))
    return commit


def without_manifest(storage: Storage, prefixes: Iterable[str], listed: Collection[int]) -> list[str]:
    """Returns the folders of attempts at steps that have no manifest, or one that was listed.

    A manifest that was not listed is looked up by its key: a listing may be stale.

    Raises:
        StorageError: the storage failed.
    """
    folders = []
    for prefix in prefixes:
        step = step_of_attempt(prefix)
        if step not in listed:
            try:
                storage.size(manifest_key(step))
            except FileNotFoundError:
                pass
            else:
                _log.warning("%s stays: its step has a manifest that was not listed", prefix)
                continue
        folders.append(prefix)
    return folders


def only_attempts(keys: Iterable[str]) -> dict[int, str]:
    """Returns, by step, the folder of the attempt where there is only one: a commit at that step is that attempt's."""
    attempts: dict[int, set[str]] = defaultdict(set)
    for step, prefix in filter(None, map(attempt_of, keys)):
        attempts[step].add(prefix)
    return {step: prefixes.pop() for step, prefixes in attempts.items() if len(prefixes) == 1}


def older_than(
    age_s: float, storage: Storage, prefixes: Collection[str], now: Callable[[], float] | None = None
) -> list[str]:
    """Returns those folders in which nothing was written for `age_s` seconds.

    Args:
        now: the current time. By default the storage's own clock, which dates the writes, too; to read it writes a
            small object.

    Raises:
        StorageError: the storage failed, or does not date its objects.
    """
    if not prefixes:
        return []
    at_present = (now or storage.now)()
    written = {prefix: storage.last_modified(prefix) for prefix in prefixes}
    return sorted(prefix for prefix, at in written.items() if at is not None and at_present - at > age_s)


def clock_folders(keys: Iterable[str]) -> list[str]:
    """Returns the folders that a process left which was killed in `Storage.now`."""
    return sorted({key.partition("/")[0] for key in keys if key.startswith(CLOCK_PREFIX)})


def unfinished_uploads(storage: Storage) -> Sequence[Upload]:
    """Returns uploads that were begun and not completed; none if the storage does not permit listing them."""
    try:
        return storage.uploads()
    except StorageError as error:
        _log.debug("cannot list unfinished uploads: %s", error)
        return []


def abort_uploads(age_s: float, storage: Storage, uploads: Sequence[Upload], dead: Collection[str] = ()) -> None:
    """Aborts uploads to dead attempts, and a run's other uploads that are older than `age_s` seconds.

    A failure is ignored: the storage may not permit it, and nothing depends on it.
    """
    try:
        now = storage.now() if uploads else 0.0
        for upload in uploads:
            attempt = attempt_of(upload.key)
            if attempt is None and parse_set_aside(upload.key) is None and not is_temporary(upload.key):
                continue
            if now - upload.started_at > age_s or (attempt is not None and attempt[1] in dead):
                storage.abort(upload)
    except StorageError as error:
        _log.debug("unfinished uploads stay: %s", error)


def remove(storage: Storage, manifests: Iterable[str], prefixes: Iterable[str]) -> None:
    """Removes manifests, then folders: wherever it is interrupted, no manifest lists missing objects.

    What cannot be removed, because of a legal hold for example, does not stop the rest.

    Raises:
        StorageError: the first failure, raised after all others were tried, or after a minute of failures. If it
            concerns a manifest, no folder is removed.
    """
    for delete, names in ((storage.delete, manifests), (storage.delete_tree, prefixes)):
        first, failing_s = None, 0.0
        for name in names:
            begun = time.monotonic()
            try:
                delete(name)
            except StorageError as error:
                first = first or error
                failing_s += time.monotonic() - begun
                if failing_s > _FAILING_S:
                    break
        if first is not None:
            raise first
