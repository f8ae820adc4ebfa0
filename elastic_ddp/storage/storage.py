"""A folder in any storage: read, replace, create once, list, delete."""

from __future__ import annotations

import errno
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec

from elastic_ddp.config.storage_uri import check_storage_uri
from elastic_ddp.errors import ConfigError, StorageError
from elastic_ddp.storage.client_errors import format_error, is_missing_bucket, suggest_fix
from elastic_ddp.storage.folder import Entry, Folder, Upload
from elastic_ddp.storage.local import TEMPORARY_PREFIX, LocalFolder
from elastic_ddp.storage.remote import RemoteFolder
from elastic_ddp.storage.s3 import S3Folder

_KEY_PART = re.compile(r"[A-Za-z0-9._=@+,~:-]+")


class Storage:
    """A folder at an fsspec URI or local path. Keys name the objects in it, for example `commits/12.json`.

    Reads and listings are never cached. An instance holds only its address: it can be pickled, sent to Ray actors,
    used after a fork, and used from several threads.

    Raises:
        ConfigError: the URI is invalid, or the fsspec package of its protocol is not installed.
        StorageError: all methods raise it if the storage fails; names the key and carries the cause.
    """

    def __init__(self, uri: str | os.PathLike[str]) -> None:
        self._folder = _open(os.fspath(uri))

    @property
    def uri(self) -> str:
        """The address: an absolute path for a local folder, else `protocol://…`, without a slash at the end."""
        return self._folder.uri

    def read(self, key: str) -> bytes:
        """Returns an object; FileNotFoundError if it is missing."""
        with self._errors("read", key, FileNotFoundError):
            return self._folder.read(_checked(key))

    def size(self, key: str) -> int:
        """Returns the size of an object in bytes; FileNotFoundError if it is missing."""
        with self._errors("read", key, FileNotFoundError):
            return self._folder.size(_checked(key))

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """Fills `buffer` with an object's bytes from offset `start`, which lies within it.

        Returns the number of bytes read, less at the object's end; FileNotFoundError if the object is missing.
        """
        with self._errors("read", key, FileNotFoundError):
            return self._folder.read_into(_checked(key), start, buffer)

    def write(self, key: str, data: bytes | memoryview) -> None:
        """Stores or replaces an object.

        On local disks and object stores the write is atomic: a reader gets the old or the new bytes, also if this
        process dies. A local object is on the disk when this returns. S3 gets a large object in parallel parts.
        """
        with self._errors("write", key):
            self._folder.write(_checked(key), data)

    def create(self, key: str, data: bytes) -> None:
        """Stores an object that does not exist yet. Of several writers, exactly one succeeds.

        On S3 `data` must be small, because only a single PUT can be conditional.

        Raises:
            FileExistsError: the object exists.
        """
        with self._errors("create", key, FileExistsError):
            self._folder.create(_checked(key), data)

    def listing(self, prefix: str = "") -> dict[str, Entry]:
        """Returns all objects below the folder `prefix`, by key, sorted by key; none if there is no such folder."""
        folder = prefix.rstrip("/")
        with self._errors("list", prefix):
            entries = self._folder.listing(_checked(folder) if folder else "")
        return {key: entries[key] for key in sorted(entries) if _is_key(key)}

    def list(self, prefix: str = "") -> list[str]:
        """Returns the keys of a listing."""
        return [*self.listing(prefix)]

    def delete(self, key: str) -> None:
        """Deletes an object, which may be missing."""
        with self._errors("delete", key):
            self._folder.delete(_checked(key))

    def delete_if(self, key: str, data: bytes) -> bool:
        """Deletes a small object if it holds `data`. Returns whether it did.

        An object that another process stores between the read and the deletion is deleted, too.
        """
        try:
            with self._errors("delete", key, FileNotFoundError):
                is_same = self._folder.read(_checked(key)) == data
                if is_same:
                    self._folder.delete(key)
                return is_same
        except FileNotFoundError:
            return False

    def delete_tree(self, prefix: str) -> None:
        """Deletes everything below the folder `prefix`, which may be missing."""
        with self._errors("delete", prefix):
            self._folder.delete_tree(_checked(prefix.rstrip("/")))

    def uploads(self) -> Sequence[Upload]:
        """Returns the unfinished writes, whose writers may have died.

        S3 keeps and bills the parts of an unfinished upload until it is aborted. A local folder keeps temporary files.
        Other storages have none.
        """
        with self._errors("list the uploads to", ""):
            return self._folder.uploads()

    def abort(self, upload: Upload) -> None:
        """Deletes the parts of an unfinished write; the write may have ended."""
        with self._errors("abort the upload of", upload.key):
            self._folder.abort(upload)

    def at(self, name: str) -> Storage:
        """Returns the folder `name` inside this one."""
        inner = Storage.__new__(Storage)
        inner._folder = self._folder.at(_checked(name.rstrip("/")))
        return inner

    def check_writable(self) -> None:
        """Raises ConfigError, with the fix, unless an object can be created, only once, and read and deleted."""
        key = f".writable-{uuid.uuid4().hex}"
        data = b"elastic_ddp"
        try:
            self._folder.create(key, data)
            try:
                with suppress(FileExistsError):
                    self._folder.create(key, data)
                    raise NotImplementedError("creating an object that exists replaced it")
                if self._folder.read(key) != data:
                    raise OSError(errno.EIO, "the bytes read differ from the bytes written")
            finally:
                self._folder.delete(key)
        except Exception as error:  # backends raise any exception of their client library
            raise ConfigError(
                f"storage={self.uri!r} cannot be used: {format_error(error)}; {suggest_fix(error)}"
            ) from error

    def filesystem_and_path(self) -> tuple[Any, str]:
        """Returns a `pyarrow.fs.FileSystem` and this folder's path in it, for Ray's `storage_filesystem`."""
        return self._folder.filesystem_and_path()

    def __repr__(self) -> str:
        return f"Storage({self.uri!r})"

    def __reduce__(self) -> tuple[type[Storage], tuple[str]]:
        return Storage, (self.uri,)

    @contextmanager
    def _errors(self, verb: str, key: str, expected: type[OSError] | None = None) -> Iterator[None]:
        """Converts exceptions of a backend to StorageError, except for the expected type."""
        try:
            yield
        except StorageError:
            raise
        except Exception as error:  # backends raise any exception of their client library
            if expected and isinstance(error, expected) and not is_missing_bucket(error):
                reason = "there is no such object" if expected is FileNotFoundError else "the object exists already"
                raise expected(error.errno, reason, f"{self.uri}/{key}") from error
            reason = f"{format_error(error)}; {suggest_fix(error)}"
            raise StorageError(f"cannot {verb} {key!r} in {self.uri}: {reason}") from error


def _open(uri: str) -> Folder:
    check_storage_uri(uri)
    protocol, separator, path = uri.partition("://")
    if not separator or protocol in ("file", "local"):
        return LocalFolder(Path(os.path.abspath(os.path.expanduser(path or uri))))
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise ConfigError(
            f"storage={uri!r} cannot be opened: {error}; install the fsspec package of this protocol, "
            "or use a local path or s3://bucket/folder"
        ) from error
    return S3Folder(uri) if protocol in ("s3", "s3a") else RemoteFolder(uri)


def _is_key(key: str) -> bool:
    return all(_KEY_PART.fullmatch(part) and part not in (".", "..") for part in key.split("/"))


def _checked(key: str) -> str:
    if not _is_key(key) or key.rpartition("/")[2].startswith(TEMPORARY_PREFIX):
        raise StorageError(
            f"{key!r} is not a key: keys are relative, of letters, digits and ._=@+,~:- between slashes, without . or "
            f".. as parts, and their names do not start with {TEMPORARY_PREFIX}"
        )
    return key
