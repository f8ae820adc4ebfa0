"""Weighted sampling with replacement: which rows an epoch draws, as a function of (seed, epoch) alone.

An epoch has as many draws as the data set has rows. Parquet is read by row groups, so every row group gets its share of
the draws, rounded up or down at random (systematic sampling), and its rows are drawn independently of each other. A
row's expected number of draws is proportional to its weight. A row group is read only if it has draws, and once for
every `rows in the group` draws.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from elastic_ddp.errors import ConfigError

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]


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
