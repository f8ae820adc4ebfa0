"""Pieces of objects, and the tensors that a restore fills from them.

A piece has neighboring blocks of a commit. A rank reads a piece, and sends it to other ranks, as a whole.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from zlib_ng import zlib_ng

from elastic_ddp.checkpoint.manifest import ALIGNMENT, Commit, StoredBlock, StoredTensor, padded
from elastic_ddp.checkpoint.planning import BLOCK_BYTES, Box, narrowed
from elastic_ddp.errors import CheckpointError
from elastic_ddp.tensors import host_memory

MAX_PIECE_BYTES = BLOCK_BYTES + (1 << 20)
"""Neighboring blocks form a piece of at most this size: a few large blocks, and small ones between them (an optimizer's
step counts)."""
LONE_BLOCK_BYTES = 8 << 20
"""A block of at least this size is a separate piece if its tensor has other blocks. Its neighbors in the object are not
its neighbors in memory, so one read could not fill them in place."""

# Otherwise the padding of a block would overwrite the next tensor in memory.
assert host_memory.ALIGNMENT == ALIGNMENT


@dataclass(frozen=True)
class Piece:
    """A range of bytes of an object with neighboring blocks."""

    key: str
    start: int
    end: int
    blocks: tuple[tuple[str, StoredBlock], ...]
    """Each block with the name of its tensor."""

    def empty(self) -> memoryview:
        """Returns new memory for the bytes of the piece."""
        return host_memory.empty_bytes(self.end - self.start)

    def verify(self, data: memoryview) -> None:
        """Raises CheckpointError unless each block in `data` has its checksum."""
        starts = [block.start for _, block in self.blocks] + [self.end]
        for (name, block), start, end in zip(self.blocks, starts, starts[1:], strict=False):
            if zlib_ng.crc32(data[start - self.start : end - self.start]) != block.crc32:
                raise CheckpointError(
                    f"{self.key} does not have the checksum it was committed with, in bytes {start} to {end} ({name})"
                )


class _PlacedBlock(NamedTuple):
    start: int
    end: int
    name: str
    block: StoredBlock
    kind: object
    is_alone: bool

    def fits(self, group: list[_PlacedBlock]) -> bool:
        """Whether the block can be read in one piece with the blocks of an earlier group."""
        last = group[-1]
        is_next = self.start == last.end and self.kind == last.kind
        return is_next and not (self.is_alone or last.is_alone) and self.end - group[0].start <= MAX_PIECE_BYTES


def pieces_of(
    commit: Commit,
    names: Iterable[str],
    kind: Callable[[str, StoredBlock], object] = lambda name, block: None,
) -> list[Piece]:
    """Returns the pieces that hold some tensors of a commit, in the order of the objects.

    Only blocks of equal kind share a piece.
    """
    by_object: list[list[_PlacedBlock]] = [[] for _ in commit.objects]
    for name in names:
        tensor = commit.tensors[name]
        kinds = [kind(name, block) for block in tensor.blocks]
        counts = Counter(kinds)
        for block, block_kind in zip(tensor.blocks, kinds, strict=True):
            end = block.start + padded(tensor.num_bytes(block))
            is_alone = end - block.start >= LONE_BLOCK_BYTES and counts[block_kind] > 1
            by_object[block.object].append(_PlacedBlock(block.start, end, name, block, block_kind, is_alone))
    pieces: list[Piece] = []
    for stored, placed in zip(commit.objects, by_object, strict=True):
        groups: list[list[_PlacedBlock]] = []
        for candidate in sorted(placed, key=lambda block: (block.start, block.end)):
            if not groups or not candidate.fits(groups[-1]):
                groups.append([])
            groups[-1].append(candidate)
        for group in groups:
            blocks = tuple((placed.name, placed.block) for placed in group)
            pieces.append(Piece(stored.key, group[0].start, group[-1].end, blocks))
    return pieces


class _Copy(NamedTuple):
    """The part of a block that a tensor needs."""

    source: tuple[int, ...]
    """First index in each dimension of the block."""
    target: tuple[int, ...]
    """First index in each dimension of the tensor to fill."""
    sizes: torch.Size


class Targets:
    """Tensors on the CPU to fill from a commit: whole ones, or this rank's part of them.

    Args:
        tensors: for each name in the commit, how the tensor is stored and which part of it to fill.
        memory: has the tensors to fill.
    """

    def __init__(self, tensors: Mapping[str, tuple[StoredTensor, Box]], memory: host_memory.Memory) -> None:
        self._memory = memory
        self._copies: dict[tuple[str, tuple[int, ...]], _Copy] = {}
        """By the tensor's name and the block's offsets."""
        self._in_place: set[tuple[str, int]] = set()
        """Key and start of the pieces that are read into the tensors themselves."""
        planned: dict[object, dict[tuple[int, ...], _Copy]] = {}  # many tensors of a model are alike
        for name, (stored, part) in tensors.items():
            boxes = tuple((block.offsets, block.sizes) for block in stored.blocks)
            kind = boxes, part
            if kind not in planned:
                planned[kind] = {offsets: copy for offsets, sizes in boxes if (copy := _overlap(offsets, sizes, part))}
            self._copies |= {(name, offsets): copy for offsets, copy in planned[kind].items()}

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
            copy = self._copies.get((name, block.offsets))
            if copy is None or copy.sizes != block.sizes:
                return None
            target = self._memory.tensors[name]
            part = narrowed(target, copy.target, copy.sizes)
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
        """Copies the tensors' bytes out of a piece, unless the piece was read in place."""
        is_in_place = (piece.key, piece.start) in self._in_place
        for name, block in piece.blocks:
            num_elements = math.prod(block.sizes)
            copy = self._copies.get((name, block.offsets))
            if copy is None or not num_elements or (is_in_place and not self._memory.is_apart(name)):
                continue
            target = self._memory.tensors[name]
            source = torch.frombuffer(data, dtype=target.dtype, count=num_elements, offset=block.start - piece.start)
            part = narrowed(source.view(block.sizes), copy.source, copy.sizes)
            narrowed(target, copy.target, copy.sizes).copy_(part)


def _overlap(offsets: tuple[int, ...], sizes: tuple[int, ...], part: Box) -> _Copy | None:
    """Returns what to copy from a block into a part of the same tensor; None if they have no element in common."""
    starts = [max(pair) for pair in zip(offsets, part.offsets, strict=True)]
    block_ends = map(sum, zip(offsets, sizes, strict=True))
    part_ends = map(sum, zip(part.offsets, part.sizes, strict=True))
    common = [min(ends) - start for *ends, start in zip(block_ends, part_ends, starts, strict=True)]
    if any(size <= 0 for size in common):
        return None
    source = tuple(start - offset for start, offset in zip(starts, offsets, strict=True))
    target = tuple(start - offset for start, offset in zip(starts, part.offsets, strict=True))
    return _Copy(source, target, torch.Size(common))
