"""A worker's feed: reads micro-batches onto its device in the background, ahead of the step that takes them."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Self

import ray
import torch

from elastic_ddp.data.index import DatasetIndex
from elastic_ddp.data.map_style import MapStyleIndex
from elastic_ddp.data.micro_batches import MicroBatch, Placer, map_tensors
from elastic_ddp.data.order import FeedPlan
from elastic_ddp.data.packing import pack
from elastic_ddp.data.pipeline import Pipeline, explain_failure
from elastic_ddp.data.split import EndedEarlyError, HostBatch
from elastic_ddp.data.user_calls import UserCallError
from elastic_ddp.data.work import CollateFn, Transform, Work
from elastic_ddp.errors import DataError, PeerFailedError
from elastic_ddp.seeding import preserve_rng_state

_MICRO_BATCHES_PER_PIPELINE = 100_000
"""A new pipeline starts after this many, because Ray Data keeps 1.2 KB for each block that it has seen."""
_RELEASE_TIMEOUT_S = 0.5
_MAX_POLL_S = 10.0
"""Longest pause between two checks for a call of the user's function that hangs."""
_MAX_PIPELINE_FAILURES = 3  # in a row, without a micro-batch


class MicroBatchFeed:
    """The micro-batches of a plan on the worker's device, in the order of the plan.

    A background thread starts to read at once. It first calls `before_reading`.
    """

    def __init__(
        self,
        index: DatasetIndex | MapStyleIndex,
        plan: FeedPlan,
        *,
        transform: Transform | None = None,
        collate_fn: CollateFn | None = None,
        device: torch.device,
        before_reading: Callable[[], object] = lambda: None,
        hang_timeout_s: float = math.inf,
    ) -> None:
        self._work = Work(index, plan, transform, collate_fn)
        self._plan = plan
        self.micro_batches = plan.micro_batches
        self._device = device
        self._any_node = False  # whether tasks may run on other nodes
        self.next_step = self._skipped_to = plan.first_step
        self._changed = threading.Condition()
        self._ready: deque[tuple[int, MicroBatch]] = deque()  # with their steps
        self._error: BaseException | None = None
        self._closed = self._interrupted = self._has_begun = False
        self._before_reading = before_reading
        self._hang_timeout_s = hang_timeout_s
        self._release_requested = self._released = False
        self._pipeline: Pipeline | None = None
        self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._produce, name="micro-batch-feed", daemon=True)
        self._thread.start()

    def step(self, step: int) -> Iterator[MicroBatch]:
        """Yields this worker's micro-batches of a step, in order. Each call takes the step after the last one.

        Raises:
            DataError: a file cannot be read, or the transform failed or returned an unusable result.
            PeerFailedError: the feed was interrupted.
            ValueError: the step is not the next one, or the feed is closed.
        """
        if step != self.next_step or step >= self._plan.last_step:
            raise ValueError(
                f"step {step} was requested, but the feed is at step {self.next_step} and ends before step "
                f"{self._plan.last_step}"
            )
        self.next_step += 1
        for _ in self._plan.micro_batches:
            yield self._take()

    def locate(self, row_ids: Sequence[int]) -> str:
        """Returns text for rows of the data set, for example "rows 3, 17 of a.parquet"."""
        return self._work.index.locate(row_ids)

    @property
    def is_ready(self) -> bool:
        """Whether the pipeline has yielded a micro-batch, or failed.

        The value stays true after `skip_to`, which may drop all ready micro-batches: the next ones follow at once.
        """
        with self._changed:
            return self._has_begun or self._error is not None

    def wait(self) -> None:
        """Waits until the first micro-batch is ready, or the feed is interrupted or closed. Raises as `step`."""
        with self._changed:
            self._wait_for_batch()
            if self._error is not None and not self._ready:
                raise self._error

    def peek(self) -> MicroBatch | None:
        """Returns a copy of the next micro-batch, or None if it is not ready."""
        with self._changed:
            if not self._ready:
                return None
            batch = self._await_copy(self._ready[0][1])
        return replace(batch, rows=copy.deepcopy(batch.rows))

    def skip_to(self, step: int) -> None:
        """Skips the steps before this one, without waiting for them."""
        with self._changed:
            if step < self.next_step:
                raise ValueError(f"step {step} was requested, but the feed is already at step {self.next_step}")
            self.next_step = self._skipped_to = step
            while self._ready and self._ready[0][0] < step:
                self._ready.popleft()
            self._changed.notify_all()

    def release_pipeline(self) -> None:
        """Frees the process of the pipeline for another feed, within 0.5 s.

        Prefetched micro-batches stay available; after the last one, the feed starts another pipeline.
        """
        with self._changed:
            self._release_requested = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._released or self._error or self._closed, timeout=_RELEASE_TIMEOUT_S)

    def interrupt(self) -> None:
        """Makes `step` raise instead of waiting. Callable from any thread; close the feed afterwards."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stops reading and frees all resources. May be called more than once."""
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

    def __exit__(self, *error: object) -> None:
        self.close()

    def _take(self) -> MicroBatch:
        with self._changed:
            self._wait_for_batch()
            if self._interrupted:
                raise PeerFailedError("a peer failed while this worker waited for data")
            if self._closed:
                raise ValueError("the feed is closed")
            if not self._ready:
                assert self._error is not None
                raise self._error
            _, batch = self._ready.popleft()
            self._changed.notify_all()
        return self._await_copy(batch)

    def _wait_for_batch(self) -> None:
        """Waits until a micro-batch is ready, or there will be none. Call it with the lock held."""
        poll_s = min(self._hang_timeout_s / 10, _MAX_POLL_S)
        begun_at = time.monotonic()
        while not self._changed.wait_for(
            lambda: self._ready or self._error or self._closed or self._interrupted, timeout=poll_s
        ):
            # A longer time shows that this process was suspended, and the calls may have been as well.
            now = time.monotonic()
            waited_s = min(now - begun_at, 2 * poll_s)
            begun_at = now
            if self._pipeline is None:
                continue
            call = self._pipeline.hanging_call(self._hang_timeout_s, waited_s)
            if call is not None:
                self._error = DataError(f"{call}\nRaise hang_timeout_s if a call may take longer.")

    def _await_copy(self, batch: MicroBatch) -> MicroBatch:
        """Makes the device's current stream wait for the copy of a micro-batch."""
        if batch.ready is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(batch.ready)

            def record(tensor: torch.Tensor) -> torch.Tensor:
                tensor.record_stream(stream)  # its memory belongs to the pool of the copying stream
                return tensor

            return replace(batch, rows=map_tensors(record, batch.rows, lambda value: value.to(self._device)))
        return batch

    def _produce(self) -> None:
        """The background thread."""
        try:
            self._before_reading()
            self._read_all()
            with self._changed:
                self._released = True
                self._changed.notify_all()
        except BaseException as error:  # `step` raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _read_all(self) -> None:
        """Reads the plan to its end, with a new pipeline whenever one ends or fails."""
        place = Placer(self._device)
        owned = len(self._plan.micro_batches)
        done = self._plan.first_step * owned  # this worker's micro-batches, counted from step 0
        failures = 0
        fatal_call: str | None = None
        while done < self._plan.last_step * owned:
            before = done
            if self._closed:
                raise _Closed
            done = max(done, self._skipped_to * owned)
            try:
                with closing(self._run_pipeline(done)) as batches:
                    for batch in batches:
                        self._put(batch, place)
                        done = batch.number + 1
            except EndedEarlyError:
                if not self._closed and not self._released:
                    raise RuntimeError("the pipeline ended before its plan did") from None
                with self._changed:  # wait until all that was read is used up
                    self._changed.wait_for(lambda: self._closed or not self._ready)
                    self._released = False
            except ray.exceptions.TaskUnschedulableError:
                # Ray is about to remove this node, so another node has to read.
                if self._any_node:
                    raise
                self._any_node = True
            except (ray.exceptions.RayError, UserCallError) as error:
                failures = failures + 1 if done == before else 1
                call = error.place if isinstance(error, UserCallError) else None
                if failures >= _MAX_PIPELINE_FAILURES or (call is not None and call == fatal_call):
                    raise explain_failure(error) from error
                fatal_call = call

    def _run_pipeline(self, done: int) -> Generator[HostBatch]:
        """Yields the micro-batches of one pipeline, from the `done`-th on."""
        owned = len(self._plan.micro_batches)
        first_step = done // owned
        steps = max(1, _MICRO_BATCHES_PER_PIPELINE // owned)
        plan = replace(self._plan, first_step=first_step, last_step=min(first_step + steps, self._plan.last_step))
        work = replace(self._work, plan=plan)
        pipeline = Pipeline(work, any_node=self._any_node)
        try:
            with self._changed:
                if self._closed:
                    raise _Closed
                self._pipeline = pipeline
            for batch in work.split(iter(pipeline), lambda: self._skipped_to):
                if batch.number >= done:
                    yield batch
        finally:
            pipeline.close()

    def _put(self, batch: HostBatch, place: Placer) -> None:
        """Copies a micro-batch to the device and appends it when there is room. Handles a requested release."""
        if batch.step < self._skipped_to:
            return
        placed = place(batch)
        room = self._plan.options.prefetch_micro_batches
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._release_requested or len(self._ready) < room)
                if self._closed:
                    raise _Closed
                if not self._release_requested:
                    if batch.step >= self._skipped_to:  # it may have been skipped meanwhile
                        self._ready.append((batch.step, placed))
                        self._has_begun = True
                        self._changed.notify_all()
                    return
            assert self._pipeline is not None
            self._pipeline.stop_tasks()
            with self._changed:
                self._release_requested = False
                self._released = True
                self._changed.notify_all()


class _Closed(Exception):
    """Ends the background thread after the feed was closed."""


class InlineFeed(MicroBatchFeed):
    """Reads each micro-batch when it is taken, in the thread that trains, without Ray.

    With this feed, `ElasticTrainer.debug` runs transform and `__getitem__` under a debugger.
    """

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
        """Frees the micro-batches that were read."""
        self._source = None
