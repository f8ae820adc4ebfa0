"""What the rendezvous has heard of a run, for the driver and for those who ask."""

from __future__ import annotations

import time
from typing import Any, TypeVar

from elastic_ddp.rendezvous.snapshot import Snapshot
from elastic_ddp.telemetry.events import Event, GenerationStarted, WorkerFailed, parse
from elastic_ddp.telemetry.progress import MovingRate

E = TypeVar("E", bound=Event)

FORGET_TOGETHER = 10_000
"""Events that the driver has written down, and are then left out of the memory at once."""


class EventLog:
    """Events in order, the newest progress, and how the run ended.

    Attributes:
        progress: the newest word of a worker on how far training is.
        outcome: how the run ended, once it has; the first word counts.
    """

    def __init__(self, memory: Snapshot) -> None:
        self.progress: dict[str, Any] = {}
        self.outcome: dict[str, Any] | None = None
        self._memory = memory
        self._events: list[Event] = []
        self._forgotten = 0
        """Events before those."""
        self._remembered = 0
        """Of the forgotten ones, those that the memory still has."""
        self._newest: dict[str, Event] = {}
        self._heard: dict[str, int] = {}
        """The number of the last message of every sender."""
        self._rate = MovingRate()
        for line in memory.lines():
            self._restore(line)

    @property
    def ended(self) -> str | None:
        """The status that the run ended with."""
        return None if self.outcome is None else str(self.outcome["status"])

    def take(
        self, events: list[Event], progress: dict[str, Any] | None, sender: str = "", first: int = 0
    ) -> list[Event]:
        """Takes messages, and returns those that were not known.

        Args:
            events: in order.
            progress: the sender's newest.
            sender, first: whose they are, and the first one's number. Senders number their messages from 1, and may
                send one twice; without a sender none is.
        """
        if progress is not None:
            self.progress = progress
            self._rate.add(time.monotonic(), progress.get("step", 0), progress.get("samples", 0))
        known = self._heard.get(sender, 0) if sender else 0
        new = [(first + place, event) for place, event in enumerate(events) if not sender or first + place > known]
        self._memory.append([_line(event, sender, number) for number, event in new])
        for number, event in new:
            self._add(event, sender, number)
        return [event for _, event in new]

    def end(self, outcome: dict[str, Any]) -> bool:
        """Takes how the run ended. Returns whether that is news."""
        if self.outcome is not None:
            return False
        self._memory.append([{"outcome": outcome}])
        self.outcome = outcome
        return True

    def _restore(self, line: dict[str, Any]) -> None:
        if "outcome" in line:
            self.outcome = line["outcome"]
        elif "forgotten" in line:
            self._forgotten, self._heard = line["forgotten"], line["heard"]
            self._newest = {name: parse(event) for name, event in line["newest"].items()}
        else:
            self._add(parse(line["event"]), line["sender"], line["number"])

    def _add(self, event: Event, sender: str, number: int) -> None:
        self._events.append(event)
        self._newest[event.event] = event
        if sender:
            self._heard[sender] = number
        if isinstance(event, GenerationStarted):
            self._rate.clear()  # time without training is no measure of it

    @property
    def num_events(self) -> int:
        """Of the whole run."""
        return self._forgotten + len(self._events)

    def after(self, number: int) -> list[Event]:
        """The events after so many. Those have been written down by who asks, and are forgotten."""
        written = min(len(self._events), max(0, number - self._forgotten))
        del self._events[:written]
        self._forgotten += written
        self._remembered += written
        if self._remembered >= FORGET_TOGETHER:
            self._remembered = 0
            newest = {name: event.to_json() for name, event in self._newest.items()}
            summary = {"forgotten": self._forgotten, "newest": newest, "heard": self._heard}
            kept = [_line(event, "", 0) for event in self._events]
            ended = [{"outcome": self.outcome}] if self.outcome is not None else []
            self._memory.replace([summary, *kept, *ended])
        return list(self._events)

    def last(self, kind: type[E]) -> E | None:
        """Returns the newest event of a class, or None."""
        event = self._newest.get(kind.event)
        return event if isinstance(event, kind) else None

    def facts(self) -> dict[str, Any]:
        """How far the run is, for `elastic-ddp status`."""
        generation, failure = self.last(GenerationStarted), self.last(WorkerFailed)
        return {
            "generation": None if generation is None else generation.generation,
            "world_size": None if generation is None else generation.world_size,
            "step": self.progress.get("step"),
            "steps_per_s": self._rate.steps_per_s,
            "loss": self.progress.get("loss"),
            "last_loss_of_a_worker": {"time": failure.at, "error": failure.error} if failure else None,
        }


def _line(event: Event, sender: str, number: int) -> dict[str, Any]:
    return {"sender": sender, "number": number, "event": event.to_json()}
