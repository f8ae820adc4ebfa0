"""A storage whose failures are given time to pass."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from elastic_ddp.errors import StorageError
from elastic_ddp.failures import is_lasting
from elastic_ddp.storage import Storage

PATIENCE_S = 60.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
"""Between tries."""

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


class PatientStorage(Storage):
    """The same folder, where what fails is tried again for some time, after pauses that grow, unless time does not mend
    it. What is to be created or removed is not: `Storage.create` sees to itself, and what is left can be removed later.

    Args:
        storage: the folder.
        within_s: no try begins later than so many seconds after the first.
    """

    def __init__(self, storage: Storage, *, within_s: float = PATIENCE_S) -> None:
        self._folder, self._storage, self._within_s = storage._folder, storage, within_s

    def read(self, key: str) -> bytes:
        return self._insist(lambda: self._storage.read(key))

    def size(self, key: str) -> int:
        return self._insist(lambda: self._storage.size(key))

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        return self._insist(lambda: self._storage.read_into(key, start, buffer))

    def write(self, key: str, data: bytes | memoryview) -> None:
        self._insist(lambda: self._storage.write(key, data))

    def create(self, key: str, data: bytes) -> None:
        self._storage.create(key, data)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        return self._insist(lambda: self._storage.sizes(prefix))

    def last_modified(self, prefix: str) -> float | None:
        return self._insist(lambda: self._storage.last_modified(prefix))

    def delete(self, key: str) -> None:
        self._storage.delete(key)

    def delete_tree(self, prefix: str) -> None:
        self._storage.delete_tree(prefix)

    def _insist(self, do: Callable[[], Result]) -> Result:
        end, pause_s = time.monotonic() + self._within_s, FIRST_PAUSE_S
        while True:
            try:
                return do()
            except StorageError as error:
                if is_lasting(error) or time.monotonic() + pause_s > end:
                    raise
                _log.warning("tried again in %g s: %s", pause_s, error)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
