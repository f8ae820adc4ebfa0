"""Parquet files at any fsspec URI: listed, their footers read, and row groups read by byte range.

Byte ranges are asked for explicitly, so that only the wanted columns of the wanted row groups leave the storage, in
one parallel request for each row group instead of one after the other.
"""

from __future__ import annotations

import bisect
import io
import os
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import PurePosixPath
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from elastic_ddp.errors import DataError, format_exception
from elastic_ddp.storage.errors import suggest_fix

_TAIL_BYTES = 64 * 1024  # read at once from a file's end: most footers are smaller
_MAGIC = b"PAR1"
_MAX_GAP_BYTES = 64 * 1024  # unwanted bytes between two wanted ranges that are cheaper to read than to ask again


Source = str | PathLike[str] | Sequence[str | PathLike[str]]
"""What stands for a data set: a path or URI of a file or folder, a glob, or a list of these."""


@dataclass(frozen=True)
class DataFile:
    """A file as it was listed."""

    path: str
    """Full path or URI, with its scheme unless it is local."""
    size: int
    """Bytes."""
    version: str
    """ETag, or the time of the last change: differs whenever the content does."""


_PYARROWS_OPTIONS = re.compile(r"^\w+://.*\?\w+=")


def filesystem_of(uri: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The fsspec file system of a URI or local path, and the path in it; access is set up by the environment.

    Raises:
        DataError: fsspec does not know it.
    """
    if _PYARROWS_OPTIONS.search(uri):
        raise DataError(
            f"data={uri!r} has options behind its path, as URIs of pyarrow may; leave them out, and set them for "
            "all of this process: AWS_ENDPOINT_URL and AWS_REGION for S3, or fsspec's configuration (FSSPEC_S3_...)"
        )
    try:
        fs, path = fsspec.core.url_to_fs(uri)
    except (ValueError, ImportError, OSError) as error:
        raise DataError(
            f"data={uri!r} cannot be opened: {error}; give a local path or a URI that fsspec knows, and install what "
            "fsspec needs for it"
        ) from error
    return fs, path


def entries_of(source: Source) -> list[str]:
    """A data set's source as the list that it stands for.

    Raises:
        DataError: it is, or holds, something that names no file.
    """
    if not isinstance(source, str | PathLike | list | tuple):
        raise DataError(f"data={source!r} is a {type(source).__name__}; give a path, a URI, a glob or a list of them")
    entries = [source] if isinstance(source, str | PathLike) else list(source)
    if not entries:
        raise DataError("data=[]: the list of files is empty; give at least one file, folder or glob")
    for entry in entries:
        if not isinstance(entry, str | PathLike) or not str(entry).strip():
            raise DataError(f"data={entry!r} names no file; give a path, a URI, a glob or a list of them")
    return [str(entry) for entry in entries]


def list_files(source: Source) -> list[DataFile]:
    """The Parquet files of a file, folder, glob or list of these, in the data set's stored order.

    A folder, also one that a glob names, stands for all `*.parquet` below it, but those in a path with a part that
    begins with `.` or `_`; a part like `key=value` is a folder's name and no column. Files
    of one folder or glob are sorted by path; the entries of a list keep their order.

    Raises:
        DataError: an entry stands for no file, or a file is there twice.
    """
    entry_of: dict[str, str] = {}
    files = []
    for entry in entries_of(source):
        for file in _list(entry):
            if file.path in entry_of:
                raise DataError(
                    f"data has {file.path} twice, as {entry_of[file.path]!r} and as {entry!r}: its rows would come "
                    "twice in an epoch; name every file once"
                )
            entry_of[file.path] = entry
            files.append(file)
    return files


def _list(source: str) -> list[DataFile]:
    fs, path = filesystem_of(source)
    fs.invalidate_cache()  # what was listed earlier in this process may have changed since
    try:
        if fsspec.core.has_magic(path) and not fs.exists(path):
            found = fs.glob(path, detail=True)
            wanted = {name: info for name, info in found.items() if info["type"] == "file"}
            for folder in found.keys() - wanted.keys():
                below = fs.find(folder, detail=True)
                wanted |= {name: info for name, info in below.items() if _is_data(name, folder)}
        elif fs.isdir(path):
            found = fs.find(path, detail=True)
            wanted = {name: info for name, info in found.items() if _is_data(name, path)}
        else:
            wanted = {path: fs.info(path)}
    except FileNotFoundError:
        where = "" if source == path else f" (at {path})"
        raise DataError(f"data={source!r}: there is no such file or folder{where}; check the path") from None
    except Exception as error:  # file systems raise whatever their client library does
        raise DataError(f"data={source!r} cannot be listed: {format_exception(error)}; {suggest_fix(error)}") from error
    if not wanted:
        raise DataError(
            f"data={source!r} holds no Parquet file; a folder needs files that end in .parquet (names that begin with "
            "'.' or '_' are left out), anything else can be given as a glob or a list"
        )
    return [
        DataFile(path=_full_name(fs, name), size=int(info["size"]), version=_version(fs, name, info))
        for name, info in sorted(wanted.items())
    ]


def _is_data(name: str, folder: str) -> bool:
    parts = PurePosixPath(name[len(folder) :]).parts
    return name.endswith(".parquet") and not any(part.startswith((".", "_")) for part in parts)


def _full_name(fs: fsspec.AbstractFileSystem, name: str) -> str:
    return name if isinstance(fs, LocalFileSystem) else fs.unstrip_protocol(name)


def _version(fs: fsspec.AbstractFileSystem, name: str, info: dict[str, Any]) -> str:
    if isinstance(fs, LocalFileSystem):
        return f"mtime_ns={os.stat(name).st_mtime_ns}"
    for key in ("ETag", "etag", "md5Hash", "generation", "LastModified", "last_modified", "updated", "mtime"):
        if info.get(key):
            return f"{key}={str(info[key]).strip(chr(34))}"
    return "unknown"  # the size still counts


def check_version(path: str, size: int, version: str) -> None:
    """Refuses a file that is not the one that was listed.

    Raises:
        DataError: it changed, or is gone.
    """
    fs, name = filesystem_of(path)
    fs.invalidate_cache()
    try:
        info = fs.info(name)
        found = DataFile(path, int(info["size"]), _version(fs, name, info))
    except FileNotFoundError as error:
        raise _gone(path) from error
    # Some file systems know more of a single file than of one that they list: another kind of version says nothing.
    is_comparable = found.version.partition("=")[0] == version.partition("=")[0]
    if found.size != size or (is_comparable and found.version != version):
        raise DataError(
            f"{path} changed since it was indexed ({size} bytes, {version} -> {found.size} bytes, {found.version}). A "
            "run uses one data set from its first step to its last: put the file back, or start a run with another name"
        )


def _gone(path: str) -> DataError:
    return DataError(
        f"{path} is gone since the data set was listed; a run reads the same files from its first step to its last: "
        "put it back, or start a run with another name"
    )


def read_footer(path: str, size: int, footer_bytes: int = _TAIL_BYTES) -> tuple[pq.FileMetaData, int]:
    """A file's metadata, and how many bytes it takes at the file's end.

    Args:
        footer_bytes: how much to read at once, exact where it is known from an earlier call.

    Raises:
        DataError: the file is not Parquet, or is gone.
    """
    tail = read_ranges(path, [(max(size - footer_bytes, 0), size)])[0]
    if len(tail) < 12 or tail[-4:] != _MAGIC:
        raise DataError(f"{path} is not a Parquet file ({size} bytes); leave it out of the data set or write it again")
    needed = struct.unpack("<I", tail[-8:-4])[0] + 8
    if needed > len(tail):
        tail = read_ranges(path, [(max(size - needed, 0), size)])[0]
    try:
        metadata = pq.read_metadata(pa.BufferReader(_MAGIC + tail[-needed:]))  # offsets are read, not followed
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}; write it again") from error
    return metadata, needed


def read_row_group(path: str, size: int, metadata: pq.FileMetaData, number: int, columns: Sequence[str]) -> pa.Table:
    """The given columns of one row group."""
    wanted = set(columns)
    group = metadata.row_group(number)
    ranges = []
    for index in range(group.num_columns):
        chunk = group.column(index)
        if chunk.path_in_schema in wanted or chunk.path_in_schema.split(".")[0] in wanted:
            start = chunk.data_page_offset
            if chunk.has_dictionary_page and chunk.dictionary_page_offset:
                start = min(start, chunk.dictionary_page_offset)
            ranges.append((start, start + chunk.total_compressed_size))
    ranges = _merge(ranges)
    parts = _Parts(size, ranges, read_ranges(path, ranges), lambda start, stop: read_ranges(path, [(start, stop)])[0])
    with pq.ParquetFile(pa.PythonFile(parts, mode="r"), metadata=metadata) as file:
        return file.read_row_group(number, columns=list(columns))


def read_ranges(path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Bytes [start, stop) of a file for each of `ranges`, together.

    Raises:
        DataError: the file is gone, or too short.
    """
    fs, name = filesystem_of(path)
    try:
        if isinstance(fs, LocalFileSystem):
            with open(name, "rb", buffering=0) as file:
                parts = [_read_at(file.fileno(), start, stop) for start, stop in ranges]
        else:
            starts, stops = [start for start, _ in ranges], [stop for _, stop in ranges]
            parts = fs.cat_ranges([name] * len(ranges), starts, stops, on_error="raise")
    except FileNotFoundError as error:
        raise _gone(path) from error
    for (start, stop), part in zip(ranges, parts, strict=True):
        if len(part) != stop - start:
            raise DataError(
                f"{path} ended {stop - start - len(part)} bytes early: it changed since it was listed. Put back what "
                "was there, or begin a run of another name"
            )
    return parts


def _read_at(descriptor: int, start: int, stop: int) -> bytes:
    """Bytes [start, stop), as far as there are any. The system gives less than 2 GiB at a time."""
    parts = []
    while start < stop and (part := os.pread(descriptor, stop - start, start)):
        parts.append(part)
        start += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _merge(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start - merged[-1][1] <= _MAX_GAP_BYTES:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


class _Parts(io.RawIOBase):
    """A read-only file of which some byte ranges are in memory; the others are fetched if they are asked for."""

    def __init__(
        self, size: int, ranges: list[tuple[int, int]], parts: list[bytes], fetch: Callable[[int, int], bytes]
    ) -> None:
        super().__init__()
        self._size = size
        self._starts = [start for start, _ in ranges]
        self._parts = parts
        self._fetch = fetch
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def read(self, size: int = -1) -> Any:  # a bytes-like object without a copy, unlike RawIOBase.read
        start, stop = self._position, self._position + size
        self._position = stop
        nearest = bisect.bisect_right(self._starts, start) - 1
        if nearest >= 0 and stop <= self._starts[nearest] + len(self._parts[nearest]):
            begin = start - self._starts[nearest]
            return pa.py_buffer(self._parts[nearest]).slice(begin, size)
        return self._fetch(start, stop)

    read_buffer = read
