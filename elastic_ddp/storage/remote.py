"""Objects in any file system that fsspec knows."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from elastic_ddp.storage.client_errors import is_missing_bucket
from elastic_ddp.storage.folder import Entry, Folder

_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "memory"})
"""File systems that need no parent folders."""
_TIME_FIELDS = ("LastModified", "last_modified", "mtime", "created")
"""Names of the time of the last write in listings of S3, of Azure, of Google, SFTP and others, and of memory."""


class RemoteFolder(Folder):
    """A folder in an fsspec file system, which each process opens at the first use."""

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self._protocol = uri.partition("://")[0]
        self._opened: tuple[int, Any, str] | None = None

    def read(self, key: str) -> bytes:
        fs, path = self._locate(key)
        return bytes(fs.cat_file(path))

    def size(self, key: str) -> int:
        fs, path = self._locate(key)
        return int(fs.info(path)["size"])

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        fs, path = self._locate(key)
        data = fs.cat_file(path, start=start, end=start + len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def write(self, key: str, data: bytes | memoryview) -> None:
        fs, path = self._locate(key)
        self._make_parent(fs, path)
        fs.pipe_file(path, bytes(data))

    def create(self, key: str, data: bytes) -> None:
        fs, path = self._locate(key)
        if getattr(fs.pipe_file, "__func__", None) is AbstractFileSystem.pipe_file:  # checks, then writes: not atomic
            raise NotImplementedError(f"{type(fs).__name__} has no mode='create' of its own")
        self._make_parent(fs, path)
        try:
            fs.pipe_file(path, data, mode="create")
        except (TypeError, ValueError) as error:  # raised by fsspec packages without modes
            raise NotImplementedError(f"{type(fs).__name__} has no mode='create': {error}") from error

    def listing(self, prefix: str) -> dict[str, Entry]:
        _, base = self._open()
        return {
            name[len(base) + 1 :]: Entry(int(info["size"]), _written_at(info))
            for name, info in self._find(prefix).items()
        }

    def delete(self, key: str) -> None:
        fs, path = self._locate(key)
        with suppress(FileNotFoundError):
            fs.rm_file(path)

    def delete_tree(self, prefix: str) -> None:
        fs, _ = self._open()
        for name in self._find(prefix):  # one by one: bulk deletion in s3fs does not report failures
            with suppress(FileNotFoundError):
                fs.rm_file(name)

    def at(self, name: str) -> RemoteFolder:
        inner = type(self)(f"{self.uri}/{name}")
        fs, path = self._locate(name)
        inner._opened = (os.getpid(), fs, path)  # shares one client, and so its connections
        return inner

    def filesystem_and_path(self) -> tuple[Any, str]:
        import pyarrow.fs

        fs, base = self._open()
        return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fs)), base

    def _open(self) -> tuple[Any, str]:
        """Returns the file system and this folder's path in it."""
        # An async file system belongs to the event loop of its process, so a fork opens its own.
        if self._opened is None or self._opened[0] != os.getpid():
            fs, base = url_to_fs(self.uri, use_listings_cache=False, **self._options())
            self._opened = (os.getpid(), fs, str(base).rstrip("/"))
        return self._opened[1:]

    def _options(self) -> dict[str, Any]:
        """Returns further options of the file system."""
        return {}

    def _locate(self, key: str) -> tuple[Any, str]:
        """Returns the file system and the path of an object in it."""
        fs, base = self._open()
        return fs, f"{base}/{key}"

    def _make_parent(self, fs: Any, path: str) -> None:
        if self._protocol not in _OBJECT_STORES:
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _find(self, prefix: str) -> dict[str, Any]:
        """Returns what the file system lists of every object below a folder, by path."""
        fs, path = self._locate(prefix)
        inside = path.rstrip("/") + "/"
        fs.invalidate_cache()
        try:
            listed = fs.find(inside, detail=True)
        except FileNotFoundError as error:
            if is_missing_bucket(error):
                raise
            return {}
        return {
            name: info
            for name, info in listed.items()
            if info["type"] == "file" and name.startswith(inside) and name != inside
        }


def _written_at(info: dict[str, Any]) -> float | None:
    at = next((info[field] for field in _TIME_FIELDS if isinstance(info.get(field), datetime | float)), None)
    return at.replace(tzinfo=at.tzinfo or UTC).timestamp() if isinstance(at, datetime) else at
