"""Removing what is not kept, by the saver behind each commit."""

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
    set_aside,
    step_of_attempt,
)
from elastic_ddp.checkpoint.metrics import Measurement, measurements
from elastic_ddp.checkpoint.reader import read_manifest
from elastic_ddp.checkpoint.record import different_runs
from elastic_ddp.checkpoint.retention import Retention, kept, removable
from elastic_ddp.errors import CheckpointError, StorageError
from elastic_ddp.storage.folder import Upload
from elastic_ddp.storage.local import is_temporary
from elastic_ddp.storage.storage import CLOCK_PREFIX, Storage

_log = logging.getLogger(__name__)

ORPHAN_AGE_S = 24 * 3600.0
"""An attempt that no manifest stands for is nobody's any more when nothing of it was written for so long: an object is
written within minutes, or given up."""
LOOK_AGAIN_S = 3600.0
"""After so long, what could not be read, or was bad, is looked at once more: that may take minutes."""
_IN_VAIN_S = 60.0
"""After so many seconds of failing, the storage is away rather than some of what is in it held."""


class Housekeeping:
    """What one saver of a run removes, commit after commit. `clock` is in seconds."""

    def __init__(self, retention: Retention, clock: Callable[[], float] = time.monotonic) -> None:
        self._retention, self._clock = retention, clock
        self._known: dict[int, tuple[str, Measurement | None]] = {}
        """Complete commits that were there the last time, each with the folder of its attempt. Their manifests are not
        read again: what is kept for good grows for as long as the run does."""
        self._left: dict[int, float] = {}
        """Steps whose manifest could not be read, those with a bad commit that might be one to keep for good, or with
        another run's, and when they were looked at."""

    def tidy(self, storage: Storage, newest: Commit, fence: Callable[[], None], is_current: Callable[[], bool]) -> None:
        """Removes what is not kept once a commit is complete. See `CheckpointStore.complete` for the arguments.

        Raises:
            StorageError: the storage failed; what is left goes with the next commit.
            Exception: what the fence raises.
        """
        uploads = unfinished(storage)
        sizes = storage.sizes()
        # Asked after the listing: if nobody has replaced this saver, and its generation goes on, nothing in that is of
        # a generation that came after it. So of attempts that no manifest stands for, those of earlier steps are dead:
        # a rank ends one save before it begins the next, and all ranks have begun this one. A worker that has left may
        # still be writing one; it looks whether all is there before it commits. Those of this step and of later ones,
        # which runs have left that went back, go by age.
        fence()
        if not is_current():
            return
        steps = [step for step in committed_steps(sizes) if step <= newest.step]
        self._left.pop(newest.step, None)  # it was written, or read, just now
        read = self._read_last(storage, newest, steps, sizes)
        older = self._older(storage, newest, steps, read, sizes)
        self._known = {commit.step: self._as_known(commit) for commit in read} | older
        measured = {step: measurement for step, (_, measurement) in self._known.items()}
        staying = kept(steps, measured, self._retention) | self._left.keys()
        keys = [*sizes, *(each.key for each in uploads if attempt_of(each.key) is not None)]
        going = removable(keys, staying, read, newest=newest.step, dead_before=newest.step)
        dead, orphans = (without_manifest(storage, each, steps) for each in (going.dead, going.orphans))
        fence()  # to look at commits may have taken long
        if not is_current():
            return
        # Once more: a worker that has left may have committed meanwhile.
        dead, orphans = (without_manifest(storage, each, steps) for each in (dead, orphans))
        abort_uploads(ORPHAN_AGE_S, storage, uploads, dead)
        try:
            remove(storage, going.manifests, [*dead, *clocks(sizes)])
        finally:
            remove(storage, [], older_than(ORPHAN_AGE_S, storage, orphans))

    def _read_last(
        self, storage: Storage, newest: Commit, steps: Iterable[int], sizes: Mapping[str, int]
    ) -> list[Commit]:
        """The complete ones among the newest, as many as stay for being that. The newest one, too, is read: if the
        storage has not kept it as it said, it pushes out no good ones."""
        read: list[Commit] = []
        for step in steps:
            if len(read) < self._retention.last:
                commit = self._complete(storage, newest, step, sizes)
                read += [commit] if commit is not None else []
        if not read:
            raise StorageError(f"{newest.key} is not there, or cannot be read, nor any before it")
        return read

    def _older(
        self,
        storage: Storage,
        newest: Commit,
        steps: Iterable[int],
        read: Collection[Commit],
        sizes: Mapping[str, int],
    ) -> dict[int, tuple[str, Measurement | None]]:
        """The complete ones before those, if any of them can stay."""
        found = {}
        alone = attempts_alone(sizes)
        oldest = min(commit.step for commit in read)
        for step in steps if self._retention.looks_back else ():
            if step < oldest:
                if step in self._known and self._known[step][0] == alone.get(step):
                    found[step] = self._known[step]
                elif (commit := self._complete(storage, newest, step, sizes)) is not None:
                    found[step] = self._as_known(commit)
        return found

    def _complete(self, storage: Storage, newest: Commit, step: int, sizes: Mapping[str, int]) -> Commit | None:
        """The commit of a step if it is known to be complete, and of the run of the newest. One that cannot be read may
        be complete: it counts for nothing, and stays, as does another run's, and a bad one where others than the newest
        are kept."""
        looked_at = self._left.get(step)
        if looked_at is not None and self._clock() - looked_at < LOOK_AGAIN_S:
            return None
        self._left.pop(step, None)
        try:
            commit = complete_commit(storage, step, sizes)
            if not different_runs(newest.record, commit.record):
                return commit
            _log.warning("step %d stays, with all that was written at it: its commit is another run's", step)
            self._left[step] = self._clock()
        except StorageError as error:
            if not isinstance(error, CheckpointError):
                check_answers(storage, manifest_key(step))
            if self._retention.looks_back or not isinstance(error, CheckpointError):
                _log.warning("step %d stays, with all that was written at it: %s", step, error)
                self._left[step] = self._clock()
        except FileNotFoundError:
            pass
        return None

    def _as_known(self, commit: Commit) -> tuple[str, Measurement | None]:
        return commit.prefix, measurements(commit.record).get(self._retention.metric or "")


def complete_commit(storage: Storage, step: int, sizes: Mapping[str, int]) -> Commit:
    """The commit of a step, which is complete.

    Args:
        sizes: of objects, by key, as they were listed. What is missing there is looked for once more: a listing may
            be of some time ago, on network mounts above all.

    Raises:
        CheckpointError: it is not complete.
        FileNotFoundError: there is none.
        StorageError: the manifest cannot be read.
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
    """Folders of attempts at steps that no manifest stands for, unless that was listed and is known. One that was not
    is asked for by its name: a listing may be of some time ago.

    Raises:
        StorageError: the storage failed.
    """
    found = []
    for prefix in prefixes:
        step = step_of_attempt(prefix)
        if step not in listed:
            try:
                storage.size(manifest_key(step))
            except FileNotFoundError:
                pass
            else:
                _log.warning("%s stays: its step has a manifest, which was not listed", prefix)
                continue
        found.append(prefix)
    return found


def attempts_alone(keys: Iterable[str]) -> dict[int, str]:
    """By step, the folder of an attempt beside which there is no other: a commit there can be of no other, either."""
    found: dict[int, set[str]] = defaultdict(set)
    for step, prefix in filter(None, map(attempt_of, keys)):
        found[step].add(prefix)
    return {step: prefixes.pop() for step, prefixes in found.items() if len(prefixes) == 1}


def older_than(
    age_s: float, storage: Storage, prefixes: Collection[str], now: Callable[[], float] | None = None
) -> list[str]:
    """Those of some folders in which nothing was written for so long. The writing and the present are both dated by
    the storage's clock, which may differ from this machine's, unless another is given; to ask it writes something.

    Raises:
        StorageError: the storage failed, or does not date what is in it.
    """
    if not prefixes:
        return []
    at_present = (now or storage.now)()
    written = {prefix: storage.last_modified(prefix) for prefix in prefixes}
    return sorted(prefix for prefix, at in written.items() if at is not None and at_present - at > age_s)


def clocks(keys: Iterable[str]) -> list[str]:
    """Folders that `Storage.now` left, as its process was killed. No other saver asks for the time now, or need not."""
    return sorted({key.partition("/")[0] for key in keys if key.startswith(CLOCK_PREFIX)})


def unfinished(storage: Storage) -> Sequence[Upload]:
    """Objects that nobody has finished writing. A storage may not let this user ask for them, and nothing depends on
    it."""
    try:
        return storage.uploads()
    except StorageError as error:
        _log.debug("uploads that nobody finished are not known: %s", error)
        return []


def abort_uploads(age_s: float, storage: Storage, uploads: Sequence[Upload], dead: Collection[str] = ()) -> None:
    """Has what was written removed of objects of dead attempts, and of others whose writers died so long ago, but for
    what is none of a run's. A storage may not let this user do that, either."""
    try:
        now = storage.now() if uploads else 0.0
        for each in uploads:
            attempt = attempt_of(each.key)
            if attempt is None and set_aside(each.key) is None and not is_temporary(each.key):
                continue
            if now - each.started_at > age_s or (attempt is not None and attempt[1] in dead):
                storage.abort(each)
    except StorageError as error:
        _log.debug("uploads that nobody finished are left: %s", error)


def remove(storage: Storage, manifests: Iterable[str], prefixes: Iterable[str]) -> None:
    """Manifests first: wherever it is interrupted, no manifest lists what is gone. What cannot be removed, as it may be
    held or somebody else's, does not keep the rest.

    Raises:
        StorageError: the first one that the storage failed with, once all has been tried, or for a minute in vain. No
            folder is removed if that was at a manifest.
    """
    for delete, names in ((storage.delete, manifests), (storage.delete_tree, prefixes)):
        first, in_vain_s = None, 0.0
        for name in names:
            begun = time.monotonic()
            try:
                delete(name)
            except StorageError as error:
                first = first or error
                in_vain_s += time.monotonic() - begun
                if in_vain_s > _IN_VAIN_S:
                    break
        if first is not None:
            raise first
