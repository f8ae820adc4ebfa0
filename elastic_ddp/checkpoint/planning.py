"""Cuts tensors into small blocks, and plans which rank writes which: pure functions of shapes and placements."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch

from elastic_ddp.tensors.dtensor import is_dtensor

if TYPE_CHECKING:
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


class Box(NamedTuple):
    """A part of a tensor."""

    offsets: torch.Size
    """First index in each dimension."""
    sizes: torch.Size


def plan_blocks(tensors: Mapping[str, torch.Tensor], block_bytes: int | None = None) -> list[Block]:
    """Cuts tensors into blocks of at most `block_bytes`, by default `BLOCK_BYTES`.

    Returns the blocks that this rank holds: all blocks of replicated tensors, its shards of the other tensors.
    """
    plan: list[Block] = []
    for name, tensor in tensors.items():
        box = local_box(tensor)
        sharded = is_sharded(tensor)
        for first, sizes in blocks_of(box.sizes, tensor.element_size(), block_bytes or BLOCK_BYTES):
            if math.prod(sizes) or not tensor.numel():  # a rank may have a shard without elements
                offsets = torch.Size(start + offset for start, offset in zip(box.offsets, first, strict=True))
                local_offsets = None if sizes == box.sizes else first
                plan.append(Block(name, tensor.dtype, tensor.size(), offsets, sizes, local_offsets, sharded))
    return plan


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


def local_box(tensor: torch.Tensor) -> Box:
    """Returns this rank's part of a tensor."""
    if not is_dtensor(tensor):
        return Box(torch.Size([0] * tensor.dim()), tensor.shape)
    [chunk] = tensor.__create_chunk_list__()  # the protocol of torch.distributed.checkpoint
    return Box(chunk.offsets, chunk.sizes)


def local_boxes(tensors: Mapping[str, torch.Tensor]) -> dict[str, Box]:
    """Returns `local_box` of each tensor, computed once for tensors of equal shape and placements: DTensor is slow."""
    known: dict[object, Box] = {}
    boxes = {}
    for name, tensor in tensors.items():
        layout = (tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else None
        kind = tensor.shape, layout
        if kind not in known:
            known[kind] = local_box(tensor)
        boxes[name] = known[kind]
    return boxes


def blocks_of(shape: torch.Size, element_bytes: int, block_bytes: int) -> Iterator[tuple[torch.Size, torch.Size]]:
    """Yields offsets and sizes of the contiguous blocks that make up a tensor, in row-major order.

    A block has at most `block_bytes`, or one element.
    """
    if not math.prod(shape):
        yield torch.Size([0] * len(shape)), shape
        return
    # Cut the first dimension whose rows fit into a block: one index of each earlier dimension, all of each later one.
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

    `blocks` are in the same order on every rank. Rank 0 writes `load_of_rank_0` bytes besides.
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
