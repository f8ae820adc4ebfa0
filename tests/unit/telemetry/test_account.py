"""A worker's account of a generation in which a peer fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from elastic_ddp.rendezvous.hang import Activity
from elastic_ddp.telemetry.account import Account, Phase
from tests.inside_run import set_clock
from tests.unit.single_worker import PEER_FAILURE, NewRun, client_of, prepared


class Worker:
    """The activity and the account of a worker, with a manual clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.activity = Activity(lambda: self.now)
        self.account = Account(lambda: self.activity.idle_s, lambda: self.now)
        self.account.begin()
        self.account.formed()
        self.account.ready()

    def work(self, seconds: float) -> None:
        self.activity.enter("forward")
        self.now += seconds
        self.activity.enter("reduction")

    def wait(self, seconds: float) -> None:
        self.now += seconds

    @property
    def wasted(self) -> tuple[float, float]:
        """Seconds of redone work and of detection."""
        seconds = self.account.seconds()
        return seconds["redone"], seconds["detection"]


def test_each_phase_has_the_time_spent_in_it_up_to_the_end() -> None:
    now = 1000.0
    account = Account(clock=lambda: now)
    account.begin()
    now += 0.25
    account.formed()
    now += 0.5
    account.ready()
    now += 8
    with pytest.raises(RuntimeError), account.checkpoint():
        now += 1
        raise RuntimeError(PEER_FAILURE)
    now += 2.0000004
    account.end()
    now += 4
    with account.checkpoint():
        now += 8
    seconds = {"rendezvous": 0.25, "hand_over": 0.5, "useful": 10.0, "checkpoint": 1.0}
    assert account.seconds() == seconds
    account.begin()
    now += 1
    assert account.seconds() == {"rendezvous": 1.0}, "a new generation has a new account"


@given(st.lists(st.one_of(st.floats(0, 1e4), st.sampled_from(["ready", "step", "save", "failure", "detection"]))))
def test_phases_add_up_to_the_time_since_the_start(actions: list[float | str]) -> None:
    now = 1000.0
    account = Account(lambda: 5.0, lambda: now)
    account.begin()
    for action in actions:
        match action:
            case "ready":
                account.ready()
            case "step":
                account.step_done()
            case "save":
                with account.checkpoint():
                    now += 1.0
            case "failure":
                account.record_failure(in_step=True)
            case "detection":
                account.record_detection()
            case float(seconds):
                now += seconds
        phases = account.seconds()
        assert min(phases.values()) >= 0 and phases.keys() <= set(get_args(Phase))
        assert sum(phases.values()) == pytest.approx(now - 1000.0, abs=1e-5)


def fail_in_the_first_step(worker: Worker) -> None:
    worker.work(2.0)
    worker.wait(30.0)
    worker.account.record_failure(in_step=True)


def fail_while_metrics_are_gathered(worker: Worker) -> None:
    worker.work(9.0)
    worker.account.step_done()
    worker.wait(2.0)
    with pytest.raises(RuntimeError), worker.activity.within("collective"):
        worker.wait(30.0)
        raise RuntimeError(PEER_FAILURE)
    worker.account.record_failure(in_step=True)


def fail_in_an_evaluation(worker: Worker) -> None:
    for _ in range(5):
        worker.work(9.0)
        worker.account.step_done()
    worker.account.mark()
    worker.work(1.0)
    worker.work(1.0)
    worker.wait(30.0)
    worker.account.record_failure(in_step=False)


@pytest.mark.parametrize("fail", [fail_in_the_first_step, fail_while_metrics_are_gathered, fail_in_an_evaluation])
def test_waiting_is_not_work_without_a_typical_step(fail: Callable[[Worker], None]) -> None:
    worker = Worker()
    fail(worker)
    assert worker.wasted == (2.0, 30.0)


def test_work_in_a_long_wait_is_at_most_a_typical_step() -> None:
    """This holds if waiting and work are in one place, such as the backward with the reduction."""
    worker = Worker()
    for seconds in (9.0, 4.0, 4.0):
        worker.work(seconds)
        worker.account.step_done()
    worker.work(1.0)
    worker.wait(30.0)
    worker.account.record_failure(in_step=True)
    assert worker.wasted == (4.0, 27.0)


def test_a_first_step_that_waits_for_a_failed_peer_counts_as_detection(new_run: NewRun) -> None:
    run, now = new_run(), 1000.0
    set_clock(run, lambda: now)
    model = prepared(run)
    for step in run.steps():
        with step:
            for batch in step.micro_batches():
                now += 1.0
                step.backward(model(batch["x"]).square().mean())
            if len(client_of(run).joins) == 1:
                now += 30.0
                raise dist.DistNetworkError(PEER_FAILURE)
            step.optimize()
    account = next(event["account"] for event in client_of(run).events if event["event"] == "generation_ended")
    assert (account["useful"], account["redone"], account["detection"]) == (0.0, 4.0, 30.0)
