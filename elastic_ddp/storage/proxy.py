"""A storage that passes each operation on to another one, through one method that subclasses override."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from elastic_ddp.storage.storage import Storage

Result = TypeVar("Result")


def _forward(method: str, *, may_retry: bool = True) -> Any:
    def forward(self: StorageProxy, *arguments: Any, **options: Any) -> Any:
        return self._call(lambda: getattr(self._storage, method)(*arguments, **options), may_retry=may_retry)

    return forward


class StorageProxy(Storage):
    """The same folder as `storage`, which carries out each operation when `_call` lets it."""

    def __init__(self, storage: Storage) -> None:
        self._folder, self._storage = storage._folder, storage

    def _call(self, operation: Callable[[], Result], *, may_retry: bool = True) -> Result:
        """Runs one operation of the other storage. Housekeeping repeats deletions later, so they are not retried."""
        raise NotImplementedError

    read = _forward("read")
    size = _forward("size")
    read_into = _forward("read_into")
    write = _forward("write")
    create = _forward("create")
    sizes = _forward("sizes")
    last_modified = _forward("last_modified")
    uploads = _forward("uploads")
    abort = _forward("abort")
    delete = _forward("delete", may_retry=False)
    delete_if = _forward("delete_if", may_retry=False)
    delete_tree = _forward("delete_tree", may_retry=False)
