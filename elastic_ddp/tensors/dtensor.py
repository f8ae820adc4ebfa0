"""DTensors, without an import of DTensor: the import takes half a second, and drivers and DDP need no DTensor."""

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
    kinds = rows.device.type, like.to_local().device.type
    if kinds[0] != like.device_mesh.device_type and kinds[1] in (kinds[0], "meta"):
        from elastic_ddp.torch_internals import dtensor_in_place

        return dtensor_in_place(rows, like)  # offloaded: `from_local` would move the rows to the mesh's device
    return type(like).from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
