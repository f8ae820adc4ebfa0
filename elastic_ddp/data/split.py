"""Cuts the chunks of a plan into micro-batches, or matches collated micro-batches with the plan."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from elastic_ddp.data.columns import Int64Array
from elastic_ddp.data.order import Chunk, FeedPlan
from elastic_ddp.data.packing import Content, Packed, title_of


class EndedEarlyError(Exception):
    """The pipeline ended before its plan did."""


@dataclass(frozen=True, eq=False)
class HostBatch:
    """A micro-batch in the worker's memory."""

    step: int
    number: int
    """The micro-batch's number among all micro-batches of this worker, counted from step 0."""
    index: int
    content: list[dict[str, Any]] | Packed
    """The columns of each piece of a chunk, or a collated batch. An empty micro-batch has `micro_batch_size` rows of
    padding."""
    row_ids: Int64Array
    """The rows' positions in the stored order of the data set, without padding, shape (num_rows,)."""


def split_into_micro_batches(
    plan: FeedPlan, contents: Iterator[Content], skipped_to: Callable[[], int]
) -> Iterator[HostBatch]:
    """Yields the micro-batches of a plan from the plan's chunks. Skips steps before the step from `skipped_to`.

    Raises:
        EndedEarlyError: there are too few chunks.
    """
    chunks = plan.chunks()
    epoch = -1
    lanes: dict[int, deque[tuple[Chunk, Content]]] = {}
    for step in range(plan.first_step, plan.last_step):
        if step < skipped_to():
            continue
        if plan.shape.epoch_of(step) != epoch:
            epoch = plan.shape.epoch_of(step)
            lanes = {}
        rows = plan.shape.rows(step)
        for position, micro_batch in enumerate(plan.micro_batches):
            lane, start, stop = plan.source(step, micro_batch)
            held = lanes.setdefault(lane, deque())
            while held and held[0][0].stop <= start:
                held.popleft()
            while not held or held[-1][0].stop < stop:
                chunk = next(chunks)  # in the order of need: after skipped steps it may belong to another lane
                content = _next(contents, chunk.key)
                if chunk.lane.epoch == epoch:
                    lanes.setdefault(chunk.lane.number, deque()).append((chunk, content))
            pieces = []
            row_ids = []
            for chunk, content in held:
                inside = slice(max(start - chunk.start, 0), min(stop, chunk.stop) - chunk.start)
                if inside.start < inside.stop:
                    pieces.append({name: values[inside] for name, values in content.value.items()})
                    row_ids.append(content.row_ids[inside])
            if not rows[micro_batch]:
                pieces *= plan.shape.micro_batch_size
            counted = np.concatenate(row_ids)[: rows[micro_batch]]
            yield HostBatch(step, step * len(plan.micro_batches) + position, micro_batch, pieces, counted)


def take_collated(plan: FeedPlan, batches: Iterator[Content], skipped_to: Callable[[], int]) -> Iterator[HostBatch]:
    """Yields the micro-batches of a plan that the data processes collated; as `split_into_micro_batches`."""
    for step in range(plan.first_step, plan.last_step):
        for position, micro_batch in enumerate(plan.micro_batches):
            batch = _next(batches, (step, micro_batch))
            if step >= skipped_to():
                number = step * len(plan.micro_batches) + position
                yield HostBatch(step, number, micro_batch, batch.value, batch.row_ids)


def _next(contents: Iterator[Content], key: tuple[int, ...]) -> Content:
    content = next(contents, None)
    if content is None:
        raise EndedEarlyError
    if content.key != key:
        raise RuntimeError(f"the pipeline yielded {title_of(content.key)} instead of {title_of(key)}")
    return content
