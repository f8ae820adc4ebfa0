"""A run with three commits, and `elastic-ddp checkpoints` commands on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from elastic_ddp.checkpoint import Commit
from elastic_ddp.cli import main
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.job import COMMITS
from tests.single_rank_store import SingleRankStore
from tests.unit.checkpoint.test_checkpoint import keys_of, make_state


def invoke(*arguments: str) -> Any:
    """Runs a command. Raises its error."""
    result = CliRunner().invoke(main.app, ["checkpoints", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def save_commits(folder: Path) -> list[Commit]:
    """Makes a run with commits of steps 10, 20 and 30. The metric `validation` grows with the step."""
    store = SingleRankStore(Storage(folder).at(COMMITS), keep=3)
    commits = []
    for step, loss in {10: 0.25, 20: 0.5, 30: 0.75}.items():
        metrics = {"validation": {"value": loss, "step": step}}
        record = {"time": 1_795_169_703.0, "epoch": 1, "samples": 40, "metrics": metrics}
        commits.append(store.save(make_state(step), step=step, record=record))
    return commits


def steps_left(tmp_path: Path) -> list[int]:
    """Returns the steps of the commits, which must be intact. Checks that nothing else is there."""
    storage = Storage(tmp_path / "lm").at(COMMITS)
    store = SingleRankStore(storage, keep=1)
    found = [(step, commit) for step, commit in store.all_commits() if isinstance(commit, Commit)]
    for _, commit in found:
        store.verify(commit)
    assert storage.list() == sorted(key for _, commit in found for key in keys_of(commit))
    return [step for step, _ in found]
