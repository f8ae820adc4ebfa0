"""The results of an evaluation's loss function for each micro-batch, gathered from all ranks."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load, save

from elastic_ddp.distributed.reduction_tree import Node, fold_to_root
from elastic_ddp.errors import ConfigError
from elastic_ddp.worker.logged_values import is_one_number
from elastic_ddp.worker.loss_scale import check_weight

if TYPE_CHECKING:
    from elastic_ddp.data.micro_batches import MicroBatch
    from elastic_ddp.distributed.process_group import ProcessGroup

_VALUE = "value."
ONLY = ""
"""The name of a value that was returned without one."""
_RETURN = (
    "Return one number, the mean over the batch's rows; or (number, weight); or a dict of these by name. For values of "
    "each row, pass compute_metrics"
)


class Unmeasured(float):
    """The result of an evaluation that did not run: NaN as a number, and NaN as any item of a dict."""

    def __getitem__(self, name: str) -> float:
        return math.nan

    def get(self, name: str, default: object = None) -> float:
        return math.nan

    def __iter__(self) -> Iterator[str]:
        """Yields no names. With `__getitem__` alone, a loop over the result, and `in`, would be endless."""
        return iter(())

    def __len__(self) -> int:
        return 0

    def keys(self) -> tuple[Any, ...]:
        return ()

    values = items = keys


class CollectedMeans:
    """One or several weighted means of the values that this rank's micro-batches returned."""

    def __init__(self, num_steps: int, num_micro_batches: int) -> None:
        self._shape = (2, num_steps, num_micro_batches)
        self._sums: dict[str, torch.Tensor] = {}
        """By name: the weighted value and the weight of each micro-batch; zero for micro-batches of other ranks."""
        self._names: list[str] | None = None

    def add(self, step: int, batch: MicroBatch, result: Any) -> None:
        """Adds the result of the loss function for a micro-batch. Raises a ConfigError if it has another form."""
        values = result if isinstance(result, Mapping) else {ONLY: result}
        self._names = _check_names(self._names, list(values))
        for name, value in values.items():
            sums = self._sums.setdefault(name, torch.zeros(self._shape, dtype=torch.float64))
            sums[:, step, batch.index] = _weighted(value, batch.num_rows)

    def combine(self, group: ProcessGroup) -> Any:
        """Returns the result, a number or a dict of numbers, identical on all ranks. Collective."""
        names: list[str] | None = None
        for part in group.all_gather_bytes(json.dumps(self._names).encode()):
            theirs = json.loads(part)
            if theirs is not None:  # a rank without rows has no names
                names = _check_names(names, theirs)
        assert names is not None, "rank 0 has rows"
        sums = torch.stack([self._sums.get(name, torch.zeros(self._shape, dtype=torch.float64)) for name in names])
        if group.world_size > 1:
            dist.all_reduce(sums)
        means = {name: _mean(name, *values) for name, values in zip(names, sums, strict=True)}
        return means[ONLY] if names == [ONLY] else means


class CollectedRows:
    """Values of each row, from which `compute_metrics` computes the result on rank 0."""

    def __init__(self, compute_metrics: Callable[[Any], Any]) -> None:
        self._compute_metrics = compute_metrics
        self._row_ids: list[np.ndarray] = []
        self._values: list[dict[str, torch.Tensor]] = []

    def add(self, step: int, batch: MicroBatch, result: Any) -> None:
        """Adds the result of the loss function for a micro-batch. Raises a ConfigError if it has another form."""
        values = result if isinstance(result, Mapping) else {ONLY: result}
        names = list(self._values[0]) if self._values else None
        _check_names(names, list(values))
        self._row_ids.append(batch.row_ids)
        self._values.append({name: _rows_of(name, value, batch.num_rows) for name, value in values.items()})

    def combine(self, group: ProcessGroup) -> Any:
        """Returns the result, a number or a dict of numbers, identical on all ranks. Collective."""
        own = b""
        if self._values:
            columns = {name: torch.cat([values[name] for values in self._values]) for name in self._values[0]}
            ids = torch.from_numpy(np.concatenate(self._row_ids))
            own = save({"ids": ids, **{_VALUE + name: column.contiguous() for name, column in columns.items()}})
        answer = None
        parts = [load(part) for part in group.all_gather_bytes(own) if part]
        if group.rank == 0:
            names = list(self._values[0])
            for part in parts:
                _check_names(names, [key.removeprefix(_VALUE) for key in part if key != "ids"])
            order = torch.cat([part["ids"] for part in parts]).argsort()
            rows = {name: torch.cat([part[_VALUE + name] for part in parts])[order] for name in names}
            result = self._compute_metrics(rows[ONLY] if list(rows) == [ONLY] else rows)
            if isinstance(result, Mapping):
                numbers: Any = {str(name): as_number(value, "compute_metrics") for name, value in result.items()}
            else:
                numbers = as_number(result, "compute_metrics")
            answer = json.dumps(numbers).encode()
        return json.loads(group.broadcast_bytes(answer))


def _check_names(names: list[str] | None, found: list[str]) -> list[str]:
    """Returns the names, in the order of the first micro-batch. Raises a ConfigError if they differ or are no names."""
    if not all(isinstance(name, str) for name in found) or not found:
        raise ConfigError(f"loss_fn of run.evaluate returned a dict with the keys {found}. Use one or more names.")
    if names is not None and set(names) != set(found):
        raise ConfigError(
            f"loss_fn of run.evaluate returned {found} for one batch and {names} for another. Return the same names "
            "for every batch; a value with weight 0 does not count."
        )
    return names if names is not None else found


def _weighted(result: Any, num_rows: int) -> torch.Tensor:
    """Returns the weighted value and the weight of a result for a micro-batch."""
    if not isinstance(result, tuple) or len(result) != 2:
        return torch.tensor([as_number(result) * num_rows, num_rows], dtype=torch.float64)
    value, weight = result
    number = check_weight("run.evaluate", weight)
    return torch.tensor([as_number(value) * number if number else 0.0, number], dtype=torch.float64)


def _mean(name: str, totals: torch.Tensor, weights: torch.Tensor) -> float:
    weight = _add_along_tree(weights)
    if not weight:
        what = f" of {name!r}" if name else ""
        raise ConfigError(f"run.evaluate: the weights{what} of all micro-batches are 0, so there is no mean.")
    return _add_along_tree(totals) / weight


def _add_along_tree(values: torch.Tensor) -> float:
    """Returns the sum over the micro-batches of all steps, with the same bits at every world size."""
    leaves = {Node(0, place): value for place, value in enumerate(values.reshape(-1).tolist())}
    return fold_to_root(leaves, len(leaves), operator.add)


def as_number(value: Any, caller: str = "loss_fn") -> float:
    """Returns the result of a user's function as a number. Raises ConfigError if it is not one number."""
    if not is_one_number(value):
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor | np.ndarray) else ""
        advice = _RETURN if caller == "loss_fn" else "Return one number, or a dict of numbers by name"
        raise ConfigError(f"{caller} of run.evaluate returned a {type(value).__name__}{shape}. {advice}.")
    return float(value)


def _rows_of(name: str, value: Any, num_rows: int) -> torch.Tensor:
    """Returns values of each row on the CPU. Raises a ConfigError if they are not as many as the batch's rows."""
    is_numeric = isinstance(value, np.ndarray) and value.dtype.kind in "biuf"
    rows = torch.from_numpy(value) if is_numeric else value
    if not isinstance(rows, torch.Tensor) or rows.shape[:1] != (num_rows,):
        shape = f" of shape {tuple(rows.shape)}" if isinstance(rows, torch.Tensor) else ""
        what = f" for {name!r}" if name else ""
        raise ConfigError(
            f"loss_fn of run.evaluate returned a {type(value).__name__}{shape}{what} for a batch of {num_rows} rows. "
            "With compute_metrics, return a tensor whose first dimension is the rows, or a dict of them by name."
        )
    return rows.detach().cpu()
