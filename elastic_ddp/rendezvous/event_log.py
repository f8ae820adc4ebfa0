"""The events, the newest progress and the outcome of a run, as the rendezvous received them."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, replace
from typing import Any, TypeVar

from elastic_ddp.rendezvous.snapshot import Snapshot
from elastic_ddp.telemetry.bottleneck import find_bottleneck
from elastic_ddp.telemetry.event import AgreedEvent, Event, parse
from elastic_ddp.telemetry.events import GenerationFormed, GenerationStarted, PhasesMeasured, WorkerFailed
from elastic_ddp.telemetry.phases import MAX_EVENTS, newest, nodes_of
from elastic_ddp.telemetry.progress import MovingRate

E = TypeVar("E", bound=Event)

COMPACT_EVERY = 10_000
"""Number of delivered events after which the snapshot is rewritten without them."""
COMPARED = 256
"""Number of newest agreed events that a repeated one is compared with: more than a rank repeats."""


class EventLog:
    """Holds the events that the driver has not received yet; a snapshot keeps them for a restarted rendezvous."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.progress: dict[str, Any] = {}
        """The newest progress report of rank 0."""
        self.outcome: dict[str, Any] | None = None
        """How the run ended; None while it runs."""
        self._snapshot = snapshot
        self._events: list[Event] = []
        self._num_delivered = 0
        """Number of events before `_events`."""
        self._num_deletable = 0
        """Number of delivered events that the snapshot still holds."""
        self._newest: dict[str, Event] = {}
        self._last_numbers: dict[str, int] = {}
        """Number of the last event of each sender."""
        self._behind_s: dict[str, float] = {}
        """Seconds by which the clock of each sender is behind, at most: a call takes time, and may be repeated."""
        self._agreed: deque[tuple[str, ...]] = deque(maxlen=COMPARED)
        """The identities of the newest agreed events."""
        self._rate = MovingRate()
        self._phases: deque[PhasesMeasured] = deque(maxlen=MAX_EVENTS)
        for line in snapshot.lines():
            if "outcome" in line:
                self.outcome = line["outcome"]
            elif "delivered" in line:
                self._num_delivered = line["delivered"]
                self._last_numbers = line["last_numbers"]
                self._newest = {name: parse(event) for name, event in line["newest"].items()}
                self._agreed.extend(map(tuple, line["agreed"]))
            else:
                self._add(parse(line["event"]), line["sender"], line["number"])

    @property
    def ended(self) -> str | None:
        """The status that the run ended with; None while it runs."""
        return None if self.outcome is None else str(self.outcome["status"])

    @property
    def step(self) -> int:
        """Steps done by the newest progress report."""
        return int(self.progress.get("step", 0))

    @property
    def steps_per_s(self) -> float | None:
        return self._rate.steps_per_s

    def update_progress(self, progress: dict[str, Any] | None) -> None:
        """Takes a progress report of rank 0, if there is one."""
        if progress is not None:
            self.progress = progress
            self._rate.add(time.monotonic(), progress.get("step", 0), progress.get("samples", 0))

    def by_own_clock(self, event: Event, sender: str, sent_at: float) -> Event:
        """Returns an event with its time by the clock of this machine, the driver's, instead of its sender's.

        `sent_at` is the sender's time as it sends the event; 0 if that is unknown.
        """
        if event.at is None or not sent_at:
            return event
        behind_s = time.time() - sent_at
        self._behind_s[sender] = min(self._behind_s.get(sender, behind_s), behind_s)
        return replace(event, at=event.at + self._behind_s[sender])

    def add(self, event: Event, sender: str = "", number: int = 0) -> bool:
        """Adds an event. Returns False if it is known: a sender numbers its events from 1, and may repeat a call.

        Ranks that follow a rank 0 repeat its newest agreed events.
        """
        if sender and number <= self._last_numbers.get(sender, 0):
            return False
        if isinstance(event, AgreedEvent) and _identity(event) in self._agreed:
            return False
        self._snapshot.append(_line(event, sender, number))
        self._add(event, sender, number)
        return True

    def end(self, outcome: dict[str, Any]) -> bool:
        """Sets how the run ended. Returns False if that was known."""
        if self.outcome is not None:
            return False
        self._snapshot.append({"outcome": outcome})
        self.outcome = outcome
        return True

    def _add(self, event: Event, sender: str, number: int) -> None:
        self._events.append(event)
        self._newest[event.event] = event
        if sender:
            self._last_numbers[sender] = number
        if isinstance(event, GenerationStarted):
            self._rate.clear()  # the rate covers time with training only
            self._phases.clear()
        if isinstance(event, AgreedEvent):
            self._agreed.append(_identity(event))
        if isinstance(event, PhasesMeasured):
            self._phases.append(event)

    @property
    def num_events(self) -> int:
        """Number of events of the run so far."""
        return self._num_delivered + len(self._events)

    def after(self, number: int) -> list[Event]:
        """Returns the events after the first `number`, and deletes those: the caller has stored them."""
        delivered = min(len(self._events), max(0, number - self._num_delivered))
        del self._events[:delivered]
        self._num_delivered += delivered
        self._num_deletable += delivered
        if self._num_deletable >= COMPACT_EVERY:
            self._num_deletable = 0
            newest = {name: event.to_json() for name, event in self._newest.items()}
            header = {"delivered": self._num_delivered, "newest": newest, "last_numbers": self._last_numbers}
            header["agreed"] = list(self._agreed)
            remaining = [_line(event, "", 0) for event in self._events]
            self._snapshot.replace([header, *remaining, {"outcome": self.outcome}])
        return list(self._events)

    def last(self, kind: type[E]) -> E | None:
        """Returns the newest event of a class, or None."""
        event = self._newest.get(kind.event)
        return event if isinstance(event, kind) else None

    def status(self) -> dict[str, Any]:
        """Returns the progress of the run, for `elastic-ddp status`."""
        generation = self.last(GenerationStarted)
        failure = self.last(WorkerFailed)
        measured = newest(list(self._phases))
        formed = self.last(GenerationFormed)
        bottleneck = None  # what bounds the newest steps of the current generation
        if measured is not None:
            bottleneck = find_bottleneck(measured, nodes_of([formed] if formed is not None else [], measured))
        return {
            "generation": None if generation is None else generation.generation,
            "world_size": None if generation is None else generation.world_size,
            "step": self.progress.get("step"),
            "steps_per_s": self.steps_per_s,
            "loss": self.progress.get("loss"),
            "last_worker_failure": None if failure is None else {"time": failure.at, "error": failure.error},
            "phases": None if measured is None else measured.to_json(),
            "bottleneck": None if bottleneck is None else asdict(bottleneck),
        }


def _identity(event: AgreedEvent) -> tuple[str, ...]:
    """Returns the identity of an event: equal in all ranks' reports of this event, and in no other event."""
    # As text, because NaN is not equal to itself.
    return tuple(str(getattr(event, name, None)) for name in ("event", "generation", "step", "name", "loss", "value"))


def _line(event: Event, sender: str, number: int) -> dict[str, Any]:
    return {"sender": sender, "number": number, "event": event.to_json()}
