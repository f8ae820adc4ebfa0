"""The record of each step that loggers get, from made-up ledgers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable

from elastic_ddp.telemetry.event import Event
from elastic_ddp.telemetry.events import (
    CommitSucceeded,
    EvaluationFinished,
    RunFinished,
    SessionStarted,
)
from elastic_ddp.telemetry.step_values import LoggedStep, StepValues, lost_steps, steps_record
from tests.unit.ledger_events import ledger_event
from tests.unit.logged_runs import LAST, session_events


def records(events: Iterable[Event]) -> list[LoggedStep]:
    steps = StepValues()
    return [record for event in events if (record := steps.add(event)) is not None]


def loss(step: int, value: float = 0.5) -> Event:
    return ledger_event("steps_completed", step=step, loss=value)


def accuracy(step: int, value: float) -> Event:
    return EvaluationFinished(generation=1, step=step, name="accuracy", value=value)


END = RunFinished(status="finished")


def test_a_step_has_all_its_values_in_one_record() -> None:
    found = records(session_events())
    assert [record.step for record in found] == list(range(1, LAST + 1))
    assert found[3].time == 104.0
    assert found[3].values == {
        "loss": 0.25,
        "epoch": 0,
        "samples": 32,
        "samples_per_s": 8.0,
        "world_size": 2,
        "grad_norm": 5.0,
        "accuracy": 0.4,
        "phases/forward_s": 0.5,
        "phases/slowest_rank_s": 0.2,
        "commit/seconds": 0.25,
        "commit/bytes": 1000,
    }
    assert "samples_per_s" not in found[0].values and "accuracy" not in found[4].values


def test_an_evaluation_between_two_logged_steps_has_a_record_of_its_own() -> None:
    found = records([loss(10), accuracy(15, 0.7), loss(20), END])
    assert [(record.step, record.values.get("loss")) for record in found] == [(10, 0.5), (15, None), (20, 0.5)]
    assert found[1].values == {"accuracy": 0.7}


def test_an_evaluation_that_the_driver_did_not_live_to_see_joins_the_repeated_step() -> None:
    found = records([loss(1), loss(2), SessionStarted(resumed_from_step=1), loss(2), accuracy(2, 0.9), loss(3), END])
    assert [(record.step, record.values.get("accuracy")) for record in found] == [(1, None), (2, 0.9), (3, None)]


def test_an_evaluation_after_a_stop_counts_for_the_next_step_and_once() -> None:
    stopped = [loss(1), RunFinished(status="stopped"), SessionStarted(), accuracy(1, 0.9), loss(2)]
    again = [SessionStarted(), loss(1), accuracy(1, 0.9), loss(2), loss(3), END]
    found = records([*stopped, *again])
    assert [(record.step, record.values.get("accuracy")) for record in found] == [(1, None), (2, 0.9), (3, None)]


def test_a_commit_belongs_to_the_newest_step_when_it_is_complete() -> None:
    commit = CommitSucceeded(generation=1, step=1, seconds=2.0, num_bytes=9)
    found = records([loss(1), loss(2), commit, loss(3), END])
    assert [record.values.get("commit/seconds") for record in found] == [None, 2.0, None]
    assert found[1].values["commit/bytes"] == 9


def test_numbers_that_json_has_not_come_back_as_numbers() -> None:
    event = ledger_event("steps_completed", step=1, loss="NaN", metrics={"scale": "Infinity", "note": "text"})
    (record,) = records([event, END])
    assert math.isnan(record.values["loss"]) and record.values["scale"] == math.inf and "note" not in record.values


def test_steps_that_the_ledger_lacks_come_from_the_commit() -> None:
    """Workers train on for a moment after their driver has died."""
    begun = ledger_event("session_started", session="a")
    told = [ledger_event("steps_completed", session="a", step=step) for step in range(1, 23)]
    record = steps_record([loss(step, math.nan if step == 30 else 0.25) for step in range(11, 42)])
    found = lost_steps([begun, *told], json.loads(json.dumps(record, allow_nan=False)), 40)
    assert [event.step for event in found] == list(range(23, 41))
    assert {event.loss for event in found} == {0.25, "NaN"}
    assert lost_steps([begun, *told], {}, 40) == []
    assert lost_steps([begun, *told], record, 20) == []
