"""Copies one rank's share of the state into host memory immediately, and writes the copy in the background."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from typing import Any

import torch
from zlib_ng import zlib_ng

from elastic_ddp import torch_internals
from elastic_ddp.checkpoint.manifest import SKELETON, Skeleton, StoredBlock, StoredObject, StoredTensor, padded
from elastic_ddp.checkpoint.parts import Part, TensorKind
from elastic_ddp.checkpoint.planning import Block, local_blocks, plan_blocks, share_of
from elastic_ddp.checkpoint.replica_check import Sample, draw_samples
from elastic_ddp.errors import CheckpointError, ElasticDDPError, format_exception
from elastic_ddp.storage.storage import Storage
from elastic_ddp.storage.watchdog import run_in_daemon
from elastic_ddp.tensors import host_memory
from elastic_ddp.tensors.dtensor import is_dtensor
from elastic_ddp.tensors.state_tree import dtype_name, flatten

MAX_BLOCKS = 400_000
"""Blocks on all ranks: a manifest of 128 MiB. Checked before training."""
MAX_SKELETON_BYTES = 2**25
"""Room for 50,000 parameters under AdamW."""
OBJECT_BYTES = 32 << 20
"""An object of this size or more gets no further blocks."""
SLAB_BYTES = 256 << 20
"""Largest allocation of pinned memory, but for a larger object."""
PARALLEL_OBJECTS = 8
"""Objects that a rank writes at a time. A storage may also split a large object into parallel requests."""

_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
_STORED_DTYPE = re.compile(r"bool|u?int(8|16|32|64)|b?float\d+(_\w+)?|complex\d+")
"""Dtypes with whole-byte elements that are not quantized."""


class HostMemoryError(ElasticDDPError):
    """The host memory for this rank's share of the state cannot be allocated."""


class StateWriter:
    """Writes a rank's share of the state of a run, for one commit after the other.

    Ranks share the writing of unsharded tensors. All ranks must hold equal values of unsharded tensors.

    Args:
        of_rank_0: components of the state that only rank 0 writes.
    """

    def __init__(self, *, of_rank_0: frozenset[str] = frozenset()) -> None:
        self._of_rank_0 = of_rank_0
        self._blocks = BlockWriter()
        self._samples: tuple[Sample, ...] = ()
        self._skeletons: dict[str, Any] | None = None
        """On rank 0: the skeletons of the staged state, until they are written. They share no memory with the state."""
        self._rank = 0
        self._plan_key: Any = None
        """All that `_share` and `_replicated` depend on. The writer plans both again if any of it changes."""
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
        self._rank = rank
        self._skeletons = skeletons if rank == 0 else None
        key = rank, world_size, _kinds_of(tensors)
        if self._plan_key != key:
            self._plan(tensors, rank, world_size)
            self._plan_key = key
        self._blocks.stage(self._share, tensors)
        self._samples = draw_samples(self._replicated, tensors, seed) if world_size > 1 else ()

    def _plan(self, tensors: dict[str, torch.Tensor], rank: int, world_size: int) -> None:
        plan = plan_blocks(tensors)
        _check_tensors(tensors, plan)
        sharded = list[Block]()
        different = list[Block]()
        of_rank_0 = list[Block]()
        shared = list[Block]()
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
        _, _, (names, dtypes, shapes, _) = self._plan_key
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
            encoded = _encode(self._skeletons)
            self._skeletons = None
            state = Skeleton(key=f"{prefix}/{SKELETON}", size=len(encoded), crc32=zlib_ng.crc32(encoded))
            storage.write(state.key, encoded)
        more = {"state": state, "bytes_of_rank_0": self._bytes_of_rank_0, "samples": self._samples}
        return part.model_copy(update=more)


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
    """Returns skeletons as JSON. Raises CheckpointError if they are too large."""
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
        if not _STORED_DTYPE.fullmatch(dtype_name(tensor.dtype)):
            raise CheckpointError(f"{name} has the dtype {tensor.dtype}, which checkpoints do not support")
    num_blocks = sum(_num_shards(tensors[block.tensor]) if block.is_sharded else 1 for block in blocks)
    if num_blocks > MAX_BLOCKS:
        raise CheckpointError(
            f"the state has {len(tensors)} tensors in {num_blocks} blocks on all ranks; the limit is {MAX_BLOCKS}. Use "
            "fewer and larger tensors, for example one parameter for the weights of all experts in a layer"
        )


def _kinds_of(tensors: Mapping[str, torch.Tensor]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Returns all that a plan depends on. The memory of tensors is not part of it: it may change between commits."""
    return (
        [*tensors],
        [tensor.dtype for tensor in tensors.values()],
        [tensor.shape for tensor in tensors.values()],
        [(tensor.placements, tensor.device_mesh.size()) for tensor in tensors.values() if is_dtensor(tensor)],
    )


class BlockWriter:
    """Writes a rank's blocks, for one commit after the other. It keeps host memory of the size of the share."""

    def __init__(self, *, object_bytes: int = OBJECT_BYTES) -> None:
        self._object_bytes = object_bytes
        self._blocks: list[Block] | None = None
        self._objects: list[list[tuple[Block, int]]] = []
        """For each object, its blocks and their offsets."""
        self._buffers: list[torch.Tensor] = []
        """The bytes of each object."""
        self._views: list[torch.Tensor] = []
        """For each block of all objects, the part of a buffer that holds its copy."""

    @torch.no_grad()
    def stage(self, blocks: list[Block], tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies the blocks. The state may change after the return.

        Args:
            blocks: the same list as at the call before, if neither shapes nor shards have changed.
            tensors: the state, by name.

        Raises:
            HostMemoryError: the host memory for the copy cannot be allocated.
        """
        if blocks is not self._blocks:
            self._lay_out(blocks)
        sources = local_blocks(tensors, blocks)
        if sources:
            torch_internals.copy_pairwise(self._views, sources)
        if any(source.is_cuda for source in sources):
            torch.cuda.current_stream().synchronize()

    def _lay_out(self, blocks: list[Block]) -> None:
        self._blocks = None
        self._objects = _pack(blocks, self._object_bytes)
        sizes = [start + padded(last.num_bytes) for *_, (last, start) in self._objects]
        if [len(buffer) for buffer in self._buffers] != sizes:
            self._views = []  # freed before the new ones are allocated
            self._buffers = []
            self._buffers = _allocate(sizes)
        else:
            for buffer in self._buffers:
                buffer.zero_()  # the padding between blocks is written, too
        self._views = [
            buffer[start : start + block.num_bytes].view(block.dtype).view(block.sizes)
            for buffer, in_object in zip(self._buffers, self._objects, strict=True)
            for block, start in in_object
        ]
        self._blocks = blocks

    def write(self, storage: Storage, prefix: str, writer: str) -> Part:
        """Writes the staged blocks, under keys that begin with the writer's name.

        Raises:
            StorageError: the storage failed.
        """
        writes = [
            (f"{prefix}/{writer}-{number}.bin", buffer.numpy().data) for number, buffer in enumerate(self._buffers)
        ]
        writing = _begin_writes(storage, writes)
        try:  # checksums are computed meanwhile
            tensors = self._checksummed([data for _, data in writes])
        finally:
            wait(writing)
        for thread in writing:
            thread.result()  # raises the error of a write
        return Part(objects=tuple(StoredObject(key=key, size=len(data)) for key, data in writes), tensors=tensors)

    def _checksummed(self, objects: list[memoryview]) -> dict[str, StoredTensor]:
        """Returns the blocks in these objects, by tensor, with their checksums."""
        stored: dict[tuple[str, torch.dtype, torch.Size], list[StoredBlock]] = {}
        for number, (data, in_object) in enumerate(zip(objects, self._objects, strict=True)):
            for block, start in in_object:
                of_tensor = stored.setdefault((block.tensor, block.dtype, block.shape), [])
                crc32 = zlib_ng.crc32(data[start : start + padded(block.num_bytes)])
                offsets = tuple(block.offsets)
                sizes = tuple(block.sizes)
                of_tensor.append(StoredBlock(offsets=offsets, sizes=sizes, object=number, start=start, crc32=crc32))
        return {
            name: StoredTensor(dtype=dtype_name(dtype), shape=tuple(shape), blocks=tuple(blocks))
            for (name, dtype, shape), blocks in stored.items()
        }


def _begin_writes(storage: Storage, writes: list[tuple[str, memoryview]]) -> list[Future[None]]:
    """Writes objects in threads, `PARALLEL_OBJECTS` at a time. After a failure, no thread begins another write."""
    remaining = iter(writes)
    has_failed = threading.Event()

    def write() -> None:
        for key, data in remaining:  # the iterator of a list gives each item to one thread
            if has_failed.is_set():
                return
            try:
                storage.write(key, data)
            except BaseException:
                has_failed.set()
                raise

    name = threading.current_thread().name
    return [run_in_daemon(write, f"{name}-{number}") for number in range(min(PARALLEL_OBJECTS, len(writes)))]


def _pack(blocks: Iterable[Block], object_bytes: int) -> list[list[tuple[Block, int]]]:
    """Returns the blocks of each object with their offsets."""
    objects: list[list[tuple[Block, int]]] = []
    end = object_bytes
    for block in blocks:
        if end >= object_bytes:
            objects.append([])
            end = 0
        objects[-1].append((block, end))
        end += padded(block.num_bytes)
    return objects


def _allocate(sizes: list[int]) -> list[torch.Tensor]:
    """Returns zeroed host memory for objects of these sizes, or raises HostMemoryError."""
    try:
        if torch.cuda.is_available():
            slabs = slabs_of(sizes)
            pinned = [torch.zeros(sum(slab), dtype=torch.uint8, pin_memory=True).split(slab) for slab in slabs]
            return [*itertools.chain(*pinned)]
        memory = host_memory.Memory({str(number): ([size], torch.uint8)} for number, size in enumerate(sizes))
        return [tensor.zero_() for tensor in memory.tensors.values()]
    except (MemoryError, RuntimeError) as error:
        reason = format_exception(error)
    # Raised here, without a cause: the saver keeps the error, and its frames would keep the state.
    raise HostMemoryError(
        f"cannot allocate {sum(sizes)} bytes of host memory for this rank's share of the state: {reason}. Give each "
        "worker more memory, or use more workers"
    )


def slabs_of(sizes: list[int]) -> list[list[int]]:
    """Groups objects, in their order, into allocations: torch rounds each of these up to a power of two."""
    slabs: list[list[int]] = []
    for size in sizes:
        if not slabs or sum(slabs[-1]) + size > SLAB_BYTES:
            slabs.append([])
        slabs[-1].append(size)
    return slabs
