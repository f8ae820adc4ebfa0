"""Finds the newest commit of a run, for a new rank 0, and refuses to ignore unusable ones."""

from __future__ import annotations

from collections.abc import Callable

from elastic_ddp.checkpoint import Commit, CommitCatalog
from elastic_ddp.errors import CheckpointError
from elastic_ddp.storage.storage import Storage


def newest_before(storage: Storage, steps_done: int, on_reject: Callable[[str, str], object]) -> Commit | None:
    """Returns the newest commit of at most `steps_done` steps; None if there is none.

    A run that resumed from an older commit may have left later ones. A commit of exactly `steps_done` steps is
    verified, because no rank commits that state again.
    """
    catalog = CommitCatalog(storage, on_reject)
    for commit in catalog.candidates():
        try:
            if commit.step == steps_done:
                catalog.verify(commit)
            if commit.step <= steps_done:
                return commit
        except FileNotFoundError:
            continue
        except CheckpointError as error:
            catalog.reject(commit.key, commit.attempt, error)
    return None


def check_no_commits(name: str, storage: Storage, rejected: list[tuple[str, str]]) -> None:
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
