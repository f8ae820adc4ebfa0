"""The model that `run.prepare` returns, for every strategy: the user's own module, whose calls are routed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from elastic_ddp import torch_internals
from elastic_ddp.distributed.first_weights import FirstWeights
from elastic_ddp.errors import ConfigError

ShardBy = type[torch.nn.Module] | tuple[type[torch.nn.Module], ...] | Callable[[torch.nn.Module], bool]
"""Selects submodules: by a class, by several classes, or by a predicate."""


class PreparedModel:
    """A run's model, and where calls of it go: `module(x)` calls the generation's DDP replica or the model itself.

    The module stays the user's own, of its own class. With `bf16`, calls of it run under autocast to bfloat16 and
    return float32, with `fp16` under autocast to float16. Copies of the module do not have the route: they compute
    outside of DDP, without autocast. `is_unit` returns whether FSDP shards a submodule as one unit. `buffer_rules` are
    rules as in `buffer_sync`. `first_weights` makes the tensors on the meta device when a run begins.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        device: torch.device,
        bf16: bool,
        fp16: bool = False,
        is_unit: Callable[[torch.nn.Module], bool] = lambda submodule: False,
        buffer_rules: Mapping[str, str] | None = None,
        first_weights: FirstWeights | None = None,
    ) -> None:
        self.module = module
        self.first_weights = first_weights or FirstWeights(0)
        self.buffer_rules = buffer_rules or {}
        self.is_unit = is_unit
        self._device_type = device.type
        self._autocast = torch.bfloat16 if bf16 else torch.float16 if fp16 else None
        self._is_in_call = False
        self._route = torch_internals.CallRoute(self._call)
        self.use_replica(None)

    def use_replica(self, replica: Callable[..., Any] | None) -> None:
        """Routes calls that record gradients to `replica`; None: to the model, without synchronization."""
        self._route.install(self.module)  # again, because module.compile() replaces it
        self._replica = replica
        self.called_replica = False

    def autocast(self, *, is_enabled: bool) -> AbstractContextManager[object]:
        """The context in which parts of the model compute as in calls of the model, or without autocast."""
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self._autocast, enabled=is_enabled)

    def call_directly(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module past the replica, with its hooks."""
        return self._route.inner(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_in_call:  # the model calls itself
            return self.call_directly(*args, **kwargs)
        target = self.call_directly
        if self._replica is not None and torch.is_grad_enabled():
            target = self._replica
            self.called_replica = True
        self._is_in_call = True
        try:
            with self.autocast(is_enabled=True):
                output = target(*args, **kwargs)
                return output if self._autocast is None else _to_fp32(output)
        finally:
            self._is_in_call = False


def unit_predicate(
    module: torch.nn.Module, class_names: Collection[str], shard: ShardBy | None
) -> Callable[[torch.nn.Module], bool]:
    """Returns a predicate for the submodules that FSDP shards as one unit each.

    Such submodules have a class of `fsdp.shard_classes`, or `run.prepare(model, shard=...)` selects them. Raises a
    ConfigError if no submodule has one of the class names, or `shard` selects none.
    """
    submodules = [submodule for submodule in module.modules() if submodule is not module]
    available = sorted({type(submodule).__name__ for submodule in submodules})
    unknown = [name for name in class_names if name not in available]
    if unknown:
        raise ConfigError(
            f"fsdp.shard_classes names {', '.join(unknown)}, but the model has no such submodule. Choose from "
            f"{', '.join(available)}."
        )

    if shard is not None and not isinstance(shard, type | tuple) and not callable(shard):
        raise ConfigError(
            f"run.prepare got shard={shard!r}. Give a class, a tuple of classes, or a function from a module to a "
            "bool; names of classes belong into fsdp.shard_classes."
        )

    def is_selected(submodule: torch.nn.Module) -> bool:
        if shard is None:
            return False
        return isinstance(submodule, shard) if isinstance(shard, type | tuple) else bool(shard(submodule))

    if shard is not None and not any(map(is_selected, submodules)):
        raise ConfigError(
            f"run.prepare got shard={shard!r}, but no submodule matches. Choose from {', '.join(available)}."
        )
    return lambda submodule: type(submodule).__name__ in class_names or is_selected(submodule)


def _to_fp32(output: Any) -> Any:
    """Returns a model's output with bfloat16 and float16 tensors as float32, so that the loss has full precision."""
    if isinstance(output, torch.Tensor):
        return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
    if isinstance(output, dict):
        converted = copy.copy(output)  # the constructor of a subclass may take other arguments
        for key, value in output.items():
            converted[key] = _to_fp32(value)
        return converted
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*map(_to_fp32, output))
    if isinstance(output, list | tuple):
        return type(output)(_to_fp32(value) for value in output)
    return output
