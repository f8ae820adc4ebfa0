"""Reads the weights of a data set's rows, which are given as an array or as the name of a column."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_ddp.data.columns import to_numpy
from elastic_ddp.data.files import read_footer, read_row_group
from elastic_ddp.data.index import DatasetIndex
from elastic_ddp.data.map_style import Columns, MapStyleIndex
from elastic_ddp.data.weights import SampleWeights
from elastic_ddp.errors import ConfigError

Weights: TypeAlias = str | Sequence[float] | npt.ArrayLike
"""The name of a column, or one number for each row in stored order."""
_THREADS = 16


def weights_of(index: DatasetIndex | MapStyleIndex, given: Weights) -> SampleWeights:
    """Returns the weights of the rows of a data set.

    Raises:
        ConfigError: there is no such column, or its values are no weights of this data set.
        DataError: a file cannot be read.
    """
    if isinstance(given, str):
        read = _read_parquet if isinstance(index, DatasetIndex) else _read_memory
        return SampleWeights.create(read(index, given), index.num_rows, f"column {given!r} of sample_weights")
    values = given.detach().cpu() if hasattr(given, "detach") else given
    return SampleWeights.create(values, index.num_rows, "sample_weights")


def _read_parquet(index: Any, name: str) -> Any:
    def read(number: int) -> list[Any]:
        file = index.files[number]
        metadata = read_footer(file.path, file.size)
        if name not in (names := metadata.schema.to_arrow_schema().names):
            raise _no_column(name, names)
        groups = index.group_number[index.group_file == number].tolist()
        tables = [read_row_group(file.path, file.size, metadata, group, [name]) for group in groups]
        return [to_numpy(name, values) for table in tables for values in table.column(name).chunks]

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="weights") as pool:
        return np.concatenate([part for parts in pool.map(read, range(len(index.files))) for part in parts])


def _read_memory(index: Any, name: str) -> Any:
    if not isinstance(index.content, Columns):
        raise ConfigError(
            f"sample_weights={name!r} names a column, but data ({index.name}) has rows. Give one number per row."
        )
    if name not in index.content.values:
        raise _no_column(name, list(index.content.values))
    values = index.content.values[name]
    return to_numpy(name, values) if isinstance(values, pa.Array) else values


def _no_column(name: str, names: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"sample_weights={name!r}: the data set has no such column. Choose from {', '.join(names)}, or give one number "
        "per row."
    )
