"""Chunks of a pipeline become micro-batches: cut, put together, put onto the device. Without Ray, without threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from elastic_ddp.data.order import Chunk, FeedPlan, Int64Array
from elastic_ddp.data.source import PreparedChunk
from elastic_ddp.errors import DataError


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The rows of one micro-batch on the device."""

    index: int
    """Its number, 0 to M-1."""
    rows: dict[str, torch.Tensor]
    """One tensor of shape `(rows, ...)` for each column. An empty micro-batch has one row here, the padding, so that a
    forward can still run on it."""
    row_ids: Int64Array
    """The rows' places in the data set's stored order, `(num_rows,)`, as they came through the pipeline."""
    ready: torch.cuda.Event | None = field(default=None, repr=False)
    """When the copy to the device is done."""

    @property
    def num_rows(self) -> int:
        """Rows that count: 0 in an empty micro-batch."""
        return len(self.row_ids)


class EndedEarlyError(Exception):
    """A pipeline ended before the end of its plan."""


@dataclass(frozen=True, eq=False)
class HostBatch:
    """A micro-batch as pieces of chunks, still in the object store's memory."""

    step: int
    number: int
    """Of all that this worker takes, from step 0 on."""
    index: int
    pieces: list[dict[str, np.ndarray]]
    row_ids: Int64Array


def split_into_micro_batches(
    plan: FeedPlan, prepared: Iterator[PreparedChunk], skipped_to: Callable[[], int]
) -> Iterator[HostBatch]:
    """Cut the chunks of a plan, which come in its order, into its micro-batches, but for steps that are left out."""
    chunks = plan.chunks()
    epoch = -1
    lanes: dict[int, deque[tuple[Chunk, PreparedChunk]]] = {}
    for step in range(plan.first_step, plan.last_step):
        if step < skipped_to():
            continue
        if plan.shape.epoch_of(step) != epoch:
            epoch = plan.shape.epoch_of(step)
            lanes = {}
        for place, micro_batch in enumerate(plan.micro_batches):
            lane, start, stop = plan.source(step, micro_batch)
            held = lanes.setdefault(lane, deque())
            while held and held[0][0].stop <= start:
                held.popleft()
            while not held or held[-1][0].stop < stop:
                chunk = next(chunks)  # in the order of need: after steps that were left out, perhaps another lane's
                content = _expect(chunk, next(prepared, None))
                if chunk.lane.epoch == epoch:
                    lanes.setdefault(chunk.lane.number, deque()).append((chunk, content))
            pieces, row_ids = [], []
            for chunk, content in held:
                inside = slice(max(start - chunk.start, 0), min(stop, chunk.stop) - chunk.start)
                if inside.start < inside.stop:
                    pieces.append({name: values[inside] for name, values in content.columns.items()})
                    row_ids.append(content.row_ids[inside])
            counted = np.concatenate(row_ids)[: plan.shape.rows_in_micro_batch(step, micro_batch)]
            yield HostBatch(step, step * len(plan.micro_batches) + place, micro_batch, pieces, counted)


def _expect(chunk: Chunk, found: PreparedChunk | None) -> PreparedChunk:
    if found is None:
        raise EndedEarlyError
    wanted = (chunk.lane.epoch, chunk.lane.number, chunk.number, chunk.stop - chunk.start)
    came = (found.epoch, found.lane, found.number, len(found.row_ids))
    if came != wanted:
        raise RuntimeError(f"the pipeline gave (epoch, lane, chunk, rows) {came} where {wanted} is due")
    return found


class Placer:
    """Puts a micro-batch together and onto the device. Used by one thread."""

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
        """One copy: out of the read-only memory of the object store, and into pinned memory where that is of use."""
        first = pieces[0][name]
        for piece in pieces[1:]:
            if piece.keys() != pieces[0].keys():
                raise DataError(
                    f"the transform returned the columns {sorted(pieces[0])} for one chunk and {sorted(piece)} for "
                    "another; it has to return the same columns always"
                )
            if (piece[name].dtype, piece[name].shape[1:]) != (first.dtype, first.shape[1:]):
                raise DataError(
                    f"rows of {name!r} that belong to one micro-batch are {first.dtype} of shape {first.shape[1:]} in "
                    f"one chunk and {piece[name].dtype} of shape {piece[name].shape[1:]} in another; let the "
                    "transform return (pad, crop) rows of one shape and type always"
                )
        shape = (sum(len(piece[name]) for piece in pieces), *first.shape[1:])
        kind = torch.from_numpy(np.empty(0, first.dtype)).dtype
        tensor = torch.empty(shape, dtype=kind, pin_memory=self._stream is not None)
        np.concatenate([piece[name] for piece in pieces], out=tensor.numpy())
        return tensor
