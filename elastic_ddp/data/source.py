"""Reads the chunks of a plan in order, for a Ray Data source with one read task.

A row of Ray Data is a whole chunk: each column is a list of one element. Ray Data cuts and joins blocks only between
rows, so chunks stay whole and in order. One task reads for a worker, because only chunks that are interleaved over the
lanes keep memory low: the task holds one window for each of the worker's lanes.

The blocks of a pipeline double in size: the first holds the chunks of one step, the next twice as many, and so on. With
small chunks, a full block holds those of hundreds of steps, and reading it would delay the first step after a
membership change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from elastic_ddp.data.columns import Array, widen
from elastic_ddp.data.files import check_version, read_footer, read_row_group
from elastic_ddp.data.index import DatasetIndex
from elastic_ddp.data.order import Chunk, FeedPlan
from elastic_ddp.errors import DataError

BLOCK_BYTES = 8 << 20
"""The size of a block, which holds several chunks. Ray Data needs about 2 ms for a block of any size."""
COLUMN_PREFIX = "column:"
"""The prefix of the user's columns in a block."""
_WINDOWS_AHEAD = 2  # windows that are read before they are needed; lanes end their windows at different steps
_CACHED_FOOTERS = 256
WindowKey = tuple[int, int, int]  # epoch, lane, window


def read_chunks(index: DatasetIndex, plan: FeedPlan) -> Iterator[pa.Table]:
    """Yields a table of one row for each chunk of the plan, in order."""
    in_first_step = sum(1 for _ in replace(plan, last_step=plan.first_step + 1).chunks())
    last_in_block = in_first_step
    filler = BlockFiller()
    for position, (chunk, rows) in enumerate(rows_of_chunks(index, plan), start=1):
        ends_block = position == last_in_block
        wrapped = wrap([chunk.lane.epoch, chunk.lane.number, chunk.number, int(ends_block)], rows)
        yield filler.pad(wrapped, ends_block=ends_block)
        if ends_block:  # double; the block may still be full earlier, here or after the transform
            last_in_block = 2 * position + in_first_step


def rows_of_chunks(index: DatasetIndex, plan: FeedPlan) -> Iterator[tuple[Chunk, pa.Table]]:
    """Yields each chunk of the plan with its rows, which have their row ids in a column `row_ids`, in order."""
    pool = ThreadPoolExecutor(_WINDOWS_AHEAD, thread_name_prefix="windows")
    try:
        chunks = _with_windows(plan.chunks(), lambda chunk: pool.submit(_load_window, index, plan, chunk))
        for chunk, window in chunks:
            start = window.num_rows - (chunk.window_stop - chunk.start)  # it begins at the first chunk that is needed
            yield chunk, window.slice(start, chunk.stop - chunk.start)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class BlockFiller:
    """Tracks the size of the block that Ray Data is filling, and pads it to end it early.

    Ray Data ends a block when it exceeds `BLOCK_BYTES`. It splits a block of more than one and a half times that size,
    so a block that should end early may end late. No chunk is lost.
    """

    def __init__(self) -> None:
        self._bytes = 0

    def pad(self, table: pa.Table, *, ends_block: bool) -> pa.Table:
        """Returns the table with a column `padding`, which fills the block if the table should end it."""
        self._bytes += table.nbytes + _NO_PADDING.nbytes
        padding = max(BLOCK_BYTES + 1 - self._bytes, 0) if ends_block else 0
        if self._bytes + padding > BLOCK_BYTES:
            self._bytes = 0
        return table.append_column("padding", as_binary(np.zeros(padding, np.uint8)) if padding else _NO_PADDING)


def as_binary(values: Array) -> pa.Array:
    """Returns an array's memory as the only value of a binary array, without a copy."""
    data = pa.py_buffer(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
    offsets = pa.py_buffer(np.array([0, data.size], dtype=np.int64))
    return pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, data])


_NO_PADDING = as_binary(np.zeros(0, np.uint8))


def _with_windows(
    chunks: Iterator[Chunk], load: Callable[[Chunk], Future[pa.Table]]
) -> Iterator[tuple[Chunk, pa.Table]]:
    """Yields each chunk with its window. Loads the next few windows ahead, and drops those that are used up."""
    coming: deque[tuple[Chunk, WindowKey]] = deque()
    loading: dict[WindowKey, Future[pa.Table]] = {}
    ahead: set[WindowKey] = set()
    while True:
        while len(ahead) < _WINDOWS_AHEAD and (chunk := next(chunks, None)) is not None:
            key = chunk.lane.epoch, chunk.lane.number, chunk.window
            coming.append((chunk, key))
            if key not in loading:
                loading[key] = load(chunk)
                ahead.add(key)
        if not coming:
            return
        chunk, key = coming.popleft()
        window = loading[key].result()
        ahead.discard(key)
        if chunk.stop == chunk.window_stop:
            del loading[key]
        yield chunk, window


def _load_window(index: DatasetIndex, plan: FeedPlan, chunk: Chunk) -> pa.Table:
    """Returns a window's rows from a chunk on, in the order of the epoch, with their row ids."""
    tables = []
    for group, start, stop in chunk.lane.segments(chunk.window):
        table, rows = _read_group(index, group), plan.rows_of_segment(chunk.lane.epoch, group, start, stop)
        table = table.slice(start, stop - start) if plan.weights is None else table.take(pa.array(rows))
        tables.append(table.append_column("row_ids", pa.array(index.first_row_ids[group] + rows)))
    try:
        return _permuted(pa.concat_tables(tables).combine_chunks(), chunk)
    except pa.ArrowException as error:  # a list has more than 2**31 elements
        reason, _, _ = str(error).partition(", consider")  # Arrow suggests a cast
        raise DataError(
            f"the {len(tables)} row groups of a window cannot be joined: {reason}. Lower data.window_row_groups (now "
            f"{plan.options.window_row_groups}), write smaller row groups, or leave the column out of data.columns."
        ) from error


def _permuted(window: pa.Table, chunk: Chunk) -> pa.Table:
    """Returns the rows of a window from a chunk on, in the order of the epoch."""
    permutation = chunk.lane.permutation(chunk.window)
    skipped = window.num_rows - (chunk.window_stop - chunk.start)
    if permutation is None:
        return window.slice(skipped)
    return window.take(pa.array(permutation[skipped:])).combine_chunks()


def _read_group(index: DatasetIndex, group: int) -> pa.Table:
    file = index.files[int(index.group_file[group])]
    number, metadata = int(index.group_number[group]), _footer(file.path, file.size, file.version)
    table = read_row_group(file.path, file.size, metadata, number, index.columns)
    return pa.table({COLUMN_PREFIX + name: widen(table.column(name)) for name in index.columns})


@lru_cache(maxsize=_CACHED_FOOTERS)
def _footer(path: str, size: int, version: str) -> pq.FileMetaData:
    check_version(path, size, version)
    return read_footer(path, size)


def wrap(key: list[int], rows: pa.Table) -> pa.Table:
    """Returns a table of one row: the key in a column `chunk`, and each column as a list."""
    wrapped = {"chunk": pa.array([key], pa.list_(pa.int64()))}
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        values = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()  # no copy of a slice
        wrapped[name] = pa.LargeListArray.from_arrays(pa.array([0, len(values)], pa.int64()), values)
    return pa.table(wrapped)
