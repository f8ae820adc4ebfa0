"""Models that FSDP cannot shard raise an error with a fix before anything is sharded."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from elastic_ddp.distributed.fsdp_units import check_shardable, locate_parameters
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import ConfigError
from tests.ranks import run_ranks
from tests.unit.distributed.test_fsdp import Block, Model, sharded


def model_with(**parameters: torch.Tensor) -> Model:
    model = Model()
    for name, tensor in parameters.items():
        model.blocks[1].register_parameter(name, torch.nn.Parameter(tensor))  # type: ignore[union-attr]
    return model


def tied_across() -> Model:
    model = Model()
    model.blocks[1].up.weight = model.blocks[0].up.weight  # type: ignore[union-attr]
    return model


def hooked(name: str) -> Model:
    model = model_with(gain=torch.ones(3))
    getattr(model.blocks[1].gain, name)(lambda tensor: None)
    return model


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        (hooked("register_hook"), Block, r"blocks\.1\.gain has hooks on its gradient"),
        (hooked("register_post_accumulate_grad_hook"), Block, r"blocks\.1\.gain has hooks on its gradient"),
        (model_with(gain=torch.tensor(1.0)), Block, r"parameter blocks\.1\.gain has shape \(\), .* shape \(1,\)"),
        (model_with(gain=torch.ones(4, 3).t()), Block, r"blocks\.1\.gain of shape \(3, 4\).*\.contiguous\(\)"),
        (
            model_with(gain=torch.ones(3, dtype=torch.bfloat16)),
            Block,
            r"blocks\.1\.scale has torch\.float32 and blocks\.1\.gain has torch\.bfloat16.* Block",
        ),
        (
            tied_across(),
            Block,
            r"blocks\.0\.up\.weight and blocks\.1\.up\.weight are one tied parameter.* Block and Block",
        ),
        (Model(), torch.nn.Linear, r"embed\.weight and head\.weight are one tied parameter .*Linear and Linear"),
        (Model(), torch.nn.ModuleList, r"blocks\.0\.scale is in the FSDP unit ModuleList.* fsdp\.shard_classes"),
    ],
    ids=["hook", "hook after", "0-d", "not contiguous", "two dtypes", "tied", "tied units", "a container"],
)
def test_a_model_that_fsdp_cannot_shard_is_rejected(model: Model, kind: type[torch.nn.Module], message: str) -> None:
    units = {model, *(module for module in model.modules() if isinstance(module, kind))}
    with pytest.raises(ConfigError, match=message):
        check_shardable(locate_parameters(model, units))


def test_a_unit_may_contain_tied_parameters_removed_hooks_and_frozen_parameters_of_another_dtype() -> None:
    model = model_with(frozen=torch.ones(3, dtype=torch.bfloat16))
    model.blocks[1].scale.register_hook(lambda gradient: None).remove()  # type: ignore[union-attr, operator]
    model.blocks[1].frozen.requires_grad_(False)  # type: ignore[union-attr]
    model.blocks.append(model.blocks[0])
    units = {model, *(module for module in model.modules() if isinstance(module, Block))}
    locations = locate_parameters(model, units)
    check_shardable(locations)
    first = {location.parameter: location.name for location in reversed(locations)}
    assert {name: parameter for parameter, name in first.items()} == dict(model.named_parameters())
    assert {type(location.unit) for location in locations if location.name.startswith("blocks")} == {Block}


def _shard(group: ProcessGroup) -> str:
    model = model_with(gain=torch.tensor(1.0))
    with pytest.raises(ConfigError) as caught:
        sharded(group, model=model)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return str(caught.value)


def test_shard_raises_before_it_changes_the_model() -> None:
    assert run_ranks(1, _shard)[0].startswith("parameter blocks.1.gain has shape ()")
