"""Objects on a local disk, or on what is mounted like one."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from elastic_ddp.storage import direct_io
from elastic_ddp.storage.s3 import Upload

TEMPORARY_PREFIX = ".tmp-"
"""Begins the name of a file that is no object yet."""

_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
_CANNOT_SYNC = frozenset({errno.EACCES, errno.EBADF, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM})
"""How file systems say that a directory cannot be opened to be synced, or be synced. Anything else says that it failed:
what was written may be gone after a crash."""


def is_temporary(key: str) -> bool:
    """Whether a file is no object yet."""
    return key.rpartition("/")[2].startswith(TEMPORARY_PREFIX)


class LocalFolder:
    """A directory, without fsspec: it neither syncs nor creates exclusively."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.uri = str(path)

    def read(self, key: str, max_bytes: int | None = None) -> bytes:
        with open(self._path / key, "rb") as file:
            # Memory for all that may come is taken before anything does.
            return file.read(-1 if max_bytes is None else min(os.fstat(file.fileno()).st_size, max_bytes) + 1)

    def size(self, key: str) -> int:
        return (self._path / key).stat().st_size

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        return direct_io.read_into(self._path / key, start, buffer)

    def write(self, key: str, data: bytes | memoryview) -> None:
        target = self._path / key
        with self._temporary(target, data) as temporary:
            os.replace(temporary, target)
        sync_directory(target.parent)

    def create(self, key: str, data: bytes, before_retry: Callable[[], None]) -> None:
        target = self._path / key
        with self._temporary(target, data) as temporary:
            try:
                os.link(temporary, target)
            except FileExistsError:
                # NFS may lose the answer to a link that was made.
                if not os.path.samefile(temporary, target):
                    sync_directory(target.parent)  # it may be our own, of a try that failed at that
                    raise
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                    raise
                if not _renamed_if_new(temporary, target):
                    # Still exclusive, but a crash can leave a part, which checksums tell.
                    with target.open("xb") as file:
                        _write_through(file, data)
                        if not os.fstat(file.fileno()).st_nlink:
                            raise OSError(errno.ESTALE, "removed while it was written", str(target)) from error
        sync_directory(target.parent)

    def sizes(self, prefix: str) -> dict[str, int]:
        files = (each for each in self._files(prefix) if not each[0].name.startswith(TEMPORARY_PREFIX))
        return {path.relative_to(self._path).as_posix(): status.st_size for path, status in files}

    def modified(self, prefix: str) -> list[float]:
        return [status.st_mtime for _, status in self._files(prefix)]

    def _files(self, prefix: str) -> Iterator[tuple[Path, os.stat_result]]:
        """Those below a folder. What was deleted since it was listed is passed over; what cannot be listed is not."""
        for folder, _, names in os.walk(self._path / prefix, onerror=_raise_unless_missing):
            for name in names:
                path = Path(folder, name)
                with suppress(FileNotFoundError):
                    yield path, path.stat()

    def delete(self, key: str) -> None:
        (self._path / key).unlink(missing_ok=True)

    def delete_if(self, key: str, data: bytes) -> bool:
        try:
            is_same = self.read(key) == data
        except FileNotFoundError:
            return False
        if is_same:
            self.delete(key)
        return is_same

    def delete_tree(self, prefix: str) -> None:
        import shutil

        with suppress(FileNotFoundError):
            shutil.rmtree(self._path / prefix)
        if "/" in prefix:
            with suppress(OSError):  # the last folder in another takes that along
                (self._path / prefix).parent.rmdir()

    def uploads(self, prefix: str) -> list[Upload]:
        """Files that are no objects yet."""
        files = (each for each in self._files(prefix) if each[0].name.startswith(TEMPORARY_PREFIX))
        return [
            Upload(path.relative_to(self._path).as_posix(), path.name, status.st_mtime, status.st_size)
            for path, status in files
        ]

    def abort(self, upload: Upload) -> None:
        self.delete(upload.key)

    def at(self, name: str) -> LocalFolder:
        return LocalFolder(self._path / name)

    def filesystem_and_path(self) -> tuple[Any, str]:
        import pyarrow.fs

        return pyarrow.fs.LocalFileSystem(), self.uri

    @contextmanager
    def _temporary(self, target: Path, data: bytes | memoryview) -> Iterator[Path]:
        """A synced file with the data beside the target; removed afterwards if it is still there."""
        temporary = target.parent / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        file = _opened(temporary)
        try:
            with file:
                _write_through(file, data)
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)


def _opened(path: Path) -> Any:
    """A new file, to be written. `delete_tree` of another one takes an empty folder above it along, perhaps in between:
    it is made once more then."""
    try:
        _make_folder(path.parent)
        return path.open("xb")
    except FileNotFoundError:
        _make_folder(path.parent)
        return path.open("xb")


def _renamed_if_new(old: Path, new: Path) -> bool:
    """Whether this is Linux's renameat2, which many file systems without hard links have.

    Raises:
        FileExistsError: there is one.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), _RENAME_NOREPLACE) == 0:
        return True
    if (code := ctypes.get_errno()) in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code), str(new))


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def sync(path: Path) -> None:
    """Makes durable what was written to a file, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_through(file: Any, data: bytes | memoryview) -> None:
    direct_io.write(file, data)
    os.fsync(file.fileno())


def _make_folder(path: Path) -> None:
    """With those above it that are missing; the names of all that were are durable."""
    missing = list(itertools.takewhile(lambda folder: not folder.exists(), (path, *path.parents)))
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        # Not to be taken for an object that exists already.
        raise NotADirectoryError(errno.ENOTDIR, "a file is in the way of this folder", str(path)) from None
    try:
        for folder in reversed(missing):
            sync_directory(folder.parent)
    except OSError:
        with suppress(OSError):  # unless somebody has written into it; else who tries again would find it, not synced
            for folder in missing:
                folder.rmdir()
        raise


def sync_directory(path: Path) -> None:
    """Make names durable; file systems that cannot sync a directory (some network mounts) are left to their ways."""
    try:
        sync(path)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
