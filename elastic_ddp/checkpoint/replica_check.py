"""Compares checksums of a random sample of the tensors that all ranks must hold alike.

Ranks share the writing of these tensors. If ranks differed, a commit would mix their states.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from pydantic import BaseModel
from zlib_ng import zlib_ng

from elastic_ddp import torch_internals
from elastic_ddp.checkpoint.manifest import padded
from elastic_ddp.checkpoint.planning import Block, local_blocks
from elastic_ddp.errors import ReplicasDifferError, shorten

SAMPLE_BYTES = 1 << 20
"""Largest sample of a commit."""
SAMPLE_PIECE_BYTES = 64 << 10
"""Largest piece of it."""
MAX_PIECES = 64


class Sample(BaseModel, frozen=True):
    """A piece of a tensor, as one rank holds it."""

    tensor: str
    crc32: int


class Sampler:
    """Draws one rank's sample, for one commit after the other. Each commit samples other pieces."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._pieces: list[tuple[str, int, int]] = []
        """Names of tensors, and where in the buffer their pieces begin and end."""

    @torch.no_grad()
    def stage(self, blocks: Sequence[Block], tensors: Mapping[str, torch.Tensor], seed: str) -> None:
        """Copies random pieces. The state may change after the return.

        Args:
            blocks: the blocks that all ranks hold, in the same order on each.
            tensors: the state, by name.
            seed: equal on all ranks.
        """
        draw = random.Random(seed)
        drawn = draw.sample(blocks, min(MAX_PIECES, len(blocks)))
        sources: list[torch.Tensor] = []
        self._pieces = []
        end = 0
        for block, source in zip(drawn, local_blocks(tensors, drawn), strict=True):
            piece = _piece_of(source, draw)
            if sources and end + piece.nbytes > SAMPLE_BYTES:
                break
            sources.append(piece)
            self._pieces.append((block.tensor, end, end + piece.nbytes))
            end += padded(piece.nbytes)
        if len(self._buffer) < end:
            self._buffer = torch.empty(end, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        copies = [
            self._buffer[start:stop].view(source.dtype).view(source.shape)
            for (_, start, stop), source in zip(self._pieces, sources, strict=True)
        ]
        if sources:
            torch_internals.copy_pairwise(copies, sources)
        if any(source.is_cuda for source in sources):
            torch.cuda.current_stream().synchronize()

    def samples(self) -> tuple[Sample, ...]:
        """Returns the checksums of the pieces that were staged last."""
        data = self._buffer.numpy().data
        return tuple(Sample(tensor=name, crc32=zlib_ng.crc32(data[start:end])) for name, start, end in self._pieces)


def _piece_of(block: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """Returns a random view of a block, of at most `SAMPLE_PIECE_BYTES`."""
    for dimension, size in enumerate(block.shape):
        row_bytes = block.nbytes // size
        rows = max(1, min(size, SAMPLE_PIECE_BYTES // row_bytes))
        block = block.narrow(dimension, draw.randint(0, size - rows), rows)
    return block


def check_replicas(samples: Iterable[Sequence[Sample]]) -> None:
    """Raises ReplicasDifferError, with the names of tensors, if the samples of two ranks differ; in rank order."""
    by_rank = [tuple(each) for each in samples]
    common, count = Counter(by_rank).most_common(1)[0]
    for rank, own in enumerate(by_rank):
        if [sample.tensor for sample in own] != [sample.tensor for sample in common]:
            raise ReplicasDifferError(
                f"rank {rank} does not hold the same tensors as rank {by_rank.index(common)}, by name and shape. The "
                "training function must prepare the same state on every rank"
            )
        different = [mine.tensor for mine, theirs in zip(own, common, strict=True) if mine != theirs]
        if different:
            names = shorten([*dict.fromkeys(different)], 5)
            what = f"ranks {by_rank.index(common)} and {rank} hold different values of {names}"
            if count == len(by_rank) - 1 > 1:
                what = f"rank {rank} holds other values of {names} than all other ranks"
            raise ReplicasDifferError(
                f"{what}, which must be equal on all ranks. This state is not committed. Run the same command again to "
                "resume from the newest commit. If the error comes back, the training function depends on the rank, "
                "the host or the time, or uses a nondeterministic operation; otherwise suspect the hardware"
            )
