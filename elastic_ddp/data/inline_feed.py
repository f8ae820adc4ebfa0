"""`InlineFeed`: a feed for `ElasticTrainer.debug`, which reads in the thread that trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from elastic_ddp.data.feed import MicroBatchFeed
from elastic_ddp.data.micro_batches import MicroBatch, Placer
from elastic_ddp.data.packing import pack
from elastic_ddp.data.split import HostBatch
from elastic_ddp.seeding import preserve_rng_state


class InlineFeed(MicroBatchFeed):
    """Reads each micro-batch when it is taken, without Ray. A debugger works in the transform and in `__getitem__`."""

    def _start(self) -> None:
        self._place = Placer(self._device)
        self._source: Iterator[HostBatch] | None = None

    def _take(self) -> MicroBatch:
        if self._source is None:  # `step` has advanced `next_step`
            plan = replace(self._plan, first_step=self.next_step - 1)
            work = replace(self._work, plan=plan)
            self._source = work.split(map(pack, work.contents()), lambda: plan.first_step)
        with preserve_rng_state(self._device):  # a data process has generators of its own
            batch = self._place(next(self._source))
        return self._await_copy(batch)

    def wait(self) -> None:
        """Returns at once: nothing is read before it is taken."""

    def close(self) -> None:
        """Frees what has been read."""
        self._source = None
