"""Cuts a pipeline's chunks into micro-batches and copies them to the device. Needs neither Ray nor threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from elastic_ddp.data.order import Chunk, FeedPlan, Int64Array
from elastic_ddp.data.transform import PreparedChunk
from elastic_ddp.errors import DataError


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The rows of one micro-batch on the device."""

    index: int
    """The micro-batch's number, 0 to M-1."""
    rows: dict[str, torch.Tensor]
    """One tensor of shape (rows, ...) for each column. An empty micro-batch has one row of padding."""
    row_ids: Int64Array
    """The rows' positions in the stored order of the data set, without padding, shape (num_rows,)."""
    ready: torch.cuda.Event | None = field(default=None, repr=False)
    """Recorded after the copy to the device."""

    @property
    def num_rows(self) -> int:
        """The number of rows without padding: 0 for an empty micro-batch."""
        return len(self.row_ids)


class EndedEarlyError(Exception):
    """The pipeline ended before its plan did."""


@dataclass(frozen=True, eq=False)
class HostBatch:
    """A micro-batch as pieces of chunks, which are views of the object store's memory."""

    step: int
    number: int
    """Its number among all micro-batches of this worker, counted from step 0."""
    index: int
    pieces: list[dict[str, np.ndarray]]
    row_ids: Int64Array


def split_into_micro_batches(
    plan: FeedPlan, prepared: Iterator[PreparedChunk], skipped_to: Callable[[], int]
) -> Iterator[HostBatch]:
    """Yields the micro-batches of a plan from the plan's chunks. Skips steps before the one that `skipped_to` returns.

    Raises:
        EndedEarlyError: there are too few chunks.
    """
    chunks = plan.chunks()
    epoch = -1
    lanes: dict[int, deque[tuple[Chunk, PreparedChunk]]] = {}
    for step in range(plan.first_step, plan.last_step):
        if step < skipped_to():
            continue
        if plan.shape.epoch_of(step) != epoch:
            epoch, lanes = plan.shape.epoch_of(step), {}
        rows = plan.shape.rows(step)
        for position, micro_batch in enumerate(plan.micro_batches):
            lane, start, stop = plan.source(step, micro_batch)
            held = lanes.setdefault(lane, deque())
            while held and held[0][0].stop <= start:
                held.popleft()
            while not held or held[-1][0].stop < stop:
                chunk = next(chunks)  # in the order of need: after skipped steps it may belong to another lane
                content = next(prepared, None)
                if content is None:
                    raise EndedEarlyError
                expected = chunk.lane.epoch, chunk.lane.number, chunk.number
                if (content.epoch, content.lane, content.number) != expected:
                    raise RuntimeError(f"the pipeline yielded {content} instead of (epoch, lane, chunk) {expected}")
                if chunk.lane.epoch == epoch:
                    lanes.setdefault(chunk.lane.number, deque()).append((chunk, content))
            pieces, row_ids = [], []
            for chunk, content in held:
                inside = slice(max(start - chunk.start, 0), min(stop, chunk.stop) - chunk.start)
                if inside.start < inside.stop:
                    pieces.append({name: values[inside] for name, values in content.columns.items()})
                    row_ids.append(content.row_ids[inside])
            counted = np.concatenate(row_ids)[: rows[micro_batch]]
            yield HostBatch(step, step * len(plan.micro_batches) + position, micro_batch, pieces, counted)


class Placer:
    """Joins the pieces of a micro-batch and copies it to the device. Use it from one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: HostBatch) -> MicroBatch:
        rows = {name: self._join(name, batch.pieces) for name in batch.pieces[0]}
        if self._stream is None:
            return MicroBatch(batch.index, rows, batch.row_ids)
        with torch.cuda.stream(self._stream):
            rows = {name: tensor.to(self._device, non_blocking=True) for name, tensor in rows.items()}
            return MicroBatch(batch.index, rows, batch.row_ids, self._stream.record_event())

    def _join(self, name: str, pieces: list[dict[str, np.ndarray]]) -> torch.Tensor:
        """Copies a column from the read-only object store into one tensor, in pinned memory for a GPU."""
        first = pieces[0][name]
        for piece in pieces[1:]:
            if piece.keys() != pieces[0].keys():
                raise DataError(
                    f"the transform returned the columns {sorted(pieces[0])} for one chunk and {sorted(piece)} for "
                    "another. Return the same columns for every chunk."
                )
            if (piece[name].dtype, piece[name].shape[1:]) != (first.dtype, first.shape[1:]):
                raise DataError(
                    f"rows of {name!r} in a micro-batch are {first.dtype} of shape {first.shape[1:]} in one chunk and "
                    f"{piece[name].dtype} of shape {piece[name].shape[1:]} in another. Return rows of one shape and "
                    "dtype from the transform: pad or crop them."
                )
        shape = (sum(len(piece[name]) for piece in pieces), *first.shape[1:])
        dtype = torch.from_numpy(np.empty(0, first.dtype)).dtype
        tensor = torch.empty(shape, dtype=dtype, pin_memory=self._stream is not None)
        np.concatenate([piece[name] for piece in pieces], out=tensor.numpy())
        return tensor
