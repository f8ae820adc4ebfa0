"""Storages whose reads fail, change bytes, or wait."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from elastic_ddp.errors import StorageError
from elastic_ddp.storage.folder import Entry
from elastic_ddp.storage.storage import Storage


class CountingReads(Storage):
    """Counts the bytes of tensors that are read."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.num_bytes = 0

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        num_bytes = super().read_into(key, start, buffer)
        self.num_bytes += num_bytes
        return num_bytes


class FlippedReads(Storage):
    """Flips a bit in the first reads of objects with a prefix."""

    def __init__(self, uri: str, prefix: str, *, times: int) -> None:
        super().__init__(uri)
        self.prefix, self.times = prefix, times

    def flip(self, key: str, data: memoryview) -> None:
        if key.startswith(self.prefix) and self.times:
            self.times -= 1
            data[len(data) // 2] ^= 0x10

    def read(self, key: str) -> bytes:
        data = bytearray(super().read(key))
        self.flip(key, memoryview(data))
        return bytes(data)

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        num_bytes = super().read_into(key, start, buffer)
        self.flip(key, buffer)
        return num_bytes


class FlippedFirstReads(Storage):
    """Flips a bit in the first read of each range of an object."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.known: set[tuple[str, int]] = set()

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        num_bytes = super().read_into(key, start, buffer)
        if (key, start) not in self.known:
            self.known.add((key, start))
            buffer[0] ^= 1
        return num_bytes


class UnreadableObject(Storage):
    """Fails every read of one object that exists, as with a bad sector or missing permissions."""

    def __init__(self, uri: str, key: str) -> None:
        super().__init__(uri)
        self.key = key

    def read(self, key: str) -> bytes:
        self.fail_if_unreadable(key)
        return super().read(key)

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        self.fail_if_unreadable(key)
        return super().read_into(key, start, buffer)

    def fail_if_unreadable(self, key: str) -> None:
        if key == self.key and self.size(key):
            raise StorageError(f"cannot read {key!r}: Permission denied") from PermissionError("Permission denied")


class UnreadableObjects(Storage):
    """Fails every read of a range."""

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        raise StorageError("connection reset")


class Unlisted(Storage):
    """Fails every listing."""

    def listing(self, prefix: str = "") -> dict[str, Entry]:
        raise StorageError("connection reset")


class Outage(Storage):
    """Fails some operations, counted from the first read of an attempt's object on."""

    def __init__(self, uri: str, fails: Callable[[int], bool]) -> None:
        super().__init__(uri)
        self.fails = fails
        self.numbers: Iterator[int] | None = None

    def count(self, key: str = "") -> None:
        if self.numbers is None and key.startswith("step="):
            self.numbers = itertools.count()
        if self.numbers is not None and self.fails(next(self.numbers)):
            raise StorageError("connection reset")

    def listing(self, prefix: str = "") -> dict[str, Entry]:
        self.count()
        return super().listing(prefix)

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        self.count(key)
        return super().read_into(key, start, buffer)
