"""What FSDP cannot shard is said before anything is sharded, with what to change."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from elastic_ddp.distributed.fsdp_units import check_shardable, locate_parameters
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import ConfigError
from elastic_ddp.worker.generation import strategy_of
from tests.ranks import run_ranks
from tests.unit.test_fsdp import Block, Model, prepared


def model_with(**parameters: torch.Tensor) -> Model:
    model = Model()
    for name, each in parameters.items():
        model.blocks[1].register_parameter(name, torch.nn.Parameter(each))  # type: ignore[union-attr]
    return model


def tied_across() -> Model:
    model = Model()
    model.blocks[1].up.weight = model.blocks[0].up.weight  # type: ignore[union-attr]
    return model


def shared_across() -> Model:
    model = Model()
    model.blocks[1].up = model.blocks[0].up  # type: ignore[union-attr]
    return model


def hooked(name: str, *, removed: bool = False) -> Model:
    model = model_with(gain=torch.ones(3))
    handle = getattr(model.blocks[1].gain, name)(lambda each: None)
    if removed:
        handle.remove()
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
            r"blocks\.1\.scale is in torch\.float32 and blocks\.1\.gain in torch\.bfloat16.* in one part, Block",
        ),
        (tied_across(), Block, r"blocks\.0\.up\.weight and blocks\.1\.up\.weight are one parameter.* Block and Block"),
        (shared_across(), Block, r"blocks\.0\.up\.weight and blocks\.1\.up\.weight are one parameter"),
        (Model(), torch.nn.Linear, r"embed\.weight and head\.weight are one parameter, .*Linear and Linear"),
        (Model(), torch.nn.ModuleList, r"blocks\.0\.scale lies in a ModuleList .* the class of what is in it"),
    ],
    ids=["hook", "hook after", "0-d", "not contiguous", "two dtypes", "tied", "shared", "tied units", "a container"],
)
def test_what_cannot_be_sharded_is_refused(model: Model, kind: type[torch.nn.Module], message: str) -> None:
    parts = {model, *(part for part in model.modules() if isinstance(part, kind))}
    with pytest.raises(ConfigError, match=message):
        check_shardable(locate_parameters(model, parts))


@pytest.mark.parametrize("name", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_was_removed_is_none(name: str) -> None:
    model = hooked(name, removed=True)
    check_shardable(locate_parameters(model, {model}))


def test_what_lies_in_one_part_may_be_tied_or_frozen_in_another_dtype() -> None:
    model = model_with(frozen=torch.ones(3, dtype=torch.bfloat16))
    model.blocks[1].frozen.requires_grad_(False)  # type: ignore[union-attr]
    model.blocks.append(model.blocks[0])
    parts = {model, *(part for part in model.modules() if isinstance(part, Block))}
    places = locate_parameters(model, parts)
    check_shardable(places)
    first = {place.parameter: place.name for place in reversed(places)}
    assert {name: each for each, name in first.items()} == dict(model.named_parameters())
    assert {type(place.part) for place in places if place.name.startswith("blocks")} == {Block}


def _spread(group: ProcessGroup) -> str:
    config, state = prepared("fsdp", model=model_with(gain=torch.tensor(1.0)))
    assert state.model is not None
    with pytest.raises(ConfigError) as refused:
        strategy_of(config)(state.model, config, group).shard(state.optimizers)
    assert not any(isinstance(each, DTensor) for each in state.module.parameters())
    return str(refused.value)


def test_it_is_refused_when_a_model_is_to_be_sharded() -> None:
    assert run_ranks(1, _spread)[0].startswith("parameter blocks.1.gain has shape ()")
