"""Writes one rank's share of the state: copies it into host memory at once, and writes it from there later."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from zlib_ng import zlib_ng

from elastic_ddp import torch_internals
from elastic_ddp.checkpoint.manifest import (
    MAX_SKELETON_BYTES,
    SKELETON,
    Skeleton,
    stored_dtype,
)
from elastic_ddp.checkpoint.parts import Part, TensorKind
from elastic_ddp.checkpoint.planning import Block, plan_blocks, share_of
from elastic_ddp.checkpoint.replica_check import Sampler
from elastic_ddp.checkpoint.staging import BlockWriter
from elastic_ddp.errors import CheckpointError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.tensors.dtensor import is_dtensor
from elastic_ddp.tensors.state_tree import dtype_name, flatten

MAX_BLOCKS = 400_000
"""Blocks on all ranks that fit into a manifest. Checked before training, unlike the limits of the manifest itself."""

_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")


class StateWriter:
    """Writes a rank's share of the state of a run, for one commit after the other.

    Ranks share the writing of tensors that are not sharded. All ranks must hold equal values of these.

    Args:
        of_rank_0: components of the state that only rank 0 writes.
    """

    def __init__(self, *, of_rank_0: frozenset[str] = frozenset()) -> None:
        self._of_rank_0 = of_rank_0
        self._blocks, self._sampler = BlockWriter(), Sampler()
        self._skeletons: dict[str, Any] | None = None
        """On rank 0: of the staged state, until it is written. They share nothing with the state, which may change."""
        self._rank = 0
        self._kind: Any = None
        """What the plan below depends on."""
        self._share: list[Block] = []
        self._replicated: list[Block] = []
        """Blocks that all ranks hold alike."""
        self._bytes_of_rank_0 = 0

    def prepare(self, state: dict[str, Any]) -> None:
        """Raises CheckpointError for a state that cannot be saved, before training."""
        skeletons, tensors = _flatten_components(state)
        _encode(skeletons)
        _check_tensors(tensors, plan_blocks(tensors))

    def stage(self, state: dict[str, Any], *, rank: int, world_size: int, seed: str = "") -> None:
        """Copies this rank's share. The state may change after the return.

        Args:
            state: trees for `state_tree.flatten`, by component (letters, digits, `_` and `-`).
            rank: this rank.
            world_size: number of ranks that share the writing.
            seed: chooses the sample for the comparison of ranks; equal on all of them.

        Raises:
            CheckpointError: the state has values that cannot be saved.
            HostMemoryError: the host memory for the share cannot be allocated.
        """
        skeletons, tensors = _flatten_components(state)
        self._rank, self._skeletons = rank, skeletons if rank == 0 else None
        kind = rank, world_size, _kinds_of(tensors)
        if self._kind != kind:
            self._plan(tensors, rank, world_size)
            self._kind = kind
        self._blocks.stage(self._share, tensors)
        self._sampler.stage(self._replicated if world_size > 1 else [], tensors, seed)

    def _plan(self, tensors: dict[str, torch.Tensor], rank: int, world_size: int) -> None:
        plan = plan_blocks(tensors)
        _check_tensors(tensors, plan)
        sharded, different, of_rank_0, shared = list[Block](), list[Block](), list[Block](), list[Block]()
        for block in plan:
            if block.is_sharded:
                sharded.append(block)
            elif _may_differ(block.tensor):
                different.append(block)
            elif block.tensor.partition(".")[0] in self._of_rank_0:
                of_rank_0.append(block)
            else:
                shared.append(block)
        self._bytes_of_rank_0 = sum(block.num_bytes for block in of_rank_0)
        share = share_of(shared, rank=rank, world_size=world_size, load_of_rank_0=self._bytes_of_rank_0)
        own = [block for number, block in enumerate(sharded) if _is_written(block, number, tensors, rank, world_size)]
        self._share = [*(different + of_rank_0 if rank == 0 else []), *share, *own]
        self._replicated = [block for block in shared if block.num_bytes]

    @property
    def kinds(self) -> dict[str, TensorKind]:
        """Dtype and shape of all tensors in the state that was staged last, by name."""
        _, _, (names, dtypes, shapes, _) = self._kind
        return {
            name: (dtype_name(dtype), tuple(shape)) for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
        }

    def write(self, storage: Storage, prefix: str) -> Part:
        """Writes the staged share, once, under keys that begin with the rank.

        Raises:
            CheckpointError: the state without its tensors is too large.
            StorageError: the storage failed.
        """
        part = self._blocks.write(storage, prefix, str(self._rank))
        state = None
        if self._skeletons is not None:
            # Encoded here, in the background: it takes a third of the time of `flatten`.
            encoded, self._skeletons = _encode(self._skeletons), None
            state = Skeleton(key=f"{prefix}/{SKELETON}", size=len(encoded), crc32=zlib_ng.crc32(encoded))
            storage.write(state.key, encoded)
        samples = self._sampler.samples()
        return part.model_copy(update={"state": state, "bytes_of_rank_0": self._bytes_of_rank_0, "samples": samples})


def _flatten_components(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Returns skeletons by component, and tensors by component and path."""
    skeletons: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    for component, tree in state.items():
        if not isinstance(component, str) or not _COMPONENT.fullmatch(component):
            raise CheckpointError(
                f"{component!r:.80} cannot name a component of the state: use up to 64 letters, digits, _ and -"
            )
        try:
            skeletons[component], in_component = flatten(tree)
        except CheckpointError as error:
            raise CheckpointError(f"{component}.{error}") from error
        tensors |= {f"{component}.{name}": tensor for name, tensor in in_component.items()}
    return skeletons, tensors


def _num_shards(tensor: torch.Tensor) -> int:
    return tensor.device_mesh.size() if is_dtensor(tensor) else 1


def _is_written(block: Block, number: int, tensors: Mapping[str, torch.Tensor], rank: int, world_size: int) -> bool:
    """Returns whether this rank writes a block of a sharded tensor: groups that each hold all shards take turns."""
    num_shards = _num_shards(tensors[block.tensor])
    return number % max(1, world_size // num_shards) == rank // num_shards


def _may_differ(name: str) -> bool:
    """Returns whether ranks may hold different values: nothing keeps the extra state of modules equal."""
    return torch_internals.EXTRA_STATE in name.split(".")


def _encode(skeletons: dict[str, Any]) -> bytes:
    """Returns skeletons as JSON. Raises CheckpointError if a reader would refuse its size."""
    try:
        encoded = json.dumps(skeletons, separators=(",", ":"), check_circular=False).encode()  # `flatten` checks that
    except ValueError as error:  # an integer of more digits than Python writes
        raise CheckpointError(f"the state without its tensors cannot be written as JSON: {error}") from error
    if len(encoded) > MAX_SKELETON_BYTES:
        raise CheckpointError(
            f"the state without its tensors has {len(encoded)} bytes as JSON; the limit is {MAX_SKELETON_BYTES}. Keep "
            "large data in tensors or arrays"
        )
    return encoded


def _check_tensors(tensors: Mapping[str, torch.Tensor], blocks: Iterable[Block]) -> None:
    """Raises CheckpointError if a dtype is not supported, or there are too many blocks for a manifest."""
    for name, tensor in tensors.items():
        try:
            stored_dtype(dtype_name(tensor.dtype))
        except ValueError as error:
            raise CheckpointError(f"{name} has the dtype {tensor.dtype}: {error}") from error
    num_blocks = sum(_num_shards(tensors[block.tensor]) if block.is_sharded else 1 for block in blocks)
    if num_blocks > MAX_BLOCKS:
        raise CheckpointError(
            f"the state has {len(tensors)} tensors in {num_blocks} blocks on all ranks; the limit is {MAX_BLOCKS}. Use "
            "fewer and larger tensors, such as one parameter for the weights of all experts in a layer"
        )


def _kinds_of(tensors: Mapping[str, torch.Tensor]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Returns all that a plan depends on. The memory of tensors is not part of it: it may change between commits."""
    return (
        [*tensors],
        [tensor.dtype for tensor in tensors.values()],
        [tensor.shape for tensor in tensors.values()],
        [(tensor.placements, tensor.device_mesh.size()) for tensor in tensors.values() if is_dtensor(tensor)],
    )
