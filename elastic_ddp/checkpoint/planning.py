"""Cuts tensors into small blocks, and plans which rank writes which: pure functions of shapes and placements."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch

from elastic_ddp.tensors.dtensor import is_dtensor, shard_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.tensor import DTensor

BLOCK_BYTES = 16 << 20
"""The largest size of a block of several elements."""


class Block(NamedTuple):
    """A box of a tensor, written as a unit."""

    tensor: str
    dtype: torch.dtype
    shape: torch.Size
    """The shape of the full tensor."""
    offsets: torch.Size
    """First index in each dimension of the full tensor."""
    sizes: torch.Size
    local_offsets: torch.Size | None
    """First index in each dimension of this rank's local part; None if the block is all of it."""
    is_sharded: bool

    @property
    def num_bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


class BlockPlanner:
    """Cuts the tensors of a state into blocks.

    Attributes:
        num_blocks: number of blocks in the newest plan, on all ranks together.
    """

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self.num_blocks = 0

    def plan(self, tensors: Mapping[str, torch.Tensor]) -> list[Block]:
        """Returns the blocks that this rank holds: all of replicated tensors, its shards of the others."""
        plan: list[Block] = []
        self.num_blocks = 0
        for name, tensor in tensors.items():
            blocks = list(self._cut(name, tensor))
            shards = shard_shapes(tensor) if is_sharded(tensor) else []
            counts = (sum(1 for _ in blocks_of(shape, tensor.element_size(), self._block_bytes)) for shape in shards)
            self.num_blocks += sum(counts) if is_sharded(tensor) else len(blocks)
            plan += blocks
        return plan

    def _cut(self, name: str, tensor: torch.Tensor) -> Iterator[Block]:
        box, sharded = local_box(tensor), is_sharded(tensor)
        for first, sizes in blocks_of(box.sizes, tensor.element_size(), self._block_bytes):
            if math.prod(sizes) or not tensor.numel():  # a rank may have a shard without elements
                offsets = torch.Size(start + offset for start, offset in zip(box.offsets, first, strict=True))
                local_offsets = None if sizes == box.sizes else first
                yield Block(name, tensor.dtype, tensor.size(), offsets, sizes, local_offsets, sharded)


def local_blocks(tensors: Mapping[str, torch.Tensor], blocks: Iterable[Block]) -> list[torch.Tensor]:
    """Returns blocks as views of this rank's memory."""
    views = []
    for block in blocks:
        tensor = tensors[block.tensor]
        local = tensor.to_local() if is_dtensor(tensor) else tensor
        views.append(local if block.local_offsets is None else narrowed(local, block.local_offsets, block.sizes))
    return views


def is_sharded(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Returns whether ranks hold different parts of a tensor. A DTensor may also be replicated on all of them."""
    return is_dtensor(tensor) and not all(placement.is_replicate() for placement in tensor.placements)


def local_box(tensor: torch.Tensor) -> ChunkStorageMetadata:
    """Returns offsets and sizes of this rank's part of a tensor."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    if not is_dtensor(tensor):
        return ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.shape)
    [box] = tensor.__create_chunk_list__()  # the protocol of torch.distributed.checkpoint
    return box


def local_boxes(tensors: Mapping[str, torch.Tensor]) -> dict[str, ChunkStorageMetadata]:
    """Returns `local_box` of each tensor, computed once for tensors of equal shape and placements: DTensor is slow."""
    known: dict[object, ChunkStorageMetadata] = {}
    boxes = {}
    for name, tensor in tensors.items():
        layout = (tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else None
        kind = tensor.shape, layout
        if kind not in known:
            known[kind] = local_box(tensor)
        boxes[name] = known[kind]
    return boxes


def shard_shapes(tensor: DTensor) -> list[torch.Size]:
    """Returns the shapes of all ranks' shards that have elements.

    Of a tensor that is not sharded in one dimension of one mesh dimension, it returns only that of this rank.
    """
    from torch.distributed.tensor import Shard

    match tensor.placements:
        case (Shard(dim=dim),):
            rows = -(-tensor.shape[dim] // tensor.device_mesh.size()) or 1  # as torch.chunk does it
            lengths = [min(rows, tensor.shape[dim] - first) for first in range(0, tensor.shape[dim], rows)]
            return [torch.Size([*tensor.shape[:dim], length, *tensor.shape[dim + 1 :]]) for length in lengths]
        case _:
            return [tensor.to_local().shape]


def laid_out(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with the placements of `like`, of which `local` is this rank's part."""
    return shard_of(local, like) if is_dtensor(like) else local


def blocks_of(shape: torch.Size, element_bytes: int, block_bytes: int) -> Iterator[tuple[torch.Size, torch.Size]]:
    """Yields offsets and sizes of the contiguous blocks that make up a tensor, in row-major order.

    A block has at most `block_bytes`, or one element.
    """
    if not math.prod(shape):
        yield torch.Size([0] * len(shape)), shape
        return
    # Cut the first dimension whose rows fit into a block. A block has one index in those before, all of those after.
    row_bytes = [math.prod(shape[dimension + 1 :]) * element_bytes for dimension in range(len(shape))]
    axis = next((dimension for dimension, size in enumerate(row_bytes) if size <= block_bytes), len(shape) - 1)
    if axis < 0:
        yield shape, shape  # a scalar
        return
    max_rows = max(1, block_bytes // row_bytes[axis])
    rows = math.ceil(shape[axis] / math.ceil(shape[axis] / max_rows))  # blocks of nearly equal size
    inner = shape[axis + 1 :]
    for outer in itertools.product(*map(range, shape[:axis])):
        for first in range(0, shape[axis], rows):
            count = min(rows, shape[axis] - first)
            yield torch.Size([*outer, first, *[0] * len(inner)]), torch.Size([*[1] * axis, count, *inner])


def narrowed(tensor: torch.Tensor, offsets: Sequence[int], sizes: torch.Size) -> torch.Tensor:
    """Returns a box of a tensor, as a view."""
    for dimension, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dimension, offset, size)
    return tensor


def share_of(blocks: Iterable[Block], *, rank: int, world_size: int, load_of_rank_0: int = 0) -> list[Block]:
    """Returns the blocks that a rank writes of tensors that all ranks hold. Ranks plan alike, without communication.

    Args:
        blocks: the blocks of those tensors, in the same order on every rank.
        rank: this rank.
        world_size: number of ranks that share the writing.
        load_of_rank_0: bytes that rank 0 writes besides.
    """
    share: list[Block] = []
    loads = [(load_of_rank_0, 0), *((0, other) for other in range(1, world_size))]
    heapq.heapify(loads)
    for block in blocks:
        load, writer = loads[0]  # the rank with the fewest bytes
        heapq.heapreplace(loads, (load + (block.num_bytes or 1), writer))
        if writer == rank:
            share.append(block)
    return share
