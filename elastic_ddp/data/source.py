"""Reads the chunks of a plan in order: a Ray Data source with one read task.

A row of Ray Data is a whole chunk: each column is a list of one element. Ray Data cuts and joins blocks between rows,
so it never cuts a chunk, and chunks stay in the order in which they are needed. One task reads for a worker, because
only chunks that are interleaved over the lanes keep memory low: the task holds one window for each of the worker's
lanes, and transformed rows wait as chunks, not as windows.

The blocks of a pipeline double in size: the first holds the chunks of one step, the next twice as many, and so on. A
pipeline starts when membership changes. With small chunks, a full block holds those of hundreds of steps, and reading
it would take the cores from the first ones.
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
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from elastic_ddp.data.columns import Array
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


class ChunkSource(Datasource):
    """A Ray Data source with one task, which yields chunks in the order in which they are needed."""

    def __init__(self, read: Callable[[], Iterator[pa.Table]]) -> None:
        super().__init__()
        self._read = read

    def get_name(self) -> str:
        return "Chunks"

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(self, parallelism: int, *args: object, **kwargs: object) -> list[ReadTask]:
        return [ReadTask(self._read, BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None))]


def read_chunks(index: DatasetIndex, plan: FeedPlan) -> Iterator[pa.Table]:
    """Yields a table of one row for each chunk of the plan, in order.

    Raises:
        DataError: a file changed, is missing or cannot be read.
    """
    pool = ThreadPoolExecutor(_WINDOWS_AHEAD, thread_name_prefix="windows")
    in_first_step = sum(1 for _ in replace(plan, last_step=plan.first_step + 1).chunks())
    last_in_block = in_first_step
    try:
        filler = BlockFiller()
        chunks = _with_windows(plan.chunks(), lambda chunk: pool.submit(_load_window, index, chunk))
        for position, (chunk, window) in enumerate(chunks, start=1):
            start = window.num_rows - (chunk.window_stop - chunk.start)  # it begins at the first chunk that is needed
            ends_block = position == last_in_block
            wrapped = _wrap(chunk, window.slice(start, chunk.stop - chunk.start), ends_block=ends_block)
            yield filler.pad(wrapped, ends_block=ends_block)
            if ends_block:  # double; the block may still be full earlier, here or after the transform
                last_in_block = 2 * position + in_first_step
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class BlockFiller:
    """Tracks the size of the block that Ray Data is filling, and pads it to end it early.

    Ray Data ends a block when it exceeds `BLOCK_BYTES`. Padding counts towards the limit on waiting blocks: early
    blocks use it up like full ones, although less was read for them.

    Ray Data splits a block of more than one and a half times that size, if its chunks differ in size, and puts the rest
    into the next block. No chunk is lost, but a block that should end early may then end late.
    """

    def __init__(self) -> None:
        self._bytes = 0

    def pad(self, table: pa.Table, *, ends_block: bool) -> pa.Table:
        """Returns the table with a column `padding`, which fills the block if the table is to end it."""
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
    coming: deque[Chunk] = deque()
    loading: dict[tuple[int, int, int], Future[pa.Table]] = {}
    ahead: set[tuple[int, int, int]] = set()
    while True:
        while len(ahead) < _WINDOWS_AHEAD and (chunk := next(chunks, None)) is not None:
            coming.append(chunk)
            if (key := _window_key(chunk)) not in loading:
                loading[key] = load(chunk)
                ahead.add(key)
        if not coming:
            return
        chunk = coming.popleft()
        key = _window_key(chunk)
        window = loading[key].result()
        ahead.discard(key)
        if chunk.stop == chunk.window_stop:
            del loading[key]
        yield chunk, window


def _window_key(chunk: Chunk) -> tuple[int, int, int]:
    return chunk.lane.epoch, chunk.lane.number, chunk.window


def _load_window(index: DatasetIndex, chunk: Chunk) -> pa.Table:
    """Returns a window's rows from a chunk on, in the order of the epoch, with their row ids."""
    tables = []
    for group, start, stop in chunk.lane.segments(chunk.window):
        table = _read_group(index, group).slice(start, stop - start)
        row_ids = index.first_row_ids[group] + np.arange(start, stop)
        tables.append(table.append_column("row_ids", pa.array(row_ids)))
    window = pa.concat_tables(tables).combine_chunks()
    permutation = chunk.lane.permutation(chunk.window)
    skipped = window.num_rows - (chunk.window_stop - chunk.start)
    if permutation is None:
        return window.slice(skipped)
    return window.take(pa.array(permutation[skipped:])).combine_chunks()


def _read_group(index: DatasetIndex, group: int) -> pa.Table:
    number = int(index.group_file[group])
    file = index.files[number]
    metadata = _footer(file.path, file.size, file.version, int(index.footer_bytes[number]))
    in_file = int(index.group_number[group])
    rows = int(index.group_rows[group])
    if in_file >= metadata.num_row_groups or metadata.row_group(in_file).num_rows != rows:
        raise DataError(
            f"{file.path} changed since it was indexed: its row group {in_file} does not have {rows} rows. A run uses "
            "the same data set in every step. Restore the file, or use another run name."
        )
    table = read_row_group(file.path, file.size, metadata, in_file, index.columns)
    return pa.table({COLUMN_PREFIX + name: _widen(table.column(name)) for name in index.columns})


@lru_cache(maxsize=_CACHED_FOOTERS)
def _footer(path: str, size: int, version: str, footer_bytes: int) -> pq.FileMetaData:
    check_version(path, size, version)
    return read_footer(path, size, footer_bytes)[0]


def _widen(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Decodes dictionaries, and gives strings 64-bit offsets: a window of strings may exceed 2 GiB."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_string(column.type) or pa.types.is_string_view(column.type):
        return column.cast(pa.large_string())
    if pa.types.is_binary(column.type) or pa.types.is_binary_view(column.type):
        return column.cast(pa.large_binary())
    return column


def _wrap(chunk: Chunk, rows: pa.Table, *, ends_block: bool) -> pa.Table:
    wrapped = {
        "epoch": pa.array([chunk.lane.epoch]),
        "lane": pa.array([chunk.lane.number]),
        "number": pa.array([chunk.number]),
        "ends_block": pa.array([ends_block]),
    }
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        values = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        wrapped[name] = pa.LargeListArray.from_arrays(pa.array([0, len(values)], pa.int64()), values)
    return pa.table(wrapped)
