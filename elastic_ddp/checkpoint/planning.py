"""Who writes which block of which tensor: torch.distributed.checkpoint's planning, with replicated tensors shared out.

DCP has a replicated tensor written by one rank, whole. Here every tensor, or this rank's shard of one, is cut into
small blocks, so that ranks share what they all hold, and what is read or sent at once is small.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeGuard

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Shard

BLOCK_BYTES = 16 << 20
"""No block is larger, but for a single element."""


class Box(NamedTuple):
    """Where a block is in what this rank has of a tensor."""

    tensor: str
    offsets: Sequence[int] | None
    """None if it is all of that."""
    sizes: torch.Size


class BlockPlanner(DefaultSavePlanner):
    """Plans the blocks of a flat dict of tensors: those that every rank holds, plain or replicated DTensors, and other
    DTensors, of which each rank holds a shard. `share_of` shares out what all ranks hold.
    """

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._block_bytes = block_bytes
        self._planned: dict[str, tuple[torch.dtype, torch.Size, list[WriteItem]]] = {}
        """Of tensors that every rank holds: they are cut alike on each, at every world size."""
        self.num_blocks: dict[str, int] = {}
        """Of each tensor in the plan that was made last, on all ranks together."""

    def create_local_plan(self) -> SavePlan:
        """What was planned for a tensor that every rank holds is used again for one like it."""
        items: list[WriteItem] = []
        before, self._planned, self.num_blocks = self._planned, {}, {}
        for name, tensor in self.state_dict.items():
            if is_in_shards(tensor):
                items += self._items(name, tensor)
                self.num_blocks[name] = sum(
                    sum(1 for _ in blocks_of(shard, tensor.element_size(), self._block_bytes))
                    for shard in shards_of(tensor)
                )
                continue
            kind, known = (tensor.dtype, tensor.shape), before.get(name)
            known = known if known is not None and known[:2] == kind else (*kind, list(self._items(name, tensor)))
            self._planned[name], self.num_blocks[name] = known, len(known[2])
            items += known[2]
        self.plan = SavePlan(items)
        return self.plan

    def _items(self, name: str, tensor: torch.Tensor) -> Iterator[WriteItem]:
        box = local_box(tensor)
        properties = TensorProperties.create_from_tensor(held_part(tensor))
        for first, sizes in blocks_of(box.sizes, tensor.element_size(), self._block_bytes):
            offsets = torch.Size(start + place for start, place in zip(box.offsets, first, strict=True))
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
        [block] = self.blocks(self.boxes([write_item]))
        return block

    def boxes(self, items: Iterable[WriteItem]) -> list[Box]:
        """Where blocks are, for `blocks`, as long as tensors have the same shapes and ranks the same shards."""
        held: dict[str, ChunkStorageMetadata] = {}
        found = []
        for item in items:
            assert item.tensor_data is not None
            name, chunk = item.index.fqn, item.tensor_data.chunk
            if name not in held:
                held[name] = local_box(self.state_dict[name])
            box = held[name]
            is_all = chunk.sizes == box.sizes
            offsets = None if is_all else [at - start for at, start in zip(chunk.offsets, box.offsets, strict=True)]
            found.append(Box(name, offsets, chunk.sizes))
        return found

    def blocks(self, boxes: Iterable[Box]) -> list[torch.Tensor]:
        """Views of this rank's memory."""
        found = []
        for name, offsets, sizes in boxes:
            held = held_part(self.state_dict[name])
            found.append(held if offsets is None else narrowed(held, offsets, sizes))
        return found


def is_in_shards(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether this rank may have only a part of a tensor; a mesh may also give all of it to every rank."""
    return isinstance(tensor, DTensor) and not all(each.is_replicate() for each in tensor.placements)


def local_box(tensor: torch.Tensor) -> ChunkStorageMetadata:
    """Which part of a tensor this rank has: where it begins, and its shape."""
    if not isinstance(tensor, DTensor):
        return ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.shape)
    [box] = tensor.__create_chunk_list__()  # DCP's protocol
    return box


def local_boxes(tensors: Mapping[str, torch.Tensor]) -> dict[str, ChunkStorageMetadata]:
    """The same of several, by name; a model has many of one shape, and DTensor takes its time for each."""
    known: dict[object, ChunkStorageMetadata] = {}
    boxes = {}
    for name, tensor in tensors.items():
        like = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        kind = tensor.shape, like
        if kind not in known:
            known[kind] = local_box(tensor)
        boxes[name] = known[kind]
    return boxes


def held_part(tensor: torch.Tensor) -> torch.Tensor:
    """That part itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shards_of(tensor: DTensor) -> list[torch.Size]:
    """The shapes of what ranks have of a tensor, but for those that have no element; of one that is not cut in a single
    dimension only what this rank has."""
    match tensor.placements:
        case (Shard(dim=dim),):
            rows = -(-tensor.shape[dim] // tensor.device_mesh.size()) or 1  # as torch.chunk does it
            lengths = [min(rows, tensor.shape[dim] - first) for first in range(0, tensor.shape[dim], rows)]
            return [torch.Size([*tensor.shape[:dim], each, *tensor.shape[dim + 1 :]]) for each in lengths]
        case _:
            return [tensor.to_local().shape]


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


def narrowed(tensor: torch.Tensor, offsets: Sequence[int], sizes: torch.Size) -> torch.Tensor:
    """A box of a tensor, a view."""
    for dimension, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dimension, offset, size)
    return tensor


def share_of(
    planner: BlockPlanner,
    *,
    rank: int,
    world_size: int,
    is_for_rank_0: Callable[[str], bool],
    may_differ: Callable[[str], bool] = lambda name: False,
) -> SavePlan:
    """What a rank is to write: its shards, and its share of what all ranks hold. Nobody has to ask the others for that:
    what they all hold, they plan alike, and share out alike: a block goes to the rank that has the least to write so
    far. DCP's own way takes time by the number of ranks, as it takes a plan of each, and counts a block as large as its
    whole tensor.

    Args:
        planner: for the state of this rank.
        is_for_rank_0: tells by its name whether rank 0 alone is to write what all may hold.
        may_differ: tells that of what ranks may hold in other shapes each, or not at all. Rank 0 writes it, too, and
            nobody else's share depends on it.
    """
    mine = planner.create_local_plan().items
    sharded = {name for name, tensor in planner.state_dict.items() if is_in_shards(tensor)}
    different = [item for item in mine if item.index.fqn not in sharded and may_differ(item.index.fqn)]
    not_alike = sharded | {item.index.fqn for item in different}
    held_by_all = [item for item in mine if item.index.fqn not in not_alike]
    of_rank_0 = [item for item in held_by_all if is_for_rank_0(item.index.fqn)]
    share = [*different, *of_rank_0] if rank == 0 else []
    loads = [(sum(map(num_bytes, of_rank_0)), 0), *((0, other) for other in range(1, world_size))]
    heapq.heapify(loads)
    alone = {item.index.fqn for item in of_rank_0}
    for item in held_by_all:
        if item.index.fqn not in alone:
            load, least = loads[0]
            heapq.heapreplace(loads, (load + (num_bytes(item) or 1), least))
            if least == rank:
                share.append(item)
    return SavePlan([*share, *(item for item in mine if item.index.fqn in sharded)])


def num_bytes(item: WriteItem) -> int:
    """Of a block."""
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
