"""`InlineFeed`: a feed for `ElasticTrainer.debug`, which reads in the thread that trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

from elastic_ddp.data.collate import Collator, batches_in_memory, collate_rows, read_rows
from elastic_ddp.data.feed import MicroBatchFeed
from elastic_ddp.data.map_style import MapStyleIndex
from elastic_ddp.data.micro_batches import MicroBatch, Placer
from elastic_ddp.data.order import FeedPlan
from elastic_ddp.data.packing import pack_blocks, unpack_block
from elastic_ddp.data.source import read_chunks
from elastic_ddp.data.split import HostBatch, split_into_micro_batches, take_collated
from elastic_ddp.data.transform import PrepareChunks, unpack
from elastic_ddp.seeding import preserve_rng_state


class InlineFeed(MicroBatchFeed):
    """Reads each micro-batch when it is taken, without Ray. A debugger works in the transform and in `__getitem__`."""

    def _start(self) -> None:
        self._place = Placer(self._device)
        self._source: Iterator[HostBatch] | None = None

    def _take(self) -> MicroBatch:
        if self._source is None:  # `step` has advanced `next_step`
            self._source = self._read(replace(self._plan, first_step=self.next_step - 1))
        with preserve_rng_state(self._device):  # a data process has generators of its own
            batch = self._place(next(self._source))
        return self._await_copy(batch)

    def _read(self, plan: FeedPlan) -> Iterator[HostBatch]:
        index, transform, skipped_to = self._index, self._transform, lambda: plan.first_step
        if not self._collates:
            prepare: Any = PrepareChunks(plan.seed, transform, index.locate)
            tables = chain.from_iterable(map(prepare, read_chunks(index, plan)))  # type: ignore[arg-type]
            return split_into_micro_batches(plan, chain.from_iterable(map(unpack, tables)), skipped_to)
        collator = Collator(plan, transform, self._collate_fn)
        if isinstance(index, MapStyleIndex):
            batches = batches_in_memory(index, collator, 0, 1, index.content)
        else:
            rows = read_rows(index, plan)
            batches = chain.from_iterable(collate_rows(collator, table, index.locate) for table in rows)
        # One batch in a block: a block of several would call the user's functions ahead of the step.
        blocks = (pack_blocks(iter([batch])) for batch in batches)
        packed = chain.from_iterable(map(unpack_block, chain.from_iterable(blocks)))
        return take_collated(plan, packed, skipped_to)

    def wait(self) -> None:
        """Returns at once: nothing is read before it is taken."""

    def close(self) -> None:
        """Frees what has been read."""
        self._source = None
