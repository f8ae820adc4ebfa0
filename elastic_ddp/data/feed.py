"""A worker's rows: from its pipeline into micro-batches on its device, ahead of the step that asks for them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import replace
from types import TracebackType
from typing import Self

import ray
import torch

from elastic_ddp.data.index import DatasetIndex
from elastic_ddp.data.micro_batches import EndedEarlyError, HostBatch, MicroBatch, Placer, split_into_micro_batches
from elastic_ddp.data.order import FeedPlan
from elastic_ddp.data.pipeline import ChunkPipeline
from elastic_ddp.data.source import Transform
from elastic_ddp.errors import PeerFailedError

_CHUNKS_PER_PIPELINE = 100_000
"""A pipeline ends after about as many chunks and another goes on: Ray Data keeps 1.2 KB for each block it has seen."""
_REST_WITHIN_S = 0.5
"""How long another feed waits for one that is to rest."""
_LOSSES_IN_A_ROW = 3
"""Pipelines that may be lost without a micro-batch in between."""


class MicroBatchFeed:
    """The micro-batches of a plan on the worker's device, in the order of the plan.

    A background thread starts to read at once. Steps are taken strictly one after the other.

    Args:
        index: the index of the data set.
        plan: the steps and micro-batch numbers to read.
        transform: maps the rows of a chunk to the rows of the micro-batches.
        device: the device of the tensors. For CUDA, a stream of its own copies them from pinned memory.
        before_reading: called once in the background thread, before it reads.
    """

    def __init__(
        self,
        index: DatasetIndex,
        plan: FeedPlan,
        *,
        transform: Transform | None = None,
        device: torch.device,
        before_reading: Callable[[], object] = lambda: None,
    ) -> None:
        self._index = index
        self._transform = transform
        self._plan = plan
        self._device = device
        self._anywhere = False
        """Whether tasks may run on other nodes than this one."""
        self._next_step = self._skipped_to = plan.first_step
        self._changed = threading.Condition()
        self._ready: deque[tuple[int, MicroBatch]] = deque()
        """With the step that each belongs to."""
        self._error: BaseException | None = None
        self._closed = self._interrupted = False
        self._before_reading = before_reading
        self._may_rest = self._rests = False
        self._pipeline: ChunkPipeline | None = None
        self._thread = threading.Thread(target=self._produce, name="micro-batch-feed", daemon=True)
        self._thread.start()

    def step(self, step: int) -> Iterator[MicroBatch]:
        """This worker's micro-batches of a step, in its order; `step` is the one after that of the call before.

        Raises:
            DataError: a file cannot be read, or the transform raised or returned something that cannot be used.
            ValueError: the steps are not taken one after the other.
        """
        if step != self._next_step or step >= self._plan.last_step:
            raise ValueError(
                f"step {step} asked of a feed that stands at step {self._next_step} and ends before step "
                f"{self._plan.last_step}: steps are taken one after the other; build a feed to start elsewhere"
            )
        self._next_step += 1
        for _ in self._plan.micro_batches:
            yield self._take()

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """The numbers it gives, in its order."""
        return self._plan.micro_batches

    @property
    def next_step(self) -> int:
        """The step that may be taken next."""
        return self._next_step

    @property
    def is_ready(self) -> bool:
        """Whether `step` would not have to wait, for its first micro-batch at least."""
        with self._changed:
            return bool(self._ready) or self._error is not None

    def wait(self) -> None:
        """Until that is so.

        Raises:
            DataError: they cannot be read.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error or self._closed or self._interrupted)
            if self._error is not None and not self._ready:
                raise self._error

    def peek(self) -> MicroBatch | None:
        """A copy of the micro-batch that comes next, if it is there."""
        with self._changed:
            if not self._ready:
                return None
            batch = self._await_device(self._ready[0][1])
        return replace(batch, rows={name: column.clone() for name, column in batch.rows.items()})

    def skip_to(self, step: int) -> None:
        """Leaves out the steps before this one. It does not wait for them."""
        with self._changed:
            if step < self._next_step:
                raise ValueError(f"step {step} asked of a feed that stands at step {self._next_step}")
            self._next_step = self._skipped_to = step
            while self._ready and self._ready[0][0] < step:
                self._ready.popleft()
            self._changed.notify_all()

    def rest(self) -> None:
        """Lets the process of its pipeline go, for another feed, and lives on what has been read. Returns when that is
        so, or soon. Once all is used up, it starts another pipeline."""
        with self._changed:
            self._may_rest = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._rests or self._error or self._closed, timeout=_REST_WITHIN_S)

    def interrupt(self) -> None:
        """Ends a wait for data, from another thread. What is left to do is to close it."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop reading and free everything, also in the middle of an epoch. May be called more than once."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            pipeline = self._pipeline
            self._changed.notify_all()
        if pipeline is not None:
            pipeline.close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self) -> MicroBatch:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error or self._closed or self._interrupted)
            if self._interrupted:
                raise PeerFailedError("the generation broke while this worker waited for data")
            if self._closed:
                raise ValueError("the feed is closed")
            if not self._ready:
                assert self._error is not None
                raise self._error
            _, batch = self._ready.popleft()
            self._changed.notify_all()
        return self._await_device(batch)

    def _await_device(self, batch: MicroBatch) -> MicroBatch:
        """Has what the device does from here on wait for the copy."""
        if batch.ready is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(batch.ready)
            for tensor in batch.rows.values():
                tensor.record_stream(stream)  # its memory came from the copy stream's pool
        return batch

    def _produce(self) -> None:
        """The background thread."""
        try:
            self._before_reading()
            place = Placer(self._device)
            done = self._plan.first_step * len(self._plan.micro_batches)  # micro-batches, counted from step 0
            losses = 0
            while done < self._plan.last_step * len(self._plan.micro_batches):
                before = done
                if self._closed:
                    raise _Closed
                done = max(done, self._skipped_to * len(self._plan.micro_batches))
                try:
                    with closing(self._run_pipeline(done)) as batches:
                        for batch in batches:
                            self._put(batch, place)
                            done = batch.number + 1
                except EndedEarlyError:
                    if not self._closed and not self._rests:
                        raise RuntimeError("the pipeline ended before its plan did") from None
                    with self._changed:  # until all that it had read is used up
                        self._changed.wait_for(lambda: self._closed or not self._ready)
                        self._rests = False
                except ray.exceptions.TaskUnschedulableError:
                    # Ray is about to take this node away: what is left to do here is read elsewhere.
                    if self._anywhere:
                        raise
                    self._anywhere = True
                except ray.exceptions.RayError:  # a task's process is gone, for lack of memory perhaps
                    losses = losses + 1 if done == before else 1
                    if losses >= _LOSSES_IN_A_ROW:
                        raise
            with self._changed:
                self._rests = True
                self._changed.notify_all()
        except BaseException as error:  # also what closing does to a pipeline; nobody is there to see that
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _run_pipeline(self, done: int) -> Generator[HostBatch]:
        """Micro-batches from the `done`-th on, until the pipeline has done its share."""
        owned = len(self._plan.micro_batches)
        first_step = done // owned
        rows_per_step = owned * self._plan.shape.micro_batch_size
        steps = max(1, _CHUNKS_PER_PIPELINE * self._plan.options.chunk_rows // rows_per_step)
        plan = replace(self._plan, first_step=first_step, last_step=min(first_step + steps, self._plan.last_step))
        pipeline = ChunkPipeline(self._index, plan, self._transform, anywhere=self._anywhere)
        try:
            with self._changed:
                if self._closed:
                    raise _Closed
                self._pipeline = pipeline
            for batch in split_into_micro_batches(plan, iter(pipeline), lambda: self._skipped_to):
                if batch.number >= done:
                    yield batch
        finally:
            pipeline.close()

    def _put(self, batch: HostBatch, place: Placer) -> None:
        if batch.step < self._skipped_to:
            return
        placed, room = place(batch), self._plan.options.prefetch_micro_batches
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._may_rest or len(self._ready) < room)
                if self._closed:
                    raise _Closed
                if not self._may_rest:
                    if batch.step >= self._skipped_to:  # it was not left out meanwhile
                        self._ready.append((batch.step, placed))
                        self._changed.notify_all()
                    return
            assert self._pipeline is not None
            self._pipeline.gather()
            with self._changed:
                self._may_rest, self._rests = False, True
                self._changed.notify_all()


class _Closed(Exception):
    """The feed, and with it its pipeline, was closed while its thread worked."""
