"""Micro-batches on the device: joins pieces of chunks, and copies batches of any structure."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from elastic_ddp.data.columns import Array, Int64Array
from elastic_ddp.data.split import HostBatch
from elastic_ddp.data.work import ColumnBatch
from elastic_ddp.errors import DataError


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The rows of one micro-batch on the device."""

    index: int
    """The micro-batch's number, 0 to M-1."""
    rows: Any
    """One tensor of shape (rows, ...) for each column, or the result of `collate_fn`. An empty micro-batch has
    `micro_batch_size` rows of padding: BatchNorm, for example, refuses one row."""
    row_ids: Int64Array
    """The rows' positions in the stored order of the data set, without padding, shape (num_rows,)."""
    ready: torch.cuda.Event | None = field(default=None, repr=False)
    """Recorded after the copy to the device."""

    @property
    def num_rows(self) -> int:
        """The number of rows without padding: 0 for an empty micro-batch."""
        return len(self.row_ids)


class Placer:
    """Copies micro-batches to the device. Use it from one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: HostBatch) -> MicroBatch:
        content = batch.content
        if isinstance(content, list):
            rows: Any = {name: self._join(name, content) for name in content[0]}
        else:
            rows = content.load(self._new_memory)
            if isinstance(rows, ColumnBatch):
                rows = {name: torch.from_numpy(values) for name, values in rows.items()}
        if self._stream is None:
            return MicroBatch(batch.index, rows, batch.row_ids)
        with torch.cuda.stream(self._stream):
            rows = map_tensors(lambda tensor: tensor.to(self._device, non_blocking=True), rows)
            return MicroBatch(batch.index, rows, batch.row_ids, self._stream.record_event())

    def _new_memory(self, size: int) -> Array:
        """Returns memory for a copy out of the read-only object store, pinned for a GPU."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None).numpy()

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


def map_tensors(
    function: Callable[[torch.Tensor], torch.Tensor], batch: Any, to_device: Callable[[Any], Any] = lambda value: value
) -> Any:
    """Returns a batch with the function applied to the tensors in its dicts, lists, tuples and named tuples.

    `to_device` is applied to objects of other classes that have a method `to`. Other values stay as they are.
    """
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, MutableMapping):
        mapped = copy.copy(batch)  # keeps its class
        mapped.update({key: map_tensors(function, value, to_device) for key, value in batch.items()})
        return mapped
    if callable(getattr(batch, "to", None)):  # also a PackedSequence, which is a named tuple
        return to_device(batch)
    if type(batch) in (list, tuple):
        return type(batch)(map_tensors(function, value, to_device) for value in batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(function, value, to_device) for value in batch))
    return batch
