"""Objects in a folder of a mounted file system."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from elastic_ddp.storage import direct_io
from elastic_ddp.storage.folder import Entry, Folder, Upload

TEMPORARY_PREFIX = ".tmp-"
"""Prefix of the names of files that are not objects yet."""

_CANNOT_LINK = frozenset({errno.EMLINK, errno.ENOSYS, errno.ENOTSUP, errno.EPERM})
"""Errors of file systems without hard links."""
_CANNOT_SYNC = frozenset({errno.EACCES, errno.EBADF, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM})
"""Errors of file systems that cannot sync a directory. Any other error means that the names may not be durable."""


def is_temporary(key: str) -> bool:
    """Returns whether a file is not an object yet."""
    return key.rpartition("/")[2].startswith(TEMPORARY_PREFIX)


class LocalFolder(Folder):
    """A directory. fsspec is not used, because it neither syncs files nor creates them exclusively."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.uri = str(path)

    def read(self, key: str) -> bytes:
        return (self._path / key).read_bytes()

    def size(self, key: str) -> int:
        return (self._path / key).stat().st_size

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        return direct_io.read_into(self._path / key, start, buffer)

    def write(self, key: str, data: bytes | memoryview) -> None:
        target = self._path / key
        with self._temporary(target, data) as temporary:
            os.replace(temporary, target)
        sync_directory(target.parent)

    def create(self, key: str, data: bytes) -> None:
        target = self._path / key
        with self._temporary(target, data) as temporary:
            try:
                os.link(temporary, target)
            except FileExistsError:
                # NFS can report this for a link that it made, when the first answer was lost.
                if not os.path.samefile(temporary, target):
                    sync_directory(target.parent)  # an earlier attempt may have linked it and failed to sync
                    raise
            except OSError as error:
                if error.errno not in _CANNOT_LINK:
                    raise
                # Exclusive, but not atomic: a crash leaves a part, which checksums detect.
                with target.open("xb") as file:
                    _write_and_sync(file, data)
                    if not os.fstat(file.fileno()).st_nlink:
                        raise OSError(errno.ESTALE, "deleted while it was written", str(target)) from error
        sync_directory(target.parent)

    def listing(self, prefix: str) -> dict[str, Entry]:
        return {
            path.relative_to(self._path).as_posix(): Entry(status.st_size, status.st_mtime)
            for path, status in self._files(prefix)
            if not is_temporary(path.name)
        }

    def delete(self, key: str) -> None:
        (self._path / key).unlink(missing_ok=True)

    def delete_tree(self, prefix: str) -> None:
        with suppress(FileNotFoundError):
            shutil.rmtree(self._path / prefix)
        if "/" in prefix:
            with suppress(OSError):  # removes the parent if it is empty now
                (self._path / prefix).parent.rmdir()

    def uploads(self) -> list[Upload]:
        return [
            Upload(path.relative_to(self._path).as_posix(), path.name, status.st_mtime, status.st_size)
            for path, status in self._files("")
            if is_temporary(path.name)
        ]

    def at(self, name: str) -> LocalFolder:
        return LocalFolder(self._path / name)

    def filesystem_and_path(self) -> tuple[Any, str]:
        import pyarrow.fs

        return pyarrow.fs.LocalFileSystem(), self.uri

    def _files(self, prefix: str) -> Iterator[tuple[Path, os.stat_result]]:
        """Yields the files below a folder, except those that are deleted meanwhile."""
        for folder, _, names in os.walk(self._path / prefix, onerror=_raise_unless_missing):
            for name in names:
                path = Path(folder, name)
                with suppress(FileNotFoundError):
                    yield path, path.stat()

    @contextmanager
    def _temporary(self, target: Path, data: bytes | memoryview) -> Iterator[Path]:
        """Yields a synced file with `data` next to `target`, and deletes it afterwards if it still exists."""
        temporary = target.parent / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        try:
            file = _open_new(temporary)
        except FileNotFoundError:  # a concurrent `delete_tree` of a sibling removed the folder while it was empty
            file = _open_new(temporary)
        try:
            with file:
                _write_and_sync(file, data)
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable, if the file system can; some network mounts cannot."""
    try:
        sync(path)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


def sync(path: Path) -> None:
    """Makes the content of a file, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_new(path: Path) -> Any:
    """Opens a new file for writing and creates its folder."""
    _make_folder(path.parent)
    return path.open("xb")


def _make_folder(path: Path) -> None:
    """Creates a folder and its missing parents, with durable names."""
    if path.exists():
        return
    _make_folder(path.parent)
    with suppress(FileExistsError):  # created meanwhile; for a file of this name, opening one below it fails
        path.mkdir()
    try:
        sync_directory(path.parent)
    except OSError:
        with suppress(OSError):  # a retry would take the folder for one with a durable name
            path.rmdir()
        raise


def _write_and_sync(file: Any, data: bytes | memoryview) -> None:
    direct_io.write(file, data)
    os.fsync(file.fileno())


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
