"""Moves Python objects between processes of a run: data sets to the data processes, their batches to the worker.

Objects are pickled, because a `collate_fn` may return anything. What is unpickled here comes from another process of
the same run, never from a file. The memory of arrays and tensors is kept apart from the pickle, to copy it less often.
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from ray import cloudpickle

from elastic_ddp.data.columns import Array
from elastic_ddp.data.order import Int64Array
from elastic_ddp.errors import DataError, format_exception

_BLOCK_BYTES = 8 << 20
_FIRST_BLOCK_S, _BLOCK_S = 0.02, 0.1
"""How long the first block is filled, so that the first rows arrive soon, and the others: each costs about 5 ms."""

Parts = list[Array]
"""A pickle, followed by the memory of the arrays and tensors in it: arrays of bytes."""


class _Pickler(cloudpickle.CloudPickler):
    """Pickles tensors as arrays of bytes, and arrays mapped from a file as the file's name."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if (
            torch is not None
            and type(value) is torch.Tensor
            and value.layout is torch.strided
            and value.is_cpu
            and not (value.is_nested or value.is_quantized)
        ):
            memory = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
            return _tensor, (memory, value.dtype, tuple(value.shape))
        if type(value) is np.memmap and value.filename is not None and value.flags.c_contiguous:
            return np.memmap, (value.filename, value.dtype, "c", _offset_in_file(value), value.shape)
        return super().reducer_override(value)


def _offset_in_file(mapped: np.memmap) -> int:
    """Returns where the file has a mapped array, which may be a slice. `memmap.offset` is that of the whole mapping."""
    whole: Any = mapped
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    return mapped.offset + mapped.__array_interface__["data"][0] - whole.__array_interface__["data"][0]


def dump(value: Any) -> Parts:
    """Pickles an object. Raises whatever its own code raises, TypeError or PicklingError if it cannot be pickled."""
    file = io.BytesIO()
    buffers: list[Any] = []
    _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    memory: list[Any] = [file.getbuffer(), *(buffer.raw() for buffer in buffers)]
    return [np.frombuffer(part, np.uint8) for part in memory]


def load(parts: Sequence[Array]) -> Any:
    """Returns the object of `dump`. Its arrays use the memory of `parts`; tensors do if that is writable."""
    pickled: Any = parts[0]
    return cloudpickle.loads(pickled, buffers=parts[1:])


def _tensor(memory: Array, dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch

    if not memory.flags.writeable:  # an in-place operation on read-only memory would kill the process
        memory = memory.copy()
    tensor = torch.from_numpy(memory)
    return tensor.view(dtype).reshape(shape) if memory.size else torch.empty(shape, dtype=dtype)


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """A micro-batch that a data process made."""

    step: int
    micro_batch: int
    row_ids: Int64Array
    parts: Parts
    """The batch as from `dump`, in the read-only memory of the object store."""

    def load(self, new_memory: Callable[[int], Array] = lambda size: np.empty(size, np.uint8)) -> Any:
        """Returns the batch, in memory of its own: `new_memory(size)` returns a writable array of bytes."""
        copies = [new_memory(len(part)) for part in self.parts[1:]]
        for copy, part in zip(copies, self.parts[1:], strict=True):
            copy[:] = part
        return load([self.parts[0], *copies])


def pack_blocks(batches: Iterator[tuple[int, int, Int64Array, Any]]) -> Iterator[pa.Table]:
    """Yields blocks of one row each, which hold batches, given as (step, micro-batch number, row ids, batch)."""
    headers: list[list[Any]] = []
    parts: Parts = []
    size, ends_at = 0, time.monotonic() + _FIRST_BLOCK_S
    for step, micro_batch, row_ids, batch in batches:
        try:
            own = [np.frombuffer(row_ids.tobytes(), np.uint8), *dump(batch)]
        except Exception as error:  # objects raise what they like
            raise DataError(
                f"the batch of micro-batch {micro_batch} of step {step} cannot be sent to the worker: "
                f"{format_exception(error)}. Return tensors, arrays, and values that can be pickled from collate_fn."
            ) from error
        headers.append([step, micro_batch, [len(part) for part in own]])
        parts += own
        size += sum(map(len, own))
        if size > _BLOCK_BYTES or time.monotonic() > ends_at:
            yield _block(headers, parts)
            headers, parts, size, ends_at = [], [], 0, time.monotonic() + _BLOCK_S
    if headers:
        yield _block(headers, parts)


def _block(headers: list[list[Any]], parts: Parts) -> pa.Table:
    payload = np.concatenate(parts)
    offsets = pa.py_buffer(np.array([0, payload.size], dtype=np.int64))
    column = pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, pa.py_buffer(payload)])
    return pa.table({"header": pa.array([json.dumps(headers)]), "payload": column})


def unpack_block(block: pa.Table) -> Iterator[PackedBatch]:
    """Yields the batches in a block of `pack_blocks`."""
    for row in range(block.num_rows):
        payload = np.frombuffer(block["payload"][row].as_buffer(), np.uint8)
        start = 0
        for step, micro_batch, sizes in json.loads(block["header"][row].as_py()):
            ends = start + np.cumsum(sizes)
            parts = [payload[end - size : end] for end, size in zip(ends.tolist(), sizes, strict=True)]
            start = int(ends[-1])
            yield PackedBatch(step, micro_batch, np.frombuffer(parts[0].tobytes(), np.int64), parts[1:])
