"""What a worker tells of its time in a generation; `goodput` makes a run's account of it."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elastic_ddp.telemetry.stopwatch import Stopwatch, split_lost

_TYPICAL_OF = 20


class Account:
    """The phases of a generation in one worker, in the order in which they come: `begin`, `formed`, `ready`, steps, a
    loss perhaps, and `end`.

    Args:
        watch: that it goes by.
        idle_s: tells for how many seconds the worker has got nowhere.
    """

    def __init__(self, watch: Stopwatch | None = None, idle_s: Callable[[], float] = lambda: 0.0) -> None:
        self._watch = watch or Stopwatch()
        self._idle_s = idle_s
        self._steps: deque[float] = deque(maxlen=_TYPICAL_OF)
        self._is_first = False
        self._ended: dict[str, float] | None = None
        """What there is to tell of a generation that was left."""

    def begin(self) -> None:
        """The worker has its place, and forms the process group."""
        self._ended = None
        self._watch.start("rendezvous")

    def formed(self) -> None:
        """The process group is formed, and all get the same state."""
        self._watch.enter("hand_over")

    def ready(self) -> None:
        """Steps can be made."""
        self._watch.enter("useful")
        self._watch.mark()
        self._is_first = True

    def step_done(self) -> float | None:
        """A step is made. Returns how long it took if it is the generation's first."""
        seconds, is_first, self._is_first = self._watch.since_mark(), self._is_first, False
        self._watch.mark()
        if is_first:  # it waits for the first rows, and is no typical one
            return seconds
        self._steps.append(seconds)
        return None

    @property
    def step_s(self) -> float:
        """How long a step takes: a typical one of the last, or what the one at hand took so far."""
        return max(self._typical_s, self._watch.since_mark())

    @property
    def _typical_s(self) -> float:
        return statistics.median(self._steps) if self._steps else 0.0

    def mark(self) -> None:
        """What is lost from here on is not the work before it."""
        self._watch.mark()

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Training waits for a commit."""
        try:
            with self._watch.within("checkpoint"):
                yield
        finally:
            self._watch.mark()

    def record_failure(self, *, in_step: bool) -> None:
        """A peer was lost since the last mark: that time was for nothing. In a step, what is longer than a typical one
        went into noticing it; where there is no typical one, what came after the last that the worker got done."""
        lost_s = self._watch.since_mark()
        worked_s = self._typical_s if in_step and self._steps else lost_s - self._idle_s()
        redone_s, detection_s = split_lost(lost_s, worked_s)
        self._watch.move("useful", "redone", redone_s)
        self._watch.move("useful", "detection", detection_s)

    def waited(self) -> None:
        """The time since the last mark went into noticing that a peer was lost."""
        self._watch.move("useful", "detection", self._watch.since_mark())

    def end(self) -> None:
        """The worker has left the generation. What it does until the next one, such as beginning its training function
        again, is nothing of this one's."""
        self._ended = self.seconds()

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase from `begin` to `end`, or until now."""
        return self._watch.seconds() if self._ended is None else self._ended
