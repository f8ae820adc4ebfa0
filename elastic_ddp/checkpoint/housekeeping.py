"""Removes superseded commits and leftovers after each commit. `retention` decides what stays."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from elastic_ddp.checkpoint.catalog import Bad, CommitCatalog
from elastic_ddp.checkpoint.manifest import Commit, attempt_of, committed_steps, manifest_key, parse_set_aside
from elastic_ddp.checkpoint.metrics import measurements
from elastic_ddp.checkpoint.record import Measurement
from elastic_ddp.checkpoint.retention import Removal, Retention, kept, plan_removals
from elastic_ddp.errors import StorageError
from elastic_ddp.storage.folder import Upload
from elastic_ddp.storage.local import is_temporary
from elastic_ddp.storage.storage import CLOCK_PREFIX, Storage

_log = logging.getLogger(__name__)

ORPHAN_AGE_S = 24 * 3600.0
"""An attempt without a manifest is removed after this long without a write: a worker writes an object in minutes."""
_FAILING_S = 60.0
"""After removals have failed for this long, the storage is considered unavailable."""
READ_AGAIN_S = 3600.0
"""Time after which a commit that could not be read, or was bad, is read again."""


class Housekeeping:
    """Removes what a run does not keep, commit after commit, for one saver."""

    def __init__(self, retention: Retention, clock: Callable[[], float] = time.monotonic) -> None:
        self._retention, self._clock = retention, clock
        self._measured: dict[int, Measurement | None] = {}
        """The metric of complete commits, by step. Older manifests are read once: their number grows with the run."""
        self._doubtful: dict[int, float] = {}
        """Steps whose commit could not be read, was bad, or is another run's, and when that was seen. They stay."""

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
        read = self._read(storage, newest, steps, sizes)
        staying = kept(steps, self._measured, self._retention) | self._doubtful.keys()
        going = plan_removals(sizes, uploads, staying, read, newest=newest.step)
        fence()  # reading manifests may have taken long
        if not is_current():
            return
        # After the fence: a worker that has left may have committed since the listing.
        orphans = uncommitted(storage, going, steps)
        dead = [removal for removal in going if removal.what == "commit"]
        dead += [orphan for orphan in orphans if orphan.step < newest.step]
        abort_uploads(storage, uploads, dead, ORPHAN_AGE_S)
        try:
            remove(storage, dead, clock_folders(sizes))
        finally:
            remove(storage, older_than(ORPHAN_AGE_S, storage, [item for item in orphans if item.step >= newest.step]))

    def _read(self, storage: Storage, newest: Commit, steps: Iterable[int], sizes: Mapping[str, int]) -> list[Commit]:
        """Finds the complete commits that may stay, and returns those whose manifests it has read.

        The newest are always read: a commit that the storage has lost must not displace good ones.
        """
        set_aside = {entry[0] for entry in map(parse_set_aside, sizes) if entry is not None}
        known, self._measured = self._measured, {}
        catalog, read = CommitCatalog(storage), list[Commit]()
        self._doubtful.pop(newest.step, None)
        now = self._clock()
        self._doubtful = {step: at for step, at in self._doubtful.items() if now - at < READ_AGAIN_S}
        for step in steps:
            is_older = len(self._measured) >= self._retention.last
            if is_older and not self._retention.keeps_older:
                break
            if step in self._doubtful:
                continue
            if is_older and step in known and step not in set_aside:  # otherwise it may have been committed again
                self._measured[step] = known[step]
                continue
            commit = catalog.complete_at(step, listed=sizes, record=newest.record)
            if isinstance(commit, Commit):
                read.append(commit)
                self._measured[step] = measurements(commit.record).get(self._retention.metric or "")
            elif isinstance(commit, Bad):
                _log.warning("step %d and all attempts at it stay: %s", step, commit.error)
                self._doubtful[step] = now
        if not read:
            raise StorageError(f"neither {newest.key} nor an earlier commit can be read")
        return read


def uncommitted(storage: Storage, removals: Iterable[Removal], listed: Collection[int]) -> list[Removal]:
    """Returns the orphans, but those at the step of a manifest that a stale listing lacks: it is looked up by key."""
    orphans = []
    for orphan in (removal for removal in removals if removal.what == "orphan"):
        try:
            if orphan.step not in listed:
                storage.size(manifest_key(orphan.step))
                _log.warning("%s stays: its step has a manifest that was not listed", *orphan.folders)
                continue
        except FileNotFoundError:
            pass
        orphans.append(orphan)
    return orphans


def older_than(
    age_s: float, storage: Storage, orphans: Collection[Removal], now: Callable[[], float] | None = None
) -> list[Removal]:
    """Returns those orphans to which nothing was written for `age_s` seconds.

    Args:
        now: the current time, by default that of the storage's clock, which dates the writes. To read it writes a small
            object.
    """
    if not orphans:
        return []
    before = (now or storage.now)() - age_s
    written = {orphan: storage.last_modified(*orphan.folders) for orphan in orphans}
    return [orphan for orphan, at in written.items() if at is not None and at < before]


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


def abort_uploads(storage: Storage, uploads: Sequence[Upload], dead: Iterable[Removal], age_s: float) -> None:
    """Aborts uploads to dead attempts, and a run's other uploads that are older than `age_s` seconds.

    A failure is ignored: the storage may not permit it, and nothing depends on it.
    """
    folders = {folder for removal in dead for folder in removal.folders}
    try:
        now = storage.now() if uploads else 0.0
        for upload in uploads:
            _, folder = attempt_of(upload.key) or (None, None)
            is_own = folder is not None or parse_set_aside(upload.key) is not None or is_temporary(upload.key)
            if folder in folders or (is_own and now - upload.started_at > age_s):
                storage.abort(upload)
    except StorageError as error:
        _log.debug("unfinished uploads stay: %s", error)


def remove(storage: Storage, removals: Iterable[Removal], more_folders: Iterable[str] = ()) -> None:
    """Removes manifests, then folders: wherever it is interrupted, no manifest lists missing objects.

    What cannot be removed, because of a legal hold for example, does not stop the rest.

    Raises:
        StorageError: the first failure, raised after all others were tried, or after a minute of failures. If it
            concerns a manifest, no folder is removed.
    """
    removals = list(removals)
    manifests = [removal.manifest for removal in removals if removal.manifest is not None]
    folders = [*(folder for removal in removals for folder in removal.folders), *more_folders]
    for delete, names in ((storage.delete, manifests), (storage.delete_tree, folders)):
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
