"""What the events of the ledger have in common, and how they are read from JSON. `events.py` has their classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any, ClassVar

EVENTS: dict[str, type[Event]] = {}
"""The event classes by name, in the order of `events.py`."""
STARTED, RESUMED, WORKER_FAILED = "start", "resume", "worker failed"
"""Reasons for which a generation forms; there are others."""
RUN_ENDED, RUN_FAILED, PEER_FAILED = "the run ended", "the run failed", "a worker failed"
MEMBERSHIP_CHANGED, STATE_TRANSFERRED = "workers join or leave", "leaving workers transferred the state"
STEP_REPEATS = "the loop ended with a step that repeats"
"""Reasons for which a generation ends."""
_FORMER_REASONS = {
    "worker lost": WORKER_FAILED,
    "a worker was lost": PEER_FAILED,
    "workers were to join or leave": MEMBERSHIP_CHANGED,
    "those who go handed the state on": STATE_TRANSFERRED,
    "the loop ended with a step that was lost, and begins again": STEP_REPEATS,
}
"""Reasons in ledgers of version 0.1.0, and what they are called now."""

Account = Mapping[str, float]
"""Seconds of a generation by phase (see `account.Phase`), as one worker measured them since it began."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """What all events have in common. A field that is added to an event later needs a default."""

    event: ClassVar[str]
    """Name of the event."""
    at: float | None = None
    """When it happened, by the clock of the process that reported it; null for events of the driver itself."""
    time: float = 0.0
    """When the driver appended it to the ledger, by the driver's clock."""
    seq: int = 0
    """Number of the event in its session, from 0."""
    session: str = ""
    """The driver's session that the event belongs to, such as `20261120T101500Z-3f9a1c`."""

    def __init_subclass__(cls) -> None:
        if "event" in vars(cls):
            EVENTS[cls.event] = cls

    def fields(self) -> dict[str, Any]:
        """Returns the fields of the event's own class by name, without those of `Event`."""
        return {name: getattr(self, name) for name in _own_fields(type(self))}

    def to_json(self) -> dict[str, Any]:
        """Returns the name, `at` if it is set, and the fields of the event's own class."""
        at = {} if self.at is None else {"at": self.at}
        return {"event": self.event, **at, **self.fields()}


@dataclass(frozen=True, kw_only=True)
class UnknownEvent(Event):
    """An event of another version: it has no class here, or lacks a field that its class needs."""

    event: str  # type: ignore[misc]
    """Name of the event."""
    content: Mapping[str, Any] = field(default_factory=dict)
    """Its fields, without those of `Event`."""

    def fields(self) -> dict[str, Any]:
        return dict(self.content)


@dataclass(frozen=True, kw_only=True)
class GenerationEvent(Event):
    """An event that belongs to one generation."""

    generation: int
    """Number of the generation in its session, from 1."""


@dataclass(frozen=True, kw_only=True)
class TrainingEvent(GenerationEvent):
    """An event about training in a generation, as its rank 0 reports it."""


_ENVELOPE = frozenset(attribute.name for attribute in dataclasses.fields(Event))


def _own_fields(kind: type[Event]) -> list[str]:
    return [attribute.name for attribute in dataclasses.fields(kind) if attribute.name not in _ENVELOPE]


def _is_required(attribute: dataclasses.Field[Any]) -> bool:
    return attribute.default is attribute.default_factory is MISSING


def parse(entry: Mapping[str, Any]) -> Event:
    """Returns the event of a JSON object.

    An event without a class, or without a field that its class needs, becomes an `UnknownEvent`. Fields that its class
    does not have are dropped.
    """
    envelope = {name: entry[name] for name in _ENVELOPE & entry.keys()}
    kind = EVENTS.get(entry["event"])
    if kind is None or any(_is_required(one) and one.name not in entry for one in dataclasses.fields(kind)):
        content = {name: value for name, value in entry.items() if name != "event" and name not in _ENVELOPE}
        return UnknownEvent(event=entry["event"], content=content, **envelope)
    fields = {name: entry[name] for name in _own_fields(kind) if name in entry}
    if isinstance(reason := fields.get("reason"), str):
        fields["reason"] = _FORMER_REASONS.get(reason, reason)
    return kind(**envelope, **fields)
