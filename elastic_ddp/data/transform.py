"""Transforms the chunks that `source` reads: Arrow to NumPy, the user's function, a check of its result, packing."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from elastic_ddp.data.columns import Array, to_numpy
from elastic_ddp.data.order import transform_generator
from elastic_ddp.data.source import COLUMN_PREFIX, BlockFiller, as_binary
from elastic_ddp.data.split import ChunkContent
from elastic_ddp.data.user_calls import describe_rows, recorded
from elastic_ddp.data.user_code import environment
from elastic_ddp.errors import ConfigError, DataError, text_of
from elastic_ddp.seeding import seed_all

Arrays = dict[str, Array]
Transform = Callable[[Arrays, np.random.Generator], Arrays]
"""Maps the rows of a chunk to as many rows, one array of shape (rows, ...) for each column.

The generator and the global generators of torch, NumPy and Python are seeded for the chunk, so that their numbers are
the same at every world size and after every resume."""


class PrepareChunks:
    """The transform stage of the pipeline, for `Dataset.map_batches`."""

    def __init__(
        self, seed: int, transform: Transform | None, locate: Callable[[list[int]], str] = describe_rows
    ) -> None:
        self._seed = seed
        self._transform = transform
        self._locate = locate
        self._filler = BlockFiller()

    def __call__(self, block: pa.Table) -> Iterator[pa.Table]:
        for row in range(block.num_rows):
            epoch, lane, number, ends_block = block["chunk"][row].as_py()
            row_ids = block["row_ids"][row].values.to_numpy()
            names = [name.removeprefix(COLUMN_PREFIX) for name in block.column_names if name.startswith(COLUMN_PREFIX)]
            columns = {name: to_numpy(name, block[COLUMN_PREFIX + name][row].values) for name in names}
            if self._transform is not None:
                chunk = epoch, lane, number
                try:
                    with recorded("the transform", _title(chunk), row_ids):
                        columns = apply_transform(self._transform, columns, self._seed, chunk, len(row_ids))
                except DataError as error:
                    raise DataError(f"{error}\nThe chunk has {self._locate(row_ids.tolist())}.") from error
            check_tensors(columns, transformed=self._transform is not None)
            header = [epoch, lane, number, {name: [array.dtype.str, array.shape] for name, array in columns.items()}]
            packed = {"header": pa.array([json.dumps(header)]), "row_ids": as_binary(row_ids)}
            packed |= {COLUMN_PREFIX + name: as_binary(array) for name, array in columns.items()}
            yield self._filler.pad(pa.table(packed), ends_block=bool(ends_block))


def _title(chunk: tuple[int, int, int]) -> str:
    return "epoch {}, lane {}, chunk {}".format(*chunk)


def apply_transform(
    transform: Transform, rows: Arrays, seed: int, chunk: tuple[int, int, int], num_rows: int
) -> Arrays:
    """Returns the transformed rows of a chunk, which is (epoch, lane, number)."""
    had_torch = "torch" in sys.modules
    writable = {name: np.array(values) for name, values in rows.items()}
    generator = transform_generator(seed, *chunk)
    seed_all(seed, "transform", *chunk)
    title = _title(chunk)
    try:
        result = transform(writable, generator)
    except ConfigError:  # it cannot be loaded
        raise
    except (Exception, SystemExit) as error:
        advice = environment().advise(error)
        text = f"the transform raised {text_of(error, repr)} in {title}:\n{traceback.format_exc().rstrip()}\n{advice}"
        raise DataError(text.rstrip()) from error
    if not had_torch and "torch" in sys.modules:  # the call imported torch, whose generator was not seeded then
        return apply_transform(transform, rows, seed, chunk, num_rows)
    _check_result(result, num_rows, title)
    return result


def _check_result(result: object, num_rows: int, title: str) -> None:
    """Raises a DataError if a transform returned something else than a dict of arrays with a row for each row."""
    if not isinstance(result, dict) or not result:
        raise DataError(
            f"the transform returned {'an empty dict' if result == {} else type(result).__name__}. Return a dict of "
            "NumPy arrays, one for each column."
        )
    for name, values in result.items():
        if not isinstance(values, np.ndarray) or values.ndim == 0:
            raise DataError(
                f"the transform returned a {type(values).__name__} for {name!r}. Return a NumPy array of shape "
                "(rows, ...)."
            )
        if len(values) != num_rows:
            raise DataError(
                f"the transform got {num_rows} rows and returned {len(values)} for {name!r} in {title}. Return every "
                "row once. Drop rows when the data set is written, or mark them with a column of weights."
            )


def check_columns(schema: pa.Schema) -> None:
    """Raises a DataError for a column type that no tensor can hold, before any row is read."""
    kinds = {field.name: field.type for field in schema if not isinstance(field.type, pa.BaseExtensionType)}
    check_tensors({name: to_numpy(name, pa.array([], kind)) for name, kind in kinds.items()}, transformed=False)


def check_tensors(rows: Arrays, *, transformed: bool) -> None:
    """Raises a DataError for a column that no tensor can hold."""
    for name, values in rows.items():
        kind = values.dtype.kind
        if kind not in "biufc":
            odd = "strings, structs, decimals or lists of different lengths"
            contents = odd if kind in "OUST" else f"{values.dtype} values"
            fix = (
                f"Return numbers for {name!r} from the transform, or leave it out of the result."
                if transformed
                else f"Convert {name!r} to numbers in a transform or a collate_fn, or leave it out of data.columns."
            )
            raise DataError(f"column {name!r} holds {contents}, which no tensor can hold. {fix}")
        if values.dtype.itemsize > (16 if kind == "c" else 8) or not values.dtype.isnative:
            raise DataError(
                f"column {name!r} holds {values.dtype} values, which no tensor can hold. Convert them with astype to "
                "float64 or narrower, in this machine's byte order."
            )


def unpack(block: pa.Table) -> Iterator[ChunkContent]:
    """Yields the chunks in a block that `PrepareChunks` returned."""
    for row in range(block.num_rows):
        epoch, lane, number, layout = json.loads(block["header"][row].as_py())
        columns = {
            name: np.ndarray(shape, dtype, block[COLUMN_PREFIX + name][row].as_buffer())
            for name, (dtype, shape) in layout.items()
        }
        row_ids = np.frombuffer(block["row_ids"][row].as_buffer(), np.int64)
        yield ChunkContent(epoch=epoch, lane=lane, number=number, row_ids=row_ids, columns=columns)
