"""When a run commits, as one worker sees it."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ddp.checkpoint import CheckpointStore
from elastic_ddp.errors import DriverReplacedError, StorageError
from elastic_ddp.job import COMMITS
from elastic_ddp.lease import DriverLease
from elastic_ddp.run import Run
from elastic_ddp.step import Step
from elastic_ddp.storage import Storage
from tests.unit.alone import NewRun, link_of, train

GROUP: Any = SimpleNamespace(is_cut=False)


def commit(folder: Path, step: int) -> None:
    CheckpointStore(Storage(folder / "run").at(COMMITS), keep=2).save({"user": {}}, step=step, record={})


def test_a_commit_that_did_not_come_to_be_is_made_up_for_by_the_next_rank_0(new_run: NewRun, tmp_path: Path) -> None:
    commits = new_run(checkpoint={"every_steps": 10, "every_seconds": 1000})._commits
    commit(tmp_path, 10)
    commits._note(20)
    commits.look()
    assert not commits.have(20, GROUP) and commits.step == 10
    assert commits.are_due(21)


def test_a_commit_that_was_made_sets_the_clock_for_the_next_rank_0_too(new_run: NewRun, tmp_path: Path) -> None:
    commits = new_run(checkpoint={"every_steps": 10, "every_seconds": 1000})._commits
    commit(tmp_path, 20)
    commits._note(20)
    noted_at = commits._at
    commits.look()
    assert commits.have(20, GROUP) and commits._at == noted_at
    assert not commits.are_due(21) and commits.are_due(30)


def test_what_is_committed_while_the_storage_is_asked_counts(new_run: NewRun, tmp_path: Path) -> None:
    commits = new_run()._commits
    commit(tmp_path, 10)
    commits._note(20)
    commits._known_step = 20  # by this worker
    commits._ask_storage(10)
    assert commits.have(20, GROUP)


def test_a_storage_that_does_not_answer_ends_nothing(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise StorageError("down")

    monkeypatch.setattr(CheckpointStore, "latest", fails)
    commits = new_run(checkpoint={"every_steps": 10})._commits
    commits._note(20)
    commits.look()
    assert not commits.have(20, GROUP), "nobody can say so"
    assert not commits.are_due(21)
    assert commits.step == 20


def test_workers_of_a_driver_that_was_replaced_commit_nothing(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run()
    storage = Storage(tmp_path / "run")
    with DriverLease(storage, "test", "another", print) as lease:
        lease.acquire()
        with pytest.raises(DriverReplacedError, match="was taken over by another driver: pid"):
            train(run)
        assert not storage.list(COMMITS), "nothing is left of what it wrote"
    assert link_of(run).steps_of("commit") == []


# Saves that fail, or take long.


def closes_first(run: Run, then: Callable[[Step], None] = lambda step: None) -> Callable[[Step], None]:
    """In every step the save of the one before has ended."""

    def in_step(step: Step) -> None:
        run._commits.close(60)
        then(step)

    return in_step


def break_storage(monkeypatch: pytest.MonkeyPatch, broken: Callable[[], bool]) -> None:
    write = Storage.write

    def fail(storage: Storage, key: str, data: bytes | memoryview) -> None:
        if key.startswith("step=") and broken():
            raise StorageError(f"cannot write {key!r}: no space left") from OSError(errno.ENOSPC, "no space left")
        write(storage, key, data)

    monkeypatch.setattr(Storage, "write", fail)


def test_training_goes_on_after_saves_that_failed(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = new_run(checkpoint={"every_steps": 1, "max_failed_saves": 2})
    now = [0]
    break_storage(monkeypatch, lambda: now[0] in (1, 2))
    train(run, closes_first(run, lambda step: now.__setitem__(0, step.index)))
    assert link_of(run).steps_of("commit_failed") == [2, 3]
    assert link_of(run).steps_of("commit") == [1, 4, 5, 6]
    [failed, *_] = [said for said in link_of(run).said if said["event"] == "commit_failed"]
    assert "no space left" in failed["error"]


def test_too_many_saves_that_fail_end_the_run_with_what_to_mend(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(checkpoint={"every_steps": 1, "max_failed_saves": 2})
    now = [0]
    break_storage(monkeypatch, lambda: now[0] >= 2)
    message = r"^3 saves in a row failed \(checkpoint\.max_failed_saves=2\).*no space left.* commit holds 2 steps"
    with pytest.raises(StorageError, match=message):
        train(run, closes_first(run, lambda step: now.__setitem__(0, step.index)))
    assert link_of(run).steps_of("commit") == [1, 2]


def test_the_last_commit_is_waited_for_and_says_why_it_failed(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run()
    break_storage(monkeypatch, lambda: True)
    with pytest.raises(StorageError, match="no space left"):
        train(run)


def slow_storage(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writes of states wait for it."""
    go, write = threading.Event(), Storage.write

    def slowly(storage: Storage, key: str, data: bytes | memoryview) -> None:
        assert not key.startswith("step=") or go.wait(60)
        write(storage, key, data)

    monkeypatch.setattr(Storage, "write", slowly)
    return go


def test_a_save_that_is_due_while_another_is_written_is_left_out_and_that_is_said(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(steps=12, checkpoint={"every_steps": 2})
    go = slow_storage(monkeypatch)

    def in_step(step: Step) -> None:
        if step.index >= 7:
            go.set()
            run._commits.close(60)

    train(run, in_step)
    assert link_of(run).steps_of("commit_left_out") == [4, 6]
    assert link_of(run).steps_of("commit") == [2, 8, 10, 12]


def test_a_commit_that_somebody_waits_for_is_not_left_out(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(checkpoint={"every_steps": 2})
    go = slow_storage(monkeypatch)

    def in_step(step: Step) -> None:
        if step.index == 3:
            link_of(run).commit_requested = 1
        if step.index == 4:
            go.set()
            run._commits.close(60)

    train(run, in_step)
    said = [(each["step"], each["request"]) for each in link_of(run).said if each["event"] == "commit"]
    assert said[:2] == [(2, None), (5, 1)] and link_of(run).steps_of("commit_left_out") == []
