from __future__ import annotations

import json
from dataclasses import fields

import pytest

from elastic_ddp.telemetry.description import describe_event, state_of
from elastic_ddp.telemetry.event import EVENTS, MEMBERSHIP_CHANGED, parse
from elastic_ddp.telemetry.events import CommitStarted
from tests.unit.ledger_events import ledger_event


@pytest.mark.parametrize("name", EVENTS)
def test_every_event_survives_a_round_trip_through_json(name: str) -> None:
    event = ledger_event(name, at=1.5, time=0.0)
    assert type(event) is EVENTS[name] and event.event == name
    assert parse(json.loads(json.dumps(event.to_json()))) == event


@pytest.mark.parametrize("name", EVENTS)
def test_every_event_can_be_described_even_if_its_texts_are_empty(name: str) -> None:
    assert describe_event(ledger_event(name)) is None or isinstance(describe_event(ledger_event(name), 2), str)


def test_an_event_happened_before_the_driver_recorded_it() -> None:
    moments = [ledger_event("commit_succeeded", at=at, time=5.0).moment for at in (None, 4.0, 6.0)]
    assert moments == [5.0, 4.0, 5.0]


def test_a_field_of_a_newer_version_is_dropped() -> None:
    entry = {"event": "commit_started", "generation": 1, "step": 5, "time": 2.0, "new": 1}
    assert parse(entry) == CommitStarted(generation=1, step=5, time=2.0)


def test_every_event_is_documented() -> None:
    for kind in EVENTS.values():
        assert kind.__doc__ and not kind.__doc__.startswith(kind.__name__), kind
        assert all(each.kw_only for each in fields(kind))


def test_a_run_trains_although_a_worker_that_has_left_reports_it_late() -> None:
    first, second = (ledger_event("generation_started", generation=number) for number in (1, 2))
    ended = ledger_event("generation_ended", generation=1, reason=MEMBERSHIP_CHANGED)
    assert state_of([first, ended]).text == "changing workers"
    assert state_of([first, second, ended]).text == "training"
