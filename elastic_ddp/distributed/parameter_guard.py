"""Detects parameters that change in a step before `optimize`, for example in a forward.

Such a change happens once for each micro-batch of a rank, so the weights would depend on the number of workers; and it
would happen again in a step that is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastic_ddp.errors import ConfigError, shorten
from elastic_ddp.torch_internals import version

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The dtypes in which bits are added up, by the size of an element."""


def changed_parameters_error(names: Sequence[str]) -> ConfigError:
    """Returns the error for parameters that changed in a step before `optimize`."""
    return ConfigError(
        f"parameters {shorten(names, 5)} changed in the step before step.optimize(). A forward would change them for "
        "each micro-batch of a rank, so weights would depend on the number of workers. Change parameters after "
        "step.optimize() in the block, which runs once per step and alike on all ranks."
    )


class ParameterGuard:
    """Compares a model's parameters at the start of a step and before `optimize`.

    Torch counts the changes of a tensor, but not those through `parameter.data`. The bits are therefore compared, too,
    but in steps 1, 2, 4, 8, … only, which costs nothing on average. Code that changes parameters does so in most steps.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._num_steps = 0

    def begin(self) -> None:
        """Begins a step."""
        self._num_steps += 1
        self._parameters = dict(self._module.named_parameters())
        self._before = [_count_changes(parameter) for parameter in self._parameters.values()]
        compares_bits = not self._num_steps & (self._num_steps - 1)
        self._sums = _sum_bits(self._parameters) if compares_bits else None

    def check(self) -> None:
        """Raises a ConfigError if a parameter changed since `begin`."""
        before = zip(self._parameters.items(), self._before, strict=True)
        changed = [name for (name, parameter), count in before if _count_changes(parameter) != count]
        if not changed and self._sums is not None:
            differ = zip(self._parameters, self._sums, _sum_bits(self._parameters), strict=True)
            changed = [name for name, before_sum, sum_now in differ if before_sum != sum_now]
        if changed:
            raise changed_parameters_error(changed)


def _count_changes(parameter: torch.Tensor) -> tuple[int, int]:
    """Returns numbers that change with the parameter's values, or with the tensor that holds them."""
    return version(parameter), parameter.data_ptr()


def _sum_bits(parameters: dict[str, torch.nn.Parameter]) -> list[int]:
    """Returns a checksum of each parameter."""
    sums = []
    for parameter in parameters.values():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter.detach()
        bits = torch.view_as_real(local) if local.is_complex() else local
        sums.append(bits.view(_INTEGERS[bits.itemsize]).sum(dtype=torch.int64))
    return torch.stack(sums).tolist() if sums else []
