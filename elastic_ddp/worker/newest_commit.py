"""Finds the newest usable commit of a run: the one that it resumes from, and the one that a new rank 0 continues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic_ddp.checkpoint import Commit, CommitCatalog
from elastic_ddp.errors import CheckpointError
from elastic_ddp.worker.restore import restore

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_ddp.distributed.process_group import ProcessGroup
    from elastic_ddp.storage.storage import Storage
    from elastic_ddp.tensors.state_tree import Layout
    from elastic_ddp.worker.job import Job


def newest_before(storage: Storage, steps_done: int, on_reject: Callable[[str, str], object]) -> Commit | None:
    """Returns the newest commit of at most `steps_done` steps; None if there is none.

    A run that resumed from an older commit may have left later ones. A commit of exactly `steps_done` steps is
    verified, because no rank commits that state again.

    Args:
        storage: the folder of commits.
        steps_done: the number of steps.
        on_reject: called with the key of each unusable commit, and the reason.

    Raises:
        StorageError: the storage could not be read.
    """
    catalog = CommitCatalog(storage, on_reject)
    for commit in catalog.candidates():
        if commit.step < steps_done:
            return commit
        if commit.step == steps_done:
            try:
                catalog.verify(commit)
            except FileNotFoundError:
                continue
            except CheckpointError as error:
                catalog.reject(commit.key, commit.attempt, error)
            else:
                return commit
    return None


def restore_newest(
    job: Job,
    storage: Storage,
    group: ProcessGroup,
    make_layout: Callable[[], Layout | None],
    *,
    fence: Callable[[], None],
    tick: Callable[[], None],
    on_reject: Callable[[str, str], object],
) -> tuple[Commit, dict[str, Any]] | None:
    """Returns the newest usable commit of the run and its state; None if the run has no commits. Every rank calls it.

    Args:
        job: the run.
        storage: the folder of commits.
        group: the open process group.
        make_layout, fence, tick: as for `restore.restore`.
        on_reject: called on rank 0 with the key of each unusable commit, and the reason.

    Raises:
        CheckpointError: on rank 0: there are commits, perhaps set aside, and none is usable.
        ConfigError: a rank does not have enough memory.
        StorageError: the storage could not be read.
    """

    def check_same_run(commit: Commit) -> None:
        if (difference := job.difference_to(commit.record)) is not None:
            raise CheckpointError(
                f"{commit.key} belongs to another run: {difference}. To start from its weights, use run.load_weights."
            )

    catalog = CommitCatalog(storage)
    newest = restore(catalog, storage, group, make_layout, check_same_run=check_same_run, fence=fence, tick=tick)
    for key, reason in catalog.rejected:
        on_reject(key, reason)
    if newest is None and group.rank == 0:
        _check_no_commits(job.config.name, storage, catalog.rejected)
    return newest


def _check_no_commits(name: str, storage: Storage, rejected: list[tuple[str, str]]) -> None:
    """Raises a CheckpointError if starting from step 0 would ignore unusable commits."""
    set_aside = storage.list("set-aside")
    if rejected:
        reasons = "; ".join(f"{key}: {reason}" for key, reason in rejected)
        folders = [f"{storage.uri}/commits", *([f"{storage.uri}/set-aside"] if set_aside else [])]
        raise CheckpointError(
            f"no commit of run {name!r} is usable: {reasons}. Repair them, make them readable, delete "
            f"{' and '.join(folders)} to start over, or use another name. A run does not start over silently."
        )
    if set_aside:
        raise CheckpointError(
            f"run {name!r} has only commits that were set aside because they did not verify: {set_aside}. Repair one "
            "and move it back, as commits/20.json for step 20, delete set-aside/ to start over, or use another name. A "
            "run does not start over silently."
        )
