"""Ledger events for tests that care about some of their fields."""

from __future__ import annotations

import dataclasses
from typing import Any

from elastic_ddp.telemetry.event import EVENTS, Event, parse

_ZEROS: dict[str, Any] = {"int": 0, "float": 0.0, "str": "", "bool": False}


def ledger_event(event: str, **fields: Any) -> Event:
    """An event by name; required fields that are not given are zero or empty. It is recorded when it happens."""
    required: dict[str, Any] = {"time": fields.get("at") or 0.0}
    if event in EVENTS:
        for each in dataclasses.fields(EVENTS[event]):
            if each.default is each.default_factory is dataclasses.MISSING:
                required[each.name] = _ZEROS.get(str(each.type), [])
    return parse({"event": event, **required, **fields})
