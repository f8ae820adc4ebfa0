"""Lists Parquet files at any fsspec URI, and reads their footers and row groups by byte range.

It requests byte ranges explicitly. Only the wanted columns of a row group leave the storage, in parallel requests
instead of one after the other.
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
from fsspec.utils import merge_offset_ranges

from elastic_ddp.errors import DataError, format_exception
from elastic_ddp.storage.errors import suggest_fix

_TAIL_BYTES = 64 * 1024  # most footers are smaller, so the first read gets all of one
_MAGIC = b"PAR1"
_MAX_GAP_BYTES = 64 * 1024  # reading so many unwanted bytes is cheaper than another request


Source = str | PathLike[str] | Sequence[str | PathLike[str]]
"""A data set: a path or URI of a file or folder, a glob, or a list of these."""


@dataclass(frozen=True)
class DataFile:
    """A listed file."""

    path: str
    """The full path, or the URI if it is not local."""
    size: int
    """Bytes."""
    version: str
    """The ETag or modification time, which changes with the content."""


_PYARROWS_OPTIONS = re.compile(r"^\w+://.*\?\w+=")


def filesystem_of(uri: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Returns the fsspec file system of a URI or local path, and the path in it.

    Raises:
        DataError: fsspec cannot open it.
    """
    if _PYARROWS_OPTIONS.search(uri):
        raise DataError(
            f"data={uri!r} has pyarrow options after its path. Remove them, and set environment variables instead: "
            "AWS_ENDPOINT_URL and AWS_REGION for S3, or fsspec's configuration (FSSPEC_S3_...)."
        )
    try:
        fs, path = fsspec.core.url_to_fs(uri)
    except (ValueError, ImportError, OSError) as error:
        raise DataError(
            f"data={uri!r} cannot be opened: {error}. Use a local path or a URI that fsspec supports, and install the "
            "package that fsspec needs for it."
        ) from error
    return fs, path


def entries_of(source: Source) -> list[str]:
    """Returns the entries of a data set's source as a list.

    Raises:
        DataError: the source is empty, or an entry is not a path.
    """
    if not isinstance(source, str | PathLike | list | tuple):
        raise DataError(f"data={source!r} is a {type(source).__name__}. Use a path, a URI, a glob or a list of them.")
    entries = [source] if isinstance(source, str | PathLike) else list(source)
    if not entries:
        raise DataError("data=[] is empty. Name at least one file, folder or glob.")
    for entry in entries:
        if not isinstance(entry, str | PathLike) or not str(entry).strip():
            raise DataError(f"data contains {entry!r}. Use a path, a URI, a glob or a list of them.")
    return [str(entry) for entry in entries]


def list_files(source: Source) -> list[DataFile]:
    """Returns the Parquet files of a data set in stored order.

    A folder, also one that a glob matches, stands for all `*.parquet` files below it, except those below a name that
    begins with `.` or `_`. Folder names such as `key=value` add no column. The files of a folder or glob are sorted by
    path; the entries of a list keep their order.

    Raises:
        DataError: an entry matches no file, or two entries match the same file.
    """
    entry_of: dict[str, str] = {}
    files = []
    for entry in entries_of(source):
        for file in _list(entry):
            if file.path in entry_of:
                raise DataError(
                    f"data contains {file.path} twice, in {entry_of[file.path]!r} and in {entry!r}, so an epoch would "
                    "use its rows twice. Name every file once."
                )
            entry_of[file.path] = entry
            files.append(file)
    return files


def _list(source: str) -> list[DataFile]:
    fs, path = filesystem_of(source)
    fs.invalidate_cache()  # an earlier listing in this process may be out of date
    try:
        if fsspec.core.has_magic(path) and not fs.exists(path):
            matches = fs.glob(path, detail=True)
            wanted = {name: info for name, info in matches.items() if info["type"] == "file"}
            for folder in matches.keys() - wanted.keys():
                below = fs.find(folder, detail=True)
                wanted |= {name: info for name, info in below.items() if _is_data(name, folder)}
        elif fs.isdir(path):
            below = fs.find(path, detail=True)
            wanted = {name: info for name, info in below.items() if _is_data(name, path)}
        else:
            wanted = {path: fs.info(path)}
    except FileNotFoundError:
        resolved = "" if source == path else f" ({path})"
        raise DataError(f"data={source!r}{resolved} does not exist. Check the path.") from None
    except Exception as error:  # file systems raise whatever their client library does
        raise DataError(f"data={source!r} cannot be listed: {format_exception(error)}; {suggest_fix(error)}") from error
    if not wanted:
        raise DataError(
            f"data={source!r} contains no Parquet file. In a folder, files must end in .parquet, and names must not "
            "begin with '.' or '_'. Use a glob or a list for other names."
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
    return "unknown"  # changes of the size are still noticed


def check_version(path: str, size: int, version: str) -> None:
    """Raises a DataError if a file changed since it was listed, or does not exist."""
    fs, name = filesystem_of(path)
    fs.invalidate_cache()
    try:
        info = fs.info(name)
        current = DataFile(path, int(info["size"]), _version(fs, name, info))
    except FileNotFoundError as error:
        raise _missing(path) from error
    # Some file systems report another kind of version for a single file than for a listed one.
    is_comparable = current.version.partition("=")[0] == version.partition("=")[0]
    if current.size != size or (is_comparable and current.version != version):
        raise DataError(
            f"{path} changed since it was indexed ({size} bytes, {version} -> {current.size} bytes, {current.version})"
            ". A run uses the same data set in every step. Restore the file, or use another run name."
        )


def _missing(path: str) -> DataError:
    return DataError(
        f"{path} does not exist any more. A run uses the same data set in every step. Restore the file, or use another "
        "run name."
    )


def read_footer(path: str, size: int, footer_bytes: int = _TAIL_BYTES) -> tuple[pq.FileMetaData, int]:
    """Returns a file's metadata and the size of its footer in bytes.

    Args:
        path: the file.
        size: its size in bytes.
        footer_bytes: the number of bytes to read first, from the end.

    Raises:
        DataError: the file is not Parquet, or does not exist.
    """
    tail = read_ranges(path, [(max(size - footer_bytes, 0), size)])[0]
    if len(tail) < 12 or tail[-4:] != _MAGIC:
        raise DataError(
            f"{path} is not a Parquet file ({size} bytes). Leave it out of the data set, or write it again."
        )
    needed = struct.unpack("<I", tail[-8:-4])[0] + 8
    if needed > len(tail):
        tail = read_ranges(path, [(max(size - needed, 0), size)])[0]
    try:
        metadata = pq.read_metadata(pa.BufferReader(_MAGIC + tail[-needed:]))  # only the footer is parsed
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} has an unreadable Parquet footer: {error}. Write the file again.") from error
    return metadata, needed


def read_row_group(path: str, size: int, metadata: pq.FileMetaData, number: int, columns: Sequence[str]) -> pa.Table:
    """Returns the given columns of one row group."""
    wanted = set(columns)
    group = metadata.row_group(number)
    starts, stops = [], []
    for index in range(group.num_columns):
        chunk = group.column(index)
        if chunk.path_in_schema in wanted or chunk.path_in_schema.split(".")[0] in wanted:
            start = chunk.data_page_offset
            if chunk.has_dictionary_page and chunk.dictionary_page_offset:
                start = min(start, chunk.dictionary_page_offset)
            starts.append(start)
            stops.append(start + chunk.total_compressed_size)
    _, starts, stops = merge_offset_ranges([path] * len(starts), starts, stops, max_gap=_MAX_GAP_BYTES)
    ranges = list(zip(starts, stops, strict=True))
    parts = _Parts(size, ranges, read_ranges(path, ranges), lambda start, stop: read_ranges(path, [(start, stop)])[0])
    with pq.ParquetFile(pa.PythonFile(parts, mode="r"), metadata=metadata) as file:
        return file.read_row_group(number, columns=list(columns))


def read_ranges(path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Returns bytes [start, stop) of a file for each range, read in parallel from remote storage.

    Raises:
        DataError: the file does not exist, or is too short.
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
        raise _missing(path) from error
    for (start, stop), part in zip(ranges, parts, strict=True):
        if len(part) != stop - start:
            raise DataError(
                f"{path} is {stop - start - len(part)} bytes too short: it changed since it was listed. Restore the "
                "file, or use another run name."
            )
    return parts


def _read_at(descriptor: int, start: int, stop: int) -> bytes:
    """Returns bytes [start, stop), or fewer at the end of the file. One read returns less than 2 GiB."""
    parts = []
    while start < stop and (part := os.pread(descriptor, stop - start, start)):
        parts.append(part)
        start += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class _Parts(io.RawIOBase):
    """A read-only file with some byte ranges in memory. Other ranges are fetched when they are read."""

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
