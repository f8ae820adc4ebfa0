"""What the data processes of a worker do: they read rows, and make chunks or whole micro-batches of them.

Of Parquet files without a `collate_fn`, they make chunks of `data.chunk_rows` rows, which the worker cuts into
micro-batches. With a `collate_fn`, and of data in memory, they make micro-batches. The transform then sees one of them
at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import pyarrow as pa

from elastic_ddp.data.collate import CollateFn, ColumnBatch, collate_rows
from elastic_ddp.data.columns import Arrays, Int64Array, check_tensors, one_array, to_numpy
from elastic_ddp.data.fingerprint import fetch_rows
from elastic_ddp.data.index import DatasetIndex
from elastic_ddp.data.map_style import Columns, MapStyleIndex, load_content
from elastic_ddp.data.order import FeedPlan
from elastic_ddp.data.packing import Content, Key, load, title_of
from elastic_ddp.data.source import read_chunks
from elastic_ddp.data.split import HostBatch, split_into_micro_batches, take_collated
from elastic_ddp.data.transform import Transform, apply_transform
from elastic_ddp.data.user_calls import recorded
from elastic_ddp.data.user_code import uninterrupted
from elastic_ddp.errors import DataError, shorten
from elastic_ddp.seeding import seed_all


@dataclass(frozen=True, eq=False)
class Work:
    """A plan for a data set, with the user's functions."""

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
        plan, data = self.plan, load_content(self.index)
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
        plan, is_chunk, num_rows = self.plan, len(key) == 3, len(next(iter(columns.values())))
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
