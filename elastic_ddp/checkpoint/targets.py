"""Tensors that a restore fills from pieces, in place where the memory allows it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from elastic_ddp.checkpoint.manifest import ALIGNMENT, StoredBlock, StoredTensor, padded
from elastic_ddp.checkpoint.pieces import Piece
from elastic_ddp.checkpoint.planning import narrowed
from elastic_ddp.tensors import host_memory

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import ReadItem

# Otherwise the padding of a block would overwrite the next tensor in memory.
assert host_memory.ALIGNMENT == ALIGNMENT


class Targets:
    """Tensors on the CPU to fill from a commit: whole ones, or this rank's part of them.

    Args:
        tensors: for each name in the commit, how the tensor is stored and which part of it to fill.
        memory: has the tensors to fill.
    """

    def __init__(
        self, tensors: Mapping[str, tuple[StoredTensor, ChunkStorageMetadata]], memory: host_memory.Memory
    ) -> None:
        self._memory = memory
        self._copies: dict[tuple[str, tuple[int, ...]], list[ReadItem]] = {}
        """What to copy from each block, by the tensor's name and the block's offsets."""
        self._in_place: set[tuple[str, int]] = set()
        """Key and start of the pieces that are read into the tensors themselves."""
        planned: dict[object, dict[tuple[int, ...], list[ReadItem]]] = {}  # many tensors of a model are alike
        for name, (stored, part) in tensors.items():
            boxes = tuple((block.offsets, block.sizes) for block in stored.blocks)
            kind = stored.shape, boxes, part.offsets, part.sizes
            if kind not in planned:
                planned[kind] = _plan_copies(stored, part)
                num_filled = sum(math.prod(item.lengths) for items in planned[kind].values() for item in items)
                if num_filled != math.prod(part.sizes):
                    # Not a CheckpointError: the commit is good, and the layout asks for what it cannot have.
                    raise RuntimeError(
                        f"{name} has the shape {stored.shape}; there is no part of shape {tuple(part.sizes)} at "
                        f"{tuple(part.offsets)} in it"
                    )
            self._copies |= {(name, offsets): items for offsets, items in planned[kind].items()}

    def needs(self, name: str, block: StoredBlock) -> bool:
        """Whether a block holds an element to fill."""
        return (name, block.offsets) in self._copies

    def buffer_for(self, piece: Piece) -> memoryview:
        """Returns memory to read a piece into: the tensors themselves if the piece has their layout, or new memory."""
        buffer = self._buffer_in_tensors(piece)
        if buffer is None:
            return piece.empty()
        self._in_place.add((piece.key, piece.start))
        return buffer

    def _buffer_in_tensors(self, piece: Piece) -> memoryview | None:
        """Returns the memory where the blocks lie as in the piece, if their padding overwrites no other element."""
        begin = None
        for name, block in piece.blocks:
            if not math.prod(block.sizes):
                continue
            items = self._copies.get((name, block.offsets), ())
            if len(items) != 1 or tuple(items[0].lengths) != block.sizes:
                return None
            target = self._memory.tensors[name]
            part = narrowed(target, list(items[0].dest_offsets), items[0].lengths)
            offset = part.data_ptr() - target.data_ptr()
            address = self._memory.addresses[name] + offset
            if begin is None:
                begin = address - (block.start - piece.start)
            is_unpadded = part.nbytes == padded(part.nbytes)
            # A tensor's slot in a slab ends at a multiple of `ALIGNMENT`, as the padding of its last block does.
            is_last = offset + part.nbytes == target.nbytes and address % ALIGNMENT == 0
            is_in_line = address - (block.start - piece.start) == begin
            if not is_in_line or not (is_unpadded or is_last) or not part.is_contiguous():
                return None
        return self._memory.bytes_at(begin, piece.end - piece.start) if begin is not None else None

    def fill(self, piece: Piece, data: memoryview) -> None:
        """Copies what the tensors need from the bytes of a piece, unless it was read into place."""
        is_in_place = (piece.key, piece.start) in self._in_place
        for name, block in piece.blocks:
            num_elements = math.prod(block.sizes)
            if not num_elements or (is_in_place and not self._memory.is_apart(name)):
                continue
            for item in self._copies.get((name, block.offsets), ()):
                target = self._memory.tensors[name]
                start = block.start - piece.start
                source = torch.frombuffer(data, dtype=target.dtype, count=num_elements, offset=start)
                part = narrowed(source.view(block.sizes), list(item.storage_offsets), item.lengths)
                narrowed(target, list(item.dest_offsets), item.lengths).copy_(part)


def _plan_copies(stored: StoredTensor, part: ChunkStorageMetadata) -> dict[tuple[int, ...], list[ReadItem]]:
    """Returns what to copy from each block of a tensor into a part of it, by the block's offsets."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    chunks = [
        ChunkStorageMetadata(torch.Size(block.offsets), torch.Size(block.sizes))
        for block in stored.blocks
        if math.prod(block.sizes)  # an empty block may have the offsets of another
    ]
    metadata = TensorStorageMetadata(TensorProperties(stored.torch_dtype), torch.Size(stored.shape), chunks=chunks)
    copies: dict[tuple[int, ...], list[ReadItem]] = {}
    for item in create_read_items_for_chunk_list("", metadata, [part]):
        assert item.storage_index.offset is not None
        copies.setdefault(tuple(item.storage_index.offset), []).append(item)
    return copies
