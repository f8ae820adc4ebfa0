"""Measures the phases of a worker's time in a generation, without gaps between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple, get_args

Phase = Literal["rendezvous", "hand_over", "useful", "checkpoint", "redone", "detection"]
"""What a worker does in a generation:

rendezvous: the process group forms.
hand_over: the state is transferred; strategy and feed get ready.
useful: steps, evaluations, and user code between them.
checkpoint: training waits for a commit.
redone: work on a step that a failed peer interrupted.
detection: waiting for a failed peer until the failure is detected.
"""
PHASES: tuple[Phase, ...] = get_args(Phase)


class _Reading(NamedTuple):
    """Immutable, so that other threads read a consistent state without a lock."""

    booked: Mapping[Phase, float]
    """Seconds of each phase, up to `since`."""
    phase: Phase
    since: float

    def at(self, now: float) -> dict[Phase, float]:
        return {**self.booked, self.phase: self.booked.get(self.phase, 0.0) + now - self.since}


class Stopwatch:
    """Measures how long each phase took since `start`. It is always in one phase, so the phases add up to the time
    since then. One thread updates it; any thread may call `seconds` and `since_mark`, which never block.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reading: _Reading | None = None
        self._marked_at: float | None = None

    def start(self, phase: Phase) -> None:
        """Resets all phases, and enters one."""
        now = self._clock()
        self._reading, self._marked_at = _Reading({}, phase, now), now

    def enter(self, phase: Phase) -> None:
        """Switches to a phase; starts with it if not started yet."""
        if self._reading is None:
            self.start(phase)
        else:
            now = self._clock()
            self._reading = _Reading(self._reading.at(now), phase, now)

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Enters a phase for a block, and then returns to the previous one."""
        before = self._reading.phase if self._reading is not None else None
        self.enter(phase)
        try:
            yield
        finally:
            if before is not None:
                self.enter(before)

    def move(self, from_: Phase, to: Phase, seconds: float) -> None:
        """Moves seconds from one phase to another; at most all that it has up to now."""
        if self._reading is None:
            return
        now = self._clock()
        booked = self._reading.at(now)
        moved = min(max(seconds, 0.0), booked.get(from_, 0.0))
        booked[from_] = booked.get(from_, 0.0) - moved
        booked[to] = booked.get(to, 0.0) + moved
        self._reading = _Reading(booked, self._reading.phase, now)

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each entered phase up to now, to the microsecond."""
        reading = self._reading  # before the clock is read: a phase entered since then does not count yet
        if reading is None:
            return {}
        return {phase: round(seconds, 6) for phase, seconds in reading.at(self._clock()).items()}

    def mark(self) -> None:
        """Sets the mark: a step is done."""
        self._marked_at = self._clock()

    def since_mark(self) -> float:
        """Returns the seconds since the mark, which `start` sets too."""
        marked_at = self._marked_at
        return self._clock() - marked_at if marked_at is not None else 0.0


def split_wasted(wasted_s: float, worked_s: float) -> tuple[float, float]:
    """Splits the seconds between the last step and a failure into (redone, detection).

    Args:
        wasted_s: seconds since the last step.
        worked_s: seconds of those in which the worker worked; it waited for the failed peer in the rest.
    """
    wasted_s = max(wasted_s, 0.0)
    redone_s = min(wasted_s, max(worked_s, 0.0))
    return redone_s, wasted_s - redone_s
