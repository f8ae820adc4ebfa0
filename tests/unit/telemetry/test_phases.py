"""The phases of steps on several ranks, with real collectives."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from elastic_ddp.telemetry.events import PhasesMeasured
from elastic_ddp.telemetry.phases import MIN_STEPS
from elastic_ddp.worker.run import Run
from elastic_ddp.worker.step import Step
from tests.ranks import run_ranks
from tests.unit.rank_steps import config_of, run_steps
from tests.unit.single_worker import CPU, prepared
from tests.workers import Workers, running

SLOW_S = 0.04
STEPS = 6
WITHIN_S = 120.0


def slow_rank(group: Any, settings: list[dict[str, Any]]) -> list[tuple[list[PhasesMeasured], list[float]]]:
    """Steps of three micro-batches on each of two ranks. Rank 1 takes longer for each forward."""

    def body(step: Step, model: Any) -> float:
        for batch in step.micro_batches():
            if group.rank == 1:
                time.sleep(SLOW_S)
            step.backward(model(batch["x"]).square().mean())
        step.optimize()
        return time.perf_counter()

    runs = []
    for each in settings:
        layers = [torch.nn.Linear(3, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)]
        measured: list[PhasesMeasured] = []
        config = config_of(steps=STEPS, **each)
        runs.append((measured, run_steps(group, config, torch.nn.Sequential(*layers), body, measured=measured)))
    return [(measured, result["returned"]) for measured, result in runs]


def test_waiting_for_a_slow_rank_is_communication_of_the_others() -> None:
    settings = [{}, {"reduction": "native"}, {"strategy": "fsdp"}]
    of_rank_0, of_rank_1 = run_ranks(2, slow_rank, settings)
    for (events, _), (_, ends) in zip(of_rank_0, of_rank_1, strict=True):
        assert [(event.step, event.num_steps) for event in events] == [(step, 1) for step in range(3, STEPS)]
        slow_s = 3 * SLOW_S
        fast, slow = (median([event.work_s[rank] for event in events]) for rank in (0, 1))
        assert slow > slow_s > 2 * fast, events
        assert median([event.phases["communication"] for event in events]) > slow_s / 4, "rank 0 waits"
        assert median([event.slowest["forward"] for event in events]) > slow_s, events
        assert {event.slowest_rank for event in events} == {1}
        assert events[0].micro_batches == [3, 3]
        # The first two steps and the last one are not in these events.
        measured_s = sum(sum(event.slowest.values()) for event in events)
        assert measured_s == pytest.approx(ends[-2] - ends[1], rel=0.02)


def train_with_a_slow_rank(run: Run) -> None:
    """Both ranks spend a while on each micro-batch, and rank 1 more."""
    model: Any = prepared(run)
    for step in run.steps():
        with step:
            for batch in step.micro_batches():
                time.sleep(SLOW_S if run.rank == 1 else SLOW_S / 4)
                step.backward(model(batch["x"]).square().mean())
            step.optimize()


def train_many_parameters(run: Run) -> None:
    """Next to no computation for many parameters."""

    class ManyParameters(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 1)
            self.many = torch.nn.Parameter(torch.zeros(500_000))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.many[:1]

    model = run.prepare(ManyParameters())
    run.prepare(torch.optim.SGD(model.parameters(), lr=0.001))
    for step in run.steps():
        with step:
            for batch in step.micro_batches():
                step.backward(model(batch["x"]).square().mean())
            step.optimize()


def until(workers: Workers, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Returns the first status of the run that satisfies a condition."""
    end = time.monotonic() + WITHIN_S
    while not condition(status := workers.rendezvous.ask("status")):
        assert time.monotonic() < end, f"{status}\n{workers.describe()}"
        time.sleep(0.05)
    return status


def bound_by(kind: str) -> Callable[[dict[str, Any]], bool]:
    return lambda status: status["bottleneck"] is not None and status["bottleneck"]["kind"] == kind


LIVE: dict[str, Any] = {"steps": 100_000, "global_batch_size": 8, "micro_batch_size": 2, "log_every_steps": 5}


def test_status_names_a_slow_rank_and_begins_anew_after_it_has_died(tmp_path: Path) -> None:
    with running(tmp_path, train_with_a_slow_rank, CPU, 2, **LIVE) as workers:
        status = until(workers, bound_by("slow rank"))
        assert status["bottleneck"]["ranks"] == [1] and status["phases"]["num_steps"] >= MIN_STEPS
        os.kill(next(member["pid"] for member in status["members"] if member["rank"] == 1), signal.SIGKILL)
        status = until(workers, lambda status: status["generation"] == 2 and status["phases"] is not None)
        assert len(status["phases"]["work_s"]) == 1 and status["bottleneck"] is None
        first_step = workers.started()[-1].first_step
        measured: list[Any] = [event for event in workers.rendezvous.events("phases_measured") if event.generation == 2]
        assert measured[0].step - measured[0].num_steps == first_step + 2, "the first two steps do not count"


def test_status_names_communication_that_all_ranks_wait_for(tmp_path: Path) -> None:
    with running(tmp_path, train_many_parameters, CPU, 2, **LIVE) as workers:
        assert "ddp.bucket_cap_mb" in until(workers, bound_by("communication"))["bottleneck"]["advice"]
