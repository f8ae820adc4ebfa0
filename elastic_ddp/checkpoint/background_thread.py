"""A thread for work beside training, which waits between tasks: a new thread can stall a busy process for ms."""

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
"""Added to the process's nice value."""

_Task = tuple[Callable[[], object], "Future[None]"]


class BackgroundThread:
    """Runs tasks one after the other in a daemon thread, which ends with this object.

    Unlike the threads of an executor, the thread does not delay the exit of the process while it hangs.
    """

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._last: Future[None] | None = None
        # A function, not a method: the thread must not hold a reference to this object.
        threading.Thread(target=_run_tasks, args=[self._tasks], name=name, daemon=True).start()
        weakref.finalize(self, self._tasks.put, None)

    @property
    def is_busy(self) -> bool:
        return self._last is not None and not self._last.done()

    def submit(self, task: Callable[[], object]) -> None:
        """Runs a task after all earlier tasks. An exception is logged."""
        self._last = Future()
        self._tasks.put((task, self._last))

    def wait(self, within_s: float | None = None) -> bool:
        """Waits for all tasks. Returns whether they have ended."""
        if self._last is not None:
            wait([self._last], within_s)
        return not self.is_busy


def _run_tasks(tasks: queue.SimpleQueue[_Task | None]) -> None:
    _lower_priority()
    while (entry := tasks.get()) is not None:
        task, done = entry
        try:
            task()
        except BaseException:
            _log.exception("unexpected error in a background task")
        finally:
            done.set_result(None)
            del entry, task, done  # or they would live until the next task


def _lower_priority() -> None:
    """Leaves the CPU to training; threads that this one starts inherit the priority. A container may forbid this."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICE))
    except OSError as error:
        _log.debug("cannot lower the priority of a background thread: %s", error)
