"""Signals as requests: SIGTERM in a worker, all stop signals in a driver. Forked children do not inherit them."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from elastic_ddp.errors import format_exception

_log = logging.getLogger(__name__)

TERMINATED = 128 + signal.SIGTERM
"""Exit code of a process that SIGTERM ended, as in shells."""
_exit = os._exit  # without the report of `Heartbeat.report_exits`, which is for calls of the training function
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, the request of a supervisor, and the end of a terminal or an ssh session."""
FATAL_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Illegal instruction": "SIGILL",
    "Floating point exception": "SIGFPE",
    "Floating-point exception": "SIGFPE",  # in newer versions of Python
}
"""The signals that Python's faulthandler reports, by its names."""

_received = threading.Event()
_exits_on_sigterm = threading.Event()


def listen_for_sigterm() -> None:
    """Turns SIGTERM into the action of `on_sigterm`. Call it once in a worker process, in its main thread.

    A Ray worker's main thread stays in Ray's C++ core, where Python runs no signal handlers. So a thread reads the
    wakeup file descriptor.
    """
    _call_in_children(_restore_defaults)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    threading.Thread(target=_read, args=(reader,), name="sigterm", daemon=True).start()


def on_sigterm(act: Callable[[], None]) -> None:
    """Calls `act` once, in a thread, when SIGTERM arrives; at once if it has arrived already."""

    def wait() -> None:
        _received.wait()
        try:
            act()
        except Exception as error:  # the run may have ended
            _log.info("the action on SIGTERM failed: %s", format_exception(error))

    threading.Thread(target=wait, name="on-sigterm", daemon=True).start()


def end_process() -> None:
    """Ends this process at once, as SIGTERM does."""
    _exit(TERMINATED)


def exit_on_sigterm() -> None:
    """Makes SIGTERM end the process from now on, because the worker has left its run."""
    _exits_on_sigterm.set()


def _read(reader: int) -> None:
    while data := os.read(reader, 64):
        if signal.SIGTERM in data:
            if _exits_on_sigterm.is_set():
                end_process()
            _received.set()


def _restore_defaults() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _call_in_children(restore: Callable[[], None]) -> None:
    """Calls `restore` in each forked child, before it can receive a signal.

    Otherwise `Process.terminate`, as in `multiprocessing.Pool`, would be a request to the parent, and end no child.
    """
    blocked_before = threading.local()

    def block() -> None:
        blocked_before.signals = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before.signals)

    def begin_child() -> None:
        restore()
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=begin_child)


class StopRequests:
    """Records stop signals inside its `with` block, in the main thread; the third Ctrl-C raises KeyboardInterrupt.

    A KeyboardInterrupt can be lost in a destructor, or in a library's callback that swallows it. A record cannot. Only
    Ctrl-C can ask for a stop at once: `timeout`, ssh and shells send SIGTERM or SIGHUP twice for one stop.
    """

    def __init__(self) -> None:
        self.requested = False
        """Whether the run should commit and stop."""
        self._num_interrupts = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            _call_in_children(self._restore)
            for number in _STOP_SIGNALS:
                # A background job of a script ignores Ctrl-C, and `nohup` SIGHUP.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    @property
    def at_once(self) -> bool:
        """Whether the run should stop without a commit."""
        return self._num_interrupts > 1

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._num_interrupts += number == signal.SIGINT
        if self._num_interrupts > 2:
            raise KeyboardInterrupt
