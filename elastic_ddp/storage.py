"""A folder in any storage that fsspec knows: read, replace, create once, list, delete."""

from __future__ import annotations

import errno
import itertools
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from elastic_ddp.errors import ConfigError, ElasticDDPError, PeerLostError, StorageError
from elastic_ddp.failures import is_lasting, is_missing_bucket, remedy, told
from elastic_ddp.s3 import Upload, abort_on_s3, create_on_s3, delete_on_s3_if, uploads_on_s3

_PART = re.compile(r"[A-Za-z0-9._=@+,~:-]+")
_TEMPORARY = ".tmp-"
CLOCK = "clock-"
"""Begins the folder of an object that `Storage.now` has written, and not removed if its process was killed."""
PART_BYTES = 8 << 20
"""Of a large object on S3, sent at once."""
PARALLEL_PARTS = 2
"""Parts of an object that are on their way."""

_CANNOT_SYNC = frozenset({errno.EACCES, errno.EBADF, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM})
"""How file systems say that a directory cannot be opened to be synced, or be synced. Anything else says that it failed:
what was written may be gone after a crash."""
# Folders need not be made there, and a PUT replaces an object as a whole.
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "memory"})
_IN_MEMORY = threading.Lock()
"""The memory file system looks whether an object exists, and then stores it."""
_MODIFIED = ("LastModified", "last_modified", "updated", "mtime")
"""What listings call the time of the last write: S3, Azure, Google, SFTP and others."""


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

    def read(self, key: str) -> bytes:
        """The whole object; FileNotFoundError if there is none."""
        with self._errors("read", key, FileNotFoundError):
            return self._folder.read(_checked(key))

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

    def create(self, key: str, data: bytes, *, before_again: Callable[[], None] = lambda: None) -> None:
        """Store an object that does not exist yet; FileExistsError if it does. Of several writers one wins; a storage
        that cannot tell is refused, here or by `check_writable`.

        On S3 `data` has to be small: only a single PUT is conditional.

        Args:
            before_again: called before every try but the first; what it raises of this package's errors ends them.
        """
        with self._errors("create", key, FileExistsError):
            self._folder.create(_checked(key), data, before_again)

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
        folder = f"{CLOCK}{uuid.uuid4().hex}"
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
        what was sent of them stays until they are aborted, and is paid for. Other storages have none to see to."""
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
            raise ConfigError(f"storage={self.uri!r} cannot be {verb}: {told(error)}; {remedy(error)}") from error

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
        except (ElasticDDPError, PeerLostError):  # meant as it is
            raise
        except Exception as error:  # backends raise whatever their client library does
            for expected in passing:
                if isinstance(error, expected) and not is_missing_bucket(error):
                    why = "there is no such object" if expected is FileNotFoundError else "the object exists already"
                    raise expected(error.errno, why, f"{self.uri}/{key}") from error
            advice = f"; {remedy(error)}" if is_lasting(error) else ""
            raise StorageError(f"cannot {verb} {key!r} in {self.uri}: {told(error)}{advice}") from error


class _Folder(Protocol):
    """What a kind of storage has to do. Keys have been checked; any exception may be raised."""

    uri: str

    def read(self, key: str) -> bytes: ...
    def size(self, key: str) -> int: ...
    def read_into(self, key: str, start: int, buffer: memoryview) -> int: ...
    def write(self, key: str, data: bytes | memoryview) -> None: ...
    def create(self, key: str, data: bytes, before_again: Callable[[], None]) -> None: ...
    def sizes(self, prefix: str) -> dict[str, int]: ...
    def modified(self, prefix: str) -> list[float]: ...
    def delete(self, key: str) -> None: ...
    def delete_if(self, key: str, data: bytes) -> bool: ...
    def delete_tree(self, prefix: str) -> None: ...
    def uploads(self, prefix: str) -> list[Upload]: ...
    def abort(self, upload: Upload) -> None: ...
    def at(self, name: str) -> _Folder: ...
    def filesystem_and_path(self) -> tuple[Any, str]: ...


class _LocalFolder:
    """A directory, without fsspec: it neither syncs nor creates exclusively."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.uri = str(path)

    def read(self, key: str) -> bytes:
        return (self._path / key).read_bytes()

    def size(self, key: str) -> int:
        return (self._path / key).stat().st_size

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        with (self._path / key).open("rb", buffering=0) as file:
            file.seek(start)
            done = 0
            while done < len(buffer) and (count := file.readinto(buffer[done:])):
                done += count
        return done

    def write(self, key: str, data: bytes | memoryview) -> None:
        target = self._path / key
        with self._temporary(target, data) as temporary:
            os.replace(temporary, target)
        _sync_directory(target.parent)

    def create(self, key: str, data: bytes, before_again: Callable[[], None]) -> None:
        target = self._path / key
        with self._temporary(target, data) as temporary:
            try:
                os.link(temporary, target)
            except FileExistsError:
                # NFS may lose the answer to a link that was made.
                if not os.path.samefile(temporary, target):
                    raise
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                    raise
                # No hard links here: still exclusive, but a crash can leave a part, which checksums tell.
                with target.open("xb") as file:
                    _write_through(file, data)
        _sync_directory(target.parent)

    def sizes(self, prefix: str) -> dict[str, int]:
        found = {}
        for folder, _, names in os.walk(self._path / prefix):
            for name in names:
                path = Path(folder, name)
                if not name.startswith(_TEMPORARY):
                    with suppress(FileNotFoundError):  # deleted since it was listed
                        found[path.relative_to(self._path).as_posix()] = path.stat().st_size
        return found

    def modified(self, prefix: str) -> list[float]:
        found = []
        for folder, _, names in os.walk(self._path / prefix):
            for name in names:
                with suppress(FileNotFoundError):  # deleted since it was listed
                    found.append(Path(folder, name).stat().st_mtime)
        return found

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
        return []

    def abort(self, upload: Upload) -> None: ...

    def at(self, name: str) -> _LocalFolder:
        return _LocalFolder(self._path / name)

    def filesystem_and_path(self) -> tuple[Any, str]:
        import pyarrow.fs

        return pyarrow.fs.LocalFileSystem(), self.uri

    @contextmanager
    def _temporary(self, target: Path, data: bytes | memoryview) -> Iterator[Path]:
        """A synced file with the data beside the target; removed afterwards if it is still there."""
        _make_folder(target.parent)
        temporary = target.parent / f"{_TEMPORARY}{uuid.uuid4().hex}"
        try:
            with temporary.open("xb") as file:
                _write_through(file, data)
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)


class _RemoteFolder:
    """A folder in a file system of fsspec, which is opened when first needed, once in each process."""

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self._protocol = uri.partition("://")[0]
        self._is_s3 = self._protocol in ("s3", "s3a")
        self._opened: tuple[int, Any, str] | None = None

    def read(self, key: str) -> bytes:
        fs, base = self._open()
        data: bytes = fs.cat_file(f"{base}/{key}")
        return data

    def size(self, key: str) -> int:
        fs, base = self._open()
        return int(fs.info(f"{base}/{key}")["size"])

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        fs, base = self._open()
        data = fs.cat_file(f"{base}/{key}", start=start, end=start + len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def write(self, key: str, data: bytes | memoryview) -> None:
        fs, base = self._open()
        self._make_parent(fs, f"{base}/{key}")
        if self._is_s3 and len(data) >= 2 * PART_BYTES:
            fs.pipe_file(f"{base}/{key}", _InParts(data), chunksize=PART_BYTES, max_concurrency=PARALLEL_PARTS)
        else:
            fs.pipe_file(f"{base}/{key}", bytes(data))

    def create(self, key: str, data: bytes, before_again: Callable[[], None]) -> None:
        fs, base = self._open()
        path = f"{base}/{key}"
        if self._is_s3:
            create_on_s3(fs, path, data, before_again)
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

    def at(self, name: str) -> _RemoteFolder:
        inner = _RemoteFolder(f"{self.uri}/{name}")
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


class _InParts:
    """What s3fs cuts a large object from: only the parts on their way are copied."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, part: slice) -> bytes:
        return bytes(self._data[part])


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


def _open(uri: str) -> _Folder:
    if not uri.strip():
        raise ConfigError("storage is empty; give a local path or a URI such as s3://bucket/runs")
    protocol, separator, rest = uri.partition("://")
    if not separator or protocol in ("file", "local"):
        path = Path(rest if separator else uri).expanduser()
        return _LocalFolder(Path(os.path.abspath(path)))
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
    return _RemoteFolder(uri)


def _is_key(key: str) -> bool:
    return all(_PART.fullmatch(part) and part not in (".", "..") for part in key.split("/"))


def _checked(key: str) -> str:
    if not _is_key(key) or key.rpartition("/")[2].startswith(_TEMPORARY):
        raise StorageError(
            f"{key!r} is not a key: keys are relative, made of letters, digits and ._=@+,~:- between slashes, "
            f"without . or .. parts, and do not start with {_TEMPORARY}"
        )
    return key


def _write_through(file: Any, data: bytes | memoryview) -> None:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def _make_folder(path: Path) -> None:
    """With those above it that are missing; the names of all that were are durable."""
    missing = list(itertools.takewhile(lambda folder: not folder.exists(), (path, *path.parents)))
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        # Not to be taken for an object that exists already.
        raise NotADirectoryError(errno.ENOTDIR, "a file is in the way of this folder", str(path)) from None
    for folder in reversed(missing):
        _sync_directory(folder.parent)


def _sync_directory(path: Path) -> None:
    """Make names durable; file systems that cannot sync a directory (some network mounts) are left to their ways."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
