"""Where a worker's time in a generation goes: phases without a gap between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple, get_args

Phase = Literal["rendezvous", "hand_over", "useful", "checkpoint", "redone", "detection"]
"""What a worker does in a generation:

rendezvous: the process group is formed.
hand_over: state, gradient strategy and feed are made ready.
useful: steps, evaluations, and the user's own code between them.
checkpoint: a commit, as far as training waits for it.
redone: a step that was lost with a peer, up to the loss.
detection: waiting for a peer that is silent, until it is known to be lost.
"""
PHASES: tuple[Phase, ...] = get_args(Phase)


class _Reading(NamedTuple):
    """Replaced as a whole, never changed: whoever reads it sees one moment, without a lock."""

    booked: Mapping[Phase, float]
    """Seconds of the phases, up to `since`."""
    phase: Phase
    since: float

    def at(self, now: float) -> dict[Phase, float]:
        return {**self.booked, self.phase: self.booked.get(self.phase, 0.0) + now - self.since}


class Stopwatch:
    """Tells how long each phase took since `start`. At any moment it is in one phase, so the phases add up to the time
    since then. One thread runs it; any may read `seconds` and `since_mark`, which never wait.

    Args:
        clock: Seconds that only go forward.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reading: _Reading | None = None
        self._marked_at: float | None = None

    def start(self, phase: Phase) -> None:
        """Forget everything, and begin with a phase."""
        now = self._clock()
        self._reading, self._marked_at = _Reading({}, phase, now), now

    def enter(self, phase: Phase) -> None:
        """Switch to a phase; on a stopwatch that was not started, start with it."""
        if self._reading is None:
            self.start(phase)
        else:
            now = self._clock()
            self._reading = _Reading(self._reading.at(now), phase, now)

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """A phase for the time of a block, then the one before it, however the block ends."""
        before = self._reading.phase if self._reading is not None else None
        self.enter(phase)
        try:
            yield
        finally:
            if before is not None:
                self.enter(before)

    def move(self, from_: Phase, to: Phase, seconds: float) -> None:
        """Book seconds that were booked for one phase, up to now, for another: at most all of them."""
        if self._reading is None:
            return
        now = self._clock()
        booked = self._reading.at(now)
        moved = min(max(seconds, 0.0), booked.get(from_, 0.0))
        booked[from_] = booked.get(from_, 0.0) - moved
        booked[to] = booked.get(to, 0.0) + moved
        self._reading = _Reading(booked, self._reading.phase, now)

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase that was entered, up to now, to the microsecond."""
        reading = self._reading  # before the clock is read: a phase entered since then does not count yet
        if reading is None:
            return {}
        return {phase: round(seconds, 6) for phase, seconds in reading.at(self._clock()).items()}

    def mark(self) -> None:
        """A step is done."""
        self._marked_at = self._clock()

    def since_mark(self) -> float:
        """Seconds since the last step that was done, or since the start where none was."""
        marked_at = self._marked_at
        return self._clock() - marked_at if marked_at is not None else 0.0


def split_lost(seconds_since_last_step: float, worked_s: float) -> tuple[float, float]:
    """The time from the last step that was done to a loss, as (redone, detection).

    What is longer than the work at hand took, or takes as a rule, the survivors spent waiting for a peer that was
    silent.
    """
    lost = max(seconds_since_last_step, 0.0)
    redone = min(lost, max(worked_s, 0.0))
    return redone, lost - redone
