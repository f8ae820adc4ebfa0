"""Objects in any file system that fsspec knows, S3 among them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from typing import Any

from elastic_ddp.storage.errors import is_missing_bucket
from elastic_ddp.storage.s3 import (
    Upload,
    abort_on_s3,
    create_on_s3,
    delete_on_s3_if,
    read_on_s3,
    uploads_on_s3,
    write_on_s3,
)

PART_BYTES = 8 << 20
"""Of a large object on S3, sent at once."""
PARALLEL_PARTS = 2
"""Parts of an object that are on their way."""

# Folders need not be made there, and a PUT replaces an object as a whole.
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "memory"})
_IN_MEMORY = threading.Lock()
"""The memory file system looks whether an object exists, and then stores it."""
_MODIFIED = ("LastModified", "last_modified", "updated", "mtime")
"""What listings call the time of the last write: S3, Azure, Google, SFTP and others."""


class RemoteFolder:
    """A folder in a file system of fsspec, which is opened when first needed, once in each process."""

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self._protocol = uri.partition("://")[0]
        self._is_s3 = self._protocol in ("s3", "s3a")
        self._opened: tuple[int, Any, str] | None = None

    def read(self, key: str, max_bytes: int | None = None) -> bytes:
        fs, base = self._open()
        path, data = f"{base}/{key}", b""
        if max_bytes is None:
            data = fs.cat_file(path)
            return data
        try:  # s3fs asks for the size of a whole object first, and so waits for S3 twice
            data = fs.cat_file(path, start=0, end=max_bytes + 1)
        except FileNotFoundError:
            raise
        except Exception:
            if self.size(key):  # else there is no range in it, which is an error in some stores
                raise
        return data

    def size(self, key: str) -> int:
        fs, base = self._open()
        return int(fs.info(f"{base}/{key}")["size"])

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        fs, base = self._open()
        if self._is_s3:
            return read_on_s3(fs, f"{base}/{key}", start, buffer)
        data = fs.cat_file(f"{base}/{key}", start=start, end=start + len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def write(self, key: str, data: bytes | memoryview) -> None:
        fs, base = self._open()
        self._make_parent(fs, f"{base}/{key}")
        if self._is_s3 and len(data) > PART_BYTES:
            write_on_s3(fs, f"{base}/{key}", memoryview(data), PART_BYTES, PARALLEL_PARTS)
        else:
            fs.pipe_file(f"{base}/{key}", bytes(data))

    def create(self, key: str, data: bytes, before_retry: Callable[[], None]) -> None:
        fs, base = self._open()
        path = f"{base}/{key}"
        if self._is_s3:
            create_on_s3(fs, path, data, before_retry)
            return
        _check_creates(fs)
        self._make_parent(fs, path)
        with _IN_MEMORY if self._protocol == "memory" else nullcontext():
            try:
                fs.pipe_file(path, data, mode="create")
            except (TypeError, ValueError) as error:  # how fsspec packages say that they know no modes
                raise NotImplementedError(f"{type(fs).__name__} has no mode='create': {error}") from error

    def sizes(self, prefix: str) -> dict[str, int]:
        fs, base = self._open()
        found = self._find(fs, f"{base}/{prefix}")
        return {name[len(base) + 1 :]: int(info["size"]) for name, info in found.items()}

    def modified(self, prefix: str) -> list[float]:
        fs, base = self._open()
        times = []
        for name, info in self._find(fs, f"{base}/{prefix}").items():
            listed = next((info[field] for field in _MODIFIED if info.get(field)), None)
            with suppress(FileNotFoundError):  # deleted since it was listed
                times.append(_timestamp(fs.modified(name) if listed is None else listed))
        return times

    def delete(self, key: str) -> None:
        fs, base = self._open()
        with suppress(FileNotFoundError):
            fs.rm_file(f"{base}/{key}")

    def delete_if(self, key: str, data: bytes) -> bool:
        fs, base = self._open()
        try:
            if self._is_s3:
                return delete_on_s3_if(fs, f"{base}/{key}", data)
            is_same = self.read(key) == data
        except FileNotFoundError as error:
            if is_missing_bucket(error):
                raise
            return False
        if is_same:
            self.delete(key)
        return is_same

    def delete_tree(self, prefix: str) -> None:
        fs, base = self._open()
        # One by one: bulk deletion in s3fs does not report the objects it could not delete.
        for name in self._find(fs, f"{base}/{prefix}"):
            with suppress(FileNotFoundError):
                fs.rm_file(name)

    def uploads(self, prefix: str) -> list[Upload]:
        if not self._is_s3:
            return []
        fs, base = self._open()
        return uploads_on_s3(fs, base, prefix)

    def abort(self, upload: Upload) -> None:
        fs, base = self._open()
        abort_on_s3(fs, base, upload)

    def at(self, name: str) -> RemoteFolder:
        inner = RemoteFolder(f"{self.uri}/{name}")
        fs, base = self._open()
        inner._opened = (os.getpid(), fs, f"{base}/{name}")  # one client, so one pool of connections
        return inner

    def filesystem_and_path(self) -> tuple[Any, str]:
        import pyarrow.fs

        fs, base = self._open()
        return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fs)), base

    def _open(self) -> tuple[Any, str]:
        # An async file system belongs to the event loop of the process that made it: a fork makes its own.
        if self._opened is None or self._opened[0] != os.getpid():
            from fsspec.core import url_to_fs

            fs, base = url_to_fs(self.uri, use_listings_cache=False)
            self._opened = (os.getpid(), fs, str(base).rstrip("/"))
        return self._opened[1:]

    def _make_parent(self, fs: Any, path: str) -> None:
        if self._protocol not in _OBJECT_STORES:
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _find(self, fs: Any, folder: str) -> dict[str, Any]:
        """What is known of each object below a folder, by its path in the file system."""
        inside = folder.rstrip("/") + "/"
        fs.invalidate_cache()
        try:
            found = fs.find(inside, detail=True)
        except FileNotFoundError:
            if self._is_s3:  # the bucket is missing: that is not an empty folder
                raise
            return {}
        return {
            name: info
            for name, info in found.items()
            if info["type"] == "file" and name.startswith(inside) and name != inside
        }


def _check_creates(fs: Any) -> None:
    """NotImplementedError where fsspec's own stand-in would do it, which looks first and then writes."""
    from fsspec import AbstractFileSystem

    if getattr(fs.pipe_file, "__func__", None) is AbstractFileSystem.pipe_file:
        raise NotImplementedError(f"{type(fs).__name__} has no mode='create' of its own")


def _timestamp(modified: Any) -> float:
    """Of a modification time as fsspec's packages give it: seconds, text or a datetime, in UTC if it does not say."""
    if isinstance(modified, int | float):
        return float(modified)
    at = datetime.fromisoformat(modified) if isinstance(modified, str) else modified
    return float((at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp())
