"""Data sets in memory: arrays, tables, and map-style data sets, which have `__len__` and `__getitem__`.

The driver puts data sets in memory into Ray's object store once. The data processes of a node share arrays and tables
there; each process unpickles its own copy of other objects.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from os import PathLike
from typing import Any, ClassVar, Protocol, TypeAlias, TypeGuard, runtime_checkable

import numpy as np
import pyarrow as pa
import ray

from elastic_ddp.data.columns import Array, Int64Array, check_names, check_nulls, check_tensors, to_numpy, widen
from elastic_ddp.data.files import Source
from elastic_ddp.data.fingerprint import of_columns, of_rows
from elastic_ddp.data.packing import dump, load
from elastic_ddp.data.user_calls import describe_rows
from elastic_ddp.data.user_code import Shipped, environment, ship, uninterrupted, user_error
from elastic_ddp.errors import ConfigError, DataError, format_exception

_CACHED_DATA_SETS = 4
"""How many data sets in memory a process keeps."""


@dataclass(frozen=True, eq=False)
class Columns:
    """A dict of arrays, or an Arrow table. Every column has one element for each row."""

    values: dict[str, Array | pa.Array]
    tensors: frozenset[str]
    """The columns that the user gave as tensors."""

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))

    def take(self, rows: Int64Array) -> dict[str, Array]:
        """Returns these rows as arrays of shape (rows, ...)."""
        return {
            name: to_numpy(name, values.take(pa.array(rows))) if isinstance(values, pa.Array) else values[rows]
            for name, values in self.values.items()
        }


@dataclass(frozen=True, eq=False)
class MapStyleIndex:
    """A data set in memory, and its identity."""

    num_rows: int
    fingerprint: str
    """SHA-256 of the data set, from `fingerprint`."""
    name: str
    content: Any
    """`Columns` or the user's object; after `share`, a `Shipped`, which `load_content` loads."""
    varying_row: int | None = None
    """A row that differs between two reads with equal seeds, if one was found."""

    compared_by: ClassVar[str] = "arrays are compared by content, other data sets by class name, length and a few rows"

    @property
    def group_rows(self) -> Int64Array:
        """All rows are in one group: they are permuted without windows."""
        return np.array([self.num_rows])

    def locate(self, row_ids: Sequence[int]) -> str:
        """Returns text for these rows."""
        return describe_rows(row_ids)

    def __str__(self) -> str:
        return f"{self.num_rows:,} rows of {self.name} (SHA-256 {self.fingerprint[:12]})"

    def check_columns(self, *, is_converted: bool) -> None:
        """Raises a DataError for a column that tensors cannot hold, unless a transform or a `collate_fn` converts it.

        Nulls in a column of integers are an error in any case.
        """
        for name, values in self.content.values.items() if isinstance(self.content, Columns) else ():
            if isinstance(values, pa.Array):
                check_nulls(name, values)
            if not is_converted:
                first = to_numpy(name, values[:1]) if isinstance(values, pa.Array) else values
                check_tensors({name: first}, transformed=False)

    def share(self) -> MapStyleIndex:
        """Returns the index with its content in Ray's object store. Raises a DataError if it cannot be pickled."""
        try:
            parts = dump(self.content)
        except Exception as error:  # objects raise what they like
            raise DataError(
                f"data ({self.name}) cannot be sent to the processes that read it: {format_exception(error)}. Open "
                "files and connections in __getitem__, on its first call, instead of keeping them in the data set."
            ) from error
        return replace(self, content=ship(parts, "data"))


def load_content(index: MapStyleIndex) -> Any:
    """Returns the content of an index, also if it was shared. Raises a DataError if this node cannot load it."""
    return _load_shared(index.content) if isinstance(index.content, Shipped) else index.content


@lru_cache(maxsize=_CACHED_DATA_SETS)
def _load_shared(content: Shipped) -> Any:
    """Returns the content that `MapStyleIndex.share` shared. A process unpickles it once."""
    parts = content.load()
    try:
        return uninterrupted(lambda: load(parts))
    except Exception as error:  # raised by modules or objects
        advice = environment().advise(error) or "Every node needs the modules and files that the data set uses."
        raise DataError(
            f"data cannot be loaded in the process that reads it: {format_exception(error)}. {advice}"
        ) from error


@runtime_checkable
class MapStyle(Protocol):
    """A data set whose rows can be read in any order: a `torch.utils.data.Dataset`, a list, a `datasets.Dataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


InMemory: TypeAlias = MapStyle | Mapping[str, Any]
"""A map-style data set, a dict of arrays or tensors, or a pandas or pyarrow table."""


def is_parquet(data: Any) -> TypeGuard[Source]:
    """Whether a data set is named by paths. Other data sets are in memory, except a `ray.data.Dataset`."""
    first = data[0] if isinstance(data, list | tuple) and data else data
    return isinstance(first, str | PathLike)


def is_ray_dataset(data: Any) -> TypeGuard[ray.data.Dataset]:
    """Whether a data set is a `ray.data.Dataset`. Does not import Ray Data, which takes half a second."""
    kind = getattr(sys.modules.get("ray.data"), "Dataset", None)
    return kind is not None and isinstance(data, kind)


def check_data(data: Any, transform: object = None, columns: Sequence[str] | None = None) -> None:
    """Raises a ConfigError if rows of `data` cannot be read in any order, or the other arguments do not apply to it."""
    if is_parquet(data) or is_ray_dataset(data):
        return
    from torch.utils.data import DataLoader, IterableDataset

    kind = type(data).__name__
    if isinstance(data, DataLoader):
        raise ConfigError(
            "data is a DataLoader. Pass data=loader.dataset, and collate_fn=loader.collate_fn if you gave it one. "
            "micro_batch_size replaces its batch_size, and data.concurrency its num_workers."
        )
    if isinstance(data, tuple):
        raise ConfigError(
            'data is a tuple. Pass arrays as a dict, such as {"x": x, "y": y}; rows as a list; or one data set.'
        )
    if has_columns(data):
        return
    if isinstance(data, IterableDataset) or not isinstance(data, MapStyle):
        raise ConfigError(
            f"data is of type {kind}, whose rows cannot be read by number (__len__ and __getitem__). Materialize it:\n"
            "    rows = list(dataset)\n"
            "    ElasticTrainer(train, data=rows, ...)\n"
            "If the rows do not fit into memory, write them as Parquet once, and pass the folder."
        )
    if transform is not None:
        raise ConfigError(
            f"transform maps columns of arrays, but data is of type {kind}, which has rows. Transform rows in "
            "__getitem__ or in collate_fn."
        )
    if columns is not None:
        raise ConfigError(
            f"data.columns={list(columns)} selects columns, but data is of type {kind}, which has rows. Remove "
            "data.columns, and leave values out in __getitem__ or in collate_fn."
        )


def index_in_memory(data: Any, columns: Sequence[str] | None = None, *, identify: bool = True) -> MapStyleIndex:
    """Returns the index of a data set in memory; `columns` selects columns of arrays and tables.

    Without `identify`, the index has no fingerprint.

    Raises:
        DataError: the data set is empty, its columns are no arrays of one length, or a row cannot be read.
    """
    content: Any = _columns_of(data, columns) if has_columns(data) else data
    is_columns = isinstance(content, Columns)
    name = f"columns {', '.join(map(repr, content.values))}" if is_columns else type(data).__qualname__
    try:
        num_rows = len(content)
    except Exception as error:  # raised by the data set
        raise user_error("len(data)", error, fix="\nReturn the number of rows from __len__.") from error
    if num_rows < 1:
        raise DataError(f"data ({name}) has no rows. Pass a data set that has some.")
    fingerprint = ""
    varying_row = None
    if identify and is_columns:
        fingerprint = of_columns(content.values)
    elif identify:
        fingerprint, varying_row = of_rows(content)
    return MapStyleIndex(num_rows, fingerprint, name, content, varying_row)


def has_columns(data: Any) -> bool:
    """Whether a data set in memory is a dict of arrays or a table."""
    return isinstance(data, Mapping | pa.Table | pa.RecordBatch) or _is_frame(data)


def _is_frame(data: Any) -> bool:
    return type(data).__module__.partition(".")[0] == "pandas" and hasattr(data, "columns")


def _columns_of(data: Any, selected: Sequence[str] | None) -> Columns:
    """Returns a dict of arrays or a table as columns."""
    tensors: frozenset[str] = frozenset()
    values: dict[str, Any]
    if isinstance(data, Mapping):
        values = {str(name): value for name, value in data.items()}
        tensors = frozenset(name for name, value in values.items() if hasattr(value, "detach"))
    else:
        table = _from_pandas(data) if _is_frame(data) else data
        values = dict(zip(table.column_names, table.columns, strict=True))
    if selected is not None:
        check_names(selected, values, "data")
        values = {name: values[name] for name in selected}
    if not values:
        raise DataError("data has no columns. Pass a data set that has some.")
    arrays = {name: _array_of(name, value) for name, value in values.items()}
    lengths = {name: len(value) for name, value in arrays.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name!r} has {length:,}" for name, length in lengths.items())
        raise DataError(f"the columns of data differ in length: {counts} rows. Give every column one element per row.")
    return Columns(arrays, tensors)


def _from_pandas(frame: Any) -> pa.Table:
    try:
        return pa.Table.from_pandas(frame, preserve_index=False)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(
            f"the pandas data frame cannot be read: {error}. Give every column one type, or pass "
            "data=frame.to_dict('records') and a collate_fn."
        ) from error


def _array_of(name: str, value: Any) -> Array | pa.Array:
    if isinstance(value, pa.ChunkedArray | pa.Array):
        return widen(value if isinstance(value, pa.ChunkedArray) else pa.chunked_array([value])).combine_chunks()
    if not isinstance(value, list | tuple) and not hasattr(value, "__array__"):
        raise DataError(
            f"data is a dict, and data[{name!r}] is a {type(value).__name__} and no array. Pass a dict of arrays, or a "
            f"single data set, such as data[{name!r}]."
        )
    try:
        array = np.asanyarray(value.detach().cpu() if hasattr(value, "detach") else value)
        if array.ndim == 0:
            raise ValueError("it has no rows: its shape is ()")
    except (TypeError, ValueError) as error:  # lists of different lengths, bfloat16
        raise DataError(
            f"data[{name!r}] cannot become an array: {error}. Convert it to an array of numbers of shape (rows, ...), "
            "or pass a list of rows and a collate_fn."
        ) from error
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)
