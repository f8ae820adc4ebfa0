"""The index of a data set: its files and row groups, and a check that they have not changed.

The index is built once from the files' footers and stored in the run's storage. Row groups are numbered in stored
order, file by file as listed. Rows are numbered the same way, which gives every row its row id.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from elastic_ddp.data.columns import Int64Array, check_names
from elastic_ddp.data.files import DataFile, Source, entries_of, filesystem_of, list_files, read_footer
from elastic_ddp.data.user_calls import describe_rows
from elastic_ddp.errors import DataError, shorten
from elastic_ddp.storage.client_errors import suggest_fix

if TYPE_CHECKING:
    from elastic_ddp.storage.storage import Storage

_log = logging.getLogger(__name__)
_FOOTER_THREADS = 16


@dataclass(frozen=True, eq=False)
class DatasetIndex:
    """A data set's files, and its row groups in stored order. It takes a few bytes of memory for each row group."""

    files: tuple[DataFile, ...]
    group_file: Int64Array
    """The index in `files` of each row group's file. This array and the next two have shape (row groups,)."""
    group_number: Int64Array
    """Each row group's number in its file."""
    group_rows: Int64Array
    schema: pa.Schema
    """The columns to read, in the order of `data.columns`."""
    copy: str = ""
    """The folder of the files in the run's own folder, if they are its copy of a `ray.data.Dataset`."""

    compared_by: ClassVar[str] = "files are compared by path, size, and time of change or ETag"

    @cached_property
    def num_rows(self) -> int:
        return int(self.group_rows.sum())

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.schema.names)

    @cached_property
    def first_row_ids(self) -> Int64Array:
        """The row id of each row group's first row, shape (row groups,)."""
        return np.r_[0, np.cumsum(self.group_rows)[:-1]].astype(np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of every file's path, size and version, different for different data sets.

        For the run's copy, the digest covers the path relative to the run's folder, which may move, and no version,
        which a move changes.
        """
        if self.copy:
            return _sha256([file.path[file.path.rindex(self.copy) :], file.size] for file in self.files)
        return _sha256([file.path, file.size, file.version] for file in self.files)

    def locate(self, row_ids: Sequence[int]) -> str:
        """Returns the files of these rows, and their numbers in the files."""
        numbers = np.asarray(row_ids)
        group = np.searchsorted(self.first_row_ids, numbers, side="right") - 1
        file = self.group_file[group]
        starts = self.first_row_ids[np.searchsorted(self.group_file, file)]
        parts = [
            describe_rows(np.sort(numbers[file == each] - starts[file == each]).tolist(), self.files[each].path)
            for each in np.unique(file)
        ]
        return shorten(parts, 5, "; ")

    def __str__(self) -> str:
        first = self.files[0].path
        span = first if len(self.files) == 1 else f"{len(self.files):,} files from {first} to {self.files[-1].path}"
        return f"{self.num_rows:,} rows in {span} ({sum(file.size for file in self.files):,} bytes)"

    def to_bytes(self) -> bytes:
        """Returns an Arrow stream of the row groups, with files and schema as JSON in its metadata."""
        header = {
            "files": [[file.path, file.size, file.version] for file in self.files],
            "schema": base64.b64encode(self.schema.serialize().to_pybytes()).decode(),
        }
        groups = pa.table({"file": self.group_file, "number": self.group_number, "rows": self.group_rows})
        groups = groups.replace_schema_metadata({"elastic_ddp": json.dumps(header)})
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, groups.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(groups)
        return sink.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> DatasetIndex:
        groups = pa.ipc.open_stream(data).read_all()
        if not groups.num_rows:
            raise ValueError("it has no row groups")
        header = json.loads(groups.schema.metadata[b"elastic_ddp"])
        return cls(
            files=tuple(DataFile(*file) for file in header["files"]),
            group_file=groups["file"].to_numpy(),
            group_number=groups["number"].to_numpy(),
            group_rows=groups["rows"].to_numpy(),
            schema=pa.ipc.read_schema(pa.py_buffer(base64.b64decode(header["schema"]))),
        )


def build_index(source: Source, columns: Sequence[str] | None = None) -> DatasetIndex:
    """Returns the index of a Parquet file, folder, glob or list of these. By default it has all columns."""
    return _index_files(source, list_files(source), columns)


def open_index(
    source: Source,
    storage: Storage,
    columns: Sequence[str] | None = None,
    *,
    may_replace: Callable[[], bool] = lambda: False,
) -> DatasetIndex:
    """Returns the run's stored index of a source, or builds and stores one. By default it has all columns.

    If files changed since the index was built, `may_replace` returns whether the run may use a new index; otherwise
    a DataError names the changes.
    """
    files = list_files(source)
    key = f"data/index-{_source_hash(source, columns)}"
    try:
        index = DatasetIndex.from_bytes(storage.read(key))
    except FileNotFoundError:
        index = _index_files(source, files, columns)
        try:
            storage.create(key, index.to_bytes())
        except FileExistsError:  # another driver of this run stored one first
            index = DatasetIndex.from_bytes(storage.read(key))
    except (pa.ArrowException, LookupError, OSError, TypeError, ValueError) as error:
        _log.warning("%s/%s is damaged, and is built again: %s", storage.uri, key, error)
        index = _index_files(source, files, columns)
        storage.write(key, index.to_bytes())
    if index.files != tuple(files):
        if not may_replace():
            raise _change_error(index.files, files)
        index = _index_files(source, files, columns)
        storage.write(key, index.to_bytes())
    return index


def _change_error(indexed: Sequence[DataFile], listed: Sequence[DataFile]) -> DataError:
    """Returns an error that names the files which differ from the indexed ones, and how."""
    before = {file.path: file for file in indexed}
    now = {file.path: file for file in listed}
    differences = [f"{path} is missing" for path in before if path not in now]
    differences += [f"{path} is new" for path in now if path not in before]
    for path, file in before.items():
        if path in now and now[path] != file:
            size = f"size {file.size} -> {now[path].size}, " if file.size != now[path].size else ""
            differences.append(f"{path} changed ({size}version {file.version} -> {now[path].version})")
    if not differences:
        differences = ["the order of the files changed"]
    return DataError(
        f"the data set changed since this run began: {shorten(differences, 3)}. A run uses the same data set "
        "in every step. Restore the files, or use another run name; run.load_weights can start that run from the "
        "weights of this one."
    )


def _sha256(files: Iterable[list[Any]]) -> str:
    return hashlib.sha256("\n".join(map(json.dumps, files)).encode()).hexdigest()


def _source_hash(source: Source, columns: Sequence[str] | None) -> str:
    absolute = [fs.unstrip_protocol(path) for fs, path in map(filesystem_of, entries_of(source))]
    text = json.dumps([absolute, None if columns is None else list(columns)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _index_files(source: Source, files: list[DataFile], columns: Sequence[str] | None) -> DatasetIndex:
    with ThreadPoolExecutor(_FOOTER_THREADS, thread_name_prefix="footers") as pool:
        schemas, rows = zip(*pool.map(_read_footer, files), strict=True)
    for file, actual in zip(files, schemas, strict=True):
        duplicates = sorted({name for name in actual.names if actual.names.count(name) > 1})
        if duplicates:
            raise DataError(
                f"{file.path} has more than one column named {', '.join(map(repr, duplicates))}. Column names must be "
                "unique."
            )
    schema = schemas[0] if columns is None else _select(schemas[0], columns, files[0].path)
    for file, actual in zip(files[1:], schemas[1:], strict=True):
        _check_schema(schema, actual, files[0].path, file.path, every_column=columns is None)
    index = DatasetIndex(
        files=tuple(files),
        group_file=np.repeat(np.arange(len(files)), [len(groups) for groups in rows]).astype(np.int64),
        group_number=np.concatenate([np.arange(len(groups)) for groups in rows]).astype(np.int64),
        group_rows=np.concatenate(rows).astype(np.int64),
        schema=schema.remove_metadata(),
    )
    if index.num_rows == 0:
        raise DataError(
            f"data={source!r} has {len(files)} Parquet files but no rows. Check how the data set was written."
        )
    return index


def _read_footer(file: DataFile) -> tuple[pa.Schema, list[int]]:
    """Returns a file's schema and the number of rows of each row group."""
    try:
        metadata = read_footer(file.path, file.size)
    except OSError as error:
        raise DataError(f"{error}; {suggest_fix(error)}") from error
    rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    return metadata.schema.to_arrow_schema(), rows


def _select(schema: pa.Schema, columns: Sequence[str], path: str) -> pa.Schema:
    check_names(columns, schema.names, path)
    if not columns:
        raise DataError(f"data.columns is empty. Name at least one of {', '.join(schema.names)}.")
    return pa.schema([schema.field(name) for name in columns])


def _check_schema(expected: pa.Schema, actual: pa.Schema, first: str, path: str, *, every_column: bool) -> None:
    """Raises a DataError if names or types of columns differ. Their order and nullability may differ."""
    problems = []
    for field in expected:
        if field.name not in actual.names:
            problems.append(f"column {field.name!r} ({field.type}) is missing")
        elif actual.field(field.name).type != field.type:
            problems.append(f"column {field.name!r} is {actual.field(field.name).type} instead of {field.type}")
    if every_column:
        problems += [f"column {name!r} is extra" for name in actual.names if name not in expected.names]
    if problems:
        raise DataError(
            f"{path} does not have the schema of {first}: {'; '.join(problems)}. Write the files with one schema, or "
            "set data.columns to columns that all files share."
        )
