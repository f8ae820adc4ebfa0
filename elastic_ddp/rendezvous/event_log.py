"""What the rendezvous has heard of a run, for the driver and for those who ask."""

from __future__ import annotations

import time
from typing import Any

from elastic_ddp.rendezvous.snapshot import Snapshot
from elastic_ddp.telemetry.progress import MovingRate

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
        self._events: list[dict[str, Any]] = []
        self._forgotten = 0
        """Events before those."""
        self._remembered = 0
        """Of the forgotten ones, those that the memory still has."""
        self._newest: dict[str, dict[str, Any]] = {}
        self._heard: dict[str, int] = {}
        """The number of the last message of every sender."""
        self._rate = MovingRate()
        for line in memory.lines():
            self._add(line)

    @property
    def ended(self) -> str | None:
        """The status that the run ended with."""
        return None if self.outcome is None else str(self.outcome["status"])

    def take(
        self, events: list[dict[str, Any]], progress: dict[str, Any] | None, sender: str = "", first: int = 0
    ) -> list[dict[str, Any]]:
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
        lines = [{"sender": sender, "number": number, "event": event} for number, event in new]
        self._memory.append(lines)
        for line in lines:
            self._add(line)
        return [event for _, event in new]

    def end(self, outcome: dict[str, Any]) -> bool:
        """Takes how the run ended. Returns whether that is news."""
        if self.outcome is not None:
            return False
        line = {"outcome": outcome}
        self._memory.append([line])
        self._add(line)
        return True

    def _add(self, line: dict[str, Any]) -> None:
        if "outcome" in line:
            self.outcome = line["outcome"]
            return
        if "forgotten" in line:
            self._forgotten, self._newest, self._heard = line["forgotten"], line["newest"], line["heard"]
            return
        event = line["event"]
        self._events.append(event)
        self._newest[event["event"]] = event
        if line["sender"]:
            self._heard[line["sender"]] = line["number"]
        if event["event"] == "generation":
            self._rate.clear()  # time without training is no measure of it

    @property
    def num_events(self) -> int:
        """Of the whole run."""
        return self._forgotten + len(self._events)

    def after(self, number: int) -> list[dict[str, Any]]:
        """The events after so many. Those have been written down by who asks, and are forgotten."""
        written = min(len(self._events), max(0, number - self._forgotten))
        del self._events[:written]
        self._forgotten += written
        self._remembered += written
        if self._remembered >= FORGET_TOGETHER:
            self._remembered = 0
            summary = {"forgotten": self._forgotten, "newest": self._newest, "heard": self._heard}
            kept = [{"sender": "", "number": 0, "event": event} for event in self._events]
            ended = [{"outcome": self.outcome}] if self.outcome is not None else []
            self._memory.replace([summary, *kept, *ended])
        return list(self._events)

    def last(self, event: str) -> dict[str, Any]:
        """The newest event of a kind; empty if there was none."""
        return self._newest.get(event, {})

    def facts(self) -> dict[str, Any]:
        """How far the run is, for `elastic-ddp status`."""
        generation, failure = self.last("generation"), self.last("worker_lost")
        return {
            "generation": generation.get("generation"),
            "world_size": generation.get("world_size"),
            "step": self.progress.get("step"),
            "steps_per_s": self._rate.steps_per_s,
            "loss": self.progress.get("loss"),
            "last_loss_of_a_worker": {key: failure[key] for key in ("time", "error")} if failure else None,
        }
