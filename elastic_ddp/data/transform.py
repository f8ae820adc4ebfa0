"""Calls the user's transform on the rows of a chunk, and checks its result."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

import numpy as np

from elastic_ddp.data.columns import Arrays
from elastic_ddp.data.order import transform_generator
from elastic_ddp.data.packing import Key, title_of
from elastic_ddp.data.user_code import environment
from elastic_ddp.errors import ConfigError, DataError, text_of
from elastic_ddp.seeding import seed_all

Transform = Callable[[Arrays, np.random.Generator], Arrays]
"""Maps the rows of a chunk to as many rows, one array of shape (rows, ...) for each column.

The generator and the global generators of torch, NumPy and Python are seeded for the chunk, so that their numbers are
the same at every world size and after every resume."""


def apply_transform(transform: Transform, rows: Arrays, seed: int, chunk: Key, num_rows: int) -> Arrays:
    """Returns the transformed rows of a chunk, which is (epoch, lane, number)."""
    had_torch = "torch" in sys.modules
    writable = {name: np.array(values) for name, values in rows.items()}
    epoch, lane, number = chunk
    generator = transform_generator(seed, epoch, lane, number)
    seed_all(seed, "transform", *chunk)
    title = title_of(chunk)
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
