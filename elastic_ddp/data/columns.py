"""From Arrow columns to NumPy arrays, by the column's type; by its values only where lists are to have one length."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_ddp.errors import DataError


def to_numpy(name: str, values: pa.Array) -> npt.NDArray[Any]:
    """A column's values as an array, without a copy where the memory allows it.

    Numbers and booleans keep their type. Lists whose rows all have the same length, and tensors written by Ray Data,
    become `(rows, length, ...)`; other lists become an object array of arrays. Strings, bytes and the rest become an
    object array of Python values. A missing floating-point number is NaN.

    Raises:
        DataError: an integer or boolean column holds nulls, which NumPy cannot represent.
    """
    if isinstance(values, pa.ExtensionArray):
        if hasattr(values, "to_numpy_ndarray"):  # Arrow's own fixed-shape tensors
            return values.to_numpy_ndarray()
        if type(values).__module__.startswith("ray."):
            return np.asarray(values.to_numpy(zero_copy_only=False))
        values = values.storage
    kind = values.type
    if pa.types.is_floating(kind):
        return values.to_numpy(zero_copy_only=False)
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        if values.null_count:
            raise DataError(
                f"column {name!r} ({kind}) holds nulls, which an array of {kind} cannot: fill them or make the column "
                "floating-point when the data set is written, or leave the column out with data.columns"
            )
        return values.to_numpy(zero_copy_only=False)
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _lists(name, values)
    return values.to_numpy(zero_copy_only=False)


def _lists(name: str, values: pa.Array) -> npt.NDArray[Any]:
    if values.null_count:
        raise DataError(
            f"column {name!r} ({values.type}) holds nulls in place of lists: write empty lists, or leave the column "
            "out with data.columns"
        )
    if pa.types.is_fixed_size_list(values.type):
        length = values.type.list_size
    else:
        lengths = values.value_lengths().to_numpy()
        length = int(lengths[0]) if len(lengths) else 0
        if (lengths != length).any():
            ragged = np.empty(len(values), dtype=object)
            inner = to_numpy(name, values.flatten())
            ends = np.cumsum(lengths)
            ragged[:] = [inner[end - count : end] for end, count in zip(ends, lengths, strict=True)]
            return ragged
    inner = to_numpy(name, values.flatten())
    return inner.reshape(len(values), length, *inner.shape[1:])
