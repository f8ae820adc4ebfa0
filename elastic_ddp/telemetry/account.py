"""A worker's account of one generation: how many seconds went into each phase. `goodput` combines the accounts.

These phases divide the time of a generation. The phases of a step, in `telemetry/phases.py`, divide the time of a step.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

Phase = Literal["rendezvous", "hand_over", "useful", "checkpoint", "redone", "detection"]
"""The activities of a worker in a generation:

rendezvous: the process group forms.
hand_over: the state is transferred; strategy and feed get ready.
useful: steps, evaluations, and user code between them.
checkpoint: training waits for a commit.
redone: work on a step that a failed peer interrupted.
detection: waiting for a failed peer until the failure is detected.
"""
_TYPICAL_OF = 20
"""Number of steps whose median is the typical duration."""


class Account:
    """Measures the phases of a generation in one worker. It is always in one phase, so they add up to the whole time.

    The worker calls `begin`, `formed`, `ready`, `step_done` for each step, `record_failure` if a peer fails, and `end`.
    Time before `begin` and after `end` does not count.

    Args:
        idle_s: returns the seconds since the worker last made progress.
        clock: monotonic time in seconds.
    """

    def __init__(self, idle_s: Callable[[], float] = lambda: 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._idle_s = idle_s
        self._clock = clock
        self._seconds: dict[Phase, float] = {}
        self._phase: Phase | None = None
        self._since = 0.0
        """Time up to which `_seconds` counts."""
        self._marked_at: float | None = None
        self._steps: deque[float] = deque(maxlen=_TYPICAL_OF)
        self._is_first = False

    def begin(self) -> None:
        """The worker has its assignment, and the process group starts to form."""
        self._phase = "rendezvous"
        self._since = self._clock()
        self._seconds = {"rendezvous": 0.0}
        self.mark()

    def formed(self) -> None:
        """The process group has formed, and all ranks get the same state."""
        self._enter("hand_over")

    def ready(self) -> None:
        """Steps can start."""
        self._enter("useful")
        self.mark()
        self._is_first = True

    def step_done(self) -> float | None:
        """A step is done. Returns its duration in seconds if it is the generation's first."""
        seconds = self._since_mark()
        self.mark()
        if self._is_first:  # it waits for the first rows, so it is not typical
            self._is_first = False
            return seconds
        self._steps.append(seconds)
        return None

    @property
    def step_s(self) -> float:
        """Duration of a step in seconds: the median of recent ones, or the current one so far if that is longer."""
        return max(self._typical_s, self._since_mark())

    @property
    def _typical_s(self) -> float:
        return statistics.median(self._steps) if self._steps else 0.0

    def mark(self) -> None:
        """Work up to now survives a failure."""
        self._marked_at = self._clock()

    def _since_mark(self) -> float:
        return 0.0 if self._marked_at is None else self._clock() - self._marked_at

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Books a block as time in which training waits for a commit."""
        before = self._phase
        self._enter("checkpoint")
        try:
            yield
        finally:
            self._enter(before)
            self.mark()

    def record_failure(self, *, in_step: bool) -> None:
        """A peer has failed: the time since the last mark was wasted.

        In a step, time beyond a typical step went into detecting the failure. Without a typical step, the time since
        the last progress did.
        """
        wasted_s = self._since_mark()
        worked_s = self._typical_s if in_step and self._steps else wasted_s - self._idle_s()
        redone_s = min(wasted_s, max(worked_s, 0.0))
        self._move("redone", redone_s)
        self._move("detection", wasted_s - redone_s)

    def record_detection(self) -> None:
        """The time since the last mark went into detecting that a peer has failed."""
        self._move("detection", self._since_mark())

    def end(self) -> None:
        """The worker has left the generation."""
        self._enter(None)

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each phase from `begin` to `end`, or until now, to the microsecond."""
        self._enter(self._phase)
        return {phase: round(seconds, 6) for phase, seconds in self._seconds.items()}

    def _enter(self, phase: Phase | None) -> None:
        if self._phase is not None:
            now = self._clock()
            self._seconds[self._phase] += now - self._since
            self._phase = phase
            self._since = now
            if phase is not None:
                self._seconds.setdefault(phase, 0.0)

    def _move(self, phase: Phase, seconds: float) -> None:
        """Moves useful seconds to another phase; at most all that there are."""
        if self._phase is not None:
            self._enter(self._phase)
            moved = min(seconds, self._seconds.get("useful", 0.0))
            self._seconds["useful"] = self._seconds.get("useful", 0.0) - moved
            self._seconds[phase] = self._seconds.get(phase, 0.0) + moved
