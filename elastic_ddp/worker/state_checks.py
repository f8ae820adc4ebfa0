"""Checks of prepared objects and of the state that they save and load.

They raise errors in place of what torch would do silently, or only at the first step.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement

from elastic_ddp import torch_internals
from elastic_ddp.errors import CheckpointError, ConfigError, shorten
from elastic_ddp.tensors.state_tree import Layout, dtype_name, flatten


def check_model(module: torch.nn.Module) -> None:
    """Raises a ConfigError for a model that a run cannot train."""
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        raise ConfigError("run.prepare got a DistributedDataParallel. Give it the plain model; it adds the wrapper.")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError("run.prepare got a model without a parameter that requires a gradient: nothing can train.")
    if sharded := [name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)]:
        raise ConfigError(
            f"run.prepare got a model whose parameters are already sharded: {shorten(sharded, 5)}. Build a new model "
            "in the training function: with FSDP it starts again whenever membership changes."
        )
    for part in module.modules():
        kind = type(part).__name__
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse:
            raise ConfigError(
                f"run.prepare got an {kind}(sparse=True). Sparse gradients cannot be reduced; use sparse=False."
            )
        if isinstance(part, torch.nn.SyncBatchNorm):
            raise ConfigError(
                f"run.prepare got a {kind}, whose statistics depend on the number of workers. Use BatchNorm: the run "
                "combines its running statistics over all micro-batches of a step."
            )
    if complex_parameters := [name for name, parameter in module.named_parameters() if parameter.is_complex()]:
        raise ConfigError(
            f"run.prepare got complex parameters: {shorten(complex_parameters, 5)}. DDP cannot reduce their gradients; "
            "use real parameters and torch.view_as_complex in forward."
        )


def check_optimizer(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module, prepared: Sequence[torch.optim.Optimizer]
) -> None:
    """Raises a ConfigError for an optimizer that a run cannot step.

    Args:
        optimizer: the optimizer to prepare.
        module: the prepared model.
        prepared: the optimizers that are already prepared.
    """
    kind = type(optimizer).__name__
    if any(optimizer is other for other in prepared):
        raise ConfigError(f"run.prepare got the same {kind} twice. Prepare each optimizer once.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "run.prepare got an LBFGS, which evaluates the model several times within a step. Use an optimizer whose "
            "step() takes no closure."
        )
    known = {id(parameter) for parameter in module.parameters()}
    num_unknown = sum(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"])
    if num_unknown:
        raise ConfigError(
            f"{num_unknown} parameters of the {kind} are not parameters of the prepared model. Build the optimizer "
            "from model.parameters() of the model that run.prepare returned."
        )


def check_scheduler(
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    optimizers: Sequence[torch.optim.Optimizer],
    prepared: Sequence[torch.optim.lr_scheduler.LRScheduler],
) -> None:
    """Raises a ConfigError for a scheduler that a run cannot step. `prepared` holds those already prepared."""
    kind = type(scheduler).__name__
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigError(
            f"run.prepare got a {kind}, which needs a metric to step. Give it to run.register instead, and step it "
            "yourself with the result of run.evaluate."
        )
    if any(scheduler is other for other in prepared):
        raise ConfigError(f"run.prepare got the same {kind} twice. Prepare each scheduler once.")
    if not any(scheduler.optimizer is optimizer for optimizer in optimizers):
        raise ConfigError(
            f"run.prepare got a {kind} of an optimizer that is not prepared. Prepare its optimizer first."
        )


def check_registered_state(user: dict[str, Any]) -> None:
    """Raises a ConfigError if registered state holds shards, which no restore could lay out again."""
    shards = [name for name, tensor in flatten({"user": user})[1].items() if isinstance(tensor, DTensor)]
    if shards:
        raise ConfigError(
            f"the state of an object given to run.register holds shards: {shorten(shards, 5)}. Have its state_dict() "
            "return tensor.full_tensor(). Its load_state_dict() may shard the value again, like the parameter that it "
            "belongs to: "
            "torch.distributed.tensor.distribute_tensor(value, parameter.device_mesh, parameter.placements)."
        )


def check_layout(optimizer: torch.optim.Optimizer, name: str, saved: Any, layout: Layout) -> None:
    """Raises a ConfigError if a restore would lay out an optimizer's state differently from how it is now.

    Args:
        optimizer: the optimizer.
        name: the path of its state in the tree.
        saved: its state dict.
        layout: how a restore lays out tensors.
    """
    differing = []
    for path, tensor in _tensors(saved, name):
        like = layout(path)
        expected = _placements(like) if like is not None and like.shape == tensor.shape else ()
        if _placements(tensor) != expected:
            how = ", ".join(map(repr, _placements(tensor))) or "not sharded"
            differing.append(f"{path} of {tuple(tensor.shape)}, {how}")
    if differing:
        raise ConfigError(
            f"a restore cannot lay out the state of the optimizer {type(optimizer).__name__} as it is now: "
            f"{shorten(differing, 5, separator='; ')}. Tensors of the parameter's shape must be sharded like the "
            "parameter, as torch.zeros_like(parameter) is; all others must not be sharded. Have the optimizer's "
            "state_dict() return tensor.full_tensor() and its load_state_dict() shard it again with "
            'torch.distributed.tensor.distribute_tensor; or use another optimizer, or strategy="ddp".'
        )


def _tensors(tree: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields tensors by the names that `flatten` gives them. Much faster than `flatten`."""
    if isinstance(tree, torch.Tensor):
        yield name, tree
    elif isinstance(tree, dict | list | tuple | deque):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _tensors(value, f"{name}.{key}")


def _placements(tensor: torch.Tensor) -> tuple[Placement, ...]:
    """Returns how a tensor is sharded; empty for one that is not."""
    return tensor.placements if isinstance(tensor, DTensor) else ()


def check_saved_model(
    model: Mapping[str, Any],
    saved_model: Mapping[str, Any],
    buffers: Mapping[str, torch.Tensor],
    saved_buffers: Mapping[str, Any],
) -> None:
    """Raises a ValueError if tensors differ in ways that `load_state_dict` of torch does not report.

    Args:
        model: the model's state dict. Torch reports missing names and other shapes, but converts dtypes silently.
        saved_model: the same in the commit.
        buffers: the non-persistent buffers; torch does not load them.
        saved_buffers: the same in the commit.
    """
    # The state of `get_extra_state` may have any type.
    tensors = {name: value for name, value in model.items() if name.rpartition(".")[2] != torch_internals.EXTRA_STATE}
    changed = _dtype_changes(tensors, saved_model, tensors.keys() & saved_model.keys())
    changed += _dtype_changes(buffers, saved_buffers, buffers.keys() | saved_buffers.keys())
    changed += [
        f"the buffer {name} has shape {tuple(saved_buffers[name].shape)} in the commit and {tuple(buffer.shape)} in "
        "the model"
        for name, buffer in buffers.items()
        if not changed and buffer.shape != saved_buffers[name].shape
    ]
    if changed:
        raise ValueError(shorten(changed, separator="; "))


def _dtype_changes(own: Mapping[str, Any], saved: Mapping[str, Any], names: Collection[str]) -> list[str]:
    def dtype(values: Mapping[str, Any], name: str) -> str:
        if name not in values:
            return "missing"
        return dtype_name(values[name].dtype) if isinstance(values[name], torch.Tensor) else "no tensor"

    return [
        f"{name} is {dtype(saved, name)} in the commit and {dtype(own, name)} in the model"
        for name in sorted(names)
        if dtype(saved, name) != dtype(own, name)
    ]


def check_saved_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Raises a CheckpointError if the state has settings of torch's optimizers that this one does not have.

    Other settings are accepted: users may add any to a param_group, and their own optimizers may add some in `step`.
    """
    if _is_from_torch(optimizer):
        for group, own in zip(saved["param_groups"], optimizer.param_groups, strict=False):
            _check_keys("optimizer", optimizer, _torch_settings().intersection(group), own)


@cache
def _torch_settings() -> frozenset[str]:
    """Returns the names of all arguments of torch's optimizers."""
    kinds = [value for value in vars(torch.optim).values() if isinstance(value, type)]
    optimizers = [kind for kind in kinds if issubclass(kind, torch.optim.Optimizer)]
    return frozenset(name for optimizer in optimizers for name in inspect.signature(optimizer).parameters)


def check_saved_scheduler(scheduler: torch.optim.lr_scheduler.LRScheduler, saved: Mapping[str, Any]) -> None:
    """Raises a CheckpointError if loading would set attributes that are no state.

    Schedulers set every key as an attribute, also in place of their methods.
    """
    own = set(scheduler.state_dict())
    if not _is_from_torch(scheduler):  # may add attributes in `step`
        own |= {name for name in saved if not hasattr(scheduler, name)}
    _check_keys("scheduler", scheduler, saved, own)
    schedulers, states = torch_internals.inner_schedulers(scheduler), torch_internals.inner_scheduler_states(saved)
    for inner, state in zip(schedulers, states, strict=False):
        check_saved_scheduler(inner, state)


def _is_from_torch(value: object) -> bool:
    return type(value).__module__.startswith("torch.")


def _check_keys(kind: str, value: Any, saved: Collection[str], own: Collection[str]) -> None:
    if unknown := sorted(map(str, set(saved).difference(own))):
        raise CheckpointError(
            f"the commit holds the state of another {kind}: {type(value).__name__} has no {', '.join(unknown)}. "
            f"Prepare the {kind} that the run began with, or use another name."
        )
