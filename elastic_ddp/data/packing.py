"""Moves Python objects between processes of a run: data sets to the data processes, chunks and batches to the worker.

Objects are pickled, because a `collate_fn` may return anything. The pickles come from another process of the same
run, never from a file. The memory of arrays and tensors is kept apart from the pickle, to copy it less often.
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from ray import cloudpickle

from elastic_ddp.data.columns import Array, Int64Array, one_array
from elastic_ddp.errors import DataError, format_exception

_BLOCK_BYTES = 8 << 20
_FIRST_TASK_BYTES = 64 << 10
_FIRST_BLOCK_S, _BLOCK_S = 0.02, 0.1
"""How long the first block is filled, so that its rows arrive soon, and other blocks: a block costs about 5 ms."""
_COLUMN = "column:"  # the prefix of the user's columns in a block of rows

Parts = list[Array]
"""A pickle, followed by the memory of the arrays and tensors in it: arrays of bytes."""
Key = tuple[int, ...]
"""(epoch, lane, number) of a chunk, or (step, number) of a micro-batch."""


def title_of(key: Key) -> str:
    """Returns the place of a chunk or micro-batch in the run, for messages."""
    return ("micro-batch {1} of step {0}" if len(key) == 2 else "epoch {}, lane {}, chunk {}").format(*key)


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
    """Returns where the file has a mapped array, which may be a slice; `memmap.offset` is for the whole mapping."""
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
class Content:
    """A chunk of rows, or a whole micro-batch."""

    key: Key
    row_ids: Int64Array
    """The rows' positions in the stored order of the data set, without padding."""
    value: Any
    """A dict of Arrow columns after reading; then a dict of arrays, or a batch; `Packed` on its way to the worker."""


@dataclass(frozen=True, eq=False)
class Packed:
    """A pickled value."""

    parts: Parts
    """Parts as from `dump`, in the read-only memory of the object store."""

    def load(self, new_memory: Callable[[int], Array] = lambda size: np.empty(size, np.uint8)) -> Any:
        """Returns the value, in memory of its own: `new_memory(size)` returns a writable array of bytes."""
        copies = [new_memory(len(part)) for part in self.parts[1:]]
        for copy, part in zip(copies, self.parts[1:], strict=True):
            copy[:] = part
        return load([self.parts[0], *copies])


def pack(content: Content) -> Content:
    """Returns the content with its value pickled. Raises a DataError if that is not possible."""
    try:
        return replace(content, value=Packed(dump(content.value)))
    except Exception as error:  # objects raise what they like
        raise DataError(
            f"the batch of {title_of(content.key)} cannot be sent to the worker: {format_exception(error)}. Return "
            "tensors, arrays, and values that can be pickled from collate_fn."
        ) from error


def pack_blocks(contents: Iterator[Content]) -> Iterator[pa.Table]:
    """Yields blocks of one row each, which hold contents."""
    headers: list[list[Any]] = []
    parts: Parts = []
    size = 0
    ends_at = time.monotonic() + _FIRST_BLOCK_S
    for content in map(pack, contents):
        own = [np.frombuffer(content.row_ids.tobytes(), np.uint8), *content.value.parts]
        headers.append([content.key, [len(part) for part in own]])
        parts += own
        size += sum(map(len, own))
        if size > _BLOCK_BYTES or time.monotonic() > ends_at:
            yield _block(headers, parts)
            headers, parts, size = [], [], 0
            ends_at = time.monotonic() + _BLOCK_S
    if headers:
        yield _block(headers, parts)


def _block(headers: list[list[Any]], parts: Parts) -> pa.Table:
    payload = np.concatenate(parts)
    offsets = pa.py_buffer(np.array([0, payload.size], dtype=np.int64))
    column = pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, pa.py_buffer(payload)])
    return pa.table({"header": pa.array([json.dumps(headers)]), "payload": column})


def unpack_block(block: pa.Table) -> Iterator[Content]:
    """Yields the contents of a block of `pack_blocks`, packed."""
    for row in range(block.num_rows):
        payload = np.frombuffer(block["payload"][row].as_buffer(), np.uint8)
        start = 0
        for key, sizes in json.loads(block["header"][row].as_py()):
            ends = start + np.cumsum(sizes)
            parts = [payload[end - size : end] for end, size in zip(ends.tolist(), sizes, strict=True)]
            start = int(ends[-1])
            yield Content(tuple(key), np.frombuffer(parts[0].tobytes(), np.int64), Packed(parts[1:]))


def pack_rows(rows: Iterator[Content]) -> Iterator[pa.Table]:
    """Yields blocks of one row each, which hold Arrow columns. Each block is a task: the first ones are small."""
    group: list[Content] = []
    size = 0
    limit = _FIRST_TASK_BYTES
    for each in rows:
        group.append(each)
        size += sum(column.nbytes for column in each.value.values())
        if size > limit:
            yield _rows(group)
            # Whole micro-batches are collated, which may multiply their size.
            limit = min(2 * limit, _BLOCK_BYTES) if len(each.key) == 3 else limit
            group, size = [], 0
    if group:
        yield _rows(group)


def _rows(group: list[Content]) -> pa.Table:
    table = pa.concat_tables(pa.table(each.value) for each in group)
    lists = {_COLUMN + name: one_array(values) for name, values in zip(table.column_names, table.columns, strict=True)}
    lists["row_ids"] = pa.array(np.concatenate([each.row_ids for each in group]))
    columns = {name: pa.LargeListArray.from_arrays([0, len(values)], values) for name, values in lists.items()}
    header = [[each.key, len(each.row_ids), len(next(iter(each.value.values())))] for each in group]
    return pa.table({"header": pa.array([json.dumps(header)]), **columns})


def unpack_rows(block: pa.Table) -> Iterator[Content]:
    """Yields the Arrow columns in a block of `pack_rows`."""
    for row in range(block.num_rows):
        lists = {name: block[name][row].values for name in block.column_names if name != "header"}
        row_ids = lists.pop("row_ids").to_numpy()
        first_id = start = 0
        for key, num_ids, num_rows in json.loads(block["header"][row].as_py()):
            columns = {name.removeprefix(_COLUMN): values.slice(start, num_rows) for name, values in lists.items()}
            yield Content(tuple(key), row_ids[first_id : first_id + num_ids], columns)
            first_id += num_ids
            start += num_rows
