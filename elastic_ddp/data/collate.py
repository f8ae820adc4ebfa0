"""Collates the rows of a micro-batch into what the training function gets."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from elastic_ddp.data.columns import Array
from elastic_ddp.data.user_code import environment
from elastic_ddp.errors import ConfigError, DataError, text_of

CollateFn = Callable[[list[Any]], Any]
"""Maps the rows of a micro-batch to a batch of any type.

The global generators of torch, NumPy and Python are seeded for the micro-batch, before its rows are fetched."""


def collate_rows(collate_fn: CollateFn | None, rows: list[Any], place: str) -> Any:
    """Returns the batch of these rows. Raises a DataError, which names the place in the run."""
    collate: CollateFn
    if collate_fn is not None:
        collate = collate_fn
    else:
        from torch.utils.data import default_collate as collate

        _check_keys(rows, place)
    try:
        batch = collate(rows)
    except ConfigError:  # it cannot be loaded
        raise
    except (Exception, SystemExit) as error:
        what, fix = "collate_fn raised", ""
        if collate_fn is None:
            what = "rows cannot be stacked into a batch by torch's default_collate, which raised"
            fix = "\nReturn tensors, arrays or numbers of equal shapes from every row, or pass a collate_fn."
        what = f"{what} {text_of(error, repr)} in {place}"
        text = f"{what}:\n{traceback.format_exc().rstrip()}{fix}\n{environment().advise(error)}"
        raise DataError(text.rstrip()) from error
    if batch is None:
        raise DataError(f"collate_fn returned None in {place}. Return the batch.")
    return batch


class ColumnBatch(dict[str, Array]):
    """A batch of arrays of shape (rows, ...), which the worker turns into a dict of tensors.

    The data process needs no torch for it.
    """


def _check_keys(rows: list[Any], place: str) -> None:
    """Raises a DataError if rows are dicts with different keys: torch would drop or miss some."""
    if not isinstance(rows[0], dict):
        return
    for row in rows[1:]:
        if not isinstance(row, dict) or row.keys() != rows[0].keys():
            other = sorted(map(str, row)) if isinstance(row, dict) else f"a {type(row).__name__}"
            raise DataError(
                f"rows of {place} differ: one has the keys {sorted(map(str, rows[0]))}, another is or has {other}. "
                "Return the same keys from every row, or pass a collate_fn."
            )
