"""A folder in any storage that fsspec knows: read, replace, create once, list, delete."""

from __future__ import annotations

import errno
import os
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from elastic_ddp.config.storage_uri import local_path
from elastic_ddp.errors import ConfigError, ElasticDDPError, PeerFailedError, StorageError
from elastic_ddp.storage.errors import format_error, is_missing_bucket, is_permanent, suggest_fix
from elastic_ddp.storage.local import TEMPORARY_PREFIX, LocalFolder
from elastic_ddp.storage.remote import RemoteFolder
from elastic_ddp.storage.s3 import Upload

_PART = re.compile(r"[A-Za-z0-9._=@+,~:-]+")
CLOCK_PREFIX = "clock-"
"""Begins the folder of an object that `Storage.now` has written, and not removed if its process was killed."""


class Storage:
    """A folder at any fsspec URI or local path; objects in it are named by keys such as `commits/12.json`.

    Reads and listings are never cached. An instance holds nothing but its address, so it can be pickled, sent to
    Ray actors and used after a fork; it may be used from several threads. Every failure of the storage itself is a
    StorageError that names the key and carries the cause.

    Keys are relative, of letters, digits and `._=@+,~:-`; `.` and `..` are refused.

    Raises:
        ConfigError: the URI is empty, or names a protocol whose package is not installed.
    """

    def __init__(self, uri: str | os.PathLike[str]) -> None:
        self._folder: _Folder = _open(os.fspath(uri))

    @property
    def uri(self) -> str:
        """The address: an absolute path for a local folder, else `protocol://…`, without a slash at the end."""
        return self._folder.uri

    @property
    def is_local(self) -> bool:
        """Whether it is a folder of a file system, this machine's own or a mounted one."""
        return isinstance(self._folder, LocalFolder)

    def read(self, key: str, max_bytes: int | None = None) -> bytes:
        """The whole object; FileNotFoundError if there is none. Of one that has more bytes than it may have, one more
        than that: it may be larger than memory is."""
        with self._errors("read", key, FileNotFoundError):
            return self._folder.read(_checked(key), max_bytes)

    def size(self, key: str) -> int:
        """Of an object, in bytes; FileNotFoundError if there is none."""
        with self._errors("read", key, FileNotFoundError):
            return self._folder.size(_checked(key))

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """Fills a buffer of bytes from an object that goes beyond `start`, from there on. Returns how many there were:
        fewer than it takes if the object ends before. FileNotFoundError if there is none."""
        with self._errors("read", key, FileNotFoundError):
            return self._folder.read_into(_checked(key), start, buffer)

    def write(self, key: str, data: bytes | memoryview) -> None:
        """Store or replace an object. Readers see the old bytes or the new ones, on local disks and object stores
        also if this process dies meanwhile; local bytes are on the disk when this returns. S3 gets a large object in
        parts, several at a time."""
        with self._errors("write", key):
            self._folder.write(_checked(key), data)

    def create(self, key: str, data: bytes, *, before_retry: Callable[[], None] = lambda: None) -> None:
        """Store an object that does not exist yet; FileExistsError if it does. Of several writers one wins; a storage
        that cannot tell is refused, here or by `check_writable`.

        On S3 `data` has to be small: only a single PUT is conditional.

        Args:
            before_retry: called before every try but the first; what it raises of this package's errors ends them.
        """
        with self._errors("create", key, FileExistsError):
            self._folder.create(_checked(key), data, before_retry)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Size in bytes of every object below the folder `prefix`, at any depth, by key in sorted order."""
        folder = prefix.rstrip("/")
        with self._errors("list", prefix):
            found = self._folder.sizes(_checked(folder) if folder else "")
        return {key: found[key] for key in sorted(found) if _is_key(key)}

    def list(self, prefix: str = "") -> list[str]:
        """Keys of the objects below the folder `prefix`, at any depth, sorted. Empty if there is no such folder."""
        return [*self.sizes(prefix)]

    def last_modified(self, prefix: str) -> float | None:
        """When anything below the folder `prefix` was last written, in seconds since 1970 by the storage's own clock;
        None if there is nothing. On a local disk what is being written counts, too."""
        with self._errors("date", prefix):
            return max(self._folder.modified(_checked(prefix.rstrip("/"))), default=None)

    def now(self) -> float:
        """The time by the storage's own clock, which may differ from this machine's: that of a small object, which is
        written and removed."""
        folder = f"{CLOCK_PREFIX}{uuid.uuid4().hex}"
        self.write(f"{folder}/now", b"")
        try:
            now = self.last_modified(folder)
        finally:
            self.delete_tree(folder)
        if now is None:
            raise StorageError(f"cannot tell the time of {self.uri}: an object that was written is not listed")
        return now

    def delete(self, key: str) -> None:
        """Remove one object; it may be missing."""
        with self._errors("delete", key):
            self._folder.delete(_checked(key))

    def delete_if(self, key: str, data: bytes) -> bool:
        """Remove a small object if these are its bytes. Returns whether they were; not if it is missing.

        Where S3 heeds `If-Match` for that, as AWS does, nothing comes between the look and the removal. Elsewhere what
        another process stores in that moment, one round trip long, is removed: no file system has such an operation.
        """
        with self._errors("delete", key):
            return self._folder.delete_if(_checked(key), data)

    def delete_tree(self, prefix: str) -> None:
        """Remove everything below the folder `prefix`; it may be missing."""
        with self._errors("delete", prefix):
            self._folder.delete_tree(_checked(prefix.rstrip("/")))

    def uploads(self, prefix: str = "") -> Sequence[Upload]:
        """Uploads of objects below the folder `prefix` whose writers have not finished them, and may have died: on S3
        what was sent of them stays until they are aborted, and is paid for, and so does a file of a local folder that
        is no object yet. Other storages have none to see to."""
        folder = prefix.rstrip("/")
        with self._errors("list the uploads to", prefix):
            return self._folder.uploads(f"{_checked(folder)}/" if folder else "")

    def abort(self, upload: Upload) -> None:
        """Remove what was sent of an upload; it may be over."""
        with self._errors("abort the upload of", upload.key):
            self._folder.abort(upload)

    def at(self, name: str) -> Storage:
        """The folder `name` inside this one."""
        inner = Storage.__new__(Storage)
        inner._folder = self._folder.at(_checked(name.rstrip("/")))
        return inner

    def check_writable(self) -> None:
        """Write, read and remove a small object, and create one that is then refused to be created again.

        Raises:
            ConfigError: one of them failed; says which, why, and what to change.
        """
        key, data = f".writable-{uuid.uuid4().hex}", b"elastic_ddp"
        verb = "written"
        try:
            # A plain write first: one that fails is told of at once, and a create is tried for a while.
            self._folder.write(key, data)
            verb = "read back"
            if self._folder.read(key) != data:
                raise OSError(errno.EIO, "other bytes came back than were written")
            verb = "deleted from"
            self._folder.delete(key)
            verb = "trusted with commits"
            self._check_exclusive(key, data)
        except Exception as error:  # backends raise whatever their client library does
            raise ConfigError(
                f"storage={self.uri!r} cannot be {verb}: {format_error(error)}; {suggest_fix(error)}"
            ) from error

    def _check_exclusive(self, key: str, data: bytes) -> None:
        self._folder.create(key, data, lambda: None)
        try:
            self._folder.create(key, data, lambda: None)
        except FileExistsError:
            return
        finally:
            self._folder.delete(key)
        raise NotImplementedError("an object was created that existed already, and was replaced")

    def filesystem_and_path(self) -> tuple[Any, str]:
        """A `pyarrow.fs.FileSystem` and the path of this folder in it, for Ray's `storage_filesystem`."""
        return self._folder.filesystem_and_path()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Storage) and other.uri == self.uri

    def __hash__(self) -> int:
        return hash(self.uri)

    def __repr__(self) -> str:
        return f"Storage({self.uri!r})"

    def __reduce__(self) -> tuple[type[Storage], tuple[str]]:
        return Storage, (self.uri,)

    @contextmanager
    def _errors(self, verb: str, key: str, *passing: type[OSError]) -> Iterator[None]:
        try:
            yield
        except (ElasticDDPError, PeerFailedError):  # meant as it is
            raise
        except Exception as error:  # backends raise whatever their client library does
            for expected in passing:
                if isinstance(error, expected) and not is_missing_bucket(error):
                    why = "there is no such object" if expected is FileNotFoundError else "the object exists already"
                    raise expected(error.errno, why, f"{self.uri}/{key}") from error
            advice = f"; {suggest_fix(error)}" if is_permanent(error) else ""
            raise StorageError(f"cannot {verb} {key!r} in {self.uri}: {format_error(error)}{advice}") from error


class _Folder(Protocol):
    """What a kind of storage has to do. Keys have been checked; any exception may be raised."""

    uri: str

    def read(self, key: str, max_bytes: int | None = None) -> bytes: ...
    def size(self, key: str) -> int: ...
    def read_into(self, key: str, start: int, buffer: memoryview) -> int: ...
    def write(self, key: str, data: bytes | memoryview) -> None: ...
    def create(self, key: str, data: bytes, before_retry: Callable[[], None]) -> None: ...
    def sizes(self, prefix: str) -> dict[str, int]: ...
    def modified(self, prefix: str) -> list[float]: ...
    def delete(self, key: str) -> None: ...
    def delete_if(self, key: str, data: bytes) -> bool: ...
    def delete_tree(self, prefix: str) -> None: ...
    def uploads(self, prefix: str) -> list[Upload]: ...
    def abort(self, upload: Upload) -> None: ...
    def at(self, name: str) -> _Folder: ...
    def filesystem_and_path(self) -> tuple[Any, str]: ...


def _open(uri: str) -> _Folder:
    if not uri.strip():
        raise ConfigError("storage is empty; give a local path or a URI such as s3://bucket/runs")
    protocol, separator, rest = uri.partition("://")
    if not separator or protocol in ("file", "local"):
        return LocalFolder(local_path(rest if separator else uri))
    import fsspec

    try:
        fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"storage={uri!r} cannot be opened: {error}; install the fsspec package of this protocol, "
            "or use a local path or s3://bucket/folder"
        ) from error
    if protocol != "memory" and not rest.strip("/"):
        raise ConfigError(f"storage={uri!r} names no bucket or host; use {protocol}://bucket/folder")
    return RemoteFolder(uri)


def _is_key(key: str) -> bool:
    return all(_PART.fullmatch(part) and part not in (".", "..") for part in key.split("/"))


def _checked(key: str) -> str:
    if not _is_key(key) or key.rpartition("/")[2].startswith(TEMPORARY_PREFIX):
        raise StorageError(
            f"{key!r} is not a key: keys are relative, made of letters, digits and ._=@+,~:- between slashes, "
            f"without . or .. parts, and do not start with {TEMPORARY_PREFIX}"
        )
    return key
