"""The FSDP strategy: every rank holds a shard of each parameter, and of what the optimizer keeps for it (FSDP2,
`torch.distributed.fsdp.fully_shard`).

Parameters of a part of the model are gathered for its forward and backward, so all ranks go through as many of those. A
rank's shards are of no use to a group of another size: a generation begins with the whole model, and what was trained
comes from the newest commit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from elastic_ddp import torch_internals
from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.distributed.fsdp_units import ParameterLocation, check_shardable, locate_parameters
from elastic_ddp.distributed.prepared_model import PreparedModel
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.distributed.strategy import Strategy, unused
from elastic_ddp.tensors.state_tree import Layout, gather_full

BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)
FP32 = MixedPrecisionPolicy()
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BF16_AS_A_WHOLE = replace(BF16, output_dtype=torch.float32)
"""Of the model: its loss is computed in full precision."""

_TAKE_PART = (
    "with FSDP every rank reduces the gradients of the same parameters, so each has to take part in every micro-batch: "
    "add 0 * parameter.sum() of those that a branch leaves out to what the model returns"
)


class FSDPStrategy(Strategy):
    """Gradients are reduced and scattered in the backward of a step's last micro-batch; until then they add up, whole,
    on each rank."""

    replicates_state = False

    def __init__(self, model: PreparedModel, config: RunConfig, group: ProcessGroup) -> None:
        super().__init__(model, config, group)
        self._gathered: dict[str, torch.nn.Parameter] = {}
        """What is trained, as it is while it is gathered: what a graph has in it, and gradients add up in."""
        self._mesh: DeviceMesh | None = None
        self._options = config.fsdp
        self._is_bf16 = config.precision == "bf16"

    def shard(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        module = self._model.module
        names = {id(each): name for name, each in module.named_parameters()}
        assert dist.group.WORLD is not None, "the generation's group is formed"
        # Meshes of the same ranks are equal in all else, whichever of them this process is, and torch keeps what came
        # of one for its equals: a rank that has moved would take the place in a tensor that it had at this size before.
        names_of_dimensions = (f"generation_{self._group.assignment.generation}",)
        mesh = DeviceMesh.from_group(dist.group.WORLD, self._group.device.type, mesh_dim_names=names_of_dimensions)
        self._mesh = mesh  # to let go of its group
        inside, outside = (BF16, BF16_AS_A_WHOLE) if self._is_bf16 else (FP32, FP32)
        parts = [each for each in module.modules() if each is not module]
        # As FSDP1 did it: statistics are in fp32, and a normalization takes parameters of their dtype.
        norms = [each for each in parts if isinstance(each, BATCH_NORMS)] if self._is_bf16 else []
        units = [each for each in parts if self._model.is_unit(each) and each not in norms]
        policies = [*((each, FP32) for each in norms), *((each, inside) for each in reversed(units)), (module, outside)]
        places = locate_parameters(module, {each for each, _ in policies})
        check_shardable(places)
        for each, policy in policies:  # the innermost first: each takes what no other has
            # What is in no unit stays gathered, as torch has it by default: the backward begins with it.
            reshard = self._options.reshard_after_forward and each is not module
            fully_shard(each, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
            each.register_forward_pre_hook(self._gatherer(each, places))
        self._trained = self._find_trained()
        # The parameters are others now, and the user built the optimizers from those before.
        sharded = dict(module.named_parameters())
        for optimizer in optimizers:
            _use_instead(optimizer, lambda each: sharded[names[id(each)]])

    def _gatherer(
        self, part: torch.nn.Module, places: Sequence[ParameterLocation]
    ) -> Callable[[torch.nn.Module, Any], None]:
        """Sees a part's parameters before its forward, after torch has gathered them."""
        trained = [each for each in places if each.part is part and each.name in self._trained]

        def see(part: torch.nn.Module, given: Any) -> None:
            self._gathered |= {each.name: each.parameter for each in trained}

        return see

    def layout(self, optimizers: Sequence[torch.optim.Optimizer]) -> Layout | None:
        like = {f"model.{name}": each for name, each in self._model.module.state_dict(keep_vars=True).items()}
        for place, optimizer in enumerate(optimizers):
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            like |= {f"optimizer.{place}.state.{number}": each for number, each in enumerate(parameters)}
        spread = {name: each for name, each in like.items() if isinstance(each, DTensor)}

        def like_of(name: str) -> torch.Tensor | None:
            # What an optimizer keeps for a parameter may be anywhere in a tree: optimizer.0.state.3.history.1
            return spread.get(name if name.startswith("model.") else ".".join(name.split(".", 4)[:4]))

        return like_of

    def begin_step(self, rows: np.ndarray) -> None:
        self.reshard()
        super().begin_step(rows)

    def reshard(self) -> None:
        for part in self._model.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def min_forwards(self, rows: np.ndarray) -> int:
        return max(int(np.count_nonzero(rows[list(each)])) for each in self.ranges)

    def prepare_forward(self, micro_batch: int) -> None:
        self._model.use_replica(None)

    def backward(self, loss: torch.Tensor, micro_batch: int) -> None:
        is_last = micro_batch == self.to_compute[-1]
        if not (weight := self.weight(micro_batch)):
            self._backward_for_nothing(loss, is_last=is_last)
            return
        # FSDP divides by the world size.
        self._backward(loss * (weight * self._group.world_size / self.divisor), is_last=is_last)

    def dummy_backward(self, loss: torch.Tensor) -> None:
        self._backward_for_nothing(loss, is_last=False)

    def _backward_for_nothing(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Zeros for all, whatever the model makes of padding: 0 times infinity would be NaN on every rank."""
        hooks = [each.register_hook(torch.zeros_like) for each in self._gathered.values()]
        try:
            self._backward(loss, is_last=is_last)
        finally:
            for hook in hooks:
                hook.remove()

    def _backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        self._check_used(loss)
        root = self._model.module
        assert isinstance(root, FSDPModule)
        root.set_requires_gradient_sync(is_last)
        root.set_is_last_backward(is_last)
        root.set_reshard_after_backward(is_last)
        loss.backward()
        if is_last and (left := [name for name, each in self._trained.items() if each.grad is None]):
            raise unused(left, _TAKE_PART)  # what `_check_used` could not see

    def _check_used(self, loss: torch.Tensor) -> None:
        """Refuses a loss that leaves out some of what is trained, before ranks reduce gradients of others than their
        peers do: torch would add them up as if they were the same ones. In every pass, so that it does not depend on
        the number of ranks what is refused."""
        reached = _leaves(loss)
        if reached is not None and (
            left := [each for each in self._trained if self._gathered.get(each) not in reached]
        ):
            raise unused(left, _TAKE_PART)

    def clip_grad_norm(self, most: float) -> torch.Tensor:
        return gather_full(super().clip_grad_norm(most))

    def close(self) -> None:
        """The shards stay, and nothing can be made of them any more.

        Nor does anything hold on to the process group: torch's caches keep every mesh there was for good, and a mesh
        its group, with all its threads and connections.
        """
        if self._mesh is not None:
            torch_internals.release_groups(self._mesh)


def _leaves(loss: torch.Tensor) -> set[torch.Tensor | None] | None:
    """What the backward of a loss adds gradients to; None if there is no telling."""
    leaves: set[torch.Tensor | None] = set()
    ahead = [loss.grad_fn] if loss.grad_fn is not None else []
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        if node.name() == "CheckpointFunctionBackward":
            return None  # re-entrant: it makes a graph of its own in the backward
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.add(leaf)
        for each, _ in node.next_functions:
            if each is not None and each not in seen:
                seen.add(each)
                ahead.append(each)
    return leaves


def _use_instead(
    optimizer: torch.optim.Optimizer, instead_of: Callable[[torch.nn.Parameter], torch.nn.Parameter]
) -> None:
    """Has an optimizer work on other parameters, with what it keeps for each laid out like it."""
    replaced = {each: instead_of(each) for group in optimizer.param_groups for each in group["params"]}
    for group in optimizer.param_groups:
        group["params"] = [replaced[each] for each in group["params"]]
    kept = {each: optimizer.state.pop(each) for each in replaced if each in optimizer.state}
    for each, state in kept.items():
        optimizer.state[replaced[each]] = torch_internals.map_tree(partial(_like, parameter=replaced[each]), state)


def _like(value: Any, parameter: torch.nn.Parameter) -> Any:
    if not isinstance(value, torch.Tensor) or not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    # The same on every rank: nothing has to be sent.
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
