"""Values that a training function logs in a step, and their means over the global batch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from elastic_ddp.errors import ConfigError

if TYPE_CHECKING:
    from elastic_ddp.distributed.process_group import ProcessGroup


_Json = dict[str, Any]


class Means(dict[str, float]):
    """Values by name. A name without a value is NaN, as `step.loss` is before `optimize`."""

    def __missing__(self, name: str) -> float:
        return math.nan


def is_one_number(value: Any) -> bool:
    """Returns whether a value is a number, or a tensor or an array with one element."""
    return isinstance(value, torch.Tensor | float | int | np.number | np.ndarray) and math.prod(np.shape(value)) == 1


class LoggedValues:
    """The values that one rank logs in a step, by name and micro-batch. `gather` averages the values of all ranks."""

    def __init__(self) -> None:
        self._values: dict[str, dict[int | None, Any]] = {}  # None: logged outside of micro-batches
        self._gathered: dict[str, float] | None = None

    def log(self, micro_batch: int | None, values: dict[str, Any]) -> None:
        """Adds values of a micro-batch. Raises a ConfigError if a value is no single number."""
        for name, value in values.items():
            if not is_one_number(value):
                raise ConfigError(f"step.log got {name}={value!r} of shape {tuple(np.shape(value))}. Log one number.")
            number = value.detach() if isinstance(value, torch.Tensor) else value
            self._values.setdefault(name, {})[micro_batch] = number

    def gather(self, group: ProcessGroup, rows: np.ndarray, ranges: Sequence[range], phases: _Json) -> list[_Json]:
        """Averages the values of all ranks over the rows of the global batch. Collective.

        Also gathers the `phases` of all ranks, and returns them in rank order.

        `rows` has the rows of each micro-batch, shape (M,), and `ranges` the micro-batches of each rank. A value that
        was logged outside of micro-batches counts for all rows of its rank. Synchronizes with the device.
        """
        own = {name: {str(m): float(value) for m, value in values.items()} for name, values in self._values.items()}
        merged: dict[str, dict[str, float]] = {}
        outside: dict[str, list[tuple[float, int]]] = {}
        sent = json.dumps({"values": own, "phases": phases})
        parts = [json.loads(part) for part in group.all_gather_bytes(sent.encode())]
        for part, owned in zip(parts, ranges, strict=True):
            for name, values in part["values"].items():
                value = values.pop("None", None)
                if value is not None:
                    outside.setdefault(name, []).append((value, int(rows[list(owned)].sum())))
                merged.setdefault(name, {}).update(values)
        by_micro_batch = {
            name: [(values[m], int(rows[int(m)])) for m in sorted(values, key=int)] for name, values in merged.items()
        }
        self._gathered = {name: _mean(values) for name, values in (by_micro_batch | outside).items()}
        for values in self._values.values():
            values.pop(None, None)
        return [part["phases"] for part in parts]

    @property
    def means(self) -> Means:
        """The gathered means, and this rank's later values."""
        outside = {name: float(values[None]) for name, values in self._values.items() if None in values}
        return Means({**(self._gathered or {}), **outside})


def _mean(values: Sequence[tuple[float, int]]) -> float:
    """Returns the mean of values with their rows. Equal values keep their bits."""
    counted = [(value, rows) for value, rows in values if rows] or values
    if len({value for value, _ in counted}) == 1:
        return counted[0][0]
    return sum(value * rows for value, rows in counted) / max(1, sum(rows for _, rows in counted))
