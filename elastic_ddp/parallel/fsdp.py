"""The FSDP strategy: every rank holds a shard of each parameter, and of what the optimizer keeps for it (FSDP2,
`torch.distributed.fsdp.fully_shard`).

Parameters of a part of the model are gathered for its forward and backward, so all ranks go through as many of those. A
rank's shards are of no use to a group of another size: a generation begins with the whole model, and what was trained
comes from the newest commit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.batchnorm import _BatchNorm

from elastic_ddp.config import RunConfig
from elastic_ddp.parallel.prepared import PreparedModel
from elastic_ddp.parallel.process_group import ProcessGroup
from elastic_ddp.parallel.strategy import Layout, Strategy
from elastic_ddp.state import whole

FP32 = MixedPrecisionPolicy()
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BF16_AS_A_WHOLE = replace(BF16, output_dtype=torch.float32)
"""Of the model: its loss is computed in full precision."""


class FSDPStrategy(Strategy):
    """Gradients are reduced and scattered in the backward of a step's last micro-batch; until then they add up, whole,
    on each rank."""

    keeps_state = False

    def __init__(self, model: PreparedModel, config: RunConfig, group: ProcessGroup) -> None:
        super().__init__(model, config, group)
        self._options = config.fsdp
        self._is_bf16 = config.precision == "bf16"

    def spread(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        module = self._model.module
        names = {id(each): name for name, each in module.named_parameters()}
        assert dist.group.WORLD is not None, "the generation's group is formed"
        mesh = DeviceMesh.from_group(dist.group.WORLD, self._group.device.type)
        inside, outside = (BF16, BF16_AS_A_WHOLE) if self._is_bf16 else (FP32, FP32)
        parts = [each for each in module.modules() if each is not module]
        # As FSDP1 did it: statistics are in fp32, and a normalization takes parameters of their dtype.
        norms = [each for each in parts if isinstance(each, _BatchNorm)] if self._is_bf16 else []
        units = [each for each in parts if self._model.is_unit(each) and each not in norms]
        policies = [*((each, FP32) for each in norms), *((each, inside) for each in reversed(units)), (module, outside)]
        for each, policy in policies:  # the innermost first: each takes what no other has
            # What is in no unit stays gathered, as torch has it by default: the backward begins with it.
            reshard = self._options.reshard_after_forward and each is not module
            fully_shard(each, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        self._trained = self._find_trained()
        # The parameters are others now, and the user built the optimizers from those before.
        sharded = dict(module.named_parameters())
        for optimizer in optimizers:
            _use_instead(optimizer, lambda each: sharded[names[id(each)]])

    def layout(self, optimizers: Sequence[torch.optim.Optimizer]) -> Layout | None:
        like = {f"model.{name}": each for name, each in self._model.module.state_dict(keep_vars=True).items()}
        for place, optimizer in enumerate(optimizers):
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            like |= {f"optimizer.{place}.state.{number}": each for number, each in enumerate(parameters)}
        spread = {name: each for name, each in like.items() if isinstance(each, DTensor)}
        return lambda name: spread.get(name) if name.startswith("model.") else spread.get(name.rpartition(".")[0])

    def begin_step(self, rows: np.ndarray) -> None:
        self.settle()
        super().begin_step(rows)

    def settle(self) -> None:
        for part in self._model.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def least_forwards(self, rows: np.ndarray) -> int:
        return max(int(np.count_nonzero(rows[list(each)])) for each in self.ranges)

    def prepare_forward(self, micro_batch: int) -> None:
        self._model.use_replica(None)

    def backward(self, loss: torch.Tensor, micro_batch: int) -> None:
        # FSDP divides by the world size.
        factor = self.weight(micro_batch) * self._group.world_size / self.divisor
        self._backward(loss * factor, is_last=micro_batch == self.to_compute[-1])

    def idle_backward(self, loss: torch.Tensor) -> None:
        self._backward(loss * 0.0, is_last=False)

    def _backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        root = self._model.module
        assert isinstance(root, FSDPModule)
        root.set_requires_gradient_sync(is_last)
        root.set_is_last_backward(is_last)
        root.set_reshard_after_backward(is_last)
        loss.backward()

    def clip_grad_norm(self, most: float) -> torch.Tensor:
        return whole(super().clip_grad_norm(most))

    def close(self) -> None:
        """The shards stay, and nothing can be made of them any more."""


def _use_instead(
    optimizer: torch.optim.Optimizer, instead_of: Callable[[torch.nn.Parameter], torch.nn.Parameter]
) -> None:
    """Has an optimizer work on other parameters, with what it keeps for each laid out like it."""
    replaced = {each: instead_of(each) for group in optimizer.param_groups for each in group["params"]}
    for group in optimizer.param_groups:
        group["params"] = [replaced[each] for each in group["params"]]
    kept = {each: optimizer.state.pop(each) for each in replaced if each in optimizer.state}
    for each, state in kept.items():
        optimizer.state[replaced[each]] = {key: _like(value, replaced[each]) for key, value in state.items()}


def _like(value: Any, parameter: torch.nn.Parameter) -> Any:
    if not isinstance(value, torch.Tensor) or not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    # The same on every rank: nothing has to be sent.
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
