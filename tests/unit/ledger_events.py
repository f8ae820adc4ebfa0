"""Ledger events for tests that care about some of their fields."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

from elastic_ddp.telemetry.account import Phase
from elastic_ddp.telemetry.event import EVENTS, Event, parse

_ZEROS: dict[str, Any] = {"int": 0, "float": 0.0, "str": "", "bool": False}


def ledger_event(event: str, **fields: Any) -> Event:
    """An event by name; required fields that are not given are zero or empty. It is recorded when it happens."""
    required: dict[str, Any] = {"time": fields.get("at") or 0.0}
    if event in EVENTS:
        for each in dataclasses.fields(EVENTS[event]):
            if each.default is each.default_factory is dataclasses.MISSING:
                required[each.name] = {} if "Mapping" in str(each.type) else _ZEROS.get(str(each.type), [])
    return parse({"event": event, **required, **fields})


def event(name: str, at: float, session: str = "s1", *, late: float = 0.25, **fields: Any) -> Event:
    """An event that the driver records a little later."""
    return ledger_event(name, at=at, time=at + late, session=session, **fields)


def started(at: float, session: str = "s1", step: int | None = None) -> Event:
    return ledger_event("session_started", time=at, session=session, resumed_from_step=step)


def finished(at: float, session: str = "s1", status: str = "finished") -> Event:
    return ledger_event("run_finished", time=at, session=session, status=status)


def formed(number: int, at: float, step: int | None, session: str = "s1", **fields: Any) -> Event:
    reason = fields.pop("reason", "start" if step is None else "worker failed")
    fields = {"generation": number, "world_size": 2, "first_step": step, "reason": reason, **fields}
    return event("generation_formed", at, session, **fields)


def accounted(name: str, number: int, at: float, session: str = "s1", **fields: Any) -> Event:
    account = {phase: fields.pop(phase) for phase in get_args(Phase) if phase in fields}
    return event(name, at, session, generation=number, account=account, **fields)
