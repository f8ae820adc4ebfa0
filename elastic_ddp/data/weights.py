"""Weighted sampling with replacement: which rows an epoch draws, as a function of (seed, epoch) alone.

An epoch has as many draws as the data set has rows. Parquet is read by row groups, so every row group gets its share of
the draws, rounded up or down at random (systematic sampling), and its rows are drawn independently of each other. A
row's expected number of draws is proportional to its weight. A row group is read only if it has draws, and once for
every `rows in the group` draws.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_ddp.data.columns import Int64Array, to_numpy
from elastic_ddp.data.files import read_footer, read_row_group
from elastic_ddp.data.index import DatasetIndex
from elastic_ddp.data.map_style import Columns, MapStyleIndex
from elastic_ddp.errors import ConfigError

Float64Array = npt.NDArray[np.float64]
Weights: TypeAlias = str | Sequence[float] | npt.ArrayLike
"""The name of a column, or one number for each row in stored order."""
_THREADS = 16


@dataclass(frozen=True, eq=False)
class SampleWeights:
    """A weight for each row of a data set, in stored order."""

    values: Float64Array
    """Finite and not negative, with a positive sum, shape (rows,)."""

    @classmethod
    def create(cls, values: Sequence[float] | npt.ArrayLike, num_rows: int, name: str) -> SampleWeights:
        """Raises a ConfigError that starts with `name` if these are no weights of a data set of `num_rows` rows."""
        try:
            weights = np.ascontiguousarray(values, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{name} cannot become an array of numbers: {error}. Give one number per row.") from error
        if weights.shape != (num_rows,):
            raise ConfigError(
                f"{name} has shape {weights.shape}, and the data set has {num_rows:,} rows. Give one number per row, "
                "in stored order."
            )
        wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
        if len(wrong):
            raise ConfigError(
                f"{name} is {weights[wrong[0]]} for row {wrong[0]:,}. Weights are finite and not negative; a weight of "
                "0 leaves the row out."
            )
        if not np.finfo(np.float64).tiny <= weights.sum() < np.inf:
            raise ConfigError(f"{name} adds up to {weights.sum()}. Give some row a weight above 0.")
        return cls(weights)

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.values.astype("<f8").tobytes()).hexdigest()

    @cached_property
    def _cumulated(self) -> Float64Array:
        return np.cumsum(self.values)  # in order, unlike np.sum, so with the same bits on every machine

    def draws_per_group(self, first_rows: Int64Array, offset: float) -> Int64Array:
        """Returns the number of draws of each row group.

        Args:
            first_rows: the first row of each row group, followed by the number of rows, shape (row groups + 1,).
            offset: a random number in [0, 1).
        """
        num_rows = len(self.values)
        ends = np.r_[0.0, self._cumulated][first_rows] / self._cumulated[-1] * num_rows
        ends = np.minimum(np.floor(ends + offset).astype(np.int64), num_rows)
        ends[-1] = num_rows
        return np.diff(ends)

    def draw(self, first_row: int, last_row: int, uniform: Float64Array) -> Int64Array:
        """Returns the drawn rows in [first_row, last_row), counted from `first_row`, from random numbers in [0, 1)."""
        everything = last_row - first_row == len(self.values)
        cumulated = self._cumulated if everything else np.cumsum(self.values[first_row:last_row])
        return np.searchsorted(cumulated, uniform * cumulated[-1], side="right").astype(np.int64)


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
        names = metadata.schema.to_arrow_schema().names
        if name not in names:
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
