"""`Mirror`: with FSDP, the shard of another rank, which this rank keeps too. If that rank dies, its shard survives.

A step changes the state in two halves. Forward, backward, the exchange of gradients and the vote need all ranks; the
optimizer does not. Before the vote, each rank sends the gradient of its shard to the rank that mirrors it. After the
vote, both ranks step the same rows with the same gradient. The mirroring rank uses a copy of the optimizers.
"""

from __future__ import annotations

import copy
import json
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.distributed.shard_moves import Spec, rotate_rows
from elastic_ddp.errors import ConfigError, format_exception, shorten
from elastic_ddp.tensors.digest import digest_named
from elastic_ddp.tensors.dtensor import is_dtensor, shard_of
from elastic_ddp.tensors.host_memory import free_bytes
from elastic_ddp.tensors.state_tree import Layout, flatten, local_part, unflatten
from elastic_ddp.torch_internals import version
from elastic_ddp.worker.optimizer_state import group_names, load_named_state, named_state

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_WITHOUT = "Or set fsdp.mirror = false: after a failure, the run then resumes from its newest commit."
_PARAMETERS = ("params", "param_names")
"""The keys of a param_group that the groups of the copy have already."""
_HOOKED = ("step", "state_dict", "load_state_dict")
_NOT_COPIED = {"state", "step", *(f"_optimizer_{name}_{when}_hooks" for name in _HOOKED for when in ("pre", "post"))}
"""Attributes of an optimizer. A scheduler sets `step`; the state is copied later, and hooks are the user's."""


class Mirror:
    """The parameters of the mirrored shard, and a copy of each optimizer that steps them.

    Every rank creates a `Mirror` when it holds its own shard, and makes the same calls. `rows` are the mirrored
    rows if this rank has them. Otherwise, the rank that owns the mirrored shard sends the rows.

    Raises:
        ConfigError: an optimizer cannot be copied, or state_dict() of the model has copies of parameters.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
        group: ProcessGroup,
        offset: int,
        rows: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._module = module
        self._own_optimizers = optimizers
        self._group = group
        self._offset = offset
        self.shard = (group.rank - offset) % group.world_size
        """The number of the mirrored shard."""
        names = self._names = {parameter: name for name, parameter in module.named_parameters()}
        for name, value in module.state_dict(keep_vars=True).items():
            if is_dtensor(value) and value not in names:
                raise ConfigError(
                    f"state_dict() of the model has a copy of a parameter as {name}, which a mirror cannot follow. "
                    f"Return the parameter itself. {_WITHOUT}"
                )
        own_tensors = self._own_tensors()
        if rows is None or rows.keys() != own_tensors.keys():
            rows = self._receive(own_tensors)
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._changes: dict[str, tuple[int, ...]] = {}  # of this rank's shard, when its optimizers had stepped it
        self._num_steps = 0
        mirrored: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        for parameter, name in names.items():
            shard = shard_of(rows[name], parameter)  # type: ignore[arg-type]
            self._parameters[name] = torch.nn.Parameter(shard, requires_grad=parameter.requires_grad)
            mirrored[parameter] = self._parameters[name]
        self._optimizers = [_copy_of(optimizer, mirrored) for optimizer in optimizers]
        for number, (optimizer, copied) in enumerate(zip(optimizers, self._optimizers, strict=True)):
            of_groups = group_names(optimizer, module)
            skeleton, tensors = flatten({"optimizer": {str(number): named_state(optimizer, of_groups)}})
            values = {
                name: shard_of(rows[name], tensor) if name in rows else tensor.clone()  # type: ignore[arg-type]
                for name, tensor in tensors.items()
            }
            load_named_state(copied, of_groups, unflatten(skeleton, values)["optimizer"][str(number)])

    def _own_tensors(self) -> dict[str, DTensor]:
        """Returns the sharded tensors of this rank: parameters, and the state of the optimizers."""
        return self._sharded(dict(self._module.named_parameters()), self._own_optimizers)

    def _sharded(
        self, parameters: Mapping[str, torch.Tensor], optimizers: list[torch.optim.Optimizer]
    ) -> dict[str, DTensor]:
        states = {
            str(number): named_state(optimizer, group_names(own, self._module))
            for number, (own, optimizer) in enumerate(zip(self._own_optimizers, optimizers, strict=True))
        }
        tensors = {**parameters, **flatten({"optimizer": states})[1]}
        return {name: tensor for name, tensor in tensors.items() if is_dtensor(tensor)}

    def _receive(self, own: Mapping[str, DTensor]) -> dict[str, torch.Tensor]:
        """Sends this rank's rows of tensors to the rank that mirrors them. Returns the rows of the mirrored shard."""
        specs = {name: Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in own.items()}
        rows = {name: local_part(tensor) for name, tensor in own.items()}
        return rotate_rows(specs, rows, self._offset, self._group)

    def receive_gradients(self) -> None:
        """Receives the gradients of the mirrored shard. Collective."""
        gradients = {name: parameter.grad for parameter, name in self._names.items() if parameter.grad is not None}
        received = self._receive(gradients)  # type: ignore[arg-type]
        for name, parameter in self._parameters.items():
            parameter.grad = shard_of(received[name], parameter) if name in received else None  # type: ignore[arg-type]

    def step_with(self, step_own: Callable[[], None], seed: Callable[[], None]) -> None:
        """Steps the optimizers by `step_own`, and then their copies, each time with the same random numbers.

        Raises a ConfigError if an optimizer ran a collective: its copy has another shard and no peers.
        """
        for own, copied in zip(self._own_optimizers, self._optimizers, strict=True):
            for group, of_copy in zip(own.param_groups, copied.param_groups, strict=True):
                of_copy.update({key: copy.deepcopy(value) for key, value in group.items() if key not in _PARAMETERS})
        before = self._group.num_collectives()
        seed()
        step_own()
        if self._group.num_collectives() != before:
            kinds = " or ".join(type(optimizer).__name__ for optimizer in self._own_optimizers)
            raise ConfigError(
                f"a step of {kinds} ran collectives, so it needs all shards, and no mirror can repeat it. Use an "
                f"optimizer that works element by element, such as AdamW. {_WITHOUT}"
            )
        seed()
        for copied in self._optimizers:
            copied.step()
        for parameter in self._parameters.values():
            parameter.grad = None
        self._changes = self._count_changes()
        self._num_steps += 1

    def check_unchanged(self) -> None:
        """Raises a ConfigError if this rank's shard, or the state of its optimizers, has changed since their step."""
        now = self._count_changes() if self._changes else {}
        changed = [name for name in self._changes | now if now.get(name) != self._changes.get(name)]
        if changed:
            raise ConfigError(
                f"{shorten(changed, 5)} changed after step.optimize(), which a mirror cannot follow. Change parameters "
                f"and the state of optimizers in an optimizer only. {_WITHOUT}"
            )

    @torch.no_grad()  # a DTensor then returns its local part at once
    def _count_changes(self) -> dict[str, tuple[int, ...]]:
        """Returns numbers that change with the shard, and with tensors in the state of the optimizers."""
        counts: dict[str, tuple[int, ...]] = {}
        for parameter, name in self._names.items():
            counts[name] = version(parameter), version(local_part(parameter))
        for optimizer in self._own_optimizers:
            for of, state in optimizer.state.items():
                for key, value in state.items():
                    if isinstance(value, torch.Tensor):
                        counts[f"{key} of {self._names.get(of)}"] = id(value), version(value)  # type: ignore[call-overload]
        return counts

    def rows(self, state: Mapping[str, DTensor], layout: Layout) -> dict[str, torch.Tensor]:
        """Returns the mirrored rows of sharded tensors of the state, by their names in `TrainState.state_dict`."""
        tensors = self._tensors()
        return {name: tensors[name if name in tensors else self._names[layout(name)]] for name in state}  # type: ignore[index]

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Returns the mirrored rows of the tensors that `_own_tensors` returns."""
        tensors = self._sharded(self._parameters, self._optimizers)
        return {name: local_part(tensor.detach()) for name, tensor in tensors.items()}

    @property
    def is_due(self) -> bool:
        """Whether to compare: after steps 1, 2, 4, 8, … in the generation, which costs nothing on average.

        The comparison finds changes that torch does not count, for example edits of `parameter.data`.
        """
        return self._num_steps > 0 and not self._num_steps & (self._num_steps - 1)

    def compare(self) -> None:
        """Compares each shard with its mirror. Collective. Raises a ConfigError on every rank if they differ."""
        own = digest_named(self._own_tensors())
        mirrored = digest_named(self._tensors())
        gathered = [json.loads(each) for each in self._group.all_gather_bytes(json.dumps([own, mirrored]).encode())]
        for rank, (of_owner, _) in enumerate(gathered):
            of_mirror = gathered[(rank + self._offset) % self._group.world_size][1]
            differing = [name for name, digest in of_owner.items() if of_mirror.get(name) != digest]
            if differing:
                raise ConfigError(
                    f"shard {rank} differs from its mirror in {shorten(differing, 5)}. Change parameters and the state "
                    "of optimizers in an optimizer only, and not by the rank, the time, or other rows. If the code "
                    f"does, a device of rank {rank}, or of the rank with its mirror, computes wrong values. {_WITHOUT}"
                )


def find_shortage(needed_bytes: int, group: ProcessGroup, device: torch.device) -> str | None:
    """Returns on which device there is too little memory for mirrors; None if there is enough. Collective."""
    name = str(device) if device.type == "cuda" else "the host"
    own = [f"{name} of {socket.gethostname()}", needed_bytes, free_bytes(device)]
    by_device: dict[str, tuple[int, int]] = {}
    for name, needed, free in map(json.loads, group.all_gather_bytes(json.dumps(own).encode())):
        total, least = by_device.get(name, (0, free))
        by_device[name] = total + needed, min(least, free)
    for name, (needed, free) in by_device.items():
        if needed > free:
            return f"{name} has {free / 1e9:.2f} GB free, and they take {needed / 1e9:.2f} GB there"
    return None


def _copy_of(
    optimizer: torch.optim.Optimizer, mirrored: Mapping[torch.nn.Parameter, torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Returns a copy of an optimizer that steps the mirrored parameters, without state."""
    memo: dict[int, Any] = {id(parameter): mirror for parameter, mirror in mirrored.items()}
    attributes = {name: value for name, value in vars(optimizer).items() if name not in _NOT_COPIED}
    try:
        copied: torch.optim.Optimizer = object.__new__(type(optimizer))
        copied.__setstate__({**copy.deepcopy(attributes, memo), "state": defaultdict(dict)})
    except Exception as error:
        kind = type(optimizer).__name__
        raise ConfigError(
            f"the {kind} cannot be copied for the mirror of a shard: {format_exception(error)}. {_WITHOUT}"
        ) from error
    return copied
