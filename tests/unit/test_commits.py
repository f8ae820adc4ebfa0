"""When a run commits, as one worker sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_ddp.checkpoint import CheckpointStore
from elastic_ddp.errors import DriverReplacedError, StorageError
from elastic_ddp.job import COMMITS
from elastic_ddp.lease import DriverLease
from elastic_ddp.storage import Storage
from tests.unit.alone import NewRun, link_of, train


def commit(folder: Path, step: int) -> None:
    CheckpointStore(Storage(folder / "run").at(COMMITS), keep=2).save({"user": {}}, step=step, record={})


def test_a_commit_that_did_not_come_to_be_is_made_up_for_by_the_next_rank_0(new_run: NewRun, tmp_path: Path) -> None:
    commits = new_run(checkpoint={"every_steps": 10, "every_seconds": 1000})._commits
    commit(tmp_path, 10)
    commits.note(20)
    commits.look()
    assert not commits.have(20) and commits.step == 10
    assert commits.are_due(21)


def test_a_commit_that_was_made_sets_the_clock_for_the_next_rank_0_too(new_run: NewRun, tmp_path: Path) -> None:
    commits = new_run(checkpoint={"every_steps": 10, "every_seconds": 1000})._commits
    commit(tmp_path, 20)
    commits.note(20)
    noted_at = commits._at
    commits.look()
    assert commits.have(20) and commits._at == noted_at
    assert not commits.are_due(21) and commits.are_due(30)


def test_what_is_committed_while_the_storage_is_asked_counts(new_run: NewRun, tmp_path: Path) -> None:
    commits = new_run()._commits
    commit(tmp_path, 10)
    commits.note(20)
    commits._ask_storage(10)
    assert commits.have(20)


def test_a_storage_that_does_not_answer_ends_nothing(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise StorageError("down")

    monkeypatch.setattr(CheckpointStore, "latest", fails)
    commits = new_run(checkpoint={"every_steps": 10})._commits
    commits.note(20)
    commits.look()
    assert not commits.have(20), "nobody can say so"
    assert not commits.are_due(21)
    commits.note(30)
    assert commits.have(30)


def test_workers_of_a_driver_that_was_replaced_commit_nothing(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run()
    storage = Storage(tmp_path / "run")
    with DriverLease(storage, "test", "another", print) as lease:
        lease.acquire()
        with pytest.raises(DriverReplacedError, match="was taken over by another driver: pid"):
            train(run)
        assert not storage.list(COMMITS), "nothing is left of what it wrote"
    assert link_of(run).steps_of("commit") == []
