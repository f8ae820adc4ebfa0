"""Work with a storage that may never return, as on a network mount whose server is gone: it is given up when it gets
nowhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from elastic_ddp.errors import StorageError
from elastic_ddp.storage.retry import StorageProxy
from elastic_ddp.storage.storage import Storage

STALL_TIMEOUT_S = 600.0
"""What works with a storage is given up when no operation of it has ended for so long: none takes longer, at an object
of some ten MiB."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class StalledError(StorageError):
    """The storage hangs."""


class WatchedStorage(StorageProxy):
    """The same folder, for one piece of work: it is known when an operation ended last, and once the work is given up
    none begins, whatever threads it has left behind."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self._given_up = False
        self._moved_at = time.monotonic()

    def run_watched(self, work: Callable[[], Result]) -> Result:
        """What it returns or raises. It does what it does with this storage in a thread of its own.

        Raises:
            StalledError: it was given up, and its thread is left behind.
        """
        done: Future[Result] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        self._moved_at = time.monotonic()
        threading.Thread(target=run, name=f"{threading.current_thread().name}-work", daemon=True).start()
        while (left_s := self._moved_at + STALL_TIMEOUT_S - time.monotonic()) > 0:
            wait([done], left_s)
            if done.done():
                return done.result()
        self._given_up = True
        raise self._stalled()

    def _do(self, operation: Callable[[], Result]) -> Result:
        if self._given_up:
            raise self._stalled()
        result = operation()
        self._moved_at = time.monotonic()
        return result

    def delete_tree(self, prefix: str) -> None:
        for key in self.list(prefix):  # there may be so many that only one after the other shows that it goes on
            self.delete(key)
        super().delete_tree(prefix)

    def _stalled(self) -> StalledError:
        return StalledError(
            f"{self.uri} hangs: no operation completed for {STALL_TIMEOUT_S:g} s. Check that this node can reach it, "
            "and that the mount is alive if it is one"
        )


class DaemonPool(Generic[Item]):
    """Calls a function with each of some items, several at a time. Its threads keep no process from its end, as those
    of an executor would, of which one may hang."""

    def __init__(self, work: Callable[[Item], object], items: Sequence[Item], *, size: int) -> None:
        self._work, self._items = work, iter(items)
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        name = threading.current_thread().name
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(min(size, len(items)))
        ]
        for each in self._threads:
            each.start()

    def wait(self) -> None:
        """Until all is done, or something failed: what is under way ends first, and that is raised."""
        for each in self._threads:
            each.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while self._error is None:
            with self._lock:
                item = next(self._items, None)
            if item is None:
                return
            try:
                self._work(item)
            except BaseException as error:
                self._error = error
