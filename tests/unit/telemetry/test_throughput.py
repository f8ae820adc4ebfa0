"""Throughput and efficiency at each world size of a run."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from elastic_ddp.cli.run_summary import render
from elastic_ddp.telemetry.event import Event
from elastic_ddp.telemetry.goodput import scaling
from elastic_ddp.telemetry.sessions import read_sessions
from elastic_ddp.telemetry.summary import summarize
from tests.unit.ledger_events import accounted, event, finished, formed, started

SAMPLES = 10
"""Samples of a step."""


def generation(number: int, world_size: int, at: float, first_step: int, session: str = "s1") -> list[Event]:
    """A generation forms, and its first step takes 2 s."""
    fields: dict[str, Any] = {"generation": number, "world_size": world_size, "first_step": first_step}
    told = formed(number, at, first_step, session)
    return [
        event("generation_formed", at, session, reason=told.reason, **fields),  # type: ignore[attr-defined]
        event("generation_started", at, session, reason="start", **fields),
        event("first_step", at + 2.0, session, generation=number, seconds=2.0),
    ]


def steps(number: int, at: float, step: int, useful: float, session: str = "s1") -> Event:
    return accounted("steps_completed", number, at, session, step=step, samples=SAMPLES * step, useful=useful)


GROWN = [
    started(0.0),
    *generation(1, 1, 10.0, 0),
    steps(1, 21.0, 10, 11.0),  # 9 steps in 9 s after the first
    steps(1, 31.0, 20, 21.0),
    *generation(2, 2, 32.0, 20),
    steps(2, 40.0, 31, 8.0),  # 10 steps in 6 s after the first
    finished(41.0),
]


def rates(events: list[Event]) -> dict[int, float]:
    return {row["world_size"]: row["samples_per_s"] for row in scaling(read_sessions(events))}


def test_each_world_size_has_its_throughput_without_the_first_step() -> None:
    one, two = scaling(read_sessions(GROWN))
    assert one == {
        "world_size": 1, "steps": 19, "samples": 190, "seconds": 19.0,
        "samples_per_s": 10.0, "samples_per_s_per_worker": 10.0, "efficiency": 1.0,
    }  # fmt: skip
    assert (two["world_size"], two["steps"], two["seconds"]) == (2, 10, 6.0)
    assert two["samples_per_s"] == pytest.approx(100 / 6, abs=1e-3)
    assert two["efficiency"] == pytest.approx(10 / 12, abs=1e-4), "of the rate per worker with one worker"


def test_steps_that_were_repeated_count_once() -> None:
    """The session before stopped at step 31 and its last commit is step 25, halfway between two accounts."""
    resumed = [*GROWN[:-1], started(100.0, "s2", step=26), *generation(1, 2, 105.0, 26, "s2")]
    resumed += [steps(1, 112.0, 32, 7.0, "s2"), finished(113.0, "s2")]
    _, two = scaling(read_sessions(resumed))
    assert two["steps"] == (26 - 21) + (32 - 27)
    assert two["seconds"] == pytest.approx(3.0 + 5.0)
    from_the_start = [
        *GROWN[:-1],
        started(100.0, "s2"),
        *generation(1, 3, 105.0, 0, "s2"),
        steps(1, 112.0, 6, 7.0, "s2"),
    ]
    assert set(rates(from_the_start)) == {3}, "no earlier work survived"


def test_steps_that_a_later_generation_of_the_session_repeats_count_once() -> None:
    """All workers failed after step 20, and the newest commit was step 15."""
    again = [*generation(2, 2, 40.0, 15), steps(2, 50.0, 30, 10.0), finished(51.0)]
    one, two = scaling(read_sessions([*GROWN[:6], *again]))
    assert (one["steps"], one["seconds"]) == (15 - 1, 14.0)
    assert two["steps"] == 30 - 16


def test_steps_of_unlogged_generations_count_by_their_last_account() -> None:
    ended = accounted("generation_ended", 2, 40.0, last_step=26, useful=5.0)
    third = [*generation(3, 1, 41.0, 26), steps(3, 50.0, 40, 9.0)]
    assert rates([*GROWN[:-2], ended, *third])[2] == pytest.approx(50 / 3.0, abs=1e-3)


def test_a_run_without_measured_steps_has_no_scaling() -> None:
    assert rates([]) == rates(GROWN[:4]) == rates([started(0.0), finished(1.0)]) == {}


def test_show_has_a_table_for_a_run_with_several_world_sizes() -> None:
    text = shown(GROWN)
    assert "scaling, without start-up; efficiency is relative to 1 worker" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["1", "10", "10", "100%", "19"] in lines and ["2", "16.7", "8.33", "83%", "10"] in lines
    assert "efficiency" not in shown(GROWN[:6])


def shown(events: list[Event]) -> str:
    console = Console(file=StringIO(), width=100)
    console.print(render(summarize(events)))
    return console.file.getvalue()  # type: ignore[attr-defined]
