"""The part of a commit that each rank wrote, and the assembly of all parts into one commit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from elastic_ddp.checkpoint.manifest import Skeleton, StoredBlock, StoredObject, StoredTensor
from elastic_ddp.checkpoint.replica_check import Sample, check_replicas
from elastic_ddp.errors import CheckpointError, ReplicasDifferError, shorten

TensorKind = tuple[str, tuple[int, ...]]
"""Name of the dtype and shape of a tensor."""


class Part(BaseModel, frozen=True):
    """The part of a commit that one rank wrote."""

    objects: tuple[StoredObject, ...]
    tensors: dict[str, StoredTensor]
    """By name, with the blocks that this rank wrote. Their `object` is an index into `objects` of this part."""
    state: Skeleton | None = None
    """Only from rank 0."""
    bytes_of_rank_0: int = 0
    """Size of the tensors that rank 0 writes for all, as this rank holds them. It must be equal on all ranks."""
    samples: tuple[Sample, ...] = ()
    """Checksums of a sample of the replicated tensors; empty at world size 1."""


def assemble(
    parts: Sequence[Part], expected: Mapping[str, TensorKind]
) -> tuple[tuple[StoredObject, ...], dict[str, StoredTensor]]:
    """Returns the objects and tensors of a commit.

    Args:
        parts: the parts of all ranks, in rank order.
        expected: the tensors that the state of rank 0 has, by name.

    Raises:
        CheckpointError: a block is missing, or was written twice.
        ReplicasDifferError: ranks hold different values where they must be equal.
    """
    sizes = [part.bytes_of_rank_0 for part in parts]
    rank = next((rank for rank, size in enumerate(sizes) if size != sizes[0]), None)
    if rank is not None:
        raise CheckpointError(
            f"registered state has {sizes[0]} bytes of tensors on rank 0 and {sizes[rank]} on rank {rank}. Give "
            "run.register the same tensors and arrays on every rank"
        )
    objects: list[StoredObject] = []
    blocks: dict[str, list[StoredBlock]] = {name: [] for name in expected}
    for rank, part in enumerate(parts):
        for name, written in part.tensors.items():
            kind = (written.dtype, written.shape)
            wanted = expected.get(name)
            if wanted is None:
                raise CheckpointError(f"{name} on rank {rank} is not in the state of rank 0")
            if wanted != kind:
                raise ReplicasDifferError(
                    f"{name} is {wanted} on rank 0 and {kind} on rank {rank}. The training function must "
                    "prepare tensors of the same dtype and shape on every rank"
                )
            for block in written.blocks:
                blocks[name].append(block.model_copy(update={"object": len(objects) + block.object}))
        objects += part.objects
    check_replicas(part.samples for part in parts)
    incomplete = [name for name, (_, shape) in expected.items() if not _covers(blocks[name], shape)]
    if incomplete:
        raise CheckpointError(f"ranks did not write every block exactly once of {shorten(incomplete, 5)}")
    return tuple(objects), {
        name: StoredTensor(dtype=dtype, shape=shape, blocks=tuple(blocks[name]))
        for name, (dtype, shape) in expected.items()
    }


def _covers(blocks: Sequence[StoredBlock], shape: tuple[int, ...]) -> bool:
    """Returns whether blocks that one plan has cut from a tensor of this shape are all there, each of them once."""
    filled = [block for block in blocks if math.prod(block.sizes)]
    num_elements = sum(math.prod(block.sizes) for block in filled)
    is_complete = bool(blocks) and num_elements == math.prod(shape)
    return is_complete and len({block.offsets for block in filled}) == len(filled)
