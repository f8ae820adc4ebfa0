"""The state to save: a model and its AdamW moments, the same on every rank or sharded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

ROWS = 256
"""Rows of a large tensor."""
TENSOR_KIB = 4096
MIB = 1 << 20


def make_state(size_mib: int, tensor_kib: int = TENSOR_KIB) -> dict[str, Any]:
    """Returns a state of about this size in tensors of this size."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"blocks.{number}.weight": torch.randn(ROWS, tensor_kib, generator=generator)
        for number in range(max(1, size_mib * 1024 // (3 * tensor_kib)))
    }
    return {
        "model": weights,
        "optimizer": {
            "state": {
                name: {"step": torch.tensor(1.0), "exp_avg": weight / 2, "exp_avg_sq": weight.square()}
                for name, weight in weights.items()
            },
            "param_groups": [{"lr": 1e-3, "betas": [0.9, 0.999], "params": [*weights]}],
        },
    }


def tensors_of(state: dict[str, Any]) -> list[torch.Tensor]:
    """Returns the large tensors of a state."""
    moments = [slots[name] for slots in state["optimizer"]["state"].values() for name in ("exp_avg", "exp_avg_sq")]
    return [*state["model"].values(), *moments]


def num_bytes(state: dict[str, Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(state))


def shard_of_any(tensor_kib: int = TENSOR_KIB) -> DTensor:
    """Returns a large DTensor, sharded like `fully_shard` does. Collective."""
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    return distribute_tensor(torch.empty(ROWS, tensor_kib), mesh, [Shard(0)], src_data_rank=None)


def in_shards(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the same state with large tensors sharded like that. Collective."""
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")

    def shard(tensor: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None) if tensor.dim() else tensor

    moments = state["optimizer"]["state"]
    return {
        "model": {name: shard(weight) for name, weight in state["model"].items()},
        "optimizer": {
            **state["optimizer"],
            "state": {name: {key: shard(value) for key, value in slots.items()} for name, slots in moments.items()},
        },
    }
