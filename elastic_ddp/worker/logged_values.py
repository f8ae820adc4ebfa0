"""What a training function logs in a step, and its means over the global batch."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from elastic_ddp.errors import ConfigError

if TYPE_CHECKING:
    from elastic_ddp.distributed.process_group import ProcessGroup


class Means(dict[str, float]):
    """Values by name. A name without a value is NaN, as `step.loss` is before `optimize`."""

    def __missing__(self, name: str) -> float:
        return math.nan


class LoggedValues:
    """The values that one rank logs in a step, by name and micro-batch. `gather` brings those of all ranks together."""

    def __init__(self) -> None:
        self._values: dict[str, dict[int | None, Any]] = {}  # None: logged outside of micro-batches
        self._gathered: dict[str, float] | None = None

    def log(self, micro_batch: int | None, values: dict[str, Any]) -> None:
        """Adds values of a micro-batch. Raises a ConfigError if a value is no single number."""
        for name, value in values.items():
            is_number = isinstance(value, torch.Tensor | float | int | np.number | np.ndarray)
            if not is_number or math.prod(np.shape(value)) != 1:
                raise ConfigError(f"step.log got {name}={value!r} of shape {tuple(np.shape(value))}. Log one number.")
            number = value.detach() if isinstance(value, torch.Tensor) else value
            self._values.setdefault(name, {})[micro_batch] = number

    def gather(self, group: ProcessGroup, rows: np.ndarray) -> None:
        """Averages the values of all ranks over the rows of the global batch, shape (M,). Collective.

        Synchronizes with the device.
        """
        own = {name: {str(m): float(value) for m, value in values.items()} for name, values in self._values.items()}
        merged: dict[str, dict[str, float]] = {}
        for part in reversed(group.all_gather_bytes(json.dumps(own).encode())):
            for name, values in json.loads(part).items():  # outside of micro-batches, rank 0's values count
                merged.setdefault(name, {}).update(values)
        self._gathered = {}
        for name, values in merged.items():
            if "None" in values:
                self._gathered[name] = values["None"]
                continue
            weights = {m: int(rows[int(m)]) for m in sorted(values, key=int)}
            total = sum(values[m] * weights[m] for m in weights)
            self._gathered[name] = total / max(1, sum(weights.values()))

    @property
    def means(self) -> Means:
        """The gathered means, and the newest values that were logged outside of micro-batches."""
        outside = {name: float(values[None]) for name, values in self._values.items() if None in values}
        return Means({**(self._gathered or {}), **outside})
