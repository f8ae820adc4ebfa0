"""Removes commits and leftovers that a user does not want to keep, while no run is live."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress

from elastic_ddp.checkpoint.catalog import Bad, CommitCatalog
from elastic_ddp.checkpoint.housekeeping import (
    ORPHAN_AGE_S,
    abort_uploads,
    clock_folders,
    older_than,
    remove,
    uncommitted,
    unfinished_uploads,
)
from elastic_ddp.checkpoint.manifest import Commit, committed_steps, manifest_key
from elastic_ddp.checkpoint.metrics import measurements
from elastic_ddp.checkpoint.record import different_runs
from elastic_ddp.checkpoint.retention import Removal, Retention, kept, plan_removals
from elastic_ddp.errors import CheckpointError, ConfigError, StorageError, shorten
from elastic_ddp.storage.storage import Storage


def removals(
    storage: Storage,
    retention: Retention | None,
    *,
    orphan_age_s: float,
    with_set_aside: bool,
    now: Callable[[], float] | None = None,
) -> tuple[list[Removal], dict[int, StorageError]]:
    """Returns what can be removed, in that order, and the doubtful commits that stay: by step, with the reason.

    The newest commit of which every byte verifies stays, and so do newer ones and all at a step that cannot be read.

    Args:
        storage: a folder of commits.
        retention: which commits stay; None for all.
        orphan_age_s: attempts without a manifest can be removed after so many seconds without a write.
        with_set_aside: whether commits that were set aside can be removed.
        now: as for `older_than`.

    Raises:
        ConfigError: the best commits by a metric are to stay, and none has a value; or a commit of another run would
            stay in place of one of this run.
        StorageError: the storage is unavailable.
    """
    uploads = unfinished_uploads(storage)
    sizes = storage.sizes()
    steps, catalog = committed_steps(sizes), CommitCatalog(storage)
    complete: dict[int, Commit] = {}
    bad: dict[int, StorageError] = {}
    doubtful: dict[int, StorageError] = {}
    for step in steps:
        commit = catalog.complete_at(step, listed=sizes)
        if isinstance(commit, Commit):
            complete[step] = commit
        elif isinstance(commit, Bad):
            cause = commit.error.__cause__
            if isinstance(cause, StorageError) and not isinstance(cause, CheckpointError):
                doubtful[step] = cause  # it cannot be read, and may be good
            else:
                bad[step] = commit.error
    staying = _staying(steps, complete, doubtful, retention)
    if staying < set(steps):  # verify what stays: the rest may be all that is good
        for step, newest in [*complete.items()]:
            with suppress(FileNotFoundError):
                try:
                    catalog.verify(newest)
                    break
                except CheckpointError as error:
                    doubtful[step] = error
            del complete[step]
        staying = _staying(steps, complete, doubtful, retention)
        _check_same_run(complete, staying)
    newest_step = max(steps, default=0)
    going = plan_removals(sizes, uploads, staying, complete.values(), newest=newest_step, with_set_aside=with_set_aside)
    old = older_than(orphan_age_s, storage, uncommitted(storage, going, steps), now)
    bad_and_staying = {step: error for step, error in bad.items() if step in staying}
    return [item for item in going if item.what != "orphan" or item in old], doubtful | bad_and_staying


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


def _check_same_run(complete: dict[int, Commit], staying: set[int]) -> None:
    """Raises ConfigError if a commit of another run would stay in place of one of this run."""
    for step, newer in itertools.product(sorted(complete.keys() - staying), sorted(complete.keys() & staying)):
        if names := different_runs(complete[step].record, complete[newer].record):
            raise ConfigError(
                f"the commits of steps {step} and {newer} belong to different runs: they differ in "
                f"{shorten(names, 5)}. Nothing is removed. Move the other run's commit away first: "
                f"{manifest_key(step)} or {manifest_key(newer)}, and its step folder"
            )


def prune(storage: Storage, chosen: list[Removal], *, orphan_age_s: float = ORPHAN_AGE_S) -> None:
    """Removes what `removals` returned, and unfinished uploads older than `orphan_age_s`.

    No other process may write to the folder meanwhile. At no moment does a manifest list missing objects.

    Raises:
        StorageError: the storage failed; call both functions again to remove the rest.
    """
    abort_uploads(storage, unfinished_uploads(storage), chosen, orphan_age_s)
    remove(storage, chosen, clock_folders(storage.list()))
