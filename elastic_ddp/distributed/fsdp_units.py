"""The parameters of each FSDP unit, and a check that FSDP can shard them.

A unit is a submodule whose parameters are gathered and sharded together. The rest of the model is a unit of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

import torch

from elastic_ddp import torch_internals
from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.errors import ConfigError


def device_of_shards(config: RunConfig, device: torch.device) -> torch.device:
    """Returns where a rank with this device keeps its shards."""
    return torch.device("cpu") if config.fsdp.cpu_offload else device


@dataclass(frozen=True)
class ParameterLocation:
    """A place in a model where a parameter is registered, under `key` in `owner`. A tied parameter has several."""

    name: str
    """The parameter's full name in the model."""
    owner: torch.nn.Module
    key: str
    unit: torch.nn.Module
    """The innermost unit that contains the parameter."""

    @property
    def parameter(self) -> torch.nn.Parameter:
        """The parameter that is registered now. FSDP registers another parameter while the unit is gathered."""
        return getattr(self.owner, self.key)


def _walk(
    owner: torch.nn.Module, units: Set[torch.nn.Module], name: str = "", unit: torch.nn.Module | None = None
) -> Iterator[tuple[str, torch.nn.Module, torch.nn.Module]]:
    """Yields the name of each module in a model, the module, and its innermost unit: parents first, with duplicates.

    The model itself is one of the units.
    """
    innermost = owner if unit is None or owner in units else unit
    yield name, owner, innermost
    for key, child in owner.named_children():
        yield from _walk(child, units, f"{name}.{key}" if name else key, innermost)


def locate_parameters(module: torch.nn.Module, units: Set[torch.nn.Module]) -> list[ParameterLocation]:
    """Returns the locations of all parameters, in the order of `named_parameters`, with duplicates."""
    return [
        ParameterLocation(f"{name}.{key}" if name else key, owner, key, unit)
        for name, owner, unit in _walk(module, units)
        for key, _ in owner.named_parameters(recurse=False, remove_duplicate=False)
    ]


def modules_by_unit(
    module: torch.nn.Module, units: Set[torch.nn.Module]
) -> dict[torch.nn.Module, dict[str, torch.nn.Module]]:
    """Returns for each unit the modules of which it is the innermost unit, by name, parents first."""
    found: dict[torch.nn.Module, dict[str, torch.nn.Module]] = {unit: {} for unit in units}
    seen: set[torch.nn.Module] = set()
    for name, owner, unit in _walk(module, units):
        if owner not in seen:
            seen.add(owner)
            found[unit][name] = owner
    return found


def check_room(locations: list[ParameterLocation], world_size: int, free_bytes: int, *, offloads: bool) -> None:
    """Raises a ConfigError if a rank with this much memory cannot hold its shard and one gathered unit.

    Shard and unit count with their gradients. Optimizer state and activations come on top, and are not known yet.
    With `offloads`, the shard is in host memory.
    """
    by_unit: dict[torch.nn.Module, int] = {}
    for parameter, unit in {location.parameter: location.unit for location in locations}.items():
        by_unit[unit] = by_unit.get(unit, 0) + parameter.nbytes * (2 if parameter.requires_grad else 1)
    unit, largest = max(by_unit.items(), key=lambda item: item[1])
    total = 0 if offloads else sum(by_unit.values())
    left = free_bytes - largest
    if largest + total / world_size <= free_bytes:
        return
    needed = f"a rank needs {(largest + total / world_size) / 1e9:.2f} GB for"
    if left <= 0:
        raise ConfigError(
            f"{needed} its largest FSDP unit alone, {_kind(unit)}, and has {free_bytes / 1e9:.2f} GB free. Name the "
            "classes of smaller modules in run.prepare(model, shard=...) or fsdp.shard_classes."
        )
    raise ConfigError(
        f"{needed} its shard and the largest unit, with gradients, and has {free_bytes / 1e9:.2f} GB free. The model "
        f"fits {-(-total // left)} workers or more: set min_workers, with hybrid sharding fsdp.shard_size, or "
        "fsdp.cpu_offload = true."
    )


def check_shardable(locations: list[ParameterLocation]) -> None:
    """Raises a ConfigError with a fix for the first parameter that FSDP cannot shard."""
    first: dict[torch.nn.Parameter, ParameterLocation] = {}
    first_trained: dict[torch.nn.Module, ParameterLocation] = {}
    for location in locations:
        _check_parameter(location)
        tied = first.setdefault(location.parameter, location)
        if tied.unit is not location.unit:
            raise ConfigError(
                f"{tied.name} and {location.name} are one tied parameter in two FSDP units, {_kind(tied.unit)} and "
                f"{_kind(location.unit)}. Name a class that contains both, or leave these classes out of "
                "run.prepare(model, shard=...) and fsdp.shard_classes."
            )
        if not location.parameter.requires_grad:
            continue
        other = first_trained.setdefault(location.unit, location)
        if other.parameter.dtype != location.parameter.dtype:
            raise ConfigError(
                f"{other.name} has {other.parameter.dtype} and {location.name} has {location.parameter.dtype}. Trained "
                f"parameters of one FSDP unit, here {_kind(location.unit)}, are reduced together and need one dtype. "
                "Convert the model, for example with model.float(), or name a class that contains only some of them in "
                "run.prepare(model, shard=...)."
            )


def _check_parameter(location: ParameterLocation) -> None:
    name, parameter = location.name, location.parameter
    if isinstance(location.unit, torch.nn.ModuleList | torch.nn.ModuleDict):
        raise ConfigError(
            f"{name} is in the FSDP unit {_kind(location.unit)}, which has no forward before which its parameters "
            "could be gathered. Name the class of its items in run.prepare(model, shard=...) or fsdp.shard_classes."
        )
    if not parameter.dim():
        raise ConfigError(
            f"parameter {name} has shape (), but FSDP shards along the first dimension. Give it shape (1,), for "
            "example torch.nn.Parameter(torch.ones(1))."
        )
    if not parameter.is_contiguous():
        raise ConfigError(
            f"parameter {name} of shape {tuple(parameter.shape)} has strides {parameter.stride()}, but FSDP shards "
            "contiguous parameters only. Create it as torch.nn.Parameter(tensor.contiguous()), without memory_format."
        )
    if torch_internals.has_gradient_hooks(parameter):
        raise ConfigError(
            f"parameter {name} has hooks on its gradient, but FSDP replaces parameters with shards that have none. "
            "Change gradients in the loop, between step.backward and step.optimize, or register a module hook."
        )


def _kind(module: torch.nn.Module) -> str:
    return type(module).__name__
