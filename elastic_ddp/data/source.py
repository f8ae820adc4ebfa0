"""A worker's Ray Data pipeline: a custom Datasource that reads chunks in order, then the transform as `map_batches`.

One row of the pipeline's blocks is a whole chunk: every column is wrapped into a list of one element. Ray Data cuts and
joins blocks between rows as it sees fit, and so never cuts a chunk, and chunks stay in the order in which they are
needed. One read task reads for the pipeline, because only chunks that come interleaved over the lanes keep memory low:
it holds one window of each of the worker's lanes, and what comes out of the transform waits by the chunk, not by the
window.

A pipeline starts slowly: its first block holds the chunks of one step, the next twice as many, then four times as
many. It begins when membership changes, and where chunks are small a full block is that of hundreds of steps, whose
reading would take the cores from the first ones.
"""

from __future__ import annotations

import json
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from elastic_ddp.data.columns import to_numpy
from elastic_ddp.data.files import check_version, read_footer, read_row_group
from elastic_ddp.data.index import DatasetIndex
from elastic_ddp.data.order import Chunk, FeedPlan, Int64Array, transform_generator
from elastic_ddp.errors import DataError

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Transform = Callable[[Arrays, np.random.Generator], Arrays]
"""Rows of one chunk in, as many rows out, as one array of shape `(rows, ...)` for each column. All randomness has to
come from the generator, which is the same whenever and wherever this chunk of this epoch is transformed."""

BLOCK_BYTES = 8 << 20
"""Chunks travel together up to this: a block costs Ray Data about 2 ms, whatever its size."""
_WINDOWS_AHEAD = 2  # windows read before they are needed; lanes end their windows at different steps
_OPEN_FILES = 256  # parsed footers that a read task keeps

_WIDEST = {"c": 16}
"""Bytes of the widest numbers that torch has, by kind; 8 of the others."""
_COLUMN = "column:"  # prefix of the user's columns in a block, whose other columns are ours


@dataclass(frozen=True, eq=False)
class PreparedChunk:
    """A chunk as it came out of the pipeline."""

    epoch: int
    lane: int
    number: int
    row_ids: Int64Array
    columns: Arrays
    """Read-only views of the object store's memory, `(rows, ...)`."""


class ChunkSource(Datasource):
    """Reads the chunks of a plan in the order in which they are needed."""

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
    """A table of one row for each chunk of the plan, see the module's docstring."""
    pool = ThreadPoolExecutor(_WINDOWS_AHEAD, thread_name_prefix="windows")
    in_first_step = sum(1 for _ in replace(plan, last_step=plan.first_step + 1).chunks())
    last_in_block = in_first_step
    try:
        block = _Block()
        chunks = _with_windows(plan.chunks(), lambda chunk: pool.submit(_load_window, index, chunk))
        for position, (chunk, window) in enumerate(chunks, start=1):
            start = window.num_rows - (chunk.window_stop - chunk.start)  # it begins at the first chunk that is needed
            ends_block = position == last_in_block
            wrapped = _wrap(chunk, window.slice(start, chunk.stop - chunk.start), ends_block=ends_block)
            yield block.add(wrapped, send=ends_block)
            if ends_block:  # the next one holds twice as many; it may be full before, here or after the transform
                last_in_block = 2 * position + in_first_step
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class _Block:
    """Follows how full the block is that Ray Data is filling, and has it sent early where that is asked for.

    Ray Data sends a block when it is larger than `BLOCK_BYTES`; ballast makes up the difference. It counts among what
    waits in the object store, so that early blocks fill the room as full ones do, with less that was read for them.

    A block that a chunk of half of it and more takes beyond one and a half is cut by Ray between chunks of unequal
    sizes, and what is left over waits for the next block: nothing is lost, and an early block may come late.
    """

    def __init__(self) -> None:
        self._bytes = 0

    def add(self, table: pa.Table, *, send: bool) -> pa.Table:
        self._bytes += table.nbytes + _NO_BALLAST.nbytes
        ballast = max(BLOCK_BYTES + 1 - self._bytes, 0) if send else 0
        if self._bytes + ballast > BLOCK_BYTES:
            self._bytes = 0
        return table.append_column("ballast", _as_binary(np.zeros(ballast, np.uint8)) if ballast else _NO_BALLAST)


def _with_windows(
    chunks: Iterator[Chunk], load: Callable[[Chunk], Future[pa.Table]]
) -> Iterator[tuple[Chunk, pa.Table]]:
    """Each chunk with its window, of which the next few are being loaded and those used up are dropped."""
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
    """A window's rows from a chunk on, in the order of the epoch, with their row ids."""
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
            f"{file.path} is not the file that was indexed: its row group {in_file} does not have {rows} rows. A run "
            "uses one data set from its first step to its last: put the file back, or start a run with another name"
        )
    table = read_row_group(file.path, file.size, metadata, in_file, index.columns)
    return pa.table({_COLUMN + name: _widen(table.column(name)) for name in index.columns})


@lru_cache(maxsize=_OPEN_FILES)
def _footer(path: str, size: int, version: str, footer_bytes: int) -> pq.FileMetaData:
    check_version(path, size, version)
    return read_footer(path, size, footer_bytes)[0]


def _widen(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Dictionaries are decoded, and strings get 64-bit offsets: a window of them may well be larger than 2 GiB."""
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


class PrepareChunks:
    """The pipeline's `map_batches` stage: Arrow to NumPy, the user's transform, and its result checked and packed."""

    def __init__(self, seed: int, transform: Transform | None) -> None:
        self._seed = seed
        self._transform = transform
        self._block = _Block()

    def __call__(self, block: pa.Table) -> Iterator[pa.Table]:
        for position in range(block.num_rows):
            epoch, lane, number = (block.column(name)[position].as_py() for name in ("epoch", "lane", "number"))
            row_ids = block.column("row_ids")[position].values.to_numpy()
            rows = {
                name.removeprefix(_COLUMN): to_numpy(name.removeprefix(_COLUMN), block.column(name)[position].values)
                for name in block.column_names
                if name.startswith(_COLUMN)
            }
            if self._transform is not None:
                generator = transform_generator(self._seed, epoch, lane, number)
                rows = _run(
                    self._transform, rows, generator, len(row_ids), f"epoch {epoch}, lane {lane}, chunk {number}"
                )
            _check_tensors(rows, transformed=self._transform is not None)
            packed = _pack(epoch, lane, number, row_ids, rows)
            yield self._block.add(packed, send=block.column("ends_block")[position].as_py())


def _run(transform: Transform, rows: Arrays, generator: np.random.Generator, num_rows: int, where: str) -> Arrays:
    writable = {name: np.array(values) for name, values in rows.items()}
    try:
        result = transform(writable, generator)
    except Exception as error:
        raise DataError(f"the transform raised {error!r} in {where}:\n{traceback.format_exc().rstrip()}") from error
    if not isinstance(result, dict) or not result:
        raise DataError(
            f"the transform returned {'an empty dict' if result == {} else type(result).__name__}; it has to "
            "return a dict of NumPy arrays, one for each column"
        )
    for name, values in result.items():
        if not isinstance(values, np.ndarray) or values.ndim == 0:
            raise DataError(
                f"the transform returned a {type(values).__name__} for {name!r}; it has to be a NumPy array of "
                "shape (rows, ...)"
            )
        if len(values) != num_rows:
            raise DataError(
                f"the transform got {num_rows} rows and returned {len(values)} for {name!r} in {where}; it has to "
                "return every row it gets, once: leave rows out when the data set is written, or mark them with a "
                "column of weights"
            )
    return result


def check_columns(schema: pa.Schema) -> None:
    """For the driver of a run without a transform: what is wrong with every row is known before one is read.

    Raises:
        DataError: names a column that no tensor can hold.
    """
    kinds = {each.name: each.type for each in schema if not isinstance(each.type, pa.BaseExtensionType)}
    _check_tensors({name: to_numpy(name, pa.array([], kind)) for name, kind in kinds.items()}, transformed=False)


def _check_tensors(rows: Arrays, *, transformed: bool) -> None:
    for name, values in rows.items():
        if values.dtype.kind in "biufc" and (
            values.dtype.itemsize > _WIDEST.get(values.dtype.kind, 8) or not values.dtype.isnative
        ):
            raise DataError(
                f"column {name!r} holds {values.dtype} values, which no tensor can hold: convert them with astype, to "
                "float64 or narrower and to this machine's byte order"
            )
        if values.dtype.kind not in "biufc":
            fix = (
                f"return numbers for {name!r} from the transform, or leave it out of what it returns"
                if transformed
                else f"turn {name!r} into numbers with a transform, or choose other columns with data.columns"
            )
            held = (
                "strings, structs, decimals or lists of different lengths"
                if values.dtype.kind in "OUST"
                else f"{values.dtype} values"
            )
            raise DataError(f"column {name!r} holds {held}, which no tensor can hold: {fix}")


def _pack(epoch: int, lane: int, number: int, row_ids: Int64Array, rows: Arrays) -> pa.Table:
    header = {name: [values.dtype.str, values.shape] for name, values in rows.items()}
    packed = {
        "epoch": pa.array([epoch]),
        "lane": pa.array([lane]),
        "number": pa.array([number]),
        "header": pa.array([json.dumps(header)]),
        "row_ids": _as_binary(row_ids),
    }
    packed.update({_COLUMN + name: _as_binary(values) for name, values in rows.items()})
    return pa.table(packed)


def _as_binary(values: Array) -> pa.Array:
    """The array's memory as the only value of a binary array, without a copy."""
    data = pa.py_buffer(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
    offsets = pa.py_buffer(np.array([0, data.size], dtype=np.int64))
    return pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, data])


_NO_BALLAST = _as_binary(np.zeros(0, np.uint8))


def unpack(block: pa.Table) -> Iterator[PreparedChunk]:
    """The chunks in a block that came out of the pipeline."""
    for position in range(block.num_rows):
        row = {name: block.column(name)[position] for name in block.column_names}
        header = json.loads(row["header"].as_py())
        columns = {
            name: np.ndarray(shape, dtype, row[_COLUMN + name].as_buffer()) for name, (dtype, shape) in header.items()
        }
        yield PreparedChunk(
            epoch=row["epoch"].as_py(),
            lane=row["lane"].as_py(),
            number=row["number"].as_py(),
            row_ids=np.frombuffer(row["row_ids"].as_buffer(), np.int64),
            columns=columns,
        )
