"""A storage that passes each operation on to another one, through one method that subclasses override."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from elastic_ddp.storage.folder import Upload
from elastic_ddp.storage.storage import Storage

Result = TypeVar("Result")


class StorageProxy(Storage):
    """The same folder as `storage`, which carries out each operation when `_call` lets it."""

    def __init__(self, storage: Storage) -> None:
        self._folder, self._storage = storage._folder, storage

    def _call(self, operation: Callable[[], Result], *, may_retry: bool = True) -> Result:
        """Runs one operation of the other storage.

        Args:
            may_retry: False for deletions, which housekeeping repeats later anyway.
        """
        raise NotImplementedError

    def read(self, key: str, max_bytes: int | None = None) -> bytes:
        return self._call(lambda: self._storage.read(key, max_bytes))

    def size(self, key: str) -> int:
        return self._call(lambda: self._storage.size(key))

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        return self._call(lambda: self._storage.read_into(key, start, buffer))

    def write(self, key: str, data: bytes | memoryview) -> None:
        self._call(lambda: self._storage.write(key, data))

    def create(self, key: str, data: bytes, *, before_retry: Callable[[], None] = lambda: None) -> None:
        self._call(lambda: self._storage.create(key, data, before_retry=before_retry))

    def sizes(self, prefix: str = "") -> dict[str, int]:
        return self._call(lambda: self._storage.sizes(prefix))

    def last_modified(self, prefix: str) -> float | None:
        return self._call(lambda: self._storage.last_modified(prefix))

    def delete(self, key: str) -> None:
        self._call(lambda: self._storage.delete(key), may_retry=False)

    def delete_if(self, key: str, data: bytes) -> bool:
        return self._call(lambda: self._storage.delete_if(key, data), may_retry=False)

    def delete_tree(self, prefix: str) -> None:
        self._call(lambda: self._storage.delete_tree(prefix), may_retry=False)

    def uploads(self, prefix: str = "") -> Sequence[Upload]:
        return self._call(lambda: self._storage.uploads(prefix))

    def abort(self, upload: Upload) -> None:
        self._call(lambda: self._storage.abort(upload))
