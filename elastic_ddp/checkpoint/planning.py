"""Who writes which block of which tensor: torch.distributed.checkpoint's planning, with replicated tensors shared out.

DCP has a replicated tensor written by one rank, whole. Here every tensor, or this rank's shard of one, is cut into
small blocks, so that ranks share what they all hold, and what is read or sent at once is small.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

BLOCK_BYTES = 16 << 20
"""No block is larger, but for a single element."""


class BlockPlanner(DefaultSavePlanner):
    """Plans the blocks of a flat dict of tensors: plain ones, which every rank holds, and DTensors, of which each rank
    holds a shard. `create_global_plan` shares out what several ranks have planned.
    """

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._block_bytes = block_bytes

    def create_local_plan(self) -> SavePlan:
        items = [item for name, tensor in self.state_dict.items() for item in self._items(name, tensor)]
        self.plan = SavePlan(items)
        return self.plan

    def _items(self, name: str, tensor: torch.Tensor) -> Iterator[WriteItem]:
        local, origin = local_part(name, tensor)
        properties = TensorProperties.create_from_tensor(local)
        for first, sizes in blocks_of(local.shape, local.element_size(), self._block_bytes):
            offsets = torch.Size(start + place for start, place in zip(origin, first, strict=True))
            if math.prod(sizes) or not tensor.numel():  # DTensors may have shards without elements
                yield WriteItem(
                    index=MetadataIndex(name, offsets),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=ChunkStorageMetadata(offsets, sizes), properties=properties, size=tensor.size()
                    ),
                )

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The block, a view of this rank's memory."""
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        local, origin = local_part(write_item.index.fqn, self.state_dict[write_item.index.fqn])
        return narrowed(local, [at - start for at, start in zip(chunk.offsets, origin, strict=True)], chunk.sizes)


def local_part(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Size]:
    """What this rank has of a tensor, and where in it that begins."""
    if not isinstance(tensor, DTensor):
        return tensor, torch.Size([0] * tensor.dim())
    [item] = tensor.__create_write_items__(name, tensor)  # DCP's protocol
    assert item.tensor_data is not None
    return tensor.to_local(), item.tensor_data.chunk.offsets


def laid_out(held: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor of which this rank holds that part which it has of another."""
    if not isinstance(like, DTensor):
        return held
    return DTensor.from_local(
        held, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def blocks_of(shape: torch.Size, element_bytes: int, block_bytes: int) -> Iterator[tuple[torch.Size, torch.Size]]:
    """Cuts a tensor so that blocks are contiguous, and no larger than they may be unless an element is: offsets and
    sizes. A block is a range in one dimension, at one place in each of those before, whole in those after."""
    if not math.prod(shape):
        yield torch.Size([0] * len(shape)), shape
        return
    # Rows of the dimension that is cut are the largest that a block has room for.
    row_bytes = [math.prod(shape[dimension + 1 :]) * element_bytes for dimension in range(len(shape))]
    axis = next((dimension for dimension, each in enumerate(row_bytes) if each <= block_bytes), len(shape) - 1)
    if axis < 0:
        yield shape, shape  # one number
        return
    most = max(1, block_bytes // row_bytes[axis])
    rows = math.ceil(shape[axis] / math.ceil(shape[axis] / most))  # as even as can be
    whole = shape[axis + 1 :]
    for outer in itertools.product(*map(range, shape[:axis])):
        for first in range(0, shape[axis], rows):
            count = min(rows, shape[axis] - first)
            yield torch.Size([*outer, first, *[0] * len(whole)]), torch.Size([*[1] * axis, count, *whole])


def narrowed(tensor: torch.Tensor, offsets: list[int], sizes: torch.Size) -> torch.Tensor:
    """A box of a tensor, a view."""
    for dimension, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dimension, offset, size)
    return tensor


def share_of(planner: BlockPlanner, *, rank: int, world_size: int, is_for_rank_0: Callable[[str], bool]) -> SavePlan:
    """What a rank is to write: its shards, and its share of what all ranks hold. Nobody has to ask the others for that:
    what they all hold, they plan alike.

    Args:
        planner: for the state of this rank.
        is_for_rank_0: tells by its name whether rank 0 alone is to write what all may hold.
    """
    mine = planner.create_local_plan().items
    sharded = {name for name, tensor in planner.state_dict.items() if isinstance(tensor, DTensor)}
    held_by_all = [item for item in mine if item.index.fqn not in sharded]
    shared = [item for item in held_by_all if not is_for_rank_0(item.index.fqn)]
    shares, _ = planner.create_global_plan([SavePlan(held_by_all), *[SavePlan(shared)] * (world_size - 1)])
    return SavePlan([*shares[rank].items, *(item for item in mine if item.index.fqn in sharded)])
