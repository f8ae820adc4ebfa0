"""Makes micro-batches in the data processes: fetches rows, and collates them into what the training function gets.

This is the path of data sets in memory, and of all data with a `collate_fn`. A chunk, the input of a transform, is then
one micro-batch. Parquet without a `collate_fn` takes the path through `transform`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import pyarrow as pa

from elastic_ddp.data.columns import Array, to_numpy
from elastic_ddp.data.fingerprint import fetch, row_error
from elastic_ddp.data.index import DatasetIndex
from elastic_ddp.data.map_style import Columns, MapStyleIndex, load_shared
from elastic_ddp.data.order import FeedPlan, Int64Array
from elastic_ddp.data.source import COLUMN_PREFIX, rows_of_chunks, wrap
from elastic_ddp.data.split import ChunkContent, split_into_micro_batches
from elastic_ddp.data.transform import Arrays, Transform, apply_transform, check_tensors
from elastic_ddp.data.user_calls import recorded
from elastic_ddp.data.user_code import environment, uninterrupted
from elastic_ddp.errors import ConfigError, DataError, shorten, text_of
from elastic_ddp.seeding import seed_all

CollateFn = Callable[[list[Any]], Any]
"""Maps the rows of a micro-batch to a batch of any type.

The global generators of torch, NumPy and Python are seeded for the micro-batch, before its rows are fetched."""


@dataclass(frozen=True)
class Collator:
    """Turns the rows of a micro-batch into a batch."""

    plan: FeedPlan
    transform: Transform | None
    collate_fn: CollateFn | None

    def from_columns(
        self, step: int, micro_batch: int, columns: Arrays, num_rows: int, tensors: frozenset[str] = frozenset()
    ) -> Any:
        """Returns the batch of columns, of which `tensors` become tensors in the rows that are collated."""
        shape = self.plan.shape
        if self.transform is not None:
            chunk = shape.epoch_of(step), micro_batch, step % shape.steps_per_epoch
            columns, tensors = apply_transform(self.transform, columns, self.plan.seed, chunk, num_rows), frozenset()
        if self.collate_fn is None:
            check_tensors(columns, transformed=self.transform is not None)
            return ColumnBatch({name: np.require(values, requirements=["C", "W"]) for name, values in columns.items()})
        torch = _import_torch()
        seed_all(self.plan.seed, "rows", step, micro_batch)
        writable = {name: np.require(column, requirements="W") for name, column in columns.items()}
        values = {name: torch.from_numpy(column) if name in tensors else column for name, column in writable.items()}
        rows = [{name: column[row] for name, column in values.items()} for row in range(num_rows)]
        return self._collate(rows, f"micro-batch {micro_batch} of step {step}")

    def from_map_style(self, step: int, micro_batch: int, data: Any, numbers: Int64Array) -> Any:
        """Returns the batch of these rows of a map-style data set."""
        _import_torch()  # before its generator is seeded
        seed_all(self.plan.seed, "rows", step, micro_batch)
        place = f"micro-batch {micro_batch} of step {step}, rows {shorten(list(map(str, numbers)))}"
        missing = numbers.tolist()
        rows = []
        try:
            for row in fetch(data, list(missing)):
                rows.append(row)
                missing = missing[1:]
        except (Exception, SystemExit) as error:
            at_once = getattr(data, "__getitems__", None) is not None
            raise row_error(missing if at_once else missing[:1], error, f" in {place}") from error
        if len(rows) != len(numbers):
            raise DataError(
                f"data.__getitems__ returned {len(rows)} rows for {len(numbers)} row numbers in {place}. Return one "
                "row for each number, in their order."
            )
        return self._collate(rows, place)

    def recorded(self, step: int, micro_batch: int, row_ids: Int64Array) -> AbstractContextManager[None]:
        """Records calls of the user's functions, to report them if the process dies."""
        functions = {"the transform": self.transform, "collate_fn": self.collate_fn}
        names = [name for name, function in functions.items() if function is not None]
        return recorded(" and ".join(names) or "__getitem__", f"micro-batch {micro_batch} of step {step}", row_ids)

    @contextmanager
    def naming_rows(
        self, step: int, micro_batch: int, row_ids: Int64Array, locate: Callable[[list[int]], str]
    ) -> Iterator[None]:
        """Adds the rows of a micro-batch to the message of a DataError."""
        try:
            yield
        except DataError as error:
            place = f"Micro-batch {micro_batch} of step {step}"
            raise DataError(f"{error}\n{place} has {locate(row_ids.tolist())}.") from error.__cause__

    def _collate(self, rows: list[Any], place: str) -> Any:
        collate: CollateFn
        if self.collate_fn is not None:
            collate = self.collate_fn
        else:
            from torch.utils.data import default_collate as collate

            _check_keys(rows, place)
        try:
            batch = collate(rows)
        except ConfigError:  # it cannot be loaded
            raise
        except (Exception, SystemExit) as error:
            what, fix = "collate_fn raised", ""
            if self.collate_fn is None:
                what = "rows cannot be stacked into a batch by torch's default_collate, which raised"
                fix = "\nReturn tensors, arrays or numbers of equal shapes from every row, or pass a collate_fn."
            what = f"{what} {text_of(error, repr)} in {place}"
            text = f"{what}:\n{traceback.format_exc().rstrip()}{fix}\n{environment().advise(error)}"
            raise DataError(text.rstrip()) from error
        if batch is None:
            raise DataError(f"collate_fn returned None in {place}. Return the batch.")
        return batch


@cache
def _import_torch() -> Any:
    return uninterrupted(lambda: import_module("torch"))


class ColumnBatch(dict[str, Array]):
    """A batch of arrays of shape (rows, ...), which the worker turns into a dict of tensors.

    The data process needs no torch for it.
    """


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


Batches = Iterator[tuple[int, int, Int64Array, Any]]
"""Micro-batches as (step, number, row ids, batch)."""


def batches_in_memory(
    index: MapStyleIndex, collator: Collator, share: int, num_shares: int, own: Any = None
) -> Batches:
    """Yields every `num_shares`-th micro-batch of the plan, from the `share`-th on. `own` is the content of the index
    if it is not shared."""
    plan, data = collator.plan, load_shared(index.content) if own is None else own
    owned = len(plan.micro_batches)
    for position in range(share, (plan.last_step - plan.first_step) * owned, num_shares):
        step, micro_batch = plan.first_step + position // owned, plan.micro_batches[position % owned]
        numbers = plan.rows_in_memory(step, micro_batch)
        start, stop = plan.shape.span(step, micro_batch)
        counted = numbers[: stop - start]
        if not len(counted):
            numbers = numbers.repeat(plan.shape.micro_batch_size)
        with collator.recorded(step, micro_batch, numbers):
            if isinstance(data, Columns):
                with collator.naming_rows(step, micro_batch, numbers, index.locate):
                    batch = collator.from_columns(step, micro_batch, data.take(numbers), len(numbers), data.tensors)
            else:
                batch = collator.from_map_style(step, micro_batch, data, numbers)
        yield step, micro_batch, counted, batch


def read_rows(index: DatasetIndex, plan: FeedPlan) -> Iterator[pa.Table]:
    """Yields a table of one row for each micro-batch of a plan of Parquet files, in order."""
    contents = (
        ChunkContent(
            epoch=chunk.lane.epoch,
            lane=chunk.lane.number,
            number=chunk.number,
            row_ids=rows["row_ids"].to_numpy(),
            columns=dict(zip(rows.column_names, rows.columns, strict=True)),
        )
        for chunk, rows in rows_of_chunks(index, plan)
    )
    for batch in split_into_micro_batches(plan, contents, lambda: plan.first_step):
        assert isinstance(batch.content, list)
        rows = pa.concat_tables(pa.table(piece) for piece in batch.content)
        yield wrap([batch.step, batch.index, len(batch.row_ids)], rows)


def collate_rows(collator: Collator, block: pa.Table, locate: Callable[[list[int]], str]) -> Batches:
    """Collates the micro-batches of a block of `read_rows`. Errors name rows as `locate` does."""
    names = [name for name in block.column_names if name.startswith(COLUMN_PREFIX)]
    for row in range(block.num_rows):
        step, micro_batch, num_counted = block["chunk"][row].as_py()
        row_ids = block["row_ids"][row].values.to_numpy()
        columns = {
            name.removeprefix(COLUMN_PREFIX): to_numpy(name.removeprefix(COLUMN_PREFIX), block[name][row].values)
            for name in names
        }
        naming = collator.naming_rows(step, micro_batch, row_ids, locate)
        with collator.recorded(step, micro_batch, row_ids), naming:
            batch = collator.from_columns(step, micro_batch, columns, len(row_ids))
        yield step, micro_batch, row_ids[:num_counted], batch
