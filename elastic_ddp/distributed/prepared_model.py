"""The user's model as the run hands it back, whichever way it is spread over the ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from elastic_ddp.errors import ConfigError

ShardBy = type[torch.nn.Module] | tuple[type[torch.nn.Module], ...] | Callable[[torch.nn.Module], bool]
"""Parts of a model: of a class, of one of several, or those of which a callable says so."""


class PreparedModel(torch.nn.Module):
    """The user's model as `run.prepare` returns it: called like the model, and the same object in every generation.

    The replica that it calls is replaced whenever membership changes. Attributes, `state_dict` and `load_state_dict`
    are those of the user's model.

    Args:
        module: the user's model.
        device: where it is.
        bf16: whether its forward runs under autocast.
        is_unit: tells the parts of it that are sharded as one.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        device: torch.device,
        bf16: bool,
        is_unit: Callable[[torch.nn.Module], bool] = lambda part: False,
    ) -> None:
        super().__init__()
        self._device_type = device.type
        self._bf16 = bf16
        self.is_unit = is_unit
        self.module = module
        self.use_replica(None)
        self.is_built = True

    def use_replica(self, replica: DistributedDataParallel | None) -> None:
        """Sets what forward goes through; None for the user's model itself, without synchronization."""
        # Past nn.Module's own attribute handling, which would register the replica as a submodule.
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
        if "is_built" not in self.__dict__ or name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)


def unit_predicate(
    module: torch.nn.Module,
    names: Collection[str],
    also: ShardBy | None,
) -> Callable[[torch.nn.Module], bool]:
    """Tells the parts of a model that are sharded as one.

    Args:
        module: the model.
        names: of their classes.
        also: classes, or a callable.

    Raises:
        ConfigError: one of the names is no class in the model, or there is no such part.
    """
    parts = [part for part in module.modules() if part is not module]
    there = {type(part).__name__ for part in parts}
    if unknown := [name for name in names if name not in there]:
        raise ConfigError(
            f"fsdp.shard_classes names {', '.join(unknown)}, and the model has no such part; it has "
            f"{', '.join(sorted(there))}"
        )

    def is_unit(part: torch.nn.Module) -> bool:
        if also is None:
            return type(part).__name__ in names
        is_also = isinstance(part, also) if isinstance(also, type | tuple) else bool(also(part))
        return is_also or type(part).__name__ in names

    if also is not None and not any(map(is_unit, parts)):
        raise ConfigError(f"run.prepare got shard={also!r}, and no part of the model is one; it has {sorted(there)}")
    return is_unit


def _to_fp32(output: Any) -> Any:
    """A model's output with bf16 tensors as fp32, so that the loss is computed in full precision."""
    if isinstance(output, torch.Tensor):
        return output.float() if output.dtype == torch.bfloat16 else output
    if isinstance(output, dict):
        converted = copy.copy(output)  # a subclass may not be built from its items
        for key, value in output.items():
            converted[key] = _to_fp32(value)
        return converted
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*map(_to_fp32, output))
    if isinstance(output, list | tuple):
        return type(output)(_to_fp32(value) for value in output)
    return output
