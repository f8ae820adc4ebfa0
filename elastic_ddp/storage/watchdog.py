"""A storage that measures its operations, and ends work that hangs, as on a mount without its server, with an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar

from elastic_ddp.errors import StorageError
from elastic_ddp.storage.storage import Storage

MAX_OPERATION_S = 300.0
"""An operation that takes longer than this may hang: a mount whose server is gone blocks forever."""

STALL_TIMEOUT_S = 600.0
"""Time without a completed operation after which the storage counts as hung. One operation moves about ten MiB."""

Result = TypeVar("Result")


def _measured(method: str) -> Any:
    def call(self: WatchedStorage, *arguments: Any, **options: Any) -> Any:
        with self.operation_in_progress():
            return getattr(self._storage, method)(*arguments, **options)

    return call


class WatchedStorage(Storage):
    """The same folder as `storage`, with a measurement of the time that its operations take."""

    def __init__(self, storage: Storage) -> None:
        self._folder = storage._folder
        self._storage = storage
        self._lock = threading.Lock()
        self._worked_s = 0.0
        self._started_at: dict[object, float] = {}
        """Start times of the operations in progress."""
        self._stalled: StorageError | None = None
        self._last_progress = time.monotonic()

    def worked_s(self) -> float:
        """Returns the seconds that operations have taken so far, each counted up to `MAX_OPERATION_S`.

        The value grows while the storage makes progress, however slow, and stands still when it hangs.
        """
        with self._lock:
            now = time.monotonic()
            in_progress = sum(min(now - started_at, MAX_OPERATION_S) for started_at in self._started_at.values())
            return self._worked_s + in_progress

    @contextmanager
    def operation_in_progress(self) -> Iterator[None]:
        """Counts the block as an operation."""
        if self._stalled is not None:
            raise self._stalled
        operation = object()
        with self._lock:
            self._started_at[operation] = time.monotonic()
        try:
            yield
            self._last_progress = time.monotonic()
        finally:
            with self._lock:
                self._worked_s += min(time.monotonic() - self._started_at.pop(operation), MAX_OPERATION_S)

    def run_watched(self, work: Callable[[], Result]) -> Result:
        """Runs `work`, which uses this storage, in a daemon thread. Returns the result of `work`, or raises its error.

        If no operation completes for `STALL_TIMEOUT_S`, it raises StorageError and leaves the thread behind. From then
        on, this storage refuses operations, so the thread cannot change anything.
        """
        self._last_progress = time.monotonic()
        done = run_in_daemon(work, f"{threading.current_thread().name}-work")
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
        self._delete_rest(prefix)

    read = _measured("read")
    size = _measured("size")
    read_into = _measured("read_into")
    write = _measured("write")
    create = _measured("create")
    listing = _measured("listing")
    uploads = _measured("uploads")
    abort = _measured("abort")
    delete = _measured("delete")
    delete_if = _measured("delete_if")
    _delete_rest = _measured("delete_tree")


def run_in_daemon(work: Callable[[], Result], name: str) -> Future[Result]:
    """Runs `work` in a thread that does not keep the process alive if the storage hangs, as an executor's would."""
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done
