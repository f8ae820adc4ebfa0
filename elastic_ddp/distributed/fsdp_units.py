"""Which parameters belong to which FSDP unit, and whether FSDP can shard them.

A unit is a submodule whose parameters are gathered and sharded together. The rest of the model is a unit of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

import torch

from elastic_ddp import torch_internals
from elastic_ddp.errors import ConfigError


@dataclass(frozen=True)
class ParameterLocation:
    """A place in a model where a parameter is registered, under `key` in `owner`. A tied parameter has several."""

    name: str
    """The parameter's full name in the model."""
    owner: torch.nn.Module
    key: str
    unit: torch.nn.Module
    """The innermost unit that contains it."""

    @property
    def parameter(self) -> torch.nn.Parameter:
        """The parameter that is registered now. FSDP registers another one while the unit is gathered."""
        return getattr(self.owner, self.key)


def locate_parameters(module: torch.nn.Module, units: Set[torch.nn.Module]) -> list[ParameterLocation]:
    """Returns the locations of all parameters, in the order of `named_parameters`, with duplicates."""

    def walk(owner: torch.nn.Module, prefix: str, unit: torch.nn.Module) -> Iterator[ParameterLocation]:
        unit = owner if owner in units else unit
        for key, _ in owner.named_parameters(recurse=False, remove_duplicate=False):
            yield ParameterLocation(f"{prefix}{key}", owner, key, unit)
        for name, child in owner.named_children():
            yield from walk(child, f"{prefix}{name}.", unit)

    return list(walk(module, "", module))


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
