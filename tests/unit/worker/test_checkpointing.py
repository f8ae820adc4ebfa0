"""Saves of a run: what they contain, and what happens when they fail or take long."""

from __future__ import annotations

import json
import platform
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from elastic_ddp.checkpoint.saver import RankFailedError
from elastic_ddp.errors import DriverReplacedError, ReplicasDifferError, StorageError
from elastic_ddp.storage.lease import DriverLease
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker import commit_schedule
from elastic_ddp.worker.job import COMMITS
from elastic_ddp.worker.step import Step
from tests.inside_run import checkpointer_of, fake_weights, job_of, leave, wait_for_save
from tests.unit.single_worker import PEER_FAILURE, NewRun, client_of, train
from tests.unit.worker.commit_helpers import (
    break_storage,
    commit,
    commits_in,
    delay_writes,
    metrics_by_step,
    newest_record,
    wait_for_saves,
)


def test_a_commit_records_its_run_versions_and_position(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run()
    train(run)
    record, job = newest_record(tmp_path), job_of(run)
    packages = {name: version(name) for name in ("elastic-ddp", "torch", "ray", "pyarrow")}
    assert record["versions"] == {"python": platform.python_version(), **packages}
    assert (record["generation"], record["epoch"]) == (1, job.shape.epoch_of(job.total_steps))
    assert record["identity"] == json.loads(json.dumps(job.identity()))
    assert record["identity"]["data"] == job.index.fingerprint
    assert record["identity"]["seed"] == job.config.seed


# Saves that may not become commits.


def test_workers_of_a_replaced_driver_commit_nothing(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run()
    storage = Storage(tmp_path / "run")
    with DriverLease(storage, "test", lambda _: "another", print) as lease:
        lease.acquire()
        with pytest.raises(DriverReplacedError, match=r"driver.*: pid"):
            train(run)
        assert not storage.list(COMMITS), "what it wrote is removed"
    assert client_of(run).steps_of("commit_succeeded") == []


@pytest.mark.parametrize(("every", "at", "before"), [(2, 3, [2]), (6, 5, [])])
def test_a_run_whose_replicas_differ_ends_and_resumes_from_the_commit_before(
    new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, at: int, before: list[int]
) -> None:
    """The error is raised at the next step, or at the end of the run."""

    def differ(samples: Any) -> None:
        raise ReplicasDifferError("ranks 0 and 1 hold different values of model.weight")

    def make_replicas_differ(step: Step) -> None:
        if step.index == at:
            patches.setattr("elastic_ddp.checkpoint.parts.check_replicas", differ)

    settings = {"every_steps": every, "keep": 9, "max_failed_saves": 0}
    first = new_run(checkpoint=settings)
    with monkeypatch.context() as patches, pytest.raises(ReplicasDifferError, match=r"model\.weight"):
        train(first, wait_for_saves(first, make_replicas_differ))
    assert sorted(metrics_by_step(tmp_path)) == before
    assert [event["counts"] for event in client_of(first).events_of("commit_failed")] == [False]
    leave(first, intact=False)
    resumed = new_run(checkpoint=settings)
    train(resumed, wait_for_saves(resumed))
    assert resumed.position.step == 6 and max(metrics_by_step(tmp_path)) == 6


def test_ranks_that_end_with_different_weights_end_the_run(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run()
    fake_weights(monkeypatch, run, ["a" * 64, "b" * 64])
    with pytest.raises(ReplicasDifferError, match=r"different weights.*0: 'a"):
        train(run)
    leave(run, intact=False)


def test_a_save_that_outlives_its_generation_removes_nothing(
    new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(checkpoint={"every_steps": 2, "keep": 1})
    storage, orphan, failed = commits_in(tmp_path), f"step=0/attempt={'a' * 32}", list[int]()
    storage.write(f"{orphan}/0-0.bin", b"perhaps of the next generation")
    may_write = delay_writes(monkeypatch)

    def in_step(step: Step) -> None:
        if step.index == 4 and not failed:
            failed.append(4)
            raise dist.DistNetworkError(PEER_FAILURE)
        if step.index == 4:
            may_write.set()
            wait_for_save(run)
            assert [*metrics_by_step(tmp_path)] == [2] and storage.list(orphan)

    train(run, in_step)
    assert failed and [*metrics_by_step(tmp_path)] == [6] and not storage.list(orphan)


# Saves that fail, or take long.


def test_training_continues_after_failed_saves(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run, step_index = new_run(checkpoint={"every_steps": 1, "max_failed_saves": 2}), [0]
    break_storage(monkeypatch, lambda: step_index[0] in (1, 2))
    train(run, wait_for_saves(run, lambda step: step_index.__setitem__(0, step.index)))
    assert client_of(run).steps_of("commit_failed") == [2, 3]
    assert client_of(run).steps_of("commit_succeeded") == [1, 4, 5, 6]
    event = client_of(run).events_of("commit_failed")[0]
    assert "no space left" in event["error"] and event["counts"] and event["of_storage"]


def test_a_silent_rank_in_an_intact_generation_is_a_failure_but_not_of_the_storage(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(checkpoint={"every_steps": 2})
    writer = checkpointer_of(run)._saver._writer
    silence = RankFailedError("rank 1 was silent for 15 s")
    monkeypatch.setattr(writer, "write", mock.Mock(side_effect=[silence, *[mock.DEFAULT] * 2], wraps=writer.write))
    train(run, wait_for_saves(run))
    assert client_of(run).steps_of("commit_failed") == [2] and client_of(run).steps_of("commit_succeeded") == [4, 6]
    [event] = client_of(run).events_of("commit_failed")
    assert event["counts"] and not event["of_storage"]


def test_a_save_whose_generation_broke_is_retried_at_once_and_does_not_count(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(checkpoint={"every_steps": 3, "max_failed_saves": 0})
    writer, may_fail, failed = checkpointer_of(run)._saver._writer, threading.Event(), list[int]()
    write = writer.write

    def fail_once(*args: Any) -> Any:
        if failed:
            return write(*args)
        assert may_fail.wait(60)
        raise RankFailedError("rank 1 failed")

    monkeypatch.setattr(writer, "write", fail_once)

    def in_step(step: Step) -> None:
        if step.index == 3 and not failed:
            checkpointer_of(run).generation_ended(intact=False)
            may_fail.set()
            wait_for_save(run)
            failed.append(3)
            raise dist.DistNetworkError(PEER_FAILURE)
        wait_for_save(run)

    train(run, in_step)
    assert client_of(run).steps_of("commit_failed") == [3] and client_of(run).steps_of("commit_succeeded") == [4, 6]
    assert not any(event["counts"] for event in client_of(run).events_of("commit_failed"))


def test_a_late_save_that_finds_a_later_commit_is_retried_at_once_and_does_not_count(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run that resumed from an older commit may have left later ones."""
    run = new_run(checkpoint={"every_steps": 3, "max_failed_saves": 0})
    may_write = delay_writes(monkeypatch, "step=3/")

    def in_step(step: Step) -> None:
        if step.index == 3 and not may_write.is_set():
            commit(tmp_path, 90)
            checkpointer_of(run).generation_ended(intact=True)
            may_write.set()
            wait_for_save(run)
            commits_in(tmp_path).delete("commits/90.json")
        checkpointer_of(run).close(60)

    train(run, in_step)
    [event] = client_of(run).events_of("commit_failed")
    assert event["step"] == 3 and "SupersededError" in event["error"] and "step 90" in event["error"]
    assert not event["counts"] and client_of(run).steps_of("commit_succeeded") == [4, 6]


def test_the_last_commit_is_awaited_and_its_error_is_raised(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_schedule, "SAVE_BACKOFF_S", 0.01)
    run = new_run(checkpoint={"max_failed_saves": 2})
    break_storage(monkeypatch, lambda: True)
    with pytest.raises(StorageError, match="no space left"):
        train(run)
    assert client_of(run).steps_of("commit_failed") == [6] * 3


def test_the_last_commit_succeeds_after_the_storage_has_failed_for_a_while(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_schedule, "SAVE_BACKOFF_S", 0.01)
    run = new_run()
    break_storage(monkeypatch, lambda: len(client_of(run).steps_of("commit_failed")) < 3)
    assert train(run)["steps"] == 6
    assert client_of(run).steps_of("commit_failed") == [6] * 3 and client_of(run).steps_of("commit_succeeded") == [6]


def test_a_requested_commit_is_retried_after_the_backoff(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run, step_index = new_run(), [0]
    client_of(run).commit_requested = 1
    break_storage(monkeypatch, lambda: step_index[0] < 5)

    def in_step(step: Step) -> None:
        step_index[0] = step.index
        if step.index == 4:
            checkpointer_of(run).schedule._backoff_ends_at = 0.0

    train(run, wait_for_saves(run, in_step))
    assert client_of(run).steps_of("commit_failed") == [1, 5] and client_of(run).steps_of("commit_succeeded") == [6]
    assert [event["request"] for event in client_of(run).events_of("commit_succeeded")] == [1]
