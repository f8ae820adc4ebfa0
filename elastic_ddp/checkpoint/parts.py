"""What each rank wrote of a commit, and how the parts of all ranks become one commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ValidationError

from elastic_ddp.checkpoint.manifest import Skeleton, StoredBlock, StoredObject, StoredTensor
from elastic_ddp.checkpoint.replica_check import Sample, check_replicas
from elastic_ddp.errors import CheckpointError, ReplicasDifferError, format_validation_error, shorten

TensorKind = tuple[str, tuple[int, ...]]
"""Name of the dtype and shape of a tensor."""


class WrittenBlock(BaseModel, frozen=True):
    """A block, and the tensor that it belongs to."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    block: StoredBlock


class Part(BaseModel, frozen=True):
    """What one rank wrote of a commit."""

    objects: tuple[StoredObject, ...]
    blocks: tuple[WrittenBlock, ...]
    """Their `object` is an index into `objects` of this part."""
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
        parts: what each rank wrote, in rank order.
        expected: the tensors that the state of rank 0 has, by name.

    Raises:
        CheckpointError: a block is missing, or was written twice.
        ReplicasDifferError: ranks hold different values where they must be equal.
    """
    sizes = [part.bytes_of_rank_0 for part in parts]
    if rank := next((rank for rank, size in enumerate(sizes) if size != sizes[0]), None):
        raise CheckpointError(
            f"registered state has {sizes[0]} bytes of tensors on rank 0 and {sizes[rank]} on rank {rank}. Give "
            "run.register the same tensors and arrays on every rank"
        )
    objects: list[StoredObject] = []
    blocks: dict[str, list[StoredBlock]] = {}
    for rank, part in enumerate(parts):
        for written in part.blocks:
            kind = (written.dtype, written.shape)
            if (wanted := expected.get(written.tensor, kind)) != kind:
                raise ReplicasDifferError(
                    f"{written.tensor} is {wanted} on rank 0 and {kind} on rank {rank}. The training function must "
                    "prepare tensors of the same dtype and shape on every rank"
                )
            stored = written.block.model_copy(update={"object": len(objects) + written.block.object})
            blocks.setdefault(written.tensor, []).append(stored)
        objects += part.objects
    if different := sorted(blocks.keys() ^ expected.keys()):
        raise CheckpointError(f"tensors are missing, or not in the state of rank 0: {shorten(different, 5)}")
    check_replicas(part.samples for part in parts)
    try:
        tensors = {
            name: StoredTensor(dtype=dtype, shape=shape, blocks=tuple(blocks[name]))
            for name, (dtype, shape) in expected.items()
        }
    except ValidationError as error:
        reason = format_validation_error(error)
    else:
        return tuple(objects), tensors
    raise CheckpointError(f"ranks did not write every block of the state exactly once: {reason}")
