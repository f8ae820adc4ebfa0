"""The work of a worker's data processes: reading rows, and making chunks or whole micro-batches of them.

From Parquet files without a `collate_fn`, data processes make chunks of `data.chunk_rows` rows, which the worker cuts
into micro-batches. With a `collate_fn`, or with data in memory, data processes make whole micro-batches. Each call of
the transform gets one chunk, or one of these micro-batches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import pyarrow as pa

from elastic_ddp.data.columns import Array, Arrays, Int64Array, check_tensors, one_array, to_numpy
from elastic_ddp.data.fingerprint import fetch_rows
from elastic_ddp.data.index import DatasetIndex
from elastic_ddp.data.map_style import Columns, MapStyleIndex, load_content
from elastic_ddp.data.order import FeedPlan, transform_generator
from elastic_ddp.data.packing import Content, Key, load, title_of
from elastic_ddp.data.source import read_chunks
from elastic_ddp.data.split import HostBatch, split_into_micro_batches, take_collated
from elastic_ddp.data.user_calls import recorded
from elastic_ddp.data.user_code import uninterrupted, user_error
from elastic_ddp.errors import ConfigError, DataError, shorten
from elastic_ddp.seeding import seed_all

Transform = Callable[[Arrays, np.random.Generator], Arrays]
"""Maps the rows of a chunk to as many rows, one array of shape (rows, ...) for each column.

The generator and the global generators of torch, NumPy and Python are seeded for the chunk, so that their numbers are
the same at every world size and after every resume."""

CollateFn = Callable[[list[Any]], Any]
"""Maps the rows of a micro-batch to a batch of any type.

The global generators of torch, NumPy and Python are seeded for the micro-batch, before its rows are fetched."""


class ColumnBatch(dict[str, Array]):
    """A batch of arrays of shape (rows, ...), which the worker turns into a dict of tensors.

    The data process needs no torch for it.
    """


@dataclass(frozen=True, eq=False)
class Work:
    """The data set, the plan, and the user's functions, from which a data process reads and makes rows."""

    index: DatasetIndex | MapStyleIndex
    plan: FeedPlan
    transform: Transform | None = None
    collate_fn: CollateFn | None = None

    @property
    def makes_batches(self) -> bool:
        """Whether the data processes make whole micro-batches."""
        return self.collate_fn is not None or isinstance(self.index, MapStyleIndex)

    def read(self) -> Iterator[Content]:
        """Yields the rows of each chunk or micro-batch of Parquet files, in order, as dicts of Arrow columns.

        An empty micro-batch has `micro_batch_size` rows of padding.
        """
        assert isinstance(self.index, DatasetIndex)
        chunks = read_chunks(self.index, self.plan)
        if not self.makes_batches:
            yield from chunks
            return
        for batch in split_into_micro_batches(self.plan, chunks, lambda: self.plan.first_step):
            assert isinstance(batch.content, list)
            columns = {
                name: pa.chunked_array([array for piece in batch.content for array in piece[name].chunks])
                for name in batch.content[0]
            }
            yield Content((batch.step, batch.index), batch.row_ids, columns)

    def make(self, rows: Content) -> Content:
        """Returns the chunk or micro-batch of rows from `read`."""
        columns = {name: to_numpy(name, one_array(column)) for name, column in rows.value.items()}
        return replace(rows, value=self._make(rows.key, rows.row_ids, columns))

    def make_in_memory(self, share: int = 0, num_shares: int = 1) -> Iterator[Content]:
        """Yields every `num_shares`-th micro-batch of a data set in memory, from the `share`-th on."""
        assert isinstance(self.index, MapStyleIndex)
        plan = self.plan
        data = load_content(self.index)
        owned = len(plan.micro_batches)
        for position in range(share, (plan.last_step - plan.first_step) * owned, num_shares):
            key = plan.first_step + position // owned, plan.micro_batches[position % owned]
            numbers = plan.rows_in_memory(*key)
            row_ids = numbers[: plan.shape.rows_of(*key)]
            if not len(row_ids):
                numbers = numbers.repeat(plan.shape.micro_batch_size)
            if isinstance(data, Columns):
                batch = self._make(key, row_ids, data.take(numbers), data.tensors)
            else:
                with self._recorded(key, numbers, default="__getitem__"):
                    _import_torch()  # before its generator is seeded
                    seed_all(plan.seed, "rows", *key)
                    place = f"{title_of(key)}, rows {shorten(list(map(str, numbers)))}"
                    rows = fetch_rows(data, numbers.tolist(), f" in {place}")
                    batch = collate_rows(self.collate_fn, rows, place)
            yield Content(key, row_ids, batch)

    def contents(self) -> Iterator[Content]:
        """Yields all chunks or micro-batches of the plan, in order."""
        if isinstance(self.index, MapStyleIndex):
            return self.make_in_memory()
        return map(self.make, self.read())

    def split(self, packed: Iterator[Content], skipped_to: Callable[[], int]) -> Iterator[HostBatch]:
        """Yields the micro-batches of the plan from its packed contents; see `split_into_micro_batches`."""
        if self.makes_batches:
            return take_collated(self.plan, packed, skipped_to)
        chunks = (replace(chunk, value=load(chunk.value.parts)) for chunk in packed)
        return split_into_micro_batches(self.plan, chunks, skipped_to)

    def _make(self, key: Key, row_ids: Int64Array, columns: Arrays, tensors: frozenset[str] = frozenset()) -> Any:
        """Returns a chunk or a batch of columns, of which `tensors` become tensors in the rows that are collated."""
        plan = self.plan
        is_chunk = len(key) == 3
        num_rows = len(next(iter(columns.values())))
        with self._recorded(key, row_ids), self._naming_rows(key, row_ids):
            if self.transform is not None:
                chunk = key if is_chunk else (plan.shape.epoch_of(key[0]), key[1], key[0] % plan.shape.steps_per_epoch)
                columns = apply_transform(self.transform, columns, plan.seed, chunk, num_rows)
                tensors = frozenset()
            if self.collate_fn is None:
                check_tensors(columns, transformed=self.transform is not None)
                # The worker copies a chunk once more, when it splits it.
                needs: Any = "C" if is_chunk else ["C", "W"]
                return ColumnBatch({name: np.require(array, None, needs) for name, array in columns.items()})
            torch = _import_torch()
            seed_all(plan.seed, "rows", *key)
            values: dict[str, Any] = {name: np.require(array, None, "W") for name, array in columns.items()}
            values |= {name: torch.from_numpy(values[name]) for name in tensors}
            rows = [{name: column[row] for name, column in values.items()} for row in range(num_rows)]
            return collate_rows(self.collate_fn, rows, title_of(key))

    def _recorded(self, key: Key, row_ids: Int64Array, default: str = "") -> AbstractContextManager[None]:
        """Records a call of the user's functions, to report it if the process dies."""
        functions = {"the transform": self.transform, "collate_fn": self.collate_fn}
        names = [name for name, function in functions.items() if function is not None]
        return recorded(" and ".join(names) or default, title_of(key), row_ids)

    @contextmanager
    def _naming_rows(self, key: Key, row_ids: Int64Array) -> Iterator[None]:
        """Adds the rows of a chunk or micro-batch to the message of a DataError."""
        try:
            yield
        except DataError as error:
            place = "The chunk" if len(key) == 3 else title_of(key).capitalize()
            rows = self.index.locate(row_ids.tolist()) if len(row_ids) else "only padding"
            raise DataError(f"{error}\n{place} has {rows}.") from error.__cause__


@cache
def _import_torch() -> Any:
    return uninterrupted(lambda: import_module("torch"))


def apply_transform(transform: Transform, rows: Arrays, seed: int, chunk: Key, num_rows: int) -> Arrays:
    """Returns the transformed rows of a chunk, which is (epoch, lane, number)."""
    had_torch = "torch" in sys.modules
    writable = {name: np.array(values) for name, values in rows.items()}
    generator = transform_generator(seed, chunk)
    seed_all(seed, "transform", *chunk)
    title = title_of(chunk)
    try:
        result = transform(writable, generator)
    except ConfigError:  # it cannot be loaded
        raise
    except (Exception, SystemExit) as error:
        raise user_error("the transform", error, f" in {title}") from error
    if not had_torch and "torch" in sys.modules:  # the call imported torch, whose generator was not seeded then
        return apply_transform(transform, rows, seed, chunk, num_rows)
    _check_result(result, num_rows, title)
    return result


def _check_result(result: object, num_rows: int, title: str) -> None:
    """Raises a DataError unless a transform returned a dict of arrays with as many rows as its input."""
    if not isinstance(result, dict) or not result:
        raise DataError(
            f"the transform returned {'an empty dict' if result == {} else type(result).__name__}. Return a dict of "
            "NumPy arrays, one for each column."
        )
    for name, values in result.items():
        if not isinstance(values, np.ndarray) or values.ndim == 0:
            raise DataError(
                f"the transform returned a {type(values).__name__} for {name!r}. Return a NumPy array of shape "
                "(rows, ...)."
            )
        if len(values) != num_rows:
            raise DataError(
                f"the transform got {num_rows} rows and returned {len(values)} for {name!r} in {title}. Return every "
                "row once. Drop rows when the data set is written, or mark them with a column of weights."
            )


def collate_rows(collate_fn: CollateFn | None, rows: list[Any], place: str) -> Any:
    """Returns the batch of these rows. Raises a DataError, which names the place in the run."""
    collate: CollateFn
    if collate_fn is not None:
        collate = collate_fn
    else:
        from torch.utils.data import default_collate as collate

        _check_keys(rows, place)
    try:
        batch = collate(rows)
    except ConfigError:  # it cannot be loaded
        raise
    except (Exception, SystemExit) as error:
        what = "collate_fn"
        fix = ""
        if collate_fn is None:
            what = "rows cannot be stacked into a batch by torch's default_collate, which"
            fix = "\nReturn tensors, arrays or numbers of equal shapes from every row, or pass a collate_fn."
        raise user_error(what, error, f" in {place}", fix) from error
    if batch is None:
        raise DataError(f"collate_fn returned None in {place}. Return the batch.")
    return batch


def _check_keys(rows: list[Any], place: str) -> None:
    """Raises a DataError if rows are dicts with different keys: torch would drop or miss some."""
    if not isinstance(rows[0], dict):
        return
    for row in rows[1:]:
        if not isinstance(row, dict) or row.keys() != rows[0].keys():
            other = sorted(map(str, row)) if isinstance(row, dict) else f"a {type(row).__name__}"
            raise DataError(
                f"rows of {place} differ: one has the keys {sorted(map(str, rows[0]))}, another is or has {other}. "
                "Return the same keys from every row, or pass a collate_fn."
            )
