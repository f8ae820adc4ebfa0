"""Detects parameters that change in a step before `optimize`, changes between two steps, and `zero_grad()` in a step.

A change in a forward happens once for each micro-batch of a rank, so the weights would depend on the number of workers.
The first two kinds of change happen again when a step is repeated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from typing import Any

import torch

from elastic_ddp.errors import ConfigError, shorten
from elastic_ddp.tensors.digest import digest_named
from elastic_ddp.torch_internals import addresses, versions


def changed_parameters_error(names: Sequence[str], module: torch.nn.Module) -> ConfigError:
    """Returns the error for parameters of a model that changed in a step before `optimize`."""
    problem = f"parameters {shorten(names, 5)} changed in the step before step.optimize()"
    owner = module.get_submodule(names[0].rpartition(".")[0])
    if isinstance(owner, torch.nn.Embedding | torch.nn.EmbeddingBag) and owner.max_norm is not None:
        return ConfigError(
            f"{problem}: {type(owner).__name__}(max_norm={owner.max_norm}) changes its weight in every forward. Leave "
            "out max_norm, and limit the norms once per step, in the block after step.optimize(): "
            f"embedding.weight.data.renorm_({owner.norm_type}, 0, {owner.max_norm})."
        )
    return ConfigError(
        f"{problem}. A forward would change them for each micro-batch of a rank, so weights would depend on the number "
        "of workers. Change parameters in the block after step.optimize(), or after the block of their update: that "
        "runs once per step and alike on all ranks. To evaluate other weights, such as an average, exchange them there "
        "and put them back, or evaluate a copy of the model."
    )


class ParameterGuard:
    """Compares a model's parameters at the start of a step and before `optimize`, and its state between two steps.

    Torch counts the changes of a tensor, but not those through `parameter.data`. The bits are therefore compared, too,
    but around steps 1, 2, 4, 8, … only, which costs nothing on average. Code that changes state does so in most steps.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._num_steps = 0
        self._at_end: dict[str, int] = {}

    def begin(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Begins a step, or an update in it, with the model's parameters.

        Raises a ConfigError if parameters or buffers changed since `end`.
        """
        at_end = self._at_end
        self._at_end = {}
        if at_end:
            now = self._digest_state()
            changed = [name for name, digest in at_end.items() if now.get(name, digest) != digest]
            if changed:
                raise ConfigError(
                    f"{shorten(changed, 5)} changed between two steps. Code after `with step` runs again when a step "
                    "is repeated. Change the state of the model in the block, after step.optimize()."
                )
        self._num_steps += 1
        self._parameters = parameters
        self._before = _marks(parameters)
        compares_bits = not self._num_steps & (self._num_steps - 1)
        self._digests = digest_named(self._parameters) if compares_bits else {}

    def check(self) -> None:
        """Raises a ConfigError if a parameter changed since `begin`."""
        changed: list[str] = []
        now = _marks(self._parameters)
        if now != self._before:
            of_each = zip(self._parameters, zip(*now, strict=True), zip(*self._before, strict=True), strict=True)
            changed = [name for name, mark, before in of_each if mark != before]
        if not changed and self._digests:
            now_digests = digest_named(self._parameters)
            changed = [name for name, digest in self._digests.items() if now_digests[name] != digest]
        if changed:
            raise changed_parameters_error(changed, self._module)

    def end(self) -> None:
        """Ends the block of a step."""
        self._at_end = self._digest_state() if self._digests else {}

    def _digest_state(self) -> dict[str, int]:
        return digest_named({**dict(self._module.named_parameters()), **dict(self._module.named_buffers())})


def _marks(parameters: Mapping[str, torch.nn.Parameter]) -> tuple[list[int], list[int]]:
    """Returns numbers of which one differs after a parameter changed in place, or by `parameter.data = …`."""
    tensors = list(parameters.values())
    return versions(tensors), addresses(tensors)


# `zero_grad()` leaves no trace where no gradient is yet, and torch has no hook for it.
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
