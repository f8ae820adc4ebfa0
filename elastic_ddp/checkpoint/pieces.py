"""Pieces of objects: neighboring blocks of a commit that are read, and sent between ranks, at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from zlib_ng import zlib_ng

from elastic_ddp.checkpoint.manifest import MAX_BLOCK_BYTES, Commit, StoredBlock, padded
from elastic_ddp.errors import CheckpointError
from elastic_ddp.tensors import host_memory

MAX_PIECE_BYTES = MAX_BLOCK_BYTES + (1 << 20)
"""Neighboring blocks form a piece of at most this size: a few large ones and the small ones between them, such as the
step counts of an optimizer."""
LONE_BLOCK_BYTES = 8 << 20
"""A block of this size is a piece of its own if the same tensor has others: its neighbors in memory are not those in
the object, so together they could not be read into place."""


@dataclass(frozen=True)
class Piece:
    """A range of bytes of an object with neighboring blocks."""

    key: str
    start: int
    end: int
    blocks: tuple[tuple[str, StoredBlock], ...]
    """Each with the name of its tensor."""

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
        """Whether it can be read in one piece with the blocks of a group before it."""
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
