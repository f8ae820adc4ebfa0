"""The interface that each kind of storage implements: a folder of objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class Entry(NamedTuple):
    """An object in a listing."""

    size: int
    """In bytes."""
    written_at: float | None
    """Seconds since 1970, by the storage's clock; None if the storage does not list it."""


@dataclass(frozen=True)
class Upload:
    """An unfinished write: a multipart upload on S3, or a temporary file of a local folder."""

    key: str
    id: str
    started_at: float
    """Seconds since 1970, by the storage's clock."""
    num_bytes: int = 0
    """Bytes stored so far; 0 on S3, which does not report it."""


class Folder(Protocol):
    """A folder in one kind of storage. `Storage` checks keys before a call and converts any exception after it."""

    uri: str

    def read(self, key: str) -> bytes: ...
    def size(self, key: str) -> int: ...
    def read_into(self, key: str, start: int, buffer: memoryview) -> int: ...
    def write(self, key: str, data: bytes | memoryview) -> None: ...
    def create(self, key: str, data: bytes) -> None: ...
    def listing(self, prefix: str) -> dict[str, Entry]: ...
    def delete(self, key: str) -> None: ...
    def delete_tree(self, prefix: str) -> None: ...
    def at(self, name: str) -> Folder: ...
    def filesystem_and_path(self) -> tuple[Any, str]: ...

    def uploads(self) -> list[Upload]:
        """Returns unfinished writes; none where the storage cleans up by itself."""
        return []

    def abort(self, upload: Upload) -> None:
        """Deletes what an unfinished write has stored."""
        self.delete(upload.key)
