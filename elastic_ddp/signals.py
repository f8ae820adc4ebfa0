"""Signals as requests: SIGTERM in a worker, Ctrl-C and SIGTERM in the driver."""

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

_TERMINATED = 128 + signal.SIGTERM
"""What a process exits with that SIGTERM has ended, as shells have it."""

_noticed = threading.Event()
_is_over = threading.Event()
_listeners: list[Callable[[], None]] = []
_lock = threading.Lock()


def listen_for_sigterm() -> None:
    """Takes SIGTERM for a notice from now on. Called once in a worker's process, in its main thread.

    Python runs signal handlers in the main thread only, which in a Ray worker is somewhere in Ray's core and does not
    come back for long. What is told at once is the wakeup descriptor, from which a thread reads.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    threading.Thread(target=_read, args=(reader,), name="sigterm", daemon=True).start()


def on_sigterm(tell: Callable[[], None]) -> None:
    """Has `tell` called once, in a thread, when SIGTERM comes, or now if it has come already."""
    with _lock:
        _listeners.append(tell)
        if not _noticed.is_set():
            return
    tell()


def exit_on_sigterm() -> None:
    """From now on SIGTERM ends the process: nobody is left to be told. Ray sends it to a worker whose room is taken
    back, and where its node is just shutting down, nothing else."""
    _is_over.set()


def _read(reader: int) -> None:
    while data := os.read(reader, 64):
        if signal.SIGTERM not in data:
            continue
        if _is_over.is_set():
            os._exit(_TERMINATED)
        with _lock:
            if _noticed.is_set():
                continue
            _noticed.set()
        for tell in _listeners:
            try:
                tell()
            except Exception as error:  # the run may be over
                _log.info("SIGTERM came, and nobody could be told: %s", format_exception(error))


class StopRequests:
    """Counts Ctrl-C and SIGTERM while its context is open, in the main thread; the third one raises.

    A KeyboardInterrupt is raised wherever the main thread happens to be, and is lost where that is a destructor, or a
    callback of a library that swallows it. A number is not.
    """

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:  # a script's background job ignores Ctrl-C
                    self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 2:
            raise KeyboardInterrupt
