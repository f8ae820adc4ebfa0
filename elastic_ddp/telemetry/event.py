"""The base class of the ledger's events, and their JSON format. `events.py` has their classes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar, dataclass_transform

E = TypeVar("E", bound="Event")

EVENTS: dict[str, type[Event]] = {}
"""The event classes by name, in the order of `events.py`."""
STARTED, RESUMED, WORKER_FAILED = "start", "resume", "worker failed"
"""Reasons for which a generation forms; there are others."""
RUN_ENDED, RUN_FAILED, PEER_FAILED = "the run ended", "the run failed", "a worker failed"
MEMBERSHIP_CHANGED, STATE_TRANSFERRED = "workers join or leave", "leaving workers transferred the state"
STEP_REPEATS = "a step is repeated"
"""Reasons for which a generation ends."""
EXITED = "its process exited"
"""How a worker failed whose process has ended; its Python stacks may follow."""

PhaseSeconds = Mapping[str, float]
"""Seconds of a generation by phase (see `account.Phase`), as one worker measured them since it began."""


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
@dataclass(frozen=True, kw_only=True)
class Event:
    """What all events have in common. A field that is added to an event later needs a default.

    A subclass is a frozen dataclass. Its name in snake case is the event's name; classes of this module are only bases.
    """

    event: ClassVar[str]
    """Name of the event, such as `run_finished`."""
    at: float | None = None
    """When it happened, by the clock of the driver's machine; null for events of the driver itself."""
    time: float = 0.0
    """When the driver appended it to the ledger, by the driver's clock."""
    seq: int = 0
    """Number of the event in its session, from 0."""
    session: str = ""
    """The driver's session that the event belongs to, such as `s000002-20261120T101500Z-3f9a1c`."""

    @property
    def moment(self) -> float:
        """When it happened: at the latest when the driver appended it, also if the clock was set back meanwhile."""
        return self.time if self.at is None else min(self.at, self.time)

    def __init_subclass__(cls) -> None:
        if cls.__module__ != __name__:
            cls.event = re.sub(r"\B(?=[A-Z])", "_", cls.__name__).lower()
            EVENTS[cls.event] = cls
        dataclass(frozen=True, kw_only=True)(cls)

    def to_json(self) -> dict[str, Any]:
        """Returns the name, `at` if it is set, and the fields of the event's own class."""
        at = {} if self.at is None else {"at": self.at}
        return {"event": self.event, **at, **{name: value for name, value in vars(self).items() if name not in _COMMON}}


_COMMON = frozenset(attribute.name for attribute in fields(Event))


class GenerationEvent(Event):
    """An event that belongs to one generation."""

    generation: int
    """Number of the generation in its session, from 1."""


class TrainingEvent(GenerationEvent):
    """An event about training in a generation, as its rank 0 reports it."""


class AgreedEvent(TrainingEvent):
    """An event about training that all ranks know. If rank 0 fails before it has reported it, another rank does."""


def last_of(events: Sequence[Event], kind: type[E]) -> E | None:
    """Returns the last event of a class; None if there is none."""
    return next((event for event in reversed(events) if isinstance(event, kind)), None)


def parse(entry: Mapping[str, Any]) -> Event:
    """Returns the event of a JSON object. Fields that its class does not have are dropped.

    Raises:
        KeyError: there is no event of this name.
        TypeError: a field is missing that the class needs.
    """
    kind = EVENTS[entry["event"]]
    return kind(**{attribute.name: entry[attribute.name] for attribute in fields(kind) if attribute.name in entry})
