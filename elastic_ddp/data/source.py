"""Reads the rows of the chunks of a plan, in order, from Parquet files.

Each of a worker's lanes needs one window in memory. The next windows are read ahead by threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from elastic_ddp.data.columns import Int64Array, widen
from elastic_ddp.data.files import check_version, read_footer, read_row_group
from elastic_ddp.data.index import DatasetIndex
from elastic_ddp.data.order import Chunk, FeedPlan
from elastic_ddp.data.packing import Content
from elastic_ddp.errors import DataError

_WINDOWS_AHEAD = 2  # windows that are read before they are needed; lanes end their windows at different steps
_CACHED_FOOTERS = 256
WindowKey = tuple[int, int, int]  # epoch, lane, window
Window = tuple[pa.Table, Int64Array]
"""Rows from the first chunk that is needed on, in the order of the epoch, and their row ids."""


def read_chunks(index: DatasetIndex, plan: FeedPlan) -> Iterator[Content]:
    """Yields the chunks of the plan in order, as dicts of Arrow columns."""
    pool = ThreadPoolExecutor(_WINDOWS_AHEAD, thread_name_prefix="windows")
    try:
        chunks = _with_windows(plan.chunks(), lambda chunk: pool.submit(_load_window, index, chunk))
        for chunk, (window, row_ids) in chunks:
            start = len(row_ids) - (chunk.window_stop - chunk.start)
            num_rows = chunk.stop - chunk.start
            columns = dict(zip(index.columns, window.slice(start, num_rows).columns, strict=True))
            yield Content(chunk.key, row_ids[start : start + num_rows], columns)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _with_windows(chunks: Iterator[Chunk], load: Callable[[Chunk], Future[Window]]) -> Iterator[tuple[Chunk, Window]]:
    """Yields each chunk with its window. Loads the next few windows ahead, and drops windows that are used up."""
    coming: deque[tuple[Chunk, WindowKey]] = deque()
    loading: dict[WindowKey, Future[Window]] = {}
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


def _load_window(index: DatasetIndex, chunk: Chunk) -> Window:
    """Reads the window of a chunk, from this chunk on."""
    lane = chunk.lane
    tables = []
    row_ids = []
    for group, start, stop in lane.segments(chunk.window):
        table = _read_group(index, group)
        rows = lane.rows_of_segment(group, start, stop)
        tables.append(table.slice(start, stop - start) if lane.plan.weights is None else table.take(pa.array(rows)))
        row_ids.append(index.first_row_ids[group] + rows)
    permutation = lane.permutation(chunk.window)
    inside = slice(chunk.start - int(lane.window_starts[chunk.window]), None)
    try:
        window = pa.concat_tables(tables).combine_chunks()
        ids = np.concatenate(row_ids)
        if permutation is None:
            return window.slice(inside.start), ids[inside]
        return window.take(pa.array(permutation[inside])).combine_chunks(), ids[permutation[inside]]
    except pa.ArrowException as error:  # a list has more than 2**31 elements
        reason = str(error).partition(", consider")[0]  # Arrow suggests a cast
        raise DataError(
            f"the {len(tables)} row groups of a window cannot be joined: {reason}. Lower data.window_row_groups (now "
            f"{lane.plan.options.window_row_groups}), write smaller row groups, or leave the column out of "
            "data.columns."
        ) from error


def _read_group(index: DatasetIndex, group: int) -> pa.Table:
    file = index.files[int(index.group_file[group])]
    metadata = _footer(file.path, file.size, file.version)
    table = read_row_group(file.path, file.size, metadata, int(index.group_number[group]), index.columns)
    return pa.table({name: widen(table.column(name)) for name in index.columns})


@lru_cache(maxsize=_CACHED_FOOTERS)
def _footer(path: str, size: int, version: str) -> pq.FileMetaData:
    check_version(path, size, version)
    return read_footer(path, size)
