"""A storage whose hung operations, such as on a network mount without its server, end with an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from elastic_ddp.errors import StorageError
from elastic_ddp.storage.proxy import Result, StorageProxy
from elastic_ddp.storage.storage import Storage

STALL_TIMEOUT_S = 600.0
"""Time without a completed operation after which the storage counts as hung. One operation moves about ten MiB."""

Item = TypeVar("Item")


class WatchedStorage(StorageProxy):
    """The same folder, for one piece of work that ends with StorageError when the storage hangs.

    After that the storage refuses operations, so threads that were left behind cannot change anything.
    """

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self._stalled: StorageError | None = None
        self._last_progress = time.monotonic()

    def run_watched(self, work: Callable[[], Result]) -> Result:
        """Runs `work`, which uses this storage, in a daemon thread. Returns or raises what it does.

        If no operation completes for `STALL_TIMEOUT_S`, it raises StorageError and leaves the thread behind.
        """
        done: Future[Result] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        self._last_progress = time.monotonic()
        threading.Thread(target=run, name=f"{threading.current_thread().name}-work", daemon=True).start()
        while (left_s := self._last_progress + STALL_TIMEOUT_S - time.monotonic()) > 0:
            wait([done], left_s)
            if done.done():
                return done.result()
        self._stalled = StorageError(
            f"{self.uri} hangs: no operation completed for {STALL_TIMEOUT_S:g} s. Check that this node can reach it, "
            "and that the mount is alive if it is one"
        )
        raise self._stalled

    def delete_tree(self, prefix: str) -> None:
        for key in self.list(prefix):  # one by one, so that each deletion counts as progress
            self.delete(key)
        super().delete_tree(prefix)

    def _call(self, operation: Callable[[], Result], *, may_retry: bool = True) -> Result:
        if self._stalled is not None:
            raise self._stalled
        result = operation()
        self._last_progress = time.monotonic()
        return result


class DaemonPool(Generic[Item]):
    """Calls `work` with each of `items` on up to `size` daemon threads.

    Unlike the threads of an executor, they do not keep the process alive if the storage hangs.
    """

    def __init__(self, work: Callable[[Item], object], items: Sequence[Item], *, size: int) -> None:
        self._work, self._items = work, iter(items)
        self._error: BaseException | None = None
        name = threading.current_thread().name
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(min(size, len(items)))
        ]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Waits for all items. After a failure, waits only for the calls in progress and raises it."""
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            for item in self._items:  # the iterator of a list or tuple gives each item to one thread
                if self._error is not None:
                    return
                self._work(item)
        except BaseException as error:
            self._error = error
