"""SHA-256 digests of data sets in memory, by which a run notices that it resumes with other data."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from elastic_ddp.data.user_code import user_error
from elastic_ddp.errors import DataError
from elastic_ddp.seeding import preserve_rng_state, seed_all

_PROBED_ROWS = 8


def fetch_rows(data: Any, numbers: list[int], where: str = "") -> list[Any]:
    """Returns rows of a map-style data set. Like a DataLoader, it reads them at once if there is `__getitems__`.

    Raises a DataError with `where`, the place in the run.
    """
    at_once = getattr(data, "__getitems__", None)
    rows: list[Any] = []
    try:
        if at_once is not None:
            rows.extend(at_once(list(numbers)))
        else:
            for number in numbers:
                rows.append(data[number])
    except (Exception, SystemExit) as error:
        failed = numbers if at_once is not None else [numbers[len(rows)]]
        what = f"data[{failed[0]}]" if len(failed) == 1 else f"data.__getitems__({failed})"
        raise user_error(what, error, where) from error
    if len(rows) != len(numbers):
        raise DataError(
            f"data.__getitems__ returned {len(rows)} rows for {len(numbers)} row numbers{where}. Return one row for "
            "each number, in their order."
        )
    return rows


def of_columns(columns: Mapping[str, Any]) -> str:
    """Returns the digest of all values. An array mapped from a file counts by the file's path, size and time."""
    digest = hashlib.sha256()
    for name, values in columns.items():
        _update(digest, name)
        _update(digest, values)
    return digest.hexdigest()


def of_rows(data: Any) -> tuple[str, int | None]:
    """Returns the digest of a map-style data set, and a row that varies, if any.

    The name of the class, the length and a few rows count. Rows that differ between two reads with equal seeds do not,
    nor do objects in rows other than arrays, images, containers and plain values. The module of the class does not
    count either, because a class in a script has another module.
    """
    digest = hashlib.sha256()
    varying = None
    _update(digest, [type(data).__name__, len(data)])
    for row in np.unique(np.linspace(0, len(data) - 1, _PROBED_ROWS).astype(np.int64)).tolist():
        first = _row_digest(data, row)
        second = _row_digest(data, row)
        _update(digest, first if first == second else None)
        if first != second and varying is None:
            varying = row
    return digest.hexdigest(), varying


def _row_digest(data: Any, row: int) -> str:
    import torch

    digest = hashlib.sha256()
    with preserve_rng_state(torch.device("cpu")):
        seed_all(0, "probe", row)
        _update(digest, fetch_rows(data, [row])[0])
    return digest.hexdigest()


def _update(digest: Any, value: Any) -> None:
    """Adds a value to a digest, with its type, so that different values are unlikely to give the same digest."""
    if type(value).__module__ == "torch" and hasattr(value, "detach"):
        value = _tensor_as_array(value)
    if isinstance(value, pa.Array):
        with pa.ipc.new_stream(pa.PythonFile(_Sink(digest), "w"), pa.schema([("values", value.type)])) as writer:
            writer.write_batch(pa.record_batch([value], ["values"]))
    elif isinstance(value, np.memmap) and value.filename is not None:
        stat = os.stat(value.filename)
        _update(digest, [str(value.filename), stat.st_size, stat.st_mtime_ns, value.dtype.str, list(value.shape)])
    elif isinstance(value, np.ndarray | np.generic) or hasattr(value, "__array_interface__"):  # also PIL images
        array = np.asarray(value)
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        if array.dtype.hasobject:
            _update(digest, array.reshape(-1).tolist())
        else:
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    elif isinstance(value, Mapping):
        _update(digest, list(value.items()))
    elif isinstance(value, list | tuple):
        digest.update(f"{type(value).__name__}{len(value)}".encode())
        for element in value:
            _update(digest, element)
    elif value is None or isinstance(value, str | bytes | int | float | complex):
        digest.update(f"{type(value).__name__}{value!r};".encode())
    else:
        digest.update(type(value).__qualname__.encode())


def _tensor_as_array(tensor: Any) -> Any:
    import torch

    dense = tensor.detach().cpu().to_dense().resolve_conj().resolve_neg().contiguous()
    return [str(dense.dtype), list(dense.shape), dense.reshape(-1).view(torch.uint8).numpy()]


class _Sink(io.RawIOBase):
    """A file whose content enters a digest."""

    def __init__(self, digest: Any) -> None:
        self._digest = digest

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._digest.update(data)
        return len(data)
