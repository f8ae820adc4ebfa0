"""Lists Parquet files at any fsspec URI, and reads their footers and row groups.

Only the wanted columns of a row group leave the storage, in parallel requests.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import PurePosixPath
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from fsspec.core import has_magic
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import merge_offset_ranges

from elastic_ddp.config.environment import check_uri_is_public
from elastic_ddp.config.storage_uri import mistyped_uri
from elastic_ddp.data.local_files import is_hidden, list_local_files, matches
from elastic_ddp.data.user_code import this_node
from elastic_ddp.errors import DataError, format_exception
from elastic_ddp.storage.client_errors import suggest_fix

_MAX_GAP_BYTES = 64 * 1024  # reading so many unwanted bytes is cheaper than another request
_PYARROWS_OPTIONS = re.compile(r"^\w+://.*\?\w+=")

_PATHS = (
    'data is a list of strings, which is a list of paths. To use texts, pass columns, such as data={"text": texts}, or '
    "a map-style data set, and turn the texts into numbers in a transform or a collate_fn. If these are paths: "
)

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
    check_uri_is_public(uri, "data")
    if _PYARROWS_OPTIONS.search(uri):
        raise DataError(
            f"data={uri!r} has pyarrow options after its path. Remove them, and set environment variables instead: "
            "AWS_ENDPOINT_URL and AWS_REGION for S3, or fsspec's configuration (FSSPEC_S3_...)."
        )
    meant = mistyped_uri(uri)
    if meant is not None:
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
        raise DataError(
            f"{_hint(source)}data={source!r:.200} names no data. Use a path, a URI, a glob or a list of them."
        )
    return [str(entry) for entry in entries]


def _hint(source: Source) -> str:
    return _PATHS if isinstance(source, list | tuple) and source and isinstance(source[0], str) else ""


def list_files(source: Source) -> list[DataFile]:
    """Returns the Parquet files of a data set in stored order.

    A folder, also one that a glob matches, stands for all `*.parquet` files below it. Folders and wildcards leave out
    names that begin with `.` or `_`. Local symbolic links are followed, except a link to a folder that it is in. The
    files of a folder or glob are sorted by path; the entries of a list keep their order.

    Raises:
        DataError: nothing was found, a file was found twice, or a folder, file or link cannot be read.
    """
    entry_of: dict[str, str] = {}
    files: list[DataFile] = []
    for entry in entries_of(source):
        try:
            found = _list(entry)
        except DataError as error:
            hint = _hint(source)
            if files or not hint:
                raise
            raise DataError(f"{hint}{error}") from error.__cause__
        for file in found:
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
    try:
        files = _list_local(path) if isinstance(fs, LocalFileSystem) else _list_remote(fs, path)
    except DataError:
        raise
    except FileNotFoundError:
        resolved = "" if source == path else f" ({path})"
        raise DataError(
            f"data={source!r}{resolved} does not exist on {this_node()}. Check the path, and whether all nodes see it."
        ) from None
    except Exception as error:  # file systems raise whatever their client library does
        raise DataError(f"data={source!r} cannot be listed: {format_exception(error)}; {suggest_fix(error)}") from error
    if not files:
        raise DataError(
            f"data={source!r} contains no Parquet file. In a folder, files must end in .parquet. A folder and a "
            "wildcard leave out names that begin with '.' or '_'. Use a glob or a list for other names."
        )
    return files


def _list_local(path: str) -> list[DataFile]:
    files = sorted(list_local_files(path).items())
    return [DataFile(name, status.st_size, f"mtime_ns={status.st_mtime_ns}") for name, status in files]


def _list_remote(fs: fsspec.AbstractFileSystem, path: str) -> list[DataFile]:
    fs.invalidate_cache()  # an earlier listing in this process may be out of date
    if has_magic(path) and not fs.exists(path):
        found = {name: info for name, info in fs.glob(path, detail=True).items() if _is_meant(name, path)}
    else:
        found = {path: {"type": "directory"} if fs.isdir(path) else fs.info(path)}
    wanted = {name: info for name, info in found.items() if info["type"] != "directory"}
    for folder in found.keys() - wanted.keys():
        below = fs.find(folder, detail=True)
        wanted |= {name: info for name, info in below.items() if _is_data(name, folder)}
    return [
        DataFile(fs.unstrip_protocol(name), int(info["size"]), _version(fs, name, info))
        for name, info in sorted(wanted.items())
    ]


def _is_meant(name: str, pattern: str) -> bool:
    """Returns whether the hidden parts of a path that matched a glob are also matched by hidden parts of the glob."""
    parts = PurePosixPath(pattern).parts
    return all(any(matches(part, each) for each in parts) for part in PurePosixPath(name).parts if is_hidden(part))


def _is_data(name: str, folder: str) -> bool:
    return name.endswith(".parquet") and not any(map(is_hidden, PurePosixPath(name[len(folder) :]).parts))


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
    with _named_errors(path):
        info = fs.info(name)
        current = DataFile(path, int(info["size"]), _version(fs, name, info))
    # Some file systems report another kind of version for a single file than for a listed one.
    is_comparable = current.version.partition("=")[0] == version.partition("=")[0]
    if current.size != size or (is_comparable and current.version != version):
        raise DataError(
            f"{path} changed since it was indexed ({size} bytes, {version} -> {current.size} bytes, {current.version} "
            f"on {this_node()}). A run uses the same data set in every step. Restore the file, or use another run "
            "name. Copies on several nodes must have the same time of change, as with rsync -t."
        )


def read_footer(path: str, size: int) -> pq.FileMetaData:
    """Returns the metadata of a file of `size` bytes. Raises errors as `read_row_group`."""
    fs, name = filesystem_of(path)
    with _named_errors(path, f" ({size} bytes)"):
        if isinstance(fs, LocalFileSystem):
            return pq.read_metadata(name)
        with fs.open(name, "rb", cache_type="none", size=size) as file:
            return pq.read_metadata(file)


def read_row_group(path: str, size: int, metadata: pq.FileMetaData, number: int, columns: Sequence[str]) -> pa.Table:
    """Returns the given columns of one row group.

    Raises:
        DataError: the file does not exist, is not Parquet, or may not be read.
        OSError: another error of the file system, which names the file and may be temporary.
    """
    fs, name = filesystem_of(path)
    with _named_errors(path, f", row group {number},"):
        if isinstance(fs, LocalFileSystem):
            source = name
        else:
            starts, stops = _ranges(name, metadata.row_group(number), columns)
            parts = fs.cat_ranges([name] * len(starts), starts, stops, on_error="raise")
            known = dict(zip(zip(starts, stops, strict=True), parts, strict=True))
            source = fs.open(name, "rb", cache_type="parts", cache_options={"data": known, "strict": True}, size=size)
        with pq.ParquetFile(source, metadata=metadata) as file:
            return file.read_row_group(number, columns=list(columns))


@contextmanager
def _named_errors(path: str, detail: str = "") -> Iterator[None]:
    """Makes errors name the file."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        reason = f"{path} does not exist any more."
        fix = "Restore the file, or use another run name."
        if ray.is_initialized() and "://" not in path:
            reason = (
                f"node {this_node()} cannot read {path}: it does not exist there, or does not exist any more. All "
                "nodes must see the data: use a folder that they share, or a bucket."
            )
            fix = "If the file was deleted, restore it, or use another run name."
        raise DataError(f"{reason} A run uses the same data set in every step. {fix}") from error
    except (PermissionError, IsADirectoryError) as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}. Allow this user to read it, or leave it out of the "
            "data set."
        ) from error
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(
            f"{path}{detail} cannot be read as Parquet: {error} Leave it out of the data set, or write it again, "
            "with row groups of less than 2 GiB."
        ) from error
    except OSError as error:
        raise OSError(f"{path}{detail} cannot be read: {format_exception(error)}") from error


def _ranges(name: str, group: pq.RowGroupMetaData, columns: Sequence[str]) -> tuple[list[int], list[int]]:
    """Returns starts and stops of the byte ranges that contain the given columns."""
    starts = []
    stops = []
    for chunk in map(group.column, range(group.num_columns)):
        if {chunk.path_in_schema, chunk.path_in_schema.split(".")[0]} & set(columns):
            starts.append(min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset))
            stops.append(starts[-1] + chunk.total_compressed_size)
    return merge_offset_ranges([name] * len(starts), starts, stops, max_gap=_MAX_GAP_BYTES)[1:]
