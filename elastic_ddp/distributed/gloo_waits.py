"""Waits for gloo's messages, which an abort ends.

When a connection breaks, gloo forgets a message that it has sent or received in part: `Pair::signalException` in its
`transport/tcp/pair.cc` visits only messages that have not begun. Only the group's timeout would then end the wait for
the message, since no connection is left that an abort could shut down. An all-reduce has several messages in flight and
is not affected.
"""

from __future__ import annotations

import datetime
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

import torch.distributed as dist

from elastic_ddp.errors import PeerFailedError

ABORT_POLL_S = 0.1
"""How often a wait looks whether the group was aborted."""
_TIMED_OUT = "Operation timed out!"


def wait_for_collective(work: dist.Work, is_aborted: Callable[[], bool]) -> None:
    """Waits for a collective of gloo that was begun with `async_op=True`: a thread of gloo runs it.

    Raises:
        PeerFailedError: the group was aborted.
        RuntimeError: the collective failed; see `is_peer_failure`.
    """
    while True:
        try:
            work.wait(datetime.timedelta(seconds=ABORT_POLL_S))
            return
        except RuntimeError as error:
            if _TIMED_OUT not in str(error):
                raise
        _check(is_aborted)


class MessageWaits:
    """Waits for messages between two ranks, in a thread: nothing else can leave gloo's wait before it ends."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def wait(self, call: Callable[[], None], is_aborted: Callable[[], bool]) -> None:
        """Runs a waiting call, with its result or error. Raises PeerFailedError after an abort."""
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._calls,), name="gloo messages", daemon=True)
            self._thread.start()
        result = Future[None]()
        self._calls.put((call, result))
        while not wait([result], ABORT_POLL_S).done:
            _check(is_aborted)
        result.result()

    def close(self) -> None:
        """Ends the thread when the call that it makes returns."""
        self._calls.put(None)


def _serve(calls: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None]) -> None:
    while (item := calls.get()) is not None:
        call, result = item
        try:
            call()
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(None)
        del item, call, result  # they keep tensors alive


def _check(is_aborted: Callable[[], bool]) -> None:
    if is_aborted():
        raise PeerFailedError("a peer failed while gloo sent or received a message")
