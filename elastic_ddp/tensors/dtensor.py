"""DTensors, without an import of DTensor: that takes half a second, and drivers and DDP need none."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Returns whether a value is a DTensor. There is none in a process that has not imported their module."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def shard_of(rows: torch.Tensor, like: DTensor) -> DTensor:
    """Returns this rank's rows as a tensor that is sharded like another one."""
    return type(like).from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
