"""Removes objects that no commit needs: after each commit of a run, and for `elastic-ddp checkpoints prune`.

`retention` decides which objects to remove.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from elastic_ddp.checkpoint.catalog import Bad, CommitCatalog
from elastic_ddp.checkpoint.manifest import Commit, committed_steps, manifest_key, parse_set_aside
from elastic_ddp.checkpoint.record import Measurement, measurements
from elastic_ddp.checkpoint.retention import Removal, Removals, Retention, kept, plan_removals
from elastic_ddp.errors import CheckpointError, ConfigError, StorageError, shorten
from elastic_ddp.storage.folder import Entry, Upload
from elastic_ddp.storage.storage import Storage

_log = logging.getLogger(__name__)

ORPHAN_AGE_S = 24 * 3600.0
"""An attempt without a manifest is removed after this long without a write: a worker writes an object in minutes."""
_FAILING_S = 60.0
"""After removals have failed for this long, the storage is considered unavailable."""


class Housekeeping:
    """Removes superseded commits and orphans after each commit of one saver."""

    def __init__(self, retention: Retention) -> None:
        self._retention = retention
        self._measured: dict[int, Measurement | None] = {}
        """The metric of complete commits, by step. Older manifests are read once: their number grows with the run."""
        self._doubtful: set[int] = set()
        """Steps whose commit cannot be read, is bad, or is another run's. Such commits stay, and are read each time."""

    def tidy(self, storage: Storage, newest: Commit, fence: Callable[[], None], is_current: Callable[[], bool]) -> None:
        """Removes objects that no kept commit needs, now that `newest` is complete. See `CheckpointStore.complete`.

        Raises:
            StorageError: the storage failed; the next call removes the rest.
            Exception: what the fence raises.
        """
        uploads = unfinished_uploads(storage)
        listing = storage.listing()
        steps = [step for step in committed_steps(listing) if step <= newest.step]
        read = self._read(storage, newest, steps, listing)
        now = listing[newest.key].written_at if newest.key in listing else None
        going = plan_removals(
            listing,
            uploads,
            kept(steps, self._measured, self._retention) | self._doubtful,
            read,
            newest=newest.step,
            written_before=0.0 if now is None else now - ORPHAN_AGE_S,
            over_before=newest.step,
        )
        # After the listing: if this saver may still commit, and its generation is running, the listing has nothing of
        # later generations. So attempts of earlier steps without a manifest are dead: every rank ends one save before
        # it begins the next. A worker that has left may still be writing one; before it commits, it checks that its
        # objects are there. Attempts of this step and later ones, from before a restore, are removed by their age.
        fence()
        if is_current():
            remove(storage, going)

    def _read(
        self, storage: Storage, newest: Commit, steps: Iterable[int], listed: Mapping[str, Entry]
    ) -> list[Commit]:
        """Finds the complete commits that may stay, and returns those whose manifests it has read.

        The newest manifests are always read: a commit that the storage has lost must not displace good ones.
        """
        set_aside = {entry[0] for entry in map(parse_set_aside, listed) if entry is not None}
        known = self._measured
        self._measured = {}
        self._doubtful &= {*steps}  # each until it is read again: the storage may fail before
        catalog = CommitCatalog(storage)
        read = list[Commit]()
        for step in steps:
            is_older = len(self._measured) >= self._retention.last
            if is_older and not self._retention.keeps_older and step not in self._doubtful:
                continue
            if is_older and step in known and step not in set_aside:  # otherwise it may have been committed again
                self._measured[step] = known[step]
                continue
            commit = catalog.complete_at(step, listed=listed, record=newest.record)
            if isinstance(commit, Bad):
                if step not in self._doubtful:
                    _log.warning("step %d and all attempts at it stay: %s", step, commit.error)
                self._doubtful.add(step)
                continue
            self._doubtful.discard(step)
            if isinstance(commit, Commit):
                read.append(commit)
                self._measured[step] = measurements(commit.record).get(self._retention.metric or "")
        if not read:
            raise StorageError(f"neither {newest.key} nor an earlier commit can be read")
        return read


def plan_prune(
    storage: Storage, retention: Retention | None, *, orphan_age_s: float = ORPHAN_AGE_S, with_set_aside: bool = False
) -> tuple[Removals, dict[int, StorageError]]:
    """Returns what can be removed while no run is live, and the doubtful commits that stay: by step, with the reason.

    The newest commit of which every byte verifies stays. Newer commits, all commits at a step that cannot be read, and
    commits of another run stay as well.

    Args:
        storage: a folder of commits.
        retention: which commits stay; None for all.
        orphan_age_s: attempts without a manifest can be removed after so many seconds without a write.
        with_set_aside: whether commits that were set aside can be removed.

    Raises:
        ConfigError: the best commits by a metric are to stay, and none has a value.
        StorageError: the storage is unavailable.
    """
    uploads = unfinished_uploads(storage)
    listing = storage.listing()
    steps = committed_steps(listing)
    catalog = CommitCatalog(storage)
    complete: dict[int, Commit] = {}
    bad: dict[int, StorageError] = {}
    doubtful: dict[int, StorageError] = {}
    for step in steps:
        newest = next(iter(complete.values()), None)
        commit = catalog.complete_at(step, listed=listing, record=newest.record if newest is not None else None)
        if isinstance(commit, Commit):
            complete[step] = commit
        elif isinstance(commit, Bad):
            (doubtful if commit.may_be_good else bad)[step] = commit.error
    staying = _staying(steps, complete, doubtful, retention)
    if staying < set(steps):  # verify what stays: the rest may be all that is good
        for step, commit in [*complete.items()]:
            with suppress(FileNotFoundError):
                try:
                    catalog.verify(commit)
                    break
                except CheckpointError as error:
                    doubtful[step] = error
            del complete[step]
        staying = _staying(steps, complete, doubtful, retention)
    going = plan_removals(
        listing,
        uploads,
        staying,
        complete.values(),
        newest=max(steps, default=0),
        written_before=time.time() - orphan_age_s,  # to read the storage's clock would take a write
        with_set_aside=with_set_aside,
    )
    return going, doubtful | {step: error for step, error in bad.items() if step in staying}


def _staying(
    steps: list[int], complete: dict[int, Commit], doubtful: dict[int, StorageError], retention: Retention | None
) -> set[int]:
    if retention is None or not complete:
        return set(steps)
    metric = retention.metric or ""
    measured = {step: measurements(commit.record).get(metric) for step, commit in complete.items()}
    if retention.best and not any(measured.values()):
        names = sorted({name for commit in complete.values() for name in measurements(commit.record)})
        raise ConfigError(
            f"no commit has a value of the metric {retention.metric!r}; nothing is removed. Metrics in the commits: "
            f"{shorten(names, 10)}"
        )
    return kept(steps, measured, retention) | doubtful.keys()


def unfinished_uploads(storage: Storage) -> Sequence[Upload]:
    """Returns uploads that were begun and not completed; none if the storage does not permit listing them."""
    try:
        return storage.uploads()
    except StorageError as error:
        _log.debug("cannot list unfinished uploads: %s", error)
        return []


def remove(storage: Storage, going: Removals) -> None:
    """Aborts uploads and removes manifests, then folders: no manifest lists missing objects, however it is interrupted.

    An object that cannot be removed (for example under a legal hold) does not stop the removal of others. An upload
    that cannot be aborted is ignored: the storage may not permit it, and nothing depends on it.

    Raises:
        StorageError: the first failure, raised after all others were tried, or after a minute of failures. If it
            concerns a manifest, no folder is removed.
    """
    items = [item for item in going.items if item.what != "orphan" or not _is_committed(storage, item, going.committed)]
    try:
        for upload in going.uploads:
            storage.abort(upload)
    except StorageError as error:
        _log.debug("unfinished uploads stay: %s", error)
    manifests = [item.manifest for item in items if item.manifest is not None]
    folders = [folder for item in items for folder in item.folders]
    for delete, names in ((storage.delete, manifests), (storage.delete_tree, folders)):
        first = None
        failing_s = 0.0
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


def _is_committed(storage: Storage, orphan: Removal, listed: set[int]) -> bool:
    """Returns whether the step of an orphan has a manifest that the listing lacks.

    The listing may be stale, or a worker that has left may have committed since.
    """
    if orphan.step in listed:
        return False
    try:
        storage.size(manifest_key(orphan.step))
    except FileNotFoundError:
        return False
    _log.warning("%s stays: its step has a manifest that was not listed", *orphan.folders)
    return True
