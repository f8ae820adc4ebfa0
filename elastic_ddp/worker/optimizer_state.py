"""The state of an optimizer by the names of its parameters, as `torch.distributed.checkpoint` writes it.

Torch numbers the parameters in the order in which the optimizer got them. Reorganized code, or a `set` of
parameters, gives another order. By number, a parameter would then get the state of another parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from elastic_ddp import torch_internals
from elastic_ddp.errors import ConfigError, shorten

GroupNames = list[list[str]]
"""The names of the parameters of each param_group."""


def group_names(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> GroupNames:
    """Returns the names of an optimizer's parameters in the model, in its order.

    Raises a ConfigError if the optimizer has a parameter that is not in the model.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    num_unknown = sum(id(each) not in names for group in optimizer.param_groups for each in group["params"])
    if num_unknown:
        raise ConfigError(
            f"{num_unknown} parameters of the {type(optimizer).__name__} are not parameters of the prepared model. "
            "Build the optimizer from model.parameters() of the model that run.prepare returned."
        )
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def named_state(optimizer: torch.optim.Optimizer, names: GroupNames) -> dict[str, Any]:
    """Returns `optimizer.state_dict()` with names in place of numbers.

    State in a format other than torch's keeps its numbers, with the names beside it.
    """
    state = optimizer.state_dict()
    by_number = dict(enumerate(name for group in names for name in group))
    groups = state["param_groups"] if state.keys() == {"state", "param_groups"} else []
    if [number for group in groups for number in group["params"]] != [*by_number]:
        return {"numbered": state, "names": names}
    return {
        "state": {by_number.get(key, key): value for key, value in state["state"].items()},
        "param_groups": [
            # The order in which this process has the names says nothing about the state.
            {key: value for key, value in group.items() if key != "param_names"} | {"params": of_group}
            for group, of_group in zip(groups, names, strict=True)
        ],
    }


def saved_names(saved: Mapping[str, Any]) -> GroupNames:
    """Returns the names in a state that `named_state` returned."""
    return saved["names"] if "numbered" in saved else [group["params"] for group in saved["param_groups"]]


def check_groups(optimizer: torch.optim.Optimizer, names: GroupNames, saved: GroupNames) -> None:
    """Raises ValueError, with the names that differ, unless each param_group has its saved parameters, in any order."""
    if [*map(frozenset, names)] == [*map(frozenset, saved)]:
        return
    own, before = ({name: number for number, group in enumerate(groups) for name in group} for groups in (names, saved))
    differences = {
        "it lacks": [name for name in before if name not in own],
        "it has in addition": [name for name in own if name not in before],
        "it has in other param_groups": [name for name in own if before.get(name, own[name]) != own[name]],
    }
    listed = "; ".join(f"{what} {shorten(which, 10)}" for what, which in differences.items() if which)
    raise ValueError(
        f"the {type(optimizer).__name__} has {len(names)} param_groups, and {len(saved)} were saved: "
        f"{listed or 'some are empty'}. Give it the same parameters in the same param_groups; their order in a group "
        "does not matter"
    )


def load_named_state(optimizer: torch.optim.Optimizer, names: GroupNames, saved: Mapping[str, Any]) -> None:
    """Loads the result of `named_state`; the saved optimizer may have had its parameters in another order.

    Raises ValueError if the saved param_groups hold other parameters, or a format other than torch's needs the order.
    """
    of_saved = saved_names(saved)
    check_groups(optimizer, names, of_saved)
    if "numbered" in saved:
        if of_saved != names:
            raise ValueError(
                f"the {type(optimizer).__name__} got its parameters in another order than before, and its own "
                "state_dict format numbers them. Give it the parameters in this order: "
                f"{shorten([name for g in of_saved for name in g], 20)}"
            )
        _load(optimizer, saved["numbered"])
        return
    numbers = {name: number for number, name in enumerate(name for group in names for name in group)}
    groups = [
        {**group, "params": [numbers[name] for name in of_group]}
        for group, of_group in zip(saved["param_groups"], names, strict=True)
    ]
    _load(optimizer, {"state": {numbers.get(k, k): v for k, v in saved["state"].items()}, "param_groups": groups})


def state_of(thing: Any, module: torch.nn.Module) -> dict[str, Any]:
    """Returns the state of a registered object: of an optimizer of the model's parameters, by their names."""
    return named_state(thing, group_names(thing, module)) if _trains(thing, module) else thing.state_dict()


def load_state_of(thing: Any, module: torch.nn.Module, saved: dict[str, Any]) -> None:
    """Loads the result of `state_of`."""
    if _trains(thing, module):
        load_named_state(thing, group_names(thing, module), saved)
    else:
        thing.load_state_dict(saved)


def _trains(thing: object, module: torch.nn.Module) -> bool:
    if not isinstance(thing, torch.optim.Optimizer):
        return False
    known = set(module.parameters())
    return all(parameter in known for group in thing.param_groups for parameter in group["params"])


def _load(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Loads an optimizer's state without conversions.

    Torch's loader converts floating-point state to the dtype of its parameter, and rebuilds strings. This function
    puts the saved values back, except for optimizers with a loader or load hooks of their own.
    """
    optimizer.load_state_dict(dict(saved))
    uses_torch_loader = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    if not uses_torch_loader or torch_internals.has_load_hooks(optimizer):
        return
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in saved["state"]:
            loaded = optimizer.state[parameter]
            optimizer.state[parameter] = torch_internals.map_tree(_as_saved, saved["state"][number], loaded)


def _as_saved(saved: Any, loaded: Any) -> Any:
    """Returns a leaf of the saved state, on the device of the loaded leaf."""
    if not isinstance(saved, torch.Tensor):
        return saved
    return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
