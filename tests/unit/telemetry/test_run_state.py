"""The state of a run in words, from the events of its ledger."""

from __future__ import annotations

from typing import Any

from elastic_ddp.telemetry.description import state_of
from elastic_ddp.telemetry.event import MEMBERSHIP_CHANGED
from tests.unit.ledger_events import ledger_event


def state_after(*events: tuple[str, dict[str, Any]]) -> str:
    ledger = [
        ledger_event(name, time=float(seq), seq=seq, session="a", **fields) for seq, (name, fields) in enumerate(events)
    ]
    return state_of(ledger).text


def started(generation: int) -> tuple[str, dict[str, Any]]:
    return "generation_started", {"generation": generation, "world_size": 2, "reason": "start", "first_step": 0}


ENDED = "generation_ended", {"generation": 1, "last_step": 7, "reason": MEMBERSHIP_CHANGED}


def test_a_run_trains_although_a_worker_that_has_left_reports_it_late() -> None:
    assert state_after(started(1), ENDED) == "changing workers"
    assert state_after(started(1), started(2), ENDED) == "training"
