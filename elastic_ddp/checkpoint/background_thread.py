"""What happens behind training, in a thread that waits from one piece of work to the next: whoever starts a new one
waits until it has begun, which beside busy processors takes 0.3 ms and now and then several."""

from __future__ import annotations

import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait

_log = logging.getLogger(__name__)

NICE = 10
"""By how much less than those in front it gets of the processors."""

_Task = tuple[Callable[[], object], "Future[None]"]


class BackgroundThread:
    """Does one thing after the other, and ends with this object."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._last: Future[None] | None = None
        # No method of this object, which would not end while its thread waits.
        threading.Thread(target=_work_through, args=[self._tasks], name=name, daemon=True).start()
        weakref.finalize(self, self._tasks.put, None)

    @property
    def is_busy(self) -> bool:
        return self._last is not None and not self._last.done()

    def do(self, work: Callable[[], object]) -> None:
        """Soon, after what it was given before. What that raises is logged, and goes no further."""
        self._last = Future()
        self._tasks.put((work, self._last))

    def wait(self, within_s: float | None = None) -> bool:
        """Until all is done that it was given. Returns whether it is."""
        if self._last is not None:
            wait([self._last], within_s)
        return not self.is_busy


def _work_through(tasks: queue.SimpleQueue[_Task | None]) -> None:
    _be_nice()
    while (task := tasks.get()) is not None:
        work, done = task
        try:
            work()
        except BaseException:
            _log.exception("an error in what happens behind training, where none is foreseen")
        finally:
            done.set_result(None)
            del task, work, done  # or what they hold would be kept until there is more to do


def _be_nice() -> None:
    """Lets those come first who train at the same time; threads that this one starts are as nice. A container may not
    allow it."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICE))
    except OSError as error:
        _log.debug("what happens behind training takes as much of the processors: %s", error)
