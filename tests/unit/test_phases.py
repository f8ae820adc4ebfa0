"""The phases of steps on several ranks, with real collectives."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import pytest
import torch

from elastic_ddp.telemetry.events import PhasesMeasured
from elastic_ddp.worker.step import Step
from tests.ranks import run_ranks
from tests.unit.rank_steps import config_of, run_steps

SLOW_S = 0.06
STEPS = 7


def slow_rank(group: Any, settings: dict[str, Any]) -> tuple[list[PhasesMeasured], list[float]]:
    """Steps of three micro-batches on each of two ranks. Rank 1 takes longer for each forward."""

    def body(step: Step, model: Any) -> float:
        for batch in step.micro_batches():
            if group.rank == 1:
                time.sleep(SLOW_S)
            step.backward(model(batch["x"]).square().mean())
        step.optimize()
        return time.perf_counter()

    config = config_of(steps=STEPS, **settings)
    layers = [torch.nn.Linear(3, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)]
    measured: list[PhasesMeasured] = []
    result = run_steps(group, config, torch.nn.Sequential(*layers), body, measured=measured)
    return measured, result["returned"]


@pytest.mark.parametrize("settings", [{}, {"reduction": "native"}, {"strategy": "fsdp"}], ids=str)
def test_waiting_for_a_slow_rank_is_communication_of_the_others(settings: dict[str, Any]) -> None:
    (events, _), (_, ends) = run_ranks(2, slow_rank, settings)
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
