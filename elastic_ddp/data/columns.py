"""Converts Arrow columns to NumPy arrays, and checks whether a tensor can hold them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_ddp.errors import DataError

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Int64Array = npt.NDArray[np.int64]


def check_names(selected: Sequence[str], available: Collection[str], where: str) -> None:
    """Raises a DataError if `data.columns` selects a column that does not exist."""
    missing = [name for name in selected if name not in available]
    if missing:
        raise DataError(
            f"data.columns names {', '.join(map(repr, missing))}, but {where} has no such column. Choose from "
            f"{', '.join(available)}."
        )


def to_numpy(name: str, values: pa.Array) -> Array:
    """Returns a column's values as an array, without a copy where the memory layout allows it.

    Numbers and booleans keep their type; a null floating-point number becomes NaN. Tensors, and lists of equal length,
    become an array of shape (rows, length, ...). Other lists become an object array of arrays, and all else an object
    array of Python values. A null in an integer, boolean or list column raises a DataError.
    """
    if isinstance(values, pa.ExtensionArray):
        if hasattr(values, "to_numpy_ndarray"):  # a fixed-shape tensor of Arrow
            return values.to_numpy_ndarray()
        if type(values).__module__.startswith("ray."):
            return np.asarray(values.to_numpy(zero_copy_only=False))
        values = values.storage
    _check_nulls(name, values)
    return _lists(name, values) if _is_list(values.type) else values.to_numpy(zero_copy_only=False)


def one_array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Returns a column as one array, without a copy if it has one chunk."""
    if isinstance(column, pa.Array):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def check_nulls(name: str, values: pa.Array) -> None:
    """Raises a DataError for a null that `to_numpy` refuses, also inside of lists."""
    if not isinstance(values, pa.ExtensionArray):
        _check_nulls(name, values)
        if _is_list(values.type):
            check_nulls(name, values.flatten())


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _check_nulls(name: str, values: pa.Array) -> None:
    kind = values.type
    if values.null_count and (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise DataError(
            f"column {name!r} ({kind}) has nulls, which an array of {kind} cannot hold. Fill them with a value, "
            "convert the column to floating-point numbers, or leave it out of data.columns."
        )
    if values.null_count and _is_list(kind):
        raise DataError(
            f"column {name!r} ({kind}) has nulls instead of lists. Write empty lists, or leave the column out of "
            "data.columns."
        )


def _lists(name: str, values: pa.Array) -> Array:
    if pa.types.is_fixed_size_list(values.type):
        length = values.type.list_size
    else:
        lengths = values.value_lengths().to_numpy()
        length = int(lengths[0]) if len(lengths) else 0
        if (lengths != length).any():
            ragged = np.empty(len(values), dtype=object)
            inner = np.array(to_numpy(name, values.flatten()))  # writable: torch can write to read-only memory, and die
            ends = np.cumsum(lengths)
            ragged[:] = [inner[end - count : end] for end, count in zip(ends, lengths, strict=True)]
            return ragged
    inner = to_numpy(name, values.flatten())
    return inner.reshape(len(values), length, *inner.shape[1:])


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


def widen(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Decodes dictionaries, and gives strings 64-bit offsets, also in lists and structs: a window may exceed 2 GiB.

    Lists keep their offsets. `take` builds an index of every element, which has twice the size with 64-bit offsets.
    """
    if pa.types.is_dictionary(column.type):  # in structs, Arrow cannot cast dictionaries with nulls
        column = column.cast(column.type.value_type)
    kind = _wide(column.type)
    return column if kind == column.type else column.cast(kind)


def _wide(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string(kind) or pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary(kind) or pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_list(kind):
        return pa.list_(_wide_field(kind.value_field))
    if pa.types.is_large_list(kind):
        return pa.large_list(_wide_field(kind.value_field))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_wide_field(kind.value_field), kind.list_size)
    if pa.types.is_struct(kind):
        return pa.struct([_wide_field(field) for field in kind])
    return kind


def _wide_field(field: pa.Field) -> pa.Field:
    return field.with_type(_wide(field.type))
