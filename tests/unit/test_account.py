"""What a worker tells of its time in a generation that loses a peer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist

from elastic_ddp.rendezvous.hang import Activity
from elastic_ddp.telemetry.account import Account
from elastic_ddp.telemetry.stopwatch import Stopwatch
from tests.unit.single_worker import PEER_FAILURE, NewRun, client_of, prepared


class Worker:
    """Where it is, and what it tells of its time; by a clock that stands still."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.activity = Activity(lambda: self.now)
        self.account = Account(Stopwatch(lambda: self.now), lambda: self.activity.idle_s)
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
    def dummy_batch(self) -> tuple[float, float]:
        """Redone, and spent on noticing that."""
        seconds = self.account.seconds()
        return seconds["redone"], seconds["detection"]


def lose_in_the_first_step(worker: Worker) -> None:
    worker.work(2.0)
    worker.wait(30.0)
    worker.account.record_failure(in_step=True)


def lose_in_the_second_step(worker: Worker) -> None:
    worker.work(9.0)
    worker.account.step_done()
    lose_in_the_first_step(worker)


def lose_where_the_first_metrics_are_gathered(worker: Worker) -> None:
    worker.work(9.0)
    worker.account.step_done()
    worker.wait(2.0)
    with pytest.raises(RuntimeError), worker.activity.within("collective"):
        worker.wait(30.0)
        raise RuntimeError(PEER_FAILURE)
    worker.account.record_failure(in_step=True)


def lose_in_an_evaluation(worker: Worker) -> None:
    for _ in range(5):
        worker.work(9.0)
        worker.account.step_done()
    worker.account.mark()
    worker.work(1.0)
    worker.work(1.0)
    worker.wait(30.0)
    worker.account.record_failure(in_step=False)


@pytest.mark.parametrize(
    "lose",
    [
        lose_in_the_first_step,
        lose_in_the_second_step,
        lose_where_the_first_metrics_are_gathered,
        lose_in_an_evaluation,
    ],
)
def test_silence_is_no_work_where_nobody_knows_how_long_that_takes(lose: Callable[[Worker], None]) -> None:
    worker = Worker()
    lose(worker)
    assert worker.dummy_batch == (2.0, 30.0)


def test_a_typical_step_tells_how_much_of_a_long_wait_was_work() -> None:
    """Also where the worker counts what it waits for as one with its work, such as the backward with the reduction."""
    worker = Worker()
    for seconds in (9.0, 4.0, 4.0):
        worker.work(seconds)
        worker.account.step_done()
    worker.work(1.0)
    worker.wait(30.0)
    worker.account.record_failure(in_step=True)
    assert worker.dummy_batch == (4.0, 27.0)


def test_a_worker_whose_first_step_waits_for_a_silent_peer_says_so(new_run: NewRun) -> None:
    run, now = new_run(), 1000.0
    run._loop.membership.account._watch = Stopwatch(lambda: now)
    run._loop.membership.activity._clock = lambda: now
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
    told = next(said["account"] for said in client_of(run).events if said["event"] == "generation_ended")
    assert (told["useful"], told["redone"], told["detection"]) == (0.0, 4.0, 30.0)
