"""A worker's account of one generation: how many seconds went into each phase. `goodput` combines the accounts."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elastic_ddp.telemetry.stopwatch import Stopwatch, split_wasted

_TYPICAL_OF = 20
"""Number of steps whose median is the typical duration."""


class Account:
    """Measures the phases of a generation in one worker.

    The worker calls `begin`, `formed`, `ready`, `step_done` for each step, `record_failure` if a peer fails, and `end`.

    Args:
        watch: measures the phases.
        idle_s: returns the seconds since the worker last made progress.
    """

    def __init__(self, watch: Stopwatch | None = None, idle_s: Callable[[], float] = lambda: 0.0) -> None:
        self._watch = watch or Stopwatch()
        self._idle_s = idle_s
        self._steps: deque[float] = deque(maxlen=_TYPICAL_OF)
        self._is_first = False
        self._ended: dict[str, float] | None = None
        """The account of a generation that has ended."""

    def begin(self) -> None:
        """The worker has its assignment, and the process group starts to form."""
        self._ended = None
        self._watch.start("rendezvous")

    def formed(self) -> None:
        """The process group has formed, and all ranks get the same state."""
        self._watch.enter("hand_over")

    def ready(self) -> None:
        """Steps can start."""
        self._watch.enter("useful")
        self._watch.mark()
        self._is_first = True

    def step_done(self) -> float | None:
        """A step is done. Returns its duration in seconds if it is the generation's first."""
        seconds, is_first, self._is_first = self._watch.since_mark(), self._is_first, False
        self._watch.mark()
        if is_first:  # it waits for the first rows, so it is not typical
            return seconds
        self._steps.append(seconds)
        return None

    @property
    def step_s(self) -> float:
        """Duration of a step in seconds: the median of recent ones, or the current one so far if that is longer."""
        return max(self._typical_s, self._watch.since_mark())

    @property
    def _typical_s(self) -> float:
        return statistics.median(self._steps) if self._steps else 0.0

    def mark(self) -> None:
        """Work up to now survives a failure."""
        self._watch.mark()

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Books a block as time in which training waits for a commit."""
        try:
            with self._watch.within("checkpoint"):
                yield
        finally:
            self._watch.mark()

    def record_failure(self, *, in_step: bool) -> None:
        """A peer has failed: the time since the last mark was wasted.

        In a step, time beyond a typical step went into detecting the failure. Without a typical step, the time since
        the last progress did.
        """
        wasted_s = self._watch.since_mark()
        worked_s = self._typical_s if in_step and self._steps else wasted_s - self._idle_s()
        redone_s, detection_s = split_wasted(wasted_s, worked_s)
        self._watch.move("useful", "redone", redone_s)
        self._watch.move("useful", "detection", detection_s)

    def record_detection(self) -> None:
        """The time since the last mark went into detecting that a peer has failed."""
        self._watch.move("useful", "detection", self._watch.since_mark())

    def end(self) -> None:
        """The worker has left the generation. Time after this does not belong to it."""
        self._ended = self.seconds()

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each phase from `begin` to `end`, or until now."""
        return self._watch.seconds() if self._ended is None else self._ended
