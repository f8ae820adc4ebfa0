"""The commit that a run resumes from, and the newest one that a new rank 0 continues from."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_ddp.checkpoint import Commit, CommitCatalog
from elastic_ddp.errors import CheckpointError, PeerFailedError, StorageError
from elastic_ddp.worker import checkpointing
from elastic_ddp.worker.checkpointing import Checkpointer
from elastic_ddp.worker.run import Run
from elastic_ddp.worker.step import Step
from tests.inside_run import checkpointer_of, restart, state_of
from tests.ranks import single_rank_group
from tests.single_rank_store import SingleRankStore
from tests.unit.checkpoint.test_checkpoint import corrupt
from tests.unit.single_worker import NewRun, client_of, train
from tests.unit.worker.commit_helpers import RUNNING, commit, commits_in, metrics_by_step, wait_for_saves


def rejected_by(run: Run) -> list[str]:
    return [event["key"] for event in client_of(run).events_of("commit_rejected")]


def restored(checkpointer: Checkpointer) -> Any:
    return checkpointer.restore(single_rank_group(), lambda: None)


# A worker that becomes rank 0.


def test_a_new_rank_0_replaces_a_commit_that_did_not_succeed(new_run: NewRun, tmp_path: Path) -> None:
    checkpointer = checkpointer_of(new_run(checkpoint={"every_steps": 10, "every_seconds": 1000}))
    commit(tmp_path, 10)
    checkpointer.schedule.reset_timer(20)
    checkpointer.refresh_newest(20)
    assert not checkpointer.is_committed(20, RUNNING) and checkpointer.schedule.step == 10
    assert checkpointer.schedule.should_commit(21)


def test_a_new_rank_0_keeps_the_timer_after_a_commit_that_succeeded(new_run: NewRun, tmp_path: Path) -> None:
    checkpointer = checkpointer_of(new_run(checkpoint={"every_steps": 10, "every_seconds": 1000}))
    commit(tmp_path, 20)
    checkpointer.schedule.reset_timer(20)
    checkpointer.refresh_newest(20)
    assert checkpointer.is_committed(20, RUNNING)
    assert not checkpointer.schedule.should_commit(21) and checkpointer.schedule.should_commit(30)


def test_a_new_rank_0_knows_the_metrics_and_failures_of_the_newest_commit(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run(checkpoint={"interval": "auto", "keep_best": 1, "best_metric": "accuracy"})
    metrics = {"accuracy": {"value": 0.75, "step": 10}}
    commit(tmp_path, 20, metrics=metrics, losses=20, watched_s=10_004.0)
    checkpointer_of(run).refresh_newest(20)
    assert checkpointer_of(run).is_committed(20, RUNNING)
    record = checkpointer_of(run)._record(state_of(run), 2)
    assert record["metrics"] == metrics and record["losses"] == 20 and record["watched_s"] >= 10_004.0


@pytest.mark.parametrize("steps_done", [15, 20])
def test_a_bad_commit_is_not_the_newest_of_a_new_rank_0(new_run: NewRun, tmp_path: Path, steps_done: int) -> None:
    run = new_run(checkpoint={"every_steps": 10})
    checkpointer, storage = checkpointer_of(run), commits_in(tmp_path)
    commit(tmp_path, 10)
    commit(tmp_path, 20)
    [skeleton] = storage.list("step=20")
    corrupt(storage, skeleton, "flip")
    checkpointer.refresh_newest(steps_done)
    assert not checkpointer.is_committed(20, RUNNING)
    assert checkpointer.schedule.step == 10 and checkpointer.schedule.should_commit(20)
    assert rejected_by(run) == ["commits/20.json"] * (steps_done == 20)


def test_a_restart_of_the_training_function_waits_for_the_newest_commit(
    new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(checkpoint={"every_steps": 10, "every_seconds": 1000})
    newest_before, may_read = checkpointing.newest_before, threading.Event()
    commit(tmp_path, 10)

    def read_late(*args: Any) -> Any:
        may_read.wait(10)
        return newest_before(*args)

    monkeypatch.setattr(checkpointing, "newest_before", read_late)
    checkpointer_of(run).schedule.reset_timer(20)
    checkpointer_of(run).refresh_newest(20)
    threading.Timer(0.2, may_read.set).start()
    restart(run)
    schedule = checkpointer_of(run).schedule
    assert schedule.step == 10 and schedule.should_commit(21)


@pytest.mark.parametrize("starts_save", [False, True])
def test_a_commit_that_succeeds_while_the_storage_is_read_counts(
    new_run: NewRun, tmp_path: Path, starts_save: bool
) -> None:
    """Also a second save of the same step, after the first one failed with its ranks."""
    checkpointer = checkpointer_of(new_run())
    commit(tmp_path, 10)
    checkpointer.schedule.reset_timer(20 if starts_save else 10)
    unchanged = checkpointer.schedule.step, checkpointer._num_saves
    checkpointer._num_saves = (3, 1)
    checkpointer.schedule.reset_timer(20)
    checkpointer.schedule.save_succeeded(20, 0, 1.0)
    checkpointer._read_newest(20, unchanged)
    assert checkpointer.is_committed(20, RUNNING)


def test_an_unreachable_storage_does_not_stop_a_new_rank_0(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise StorageError("down")

    monkeypatch.setattr(CommitCatalog, "candidates", fail)
    checkpointer = checkpointer_of(new_run(checkpoint={"every_steps": 10}))
    checkpointer.schedule.reset_timer(20)
    checkpointer.refresh_newest(20)
    assert not checkpointer.is_committed(20, RUNNING), "it is not known"
    assert not checkpointer.schedule.should_commit(21) and checkpointer.schedule.step == 20


# Resuming.


def test_a_run_whose_commits_were_all_set_aside_does_not_start_over(new_run: NewRun, tmp_path: Path) -> None:
    storage = commits_in(tmp_path)
    store = SingleRankStore(storage, keep=1)
    bad = store.save({"user": {}}, step=10, record={})
    store.set_aside(bad.key, bad.attempt)
    [aside] = storage.list("set-aside")
    checkpointer = checkpointer_of(new_run())
    with pytest.raises(CheckpointError, match=re.escape(aside)) as caught:
        restored(checkpointer)
    assert "does not start over" in str(caught.value)
    storage.delete(aside)
    assert restored(checkpointer) is None


@pytest.mark.parametrize("was_set_aside", [False, True])
def test_a_run_starts_over_once_the_folders_that_the_error_names_are_deleted(
    new_run: NewRun, tmp_path: Path, was_set_aside: bool
) -> None:
    checkpointer = checkpointer_of(new_run())
    commit(tmp_path, 1)
    folders = [Path(commits_in(tmp_path).uri) / "commits"]
    if was_set_aside:
        commit(tmp_path, 2)
        (folders[0] / "2.json").write_bytes(b"torn")
        assert restored(checkpointer) == {"user": {}}
        folders.append(folders[0].with_name("set-aside"))
    (folders[0] / "1.json").write_bytes(b"torn")
    names = re.escape(" and ".join(map(str, folders)))
    with pytest.raises(CheckpointError, match=f"delete {names} .*does not start over"):
        restored(checkpointer)
    for folder in folders:
        shutil.rmtree(folder)
    assert restored(checkpointer) is None


def test_a_worker_that_was_presumed_dead_restores_and_sets_nothing_aside(new_run: NewRun, tmp_path: Path) -> None:
    run, storage = new_run(), commits_in(tmp_path)
    commit(tmp_path, 1)
    commit(tmp_path, 2)
    storage.write("commits/2.json", b"torn")
    client_of(run).presumed_dead = True
    with pytest.raises(PeerFailedError):
        restored(checkpointer_of(run))
    assert storage.list("commits") == ["commits/1.json", "commits/2.json"]
    client_of(run).presumed_dead = False
    assert restored(checkpointer_of(run)) == {"user": {}}
    assert storage.list("commits") == ["commits/1.json"]


def edited_record(folder: Path, step: int, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edits the record of a commit."""
    storage, key = commits_in(folder), f"commits/{step}.json"
    changed = Commit.from_bytes(key, storage.read(key))
    edit(changed.record)
    storage.write(key, changed.to_bytes())


@pytest.mark.parametrize("what", ["seed", "data"])
def test_a_commit_of_another_run_is_rejected(new_run: NewRun, tmp_path: Path, what: str) -> None:
    first = new_run(checkpoint={"every_steps": 2, "keep": 9})
    train(first, wait_for_saves(first))
    edited_record(tmp_path, 6, lambda record: record["identity"].update({what: "other"}))
    edited_record(tmp_path, 4, lambda record: record["identity"].update({"from a later version": 1}))
    resumed = new_run(checkpoint={"every_steps": 2, "keep": 9}, steps=8)
    train(resumed)
    assert client_of(resumed).steps_of("resumed") == [4]
    [reason] = {event["reason"] for event in client_of(resumed).events_of("commit_rejected")}
    assert "commits/6.json" in reason and f"{what} was " in reason and "run.load_weights" in reason
    [aside] = commits_in(tmp_path).list("set-aside")
    assert aside.startswith("set-aside/6-")


def test_a_bad_commit_that_a_save_sets_aside_is_in_the_ledger(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run(checkpoint={"every_steps": 2})

    def in_step(step: Step) -> None:
        if step.index == 2:
            commits_in(tmp_path).write("commits/4.json", b"torn")

    train(run, wait_for_saves(run, in_step))
    [event] = client_of(run).events_of("commit_rejected")
    assert event["key"] == "commits/4.json" and "manifest" in event["reason"]
    assert client_of(run).steps_of("commit_succeeded") == [2, 4, 6] and max(metrics_by_step(tmp_path)) == 6
