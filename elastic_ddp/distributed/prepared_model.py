"""The user's model as `run.prepare` returns it, for every strategy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from elastic_ddp.errors import ConfigError

ShardBy = type[torch.nn.Module] | tuple[type[torch.nn.Module], ...] | Callable[[torch.nn.Module], bool]
"""Selects submodules: by a class, by several classes, or by a predicate."""


def _of_module(name: str) -> Any:
    """Returns a method that calls the method of the user's model."""
    return lambda self, *args, **kwargs: getattr(self.module, name)(*args, **kwargs)


class PreparedModel(torch.nn.Module):
    """A wrapper around the user's model that stays the same object in every generation.

    Its forward calls the generation's DDP replica or the user's model, with `bf16` under autocast to bfloat16.
    Attributes, `state_dict` and `load_state_dict` are those of the user's model. `is_unit` returns whether FSDP shards
    a submodule as one unit.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        device: torch.device,
        bf16: bool,
        is_unit: Callable[[torch.nn.Module], bool] = lambda submodule: False,
    ) -> None:
        super().__init__()
        self._device_type = device.type
        self._bf16 = bf16
        self.is_unit = is_unit
        self.module = module
        self.use_replica(None)
        self._is_built = True

    def use_replica(self, replica: DistributedDataParallel | None) -> None:
        """Sets the replica that forward calls. None: forward calls the user's model, without synchronization."""
        # Bypasses nn.Module.__setattr__, which would register the replica as a submodule.
        object.__setattr__(self, "_replica", replica)
        object.__setattr__(self, "called_replica", False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        target = self._replica if self._replica is not None and torch.is_grad_enabled() else self.module
        object.__setattr__(self, "called_replica", self.called_replica or target is self._replica)
        if not self._bf16:
            return target(*args, **kwargs)
        with torch.autocast(self._device_type, dtype=torch.bfloat16):
            return _to_fp32(target(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_is_built" not in self.__dict__ or name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    named_parameters = _of_module("named_parameters")
    named_buffers = _of_module("named_buffers")
    state_dict = _of_module("state_dict")
    load_state_dict = _of_module("load_state_dict")


def unit_predicate(
    module: torch.nn.Module, class_names: Collection[str], shard: ShardBy | None
) -> Callable[[torch.nn.Module], bool]:
    """Returns a predicate for the submodules that FSDP shards as one unit each.

    They have a class of `fsdp.shard_classes`, or `run.prepare(model, shard=...)` selects them. Raises a ConfigError if
    no submodule has one of the class names, or `shard` selects none.
    """
    submodules = [submodule for submodule in module.modules() if submodule is not module]
    available = sorted({type(submodule).__name__ for submodule in submodules})
    if unknown := [name for name in class_names if name not in available]:
        raise ConfigError(
            f"fsdp.shard_classes names {', '.join(unknown)}, but the model has no such submodule. Choose from "
            f"{', '.join(available)}."
        )

    def is_selected(submodule: torch.nn.Module) -> bool:
        if shard is None:
            return False
        return isinstance(submodule, shard) if isinstance(shard, type | tuple) else bool(shard(submodule))

    if shard is not None and not class_names and not any(map(is_selected, submodules)):
        raise ConfigError(
            f"run.prepare got shard={shard!r}, but no submodule matches. Choose from {', '.join(available)}."
        )
    return lambda submodule: type(submodule).__name__ in class_names or is_selected(submodule)


def _to_fp32(output: Any) -> Any:
    """Returns a model's output with bfloat16 tensors as float32, so that the loss has full precision."""
    if isinstance(output, torch.Tensor):
        return output.float() if output.dtype == torch.bfloat16 else output
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
