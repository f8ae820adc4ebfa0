"""When a run commits."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_ddp.checkpoint.interval import FIRST_INTERVAL_S
from elastic_ddp.config.run_config import CheckpointConfig
from elastic_ddp.worker.commit_schedule import MAX_SAVE_BACKOFF_S, SAVE_BACKOFF_S, CommitSchedule
from elastic_ddp.worker.step import Step
from tests.inside_run import checkpointer_of, wait_for_save
from tests.unit.single_worker import NewRun, PeerFailures, client_of, train, train_and_count
from tests.unit.worker.commit_helpers import delay_writes, newest_record, wait_for_saves


@dataclasses.dataclass
class Scheduled:
    """A schedule whose clock and requests a test sets."""

    settings: dict[str, Any]
    now: float = 1000.0
    requested: int = 0

    def __post_init__(self) -> None:
        self.schedule = CommitSchedule(
            CheckpointConfig(**self.settings), 100, lambda: self.requested, clock=lambda: self.now, steps_per_epoch=5
        )


def test_a_commit_is_due_after_every_steps_or_every_seconds() -> None:
    case = Scheduled({"every_steps": 10, "every_seconds": 30})
    assert not case.schedule.should_commit(9) and case.schedule.should_commit(10)
    case.schedule.reset_timer(10)
    assert not case.schedule.should_commit(19)
    case.now += 30.0
    assert case.schedule.should_commit(11)


def test_a_commit_is_due_after_every_epochs_also_if_a_save_is_running_then() -> None:
    case = Scheduled({"every_epochs": 2})
    due = [
        steps
        for steps in range(1, 31)
        if case.schedule.should_commit(steps) and case.schedule.reset_timer(steps) is None
    ]
    assert due == [10, 20, 30]
    assert not case.schedule.skip(40), "the commit is made when the running save has ended"
    assert case.schedule.should_commit(41)
    case.schedule.reset_timer(41)
    assert not case.schedule.should_commit(42) and case.schedule.should_commit(50)


def test_a_measured_interval_follows_from_the_time_that_saves_stall_training() -> None:
    case = Scheduled({"max_overhead": 0.02})
    case.schedule.reset_timer(3)
    case.now += FIRST_INTERVAL_S - 1
    assert not case.schedule.should_commit(4)
    case.now += 2.0
    assert case.schedule.should_commit(4)
    case.schedule.interval.stalled(0.2)
    case.schedule.reset_timer(4)
    case.now += 9.9
    assert not case.schedule.should_commit(5)
    case.now += 0.2
    assert case.schedule.should_commit(5) and case.schedule.interval_s == 10.0


def test_the_backoff_doubles_with_each_failure_in_a_row_up_to_a_limit() -> None:
    case, backoffs = Scheduled({"every_steps": 1}), []
    for _ in range(6):
        case.schedule.save_failed(counts=True, retry_at_once=False)
        began_at = case.now
        while case.schedule.in_backoff:
            case.now += 0.5
        backoffs.append(case.now - began_at)
    assert backoffs == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0] and backoffs[0] == SAVE_BACKOFF_S
    assert backoffs[-1] == MAX_SAVE_BACKOFF_S
    case.schedule.save_succeeded(1, 0, 1.0)
    case.schedule.save_failed(counts=True, retry_at_once=False)
    case.now += SAVE_BACKOFF_S
    assert not case.schedule.in_backoff


def test_a_request_is_not_retried_during_the_backoff() -> None:
    case = Scheduled({"every_seconds": 1000}, requested=1)
    assert case.schedule.should_commit(1)
    case.schedule.save_started(1)
    assert not case.schedule.should_commit(2), "the running save fulfills it"
    case.requested = 2
    assert case.schedule.should_commit(2) and not case.schedule.skip(2), "a later one waits for the end of that save"
    case.requested = 1
    case.schedule.save_failed(counts=True, retry_at_once=False)
    assert not case.schedule.should_commit(3)
    case.now += SAVE_BACKOFF_S
    assert case.schedule.should_commit(4)
    case.schedule.save_succeeded(4, 1, 1.0)
    assert not case.schedule.should_commit(5)


def test_a_save_that_a_failed_rank_interrupts_is_retried_at_once() -> None:
    case = Scheduled({"every_steps": 10})
    case.schedule.reset_timer(10)
    case.schedule.save_failed(counts=False, retry_at_once=True)
    assert not case.schedule.in_backoff and case.schedule.step is None and case.schedule.should_commit(11)
    assert not case.schedule.skip(11), "it replaces a commit"


def test_the_newest_commit_in_the_storage_decides_when_the_next_is_due() -> None:
    case = Scheduled({"every_steps": 10, "every_seconds": 1000})
    case.schedule.reset_timer(20)
    case.schedule.set_newest(20)
    assert not case.schedule.should_commit(21) and case.schedule.should_commit(30)
    case.schedule.set_newest(10)
    assert (case.schedule.step, case.schedule.committed_step) == (10, 10) and case.schedule.should_commit(21)


def test_all_failed_workers_of_an_earlier_process_count_once_when_a_run_resumes() -> None:
    for after_failure, seen, expected in [(True, False, 3), (False, False, 2), (True, True, 2)]:
        case = Scheduled({"interval": "auto"})
        if seen:
            case.schedule.worker_failed()
        case.schedule.resume(7, {"losses": 2, "watched_s": 5.0}, after_failure=after_failure)
        assert case.schedule.to_record()["losses"] == expected and case.schedule.committed_step == 7


# In a run.


def test_commits_come_every_so_many_steps_and_name_no_interval(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run(steps=7, checkpoint={"every_steps": 3})
    train(run, wait_for_saves(run))
    assert client_of(run).steps_of("commit_succeeded") == [3, 6, 7]
    assert {event["interval_s"] for event in client_of(run).events_of("commit_succeeded")} == {None}
    assert not {"losses", "watched_s"} & newest_record(tmp_path).keys()


def test_a_measured_interval_is_in_the_ledger_and_in_the_commit(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run(checkpoint={"interval": "auto"})

    def request(step: Step) -> None:
        if step.index in (1, 3):
            client_of(run).commit_requested += 1

    train(run, wait_for_saves(run, request))
    commits = client_of(run).events_of("commit_succeeded")
    assert [event["step"] for event in commits] == [2, 4, 6]
    assert commits[-1]["interval_s"] == pytest.approx(checkpointer_of(run).schedule.interval_s, rel=0.05)
    assert commits[-1]["interval_s"] != FIRST_INTERVAL_S
    record = newest_record(tmp_path)
    assert record["losses"] == 0 and record["watched_s"] > 0


def test_a_resumed_run_keeps_the_failures_that_it_has_counted(new_run: NewRun) -> None:
    settings = {"interval": "auto"}
    run, fail = new_run(checkpoint=settings), PeerFailures(1, 2)
    train(run, lambda step: fail(step.index))
    before = checkpointer_of(run).schedule.to_record()
    resumed = new_run(checkpoint=settings, steps=8)
    train(resumed)
    after = checkpointer_of(resumed).schedule.to_record()
    assert before["losses"] == after["losses"] == 2 and after["watched_s"] > before["watched_s"] / 2


def test_measurements_survive_restarts_of_the_training_function(new_run: NewRun) -> None:
    """Each failure between two commits counts, although the commit that the run returns to has none of them."""
    run, fail = new_run(checkpoint={"interval": "auto"}), PeerFailures(("optimizer", 1), ("optimizer", 2))
    checkpointer_of(run).schedule.interval.stalled(0.5)
    checkpointer_of(run).schedule.save_succeeded(0, 0, 1.5)
    train_and_count(run, lambda *place: fail(place))
    assert len(fail.raised) == 2 and checkpointer_of(run).schedule.to_record()["losses"] == 2
    assert client_of(run).events_of("commit_succeeded")[-1]["interval_s"] != FIRST_INTERVAL_S


def test_the_failure_of_all_workers_counts_for_those_that_resume(new_run: NewRun) -> None:
    settings = {"interval": "auto"}
    train(new_run(checkpoint=settings))
    resumed = new_run(checkpoint=settings, steps=8)
    join = client_of(resumed).join
    client_of(resumed).join = lambda request, **facts: replace(join(request, **facts), reason="worker failed")  # type: ignore[method-assign]
    train(resumed)
    assert checkpointer_of(resumed).schedule.to_record()["losses"] == 1


def test_a_commit_that_is_due_while_another_is_written_is_skipped(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(steps=12, checkpoint={"every_steps": 2})
    may_write = delay_writes(monkeypatch)

    def in_step(step: Step) -> None:
        if step.index >= 7:
            may_write.set()
            wait_for_save(run)

    train(run, in_step)
    assert client_of(run).steps_of("commit_skipped") == [4, 6]
    assert client_of(run).steps_of("commit_succeeded") == [2, 8, 10, 12]


def test_a_commit_that_replaces_one_of_a_failed_rank_0_is_not_skipped(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(steps=12, checkpoint={"every_steps": 4})
    checkpointer, may_write = checkpointer_of(run), delay_writes(monkeypatch, "step=4/")

    def in_step(step: Step) -> None:
        if step.index == 4:  # as after rank 0 failed in its save of step 4, while this rank is still writing
            checkpointer.refresh_newest(4)
            checkpointer._join_refresh()
        if step.index >= 6:
            may_write.set()
            checkpointer.close(60)

    train(run, in_step)
    assert client_of(run).steps_of("commit_skipped") == []
    assert client_of(run).steps_of("commit_succeeded") == [4, 7, 11, 12]


# When one node is left.


def test_a_state_that_is_left_on_one_node_is_committed_at_once() -> None:
    case = Scheduled({"every_seconds": 1000})
    case.schedule.generation_formed(2)
    case.schedule.reset_timer(10)
    case.schedule.save_succeeded(10, 0, 3.0)
    case.now += 2.0
    case.schedule.generation_formed(1)
    assert not case.schedule.should_commit(11), "a save takes longer than the work since the last commit"
    case.now += 2.0
    assert case.schedule.should_commit(12)
    case.schedule.generation_formed(1)
    assert case.schedule.should_commit(12), "the save has not begun"
    case.schedule.reset_timer(12)
    case.now += 100.0
    assert not case.schedule.should_commit(13), "it is committed"


@pytest.mark.parametrize("nodes", [(1, 1, 2, 3, 2), (2, 1, 2)], ids=["one node at first", "a node that joins in time"])
def test_a_run_that_is_not_left_on_one_node_commits_as_configured(nodes: tuple[int, ...]) -> None:
    case = Scheduled({"every_seconds": 1000})
    for num_nodes in nodes:
        case.schedule.generation_formed(num_nodes)
    case.now += 10.0
    assert not case.schedule.should_commit(5)


def test_a_run_commits_after_the_step_in_which_one_node_is_left(new_run: NewRun) -> None:
    run = new_run(checkpoint={"every_seconds": 1000})
    client, fail = client_of(run), PeerFailures(2)
    join = client.join
    client.join = lambda request, **facts: replace(join(request, **facts), num_nodes=1 if len(client.joins) > 1 else 2)  # type: ignore[method-assign]
    train(run, wait_for_saves(run, lambda step: fail(step.index)))
    assert client.steps_of("commit_succeeded") == [3, 6]
