"""A storage whose failures are given time to pass."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from elastic_ddp.errors import StorageError
from elastic_ddp.storage.errors import is_permanent
from elastic_ddp.storage.folder import Upload
from elastic_ddp.storage.storage import Storage

RETRY_FOR_S = 60.0
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 10.0
"""Between tries."""
MAX_OPERATION_S = 300.0
"""What takes longer, with all its tries, is not known to come to an end: clients give a request up within a minute or
so, a folder on a server that is gone holds it for good."""

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


class StorageProxy(Storage):
    """The same folder as another storage, which does all the work; how it is asked is for `_do` to say."""

    def __init__(self, storage: Storage) -> None:
        self._folder, self._storage = storage._folder, storage

    def _do(self, operation: Callable[[], Result]) -> Result:
        raise NotImplementedError

    def read(self, key: str, max_bytes: int | None = None) -> bytes:
        return self._do(lambda: self._storage.read(key, max_bytes))

    def size(self, key: str) -> int:
        return self._do(lambda: self._storage.size(key))

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        return self._do(lambda: self._storage.read_into(key, start, buffer))

    def write(self, key: str, data: bytes | memoryview) -> None:
        self._do(lambda: self._storage.write(key, data))

    def create(self, key: str, data: bytes, *, before_retry: Callable[[], None] = lambda: None) -> None:
        self._do(lambda: self._storage.create(key, data, before_retry=before_retry))

    def sizes(self, prefix: str = "") -> dict[str, int]:
        return self._do(lambda: self._storage.sizes(prefix))

    def last_modified(self, prefix: str) -> float | None:
        return self._do(lambda: self._storage.last_modified(prefix))

    def delete(self, key: str) -> None:
        self._do(lambda: self._storage.delete(key))

    def delete_if(self, key: str, data: bytes) -> bool:
        return self._do(lambda: self._storage.delete_if(key, data))

    def delete_tree(self, prefix: str) -> None:
        self._do(lambda: self._storage.delete_tree(prefix))

    def uploads(self, prefix: str = "") -> Sequence[Upload]:
        return self._do(lambda: self._storage.uploads(prefix))

    def abort(self, upload: Upload) -> None:
        self._do(lambda: self._storage.abort(upload))


class RetryingStorage(StorageProxy):
    """The same folder, where what fails is tried again for some time, after pauses that grow, unless time does not mend
    it. What is to be removed is not: it can be later. What is to be created and is there may be our own, of a try whose
    answer was lost: that the caller has to see.

    Args:
        storage: the folder.
        retry_for_s: no try begins later than so many seconds after the first.
    """

    def __init__(self, storage: Storage, *, retry_for_s: float = RETRY_FOR_S) -> None:
        super().__init__(storage)
        self._retry_for_s = retry_for_s
        self._lock = threading.Lock()
        self._worked_s = 0.0
        self._begun_at: dict[object, float] = {}
        """Of the operations that are under way."""

    def worked_s(self) -> float:
        """Seconds that operations have taken by now, each counted for at most MAX_OPERATION_S. It grows as long as the
        storage is at work, however slow it is, and stands still if it hangs."""
        with self._lock:
            now = time.monotonic()
            return self._worked_s + sum(min(now - each, MAX_OPERATION_S) for each in self._begun_at.values())

    @contextmanager
    def operation_in_progress(self) -> Iterator[None]:
        """What is in the block counts as an operation."""
        operation = object()
        with self._lock:
            self._begun_at[operation] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._worked_s += min(time.monotonic() - self._begun_at.pop(operation), MAX_OPERATION_S)

    def create(self, key: str, data: bytes, *, before_retry: Callable[[], None] = lambda: None) -> None:
        tries = itertools.count()

        def attempt() -> None:
            if next(tries):
                before_retry()
            self._storage.create(key, data, before_retry=before_retry)

        self._do(attempt)

    def delete(self, key: str) -> None:
        with self.operation_in_progress():
            self._storage.delete(key)

    def delete_if(self, key: str, data: bytes) -> bool:
        with self.operation_in_progress():
            return self._storage.delete_if(key, data)

    def delete_tree(self, prefix: str) -> None:
        with self.operation_in_progress():
            self._storage.delete_tree(prefix)

    def _do(self, operation: Callable[[], Result]) -> Result:
        with self.operation_in_progress():
            return self._try(operation)

    def _try(self, operation: Callable[[], Result]) -> Result:
        end, pause_s = time.monotonic() + self._retry_for_s, FIRST_BACKOFF_S
        while True:
            try:
                return operation()
            except StorageError as error:
                if is_permanent(error) or time.monotonic() + pause_s > end:
                    raise
                _log.warning("tried again in %g s: %s", pause_s, error)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_BACKOFF_S)
