"""Whether all ranks hold what they should hold alike: checksums of a sample of it, which every rank draws alike.

Ranks share out what they all hold, so a commit would be a mixture of their states where these differ.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import torch
from pydantic import BaseModel, ConfigDict
from torch.distributed.checkpoint.planner import WriteItem
from zlib_ng import zlib_ng

from elastic_ddp import torch_internals
from elastic_ddp.checkpoint.manifest import padded
from elastic_ddp.checkpoint.planning import BlockPlanner
from elastic_ddp.errors import ReplicasDifferError, shorten

SAMPLE_BYTES, PIECE_BYTES = 1 << 20, 64 << 10
"""What a commit takes more, at most, to copy and in memory. What is drawn is another part of the state in each."""
NUM_PIECES = 64
"""At most, where tensors are small: each is looked up in Python."""


class Sample(BaseModel):
    """A piece of a tensor, as one rank holds it."""

    model_config = ConfigDict(frozen=True)

    tensor: str
    crc32: int


class Sampler:
    """Draws one rank's sample, for one commit after the other."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._places: list[tuple[str, int, int]] = []
        """Tensors, and where in the buffer their pieces begin and end."""

    @torch.no_grad()
    def stage(self, items: Sequence[WriteItem], planner: BlockPlanner, seed: str) -> None:
        """Copies some pieces. When this returns the state may change.

        Args:
            items: the blocks of what all ranks hold, in the same order on each.
            planner: of the state.
            seed: the same on every rank.
        """
        draw = random.Random(seed)
        boxes = planner.boxes(draw.sample(items, min(NUM_PIECES, len(items))))
        pieces: list[torch.Tensor] = []
        self._places, end = [], 0
        for box, block in zip(boxes, planner.blocks(boxes), strict=True):
            piece = _piece_of(block, draw)
            if pieces and end + piece.nbytes > SAMPLE_BYTES:
                break
            pieces.append(piece)
            self._places.append((box.tensor, end, end + piece.nbytes))
            end += padded(piece.nbytes)
        if len(self._buffer) < end:
            self._buffer = torch.empty(end, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        held = [
            self._buffer[start:stop].view(piece.dtype).view(piece.shape)
            for (_, start, stop), piece in zip(self._places, pieces, strict=True)
        ]
        if pieces:
            torch_internals.copy_pairwise(held, pieces)
        if any(piece.is_cuda for piece in pieces):
            torch.cuda.current_stream().synchronize()

    def samples(self) -> tuple[Sample, ...]:
        """Of what was staged last."""
        data = self._buffer.numpy().data
        return tuple(Sample(tensor=name, crc32=zlib_ng.crc32(data[start:end])) for name, start, end in self._places)


def _piece_of(block: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """A view of some of it that is no larger than a piece."""
    for dimension, size in enumerate(block.shape):
        row_bytes = block.nbytes // size
        rows = max(1, min(size, PIECE_BYTES // row_bytes))
        block = block.narrow(dimension, draw.randint(0, size - rows), rows)
    return block


def check_same(drawn: Iterable[Sequence[Sample]]) -> None:
    """Whether the ranks' samples are the same.

    Args:
        drawn: by rank; empty for one that drew none.

    Raises:
        ReplicasDifferError: they are not, which names the tensors.
    """
    first, *others = drawn
    for rank, other in enumerate(others, start=1):
        if [each.tensor for each in first] != [each.tensor for each in other]:  # drawn of other tensors
            raise ReplicasDifferError(
                f"the state of rank {rank} has not the tensors that rank 0's has, by name and shape; what a training "
                "function prepares has to be the same on every rank"
            )
        if different := [mine.tensor for mine, theirs in zip(first, other, strict=True) if mine != theirs]:
            names = shorten([*dict.fromkeys(different)], 5)
            raise ReplicasDifferError(
                f"ranks 0 and {rank} hold different values of {names}, which all ranks hold alike; of such a state "
                "nothing is committed. Run the same command again: it goes on from the newest commit. If it comes "
                "again, something in the training function depends on the rank, the host or the time, or uses a "
                "nondeterministic operation; otherwise a machine has made a mistake"
            )
