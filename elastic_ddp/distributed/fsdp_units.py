"""Which parameters of a model lie in which of the parts that are gathered and sharded as one, and whether FSDP can
shard them."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

import torch

from elastic_ddp import torch_internals
from elastic_ddp.errors import ConfigError


@dataclass(frozen=True)
class ParameterLocation:
    """Of a parameter in a model. One that is tied has several."""

    name: str
    """From the model on."""
    owner: torch.nn.Module
    """Whose parameter it is."""
    key: str
    """Its name there."""
    part: torch.nn.Module
    """The innermost that it lies in."""

    @property
    def parameter(self) -> torch.nn.Parameter:
        """What is there now: while its part is gathered another object than before."""
        return getattr(self.owner, self.key)


def locate_parameters(module: torch.nn.Module, parts: Set[torch.nn.Module]) -> list[ParameterLocation]:
    """Of all parameters, in the order of `named_parameters`; those of modules that are in the model twice, twice."""

    def within(owner: torch.nn.Module, prefix: str, part: torch.nn.Module) -> Iterator[ParameterLocation]:
        part = owner if owner in parts else part
        for key, _ in owner.named_parameters(recurse=False, remove_duplicate=False):
            yield ParameterLocation(f"{prefix}{key}", owner, key, part)
        for name, child in owner.named_children():
            yield from within(child, f"{prefix}{name}.", part)

    return list(within(module, "", module))


def check_shardable(places: list[ParameterLocation]) -> None:
    """Raises a ConfigError for what FSDP cannot shard, with what to change."""
    first: dict[torch.nn.Parameter, ParameterLocation] = {}
    of_part: dict[torch.nn.Module, ParameterLocation] = {}
    for place in places:
        name, parameter = place.name, place.parameter
        if isinstance(place.part, torch.nn.ModuleList | torch.nn.ModuleDict):
            raise ConfigError(
                f"{name} lies in a {_kind(place.part)} that is to be sharded as one, and that has no forward "
                "before which it could be gathered; name the class of what is in it, in run.prepare(model, shard=...) "
                "or fsdp.shard_classes"
            )
        if not parameter.dim():
            raise ConfigError(
                f"parameter {name} has shape (), and FSDP shards the first dimension; give it shape (1,), such as "
                "torch.nn.Parameter(torch.ones(1))"
            )
        if not parameter.is_contiguous():
            raise ConfigError(
                f"parameter {name} of shape {tuple(parameter.shape)} has strides {parameter.stride()}, and FSDP shards "
                "contiguous ones; build it as torch.nn.Parameter(tensor.contiguous()), and leave memory_format out"
            )
        if torch_internals.has_gradient_hooks(parameter):
            raise ConfigError(
                f"parameter {name} has hooks on its gradient, and FSDP replaces parameters by shards, which have none; "
                "change gradients in the loop, between step.backward and the clipping, or hook a module instead"
            )
        tied = first.setdefault(parameter, place)
        if tied.part is not place.part:
            raise ConfigError(
                f"{tied.name} and {name} are one parameter, and lie in parts that are sharded apart, "
                f"{_kind(tied.part)} and {_kind(place.part)}; have one part hold both: leave these out of "
                "run.prepare(model, shard=...) and fsdp.shard_classes, or name a class that holds them"
            )
        if not parameter.requires_grad:
            continue
        other = of_part.setdefault(place.part, place)
        if other.parameter.dtype != parameter.dtype:
            raise ConfigError(
                f"{other.name} is in {other.parameter.dtype} and {name} in {parameter.dtype}, and both are trained in "
                f"one part, {_kind(place.part)}, whose gradients are reduced together; have them in one dtype, "
                "such as model.float(), or name a class that holds the others in run.prepare(model, shard=...)"
            )


def _kind(part: torch.nn.Module) -> str:
    return type(part).__name__
