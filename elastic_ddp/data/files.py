"""Lists Parquet files at any fsspec URI, and reads their footers and row groups.

Only the wanted columns of a row group leave the storage, in parallel requests.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import PurePosixPath
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import merge_offset_ranges

from elastic_ddp.config.storage_uri import mistyped_uri
from elastic_ddp.errors import DataError, format_exception
from elastic_ddp.storage.errors import suggest_fix

_MAX_GAP_BYTES = 64 * 1024  # reading so many unwanted bytes is cheaper than another request
_PYARROWS_OPTIONS = re.compile(r"^\w+://.*\?\w+=")

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


def filesystem_of(uri: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Returns the fsspec file system of a URI or local path, and the path in it."""
    if _PYARROWS_OPTIONS.search(uri):
        raise DataError(
            f"data={uri!r} has pyarrow options after its path. Remove them, and set environment variables instead: "
            "AWS_ENDPOINT_URL and AWS_REGION for S3, or fsspec's configuration (FSSPEC_S3_...)."
        )
    if (meant := mistyped_uri(uri)) is not None:
        raise DataError(f"data={uri!r} is neither a path nor a URI; did you mean {meant}?")
    try:
        return fsspec.core.url_to_fs(uri)
    except (ValueError, ImportError, OSError) as error:
        raise DataError(
            f"data={uri!r} cannot be opened: {error}. Use a local path or a URI that fsspec supports, and install the "
            "package that fsspec needs for it."
        ) from error


def entries_of(source: Source) -> list[str]:
    """Returns the entries of a data set's source as a list."""
    entries = [source] if isinstance(source, str | PathLike) else source
    if (
        not isinstance(entries, list | tuple)
        or not entries
        or not all(isinstance(entry, str | PathLike) and str(entry).strip() for entry in entries)
    ):
        raise DataError(f"data={source!r} names no data. Use a path, a URI, a glob or a list of them.")
    return [str(entry) for entry in entries]


def list_files(source: Source) -> list[DataFile]:
    """Returns the Parquet files of a data set in stored order.

    A folder, also one that a glob matches, stands for all `*.parquet` files below it, except those below a name that
    begins with `.` or `_`. The files of a folder or glob are sorted by path; the entries of a list keep their order.
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
        else:
            matches = {path: {"type": "directory"} if fs.isdir(path) else fs.info(path)}
        wanted = {name: info for name, info in matches.items() if info["type"] != "directory"}
        for folder in matches.keys() - wanted.keys():
            below = fs.find(folder, detail=True)
            wanted |= {name: info for name, info in below.items() if _is_data(name, folder)}
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
    full_name = str if isinstance(fs, LocalFileSystem) else fs.unstrip_protocol
    return [
        DataFile(path=full_name(name), size=int(info["size"]), version=_version(fs, name, info))
        for name, info in sorted(wanted.items())
    ]


def _is_data(name: str, folder: str) -> bool:
    parts = PurePosixPath(name[len(folder) :]).parts
    return name.endswith(".parquet") and not any(part.startswith((".", "_")) for part in parts)


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


def read_footer(path: str, size: int) -> pq.FileMetaData:
    """Returns the metadata of a file of `size` bytes. Raises a DataError if it is not Parquet, or does not exist."""
    fs, name = filesystem_of(path)
    try:
        if isinstance(fs, LocalFileSystem):
            return pq.read_metadata(name)
        with fs.open(name, "rb", cache_type="none", size=size) as file:
            return pq.read_metadata(file)
    except FileNotFoundError as error:
        raise _missing(path) from error
    except pa.ArrowInvalid as error:
        raise DataError(
            f"{path} ({size} bytes) cannot be read as Parquet: {error} Leave it out of the data set, or write it again."
        ) from error


def read_row_group(path: str, size: int, metadata: pq.FileMetaData, number: int, columns: Sequence[str]) -> pa.Table:
    """Returns the given columns of one row group. Raises a DataError if the file does not exist."""
    fs, name = filesystem_of(path)
    try:
        if isinstance(fs, LocalFileSystem):
            source = name
        else:
            starts, stops = _ranges(name, metadata.row_group(number), columns)
            parts = fs.cat_ranges([name] * len(starts), starts, stops, on_error="raise")
            known = dict(zip(zip(starts, stops, strict=True), parts, strict=True))
            source = fs.open(name, "rb", cache_type="parts", cache_options={"data": known, "strict": True}, size=size)
        with pq.ParquetFile(source, metadata=metadata) as file:
            return file.read_row_group(number, columns=list(columns))
    except FileNotFoundError as error:
        raise _missing(path) from error


def _ranges(name: str, group: pq.RowGroupMetaData, columns: Sequence[str]) -> tuple[list[int], list[int]]:
    """Returns starts and stops of the byte ranges that contain the given columns."""
    starts, stops = [], []
    for chunk in map(group.column, range(group.num_columns)):
        if {chunk.path_in_schema, chunk.path_in_schema.split(".")[0]} & set(columns):
            starts.append(min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset))
            stops.append(starts[-1] + chunk.total_compressed_size)
    return merge_offset_ranges([name] * len(starts), starts, stops, max_gap=_MAX_GAP_BYTES)[1:]
