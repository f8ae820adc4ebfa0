"""A storage that retries failed operations with exponential backoff."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elastic_ddp.errors import StorageError
from elastic_ddp.storage.errors import is_permanent
from elastic_ddp.storage.proxy import Result, StorageProxy
from elastic_ddp.storage.storage import Storage

RETRY_FOR_S = 60.0
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 10.0
MAX_OPERATION_S = 300.0
"""An operation with its retries that takes longer may hang. Clients give up a request within about a minute, but a
network mount whose server is gone blocks forever."""

_log = logging.getLogger(__name__)


class RetryingStorage(StorageProxy):
    """The same folder; operations that fail for a temporary reason are retried.

    Deletions are not retried. A retried `create` can raise FileExistsError for the object of its own first attempt,
    if the answer to that was lost; the caller must check.

    Args:
        storage: the folder.
        retry_for_s: seconds after the first attempt in which further ones may start.
    """

    def __init__(self, storage: Storage, *, retry_for_s: float = RETRY_FOR_S) -> None:
        super().__init__(storage)
        self._retry_for_s = retry_for_s
        self._lock = threading.Lock()
        self._worked_s = 0.0
        self._started_at: dict[object, float] = {}
        """Start times of the operations in progress."""

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
        """Counts the block as an operation in `worked_s`."""
        operation = object()
        with self._lock:
            self._started_at[operation] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._worked_s += min(time.monotonic() - self._started_at.pop(operation), MAX_OPERATION_S)

    def create(self, key: str, data: bytes, *, before_retry: Callable[[], None] = lambda: None) -> None:
        self._call(lambda: self._storage.create(key, data), before_retry=before_retry)

    def _call(
        self,
        operation: Callable[[], Result],
        *,
        may_retry: bool = True,
        before_retry: Callable[[], None] = lambda: None,
    ) -> Result:
        end = time.monotonic() + (self._retry_for_s if may_retry else 0.0)
        backoff_s = FIRST_BACKOFF_S
        with self.operation_in_progress():
            while True:
                try:
                    return operation()
                except StorageError as error:
                    if is_permanent(error) or time.monotonic() + backoff_s > end:
                        raise
                    _log.warning("retrying in %g s: %s", backoff_s, error)
                time.sleep(backoff_s)
                before_retry()
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
