"""Compares checksums of a random sample of the tensors that all ranks must hold alike.

Ranks share the writing of these tensors. If ranks differed, a commit would mix their states.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from pydantic import BaseModel
from zlib_ng import zlib_ng

from elastic_ddp.checkpoint.manifest import padded
from elastic_ddp.checkpoint.planning import Block, local_blocks
from elastic_ddp.errors import ReplicasDifferError, shorten
from elastic_ddp.tensors.state_tree import ravel

SAMPLE_BYTES = 1 << 20
"""Largest sample of a commit."""
SAMPLE_PIECE_BYTES = 64 << 10
"""Largest piece of a sample."""
MAX_PIECES = 64


class Sample(BaseModel, frozen=True):
    """A piece of a tensor, as one rank holds it."""

    tensor: str
    crc32: int


def draw_samples(blocks: Sequence[Block], tensors: Mapping[str, torch.Tensor], seed: str) -> tuple[Sample, ...]:
    """Returns the checksums of random pieces of one rank's state. Another seed draws other pieces.

    Args:
        blocks: the blocks that all ranks hold, in the same order on each.
        tensors: the state, by name.
        seed: equal on all ranks.
    """
    draw = random.Random(seed)
    drawn = draw.sample(blocks, min(MAX_PIECES, len(blocks)))
    pieces: list[tuple[str, torch.Tensor]] = []
    num_bytes = 0
    for block, source in zip(drawn, local_blocks(tensors, drawn), strict=True):
        piece = _piece_of(source, draw)
        if pieces and num_bytes + piece.nbytes > SAMPLE_BYTES:
            break
        num_bytes += padded(piece.nbytes)
        pieces.append((block.tensor, ravel(piece).view(torch.uint8)))
    copies: dict[torch.device, Iterator[torch.Tensor]] = {}
    for device in {data.device for _, data in pieces}:
        parts = [data for _, data in pieces if data.device == device]
        if device.type == "cpu":
            copies[device] = iter(parts)
        else:  # one copy for each device, since a copy waits for it
            copies[device] = iter(torch.cat(parts).cpu().split([len(part) for part in parts]))
    return tuple(Sample(tensor=name, crc32=zlib_ng.crc32(next(copies[data.device]).numpy())) for name, data in pieces)


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
