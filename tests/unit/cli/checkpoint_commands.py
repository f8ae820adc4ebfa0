"""`elastic-ddp checkpoints` commands, and the commits that they leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from elastic_ddp.checkpoint import Commit
from elastic_ddp.cli import main
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.job import COMMITS
from tests.single_rank_store import SingleRankStore
from tests.unit.checkpoint.test_checkpoint import keys_of


def invoke(*arguments: str) -> Any:
    """Runs a command. Raises its error."""
    result = CliRunner().invoke(main.app, ["checkpoints", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def steps_left(tmp_path: Path) -> list[int]:
    """Returns the steps of the commits, which must be intact. Checks that nothing else is there."""
    storage = Storage(tmp_path / "lm").at(COMMITS)
    store = SingleRankStore(storage, keep=1)
    found = [(step, commit) for step, commit in store.all_commits() if isinstance(commit, Commit)]
    for _, commit in found:
        store.verify(commit)
    assert storage.list() == sorted(key for _, commit in found for key in keys_of(commit))
    return [step for step, _ in found]
