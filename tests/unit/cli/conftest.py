"""A run with three commits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from elastic_ddp.checkpoint import Commit
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.job import COMMITS
from tests.single_rank_store import SingleRankStore
from tests.unit.checkpoint.test_checkpoint import make_state


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Commit]]:
    """A run with commits of steps 10, 20 and 30. The metric `validation` grows with the step."""
    folder = tmp_path_factory.mktemp("commits") / "lm"
    store = SingleRankStore(Storage(folder).at(COMMITS), keep=3)
    commits = []
    for step, loss in {10: 0.25, 20: 0.5, 30: 0.75}.items():
        metrics = {"validation": {"value": loss, "step": step}}
        record = {"time": 1_795_169_703.0, "epoch": 1, "samples": 40, "metrics": metrics}
        commits.append(store.save(make_state(step), step=step, record=record))
    return folder, commits


@pytest.fixture
def commits(saved: tuple[Path, list[Commit]], tmp_path: Path) -> list[Commit]:
    """The commits of a copy of that run, in `tmp_path / "lm"`."""
    folder, commits = saved
    shutil.copytree(folder, tmp_path / "lm")
    return commits
