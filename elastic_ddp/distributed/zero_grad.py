"""Refuses `zero_grad()` in a step. It leaves no trace where no gradient is yet, and torch has no hook for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any

import torch

from elastic_ddp.errors import ConfigError

_refused: list[tuple[torch.nn.Module, Iterable[torch.Tensor]]] = []


def refuse_zero_grad(module: torch.nn.Module, parameters: Iterable[torch.Tensor]) -> None:
    """Makes `zero_grad()` of the module, of a part of it, or of an optimizer of the parameters a ConfigError."""
    _wrap_methods()
    _refused[:] = [(module, parameters)]


def allow_zero_grad() -> None:
    _refused.clear()


@cache
def _wrap_methods() -> None:
    for owner in (torch.nn.Module, torch.optim.Optimizer):
        owner.zero_grad = _checked(owner.zero_grad)  # type: ignore[method-assign]


def _checked(zero_grad: Callable[..., None]) -> Callable[..., None]:
    @wraps(zero_grad)
    def call(owner: Any, *args: Any, **kwargs: Any) -> None:
        if any(_concerns(owner, *refused) for refused in _refused):
            caller = sys._getframe(1)
            place = f"{caller.f_code.co_filename}:{caller.f_lineno} in {caller.f_code.co_name}"
            raise ConfigError(
                f"{type(owner).__name__}.zero_grad() at {place} was called between the first batch of "
                "step.micro_batches() and the step of the optimizer, where it would lose gradients. Remove the call: "
                "the step clears them. To leave parameters out of a step, set their grad to None after the loop."
            )
        zero_grad(owner, *args, **kwargs)

    return call


def _concerns(owner: Any, module: torch.nn.Module, parameters: Iterable[torch.Tensor]) -> bool:
    if isinstance(owner, torch.nn.Module):
        return not set(owner.modules()).isdisjoint(module.modules())
    return not {parameter for group in owner.param_groups for parameter in group["params"]}.isdisjoint(parameters)
