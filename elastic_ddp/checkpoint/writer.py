"""What one rank writes of a commit: its share of the state, copied into host memory at once and written from there
later."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor
from zlib_ng import zlib_ng

from elastic_ddp import torch_internals
from elastic_ddp.checkpoint.manifest import (
    MAX_MANIFEST_BYTES,
    MAX_MANIFEST_VALUES,
    MAX_SKELETON_BYTES,
    MAX_SKELETON_VALUES,
    SKELETON,
    Skeleton,
    StoredBlock,
    StoredObject,
    StoredTensor,
    num_values,
    padded,
    stored_dtype,
)
from elastic_ddp.checkpoint.planning import BlockPlanner, Box, is_in_shards, num_bytes, share_of
from elastic_ddp.checkpoint.replica_check import Sample, Sampler, check_same
from elastic_ddp.errors import (
    CheckpointError,
    ElasticDDPError,
    ReplicasDifferError,
    format_exception,
    format_validation_error,
)
from elastic_ddp.storage.storage import Storage
from elastic_ddp.storage.watchdog import DaemonPool
from elastic_ddp.tensors import host_memory
from elastic_ddp.tensors.state_tree import dtype_name, flatten

OBJECT_BYTES = 32 << 20
"""An object gets no more blocks when it has so many bytes."""
SLAB_BYTES = 512 << 20
"""Of pinned memory that is taken at once, at most, but for a larger object. Torch keeps what it has had, and has a use
for it again if later pieces are as large, as most of them are then, whatever the share."""
PARALLEL_OBJECTS = 8
"""Objects that a rank writes at the same time; a storage sends the pieces of a large one at the same time, too."""

_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")


Kind = tuple[str, tuple[int, ...]]
"""Of a tensor: the name of its dtype, and its shape."""


class HostMemoryError(ElasticDDPError):
    """This process does not get the host memory for its share of a state."""


class WrittenBlock(BaseModel):
    """A block, and the tensor that it belongs to."""

    model_config = ConfigDict(frozen=True)

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    block: StoredBlock


class Part(BaseModel):
    """What one rank wrote."""

    model_config = ConfigDict(frozen=True)

    objects: tuple[StoredObject, ...]
    blocks: tuple[WrittenBlock, ...]
    """Their `object` is a place among this part's."""
    state: Skeleton | None = None
    """From rank 0."""
    bytes_of_rank_0: int = 0
    """Of tensors that rank 0 writes for all, as this rank has them: shares depend on that."""
    samples: tuple[Sample, ...] = ()
    """Of what all ranks hold; none where one rank is alone."""


class StateWriter:
    """Writes a rank's share of the state of a run, for one commit after the other.

    Tensors that are not in shards are shared out among the ranks, all of which have to hold the same; those of the
    components that are named in `of_rank_0` are its alone. Of the others each rank writes its shard.
    """

    def __init__(self, *, of_rank_0: frozenset[str] = frozenset()) -> None:
        self._of_rank_0 = of_rank_0
        self._blocks = BlockWriter()
        self._planner = BlockPlanner()
        self._skeletons: dict[str, Any] | None = None
        """Of what was staged and is to be written, by rank 0; nothing in them is the state's, which may change."""
        self._sampler = Sampler()
        self._share: tuple[Any, SavePlan, list[WriteItem]] | None = None
        """For states of one kind: what this rank writes, and the blocks that all hold."""
        self._rank = self._bytes_of_rank_0 = 0

    def prepare(self, state: dict[str, Any]) -> None:
        """Plans what can be planned for a state while the number of ranks is not known; `stage` then takes less time.

        Raises:
            CheckpointError: the state holds something that cannot be kept.
        """
        skeletons, tensors = flattened(state)
        _encoded(skeletons)
        with self._planned(tensors):
            self._planner.create_local_plan()
            _check_manifest(tensors, self._planner.num_blocks)

    def stage(self, state: dict[str, Any], *, rank: int, world_size: int, seed: str = "") -> None:
        """Copies this rank's share. When this returns the state may change.

        Args:
            state: components by name (letters, digits, `_` and `-`), each a tree for `state_tree.flatten`.
            rank: this one's, of `world_size`.
            seed: the same on every rank, of the sample by which it is seen that they hold the same.

        Raises:
            CheckpointError: the state holds something that cannot be kept.
            HostMemoryError: there is no room for the share.
        """
        skeletons, tensors = flattened(state)
        self._rank = rank
        self._bytes_of_rank_0 = sum(
            each.nbytes for name, each in tensors.items() if self._is_for_rank_0(name) and not _may_differ(name)
        )
        self._skeletons = skeletons if rank == 0 else {}
        with self._planned(tensors):
            self._stage(tensors, rank, world_size, seed)

    @contextmanager
    def _planned(self, tensors: dict[str, torch.Tensor]) -> Iterator[None]:
        """The planner keeps none of them for longer: they may go before the next commit."""
        self._planner.set_up_planner(tensors)
        try:
            yield
        finally:
            self._planner.set_up_planner({})

    def _stage(self, tensors: dict[str, torch.Tensor], rank: int, world_size: int, seed: str) -> None:
        kind = rank, world_size, _kinds_of(tensors)
        if self._share is None or self._share[0] != kind:  # else it is the one of the commit before
            share = share_of(
                self._planner,
                rank=rank,
                world_size=world_size,
                is_for_rank_0=self._is_for_rank_0,
                may_differ=_may_differ,
            )
            _check_manifest(tensors, self._planner.num_blocks)
            self._share = kind, share, self._held_by_all(tensors)
        self._blocks.stage(self._share[1], self._planner)
        self._sampler.stage(self._share[2] if world_size > 1 else [], self._planner, seed)

    @property
    def kinds(self) -> dict[str, Kind]:
        """Of all tensors in the state that was staged last, by name."""
        assert self._share is not None
        _, _, (names, dtypes, shapes, _) = self._share[0]
        return {
            name: (dtype_name(dtype), tuple(shape)) for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
        }

    def write(self, storage: Storage, prefix: str) -> Part:
        """Writes what was staged, once, under keys that begin with the rank.

        Raises:
            CheckpointError: what is no tensor in the state has become too large to be kept.
            StorageError: the storage failed.
        """
        # Here rather than in `stage`, as nobody waits for it: it takes a third as long as to take the state apart.
        skeletons, self._skeletons = self._skeletons, None
        assert skeletons is not None, "what was staged is written once"
        encoded = _encoded(skeletons) if self._rank == 0 else b""
        part = self._blocks.write(storage, prefix, str(self._rank))
        told = {"bytes_of_rank_0": self._bytes_of_rank_0, "samples": self._sampler.samples()}
        part = part.model_copy(update=told)
        if self._rank != 0:
            return part
        key = f"{prefix}/{SKELETON}"
        storage.write(key, encoded)
        state = Skeleton(key=key, size=len(encoded), crc32=zlib_ng.crc32(encoded))
        return part.model_copy(update={"state": state})

    def _held_by_all(self, tensors: Mapping[str, torch.Tensor]) -> list[WriteItem]:
        """The blocks that were planned of what all ranks hold alike."""
        names = {
            name
            for name, each in tensors.items()
            if not is_in_shards(each) and not self._is_for_rank_0(name) and not _may_differ(name)
        }
        return [item for item in self._planner.plan.items if item.index.fqn in names and num_bytes(item)]

    def _is_for_rank_0(self, name: str) -> bool:
        return name.partition(".")[0] in self._of_rank_0


class BlockWriter:
    """Writes a rank's share of commits, one after the other.

    Host memory is kept from one to the next: as much as this rank's share.
    """

    def __init__(self, *, object_bytes: int = OBJECT_BYTES) -> None:
        self._object_bytes = object_bytes
        self._plan: SavePlan | None = None
        self._items: list[list[tuple[WriteItem, int]]] = []
        self._buffers: list[torch.Tensor] = []
        self._boxes: list[Box] = []
        """Of the plan's blocks."""
        self._places: list[torch.Tensor] = []
        """The same blocks, in the buffers."""

    @torch.no_grad()
    def stage(self, plan: SavePlan, planner: BlockPlanner) -> None:
        """Copies what is to be written. When this returns the state may change."""
        if plan is not self._plan:
            self._lay_out(plan, planner)
        blocks = planner.blocks(self._boxes)
        if blocks:
            torch_internals.copy_pairwise(self._places, blocks)
        if any(block.is_cuda for block in blocks):
            torch.cuda.current_stream().synchronize()

    def _lay_out(self, plan: SavePlan, planner: BlockPlanner) -> None:
        self._plan = None
        self._items = _packed(plan.items, self._object_bytes)
        sizes = [_end(blocks) for blocks in self._items]
        if [len(buffer) for buffer in self._buffers] != sizes:
            self._buffers, self._places = [], []  # before there are others
            self._buffers = _buffers(sizes)
        else:
            for buffer in self._buffers:
                buffer.zero_()  # or padding would be what was there before
        self._places = [
            _place_in(buffer, item, start)
            for buffer, blocks in zip(self._buffers, self._items, strict=True)
            for item, start in blocks
        ]
        self._boxes = planner.boxes(plan.items)
        self._plan = plan

    def write(self, storage: Storage, prefix: str, writer: str) -> Part:
        """Writes what was staged, under keys that begin with the writer's name.

        Raises:
            StorageError: the storage failed.
        """
        data: list[memoryview] = [buffer.numpy().data for buffer in self._buffers]
        keys = [f"{prefix}/{writer}-{number}.bin" for number in range(len(data))]
        crew = DaemonPool(lambda each: storage.write(*each), list(zip(keys, data, strict=True)), size=PARALLEL_OBJECTS)
        try:
            blocks = [block for number, each in enumerate(data) for block in self._blocks_in(number, each)]  # meanwhile
        finally:
            crew.wait()
        objects = [StoredObject(key=key, size=len(each)) for key, each in zip(keys, data, strict=True)]
        return Part(objects=tuple(objects), blocks=tuple(blocks))

    def _blocks_in(self, number: int, data: memoryview) -> Iterator[WrittenBlock]:
        """Those of an object, with their checksums."""
        for item, start in self._items[number]:
            assert item.tensor_data is not None
            chunk = item.tensor_data.chunk
            crc32 = zlib_ng.crc32(data[start : start + padded(num_bytes(item))])
            stored = StoredBlock(
                offsets=tuple(chunk.offsets), sizes=tuple(chunk.sizes), object=number, start=start, crc32=crc32
            )
            dtype = dtype_name(item.tensor_data.properties.dtype)
            shape = tuple(item.tensor_data.size)
            yield WrittenBlock(tensor=item.index.fqn, dtype=dtype, shape=shape, block=stored)


def put_together(
    parts: Iterable[Part], expected: Mapping[str, Kind]
) -> tuple[tuple[StoredObject, ...], dict[str, StoredTensor]]:
    """The objects and the tensors of a commit, from what all ranks wrote of it, where these are to be in it.

    Raises:
        CheckpointError: something is missing, or was written twice.
        ReplicasDifferError: ranks do not hold the same, as a sample shows.
    """
    parts = list(parts)
    sizes = [part.bytes_of_rank_0 for part in parts]
    if other := next((rank for rank, size in enumerate(sizes) if size != sizes[0]), None):
        raise CheckpointError(
            f"state that rank 0 writes for all has {sizes[0]} bytes of tensors there and {sizes[other]} on rank "
            f"{other}; keep what is given to run.register the same on every rank, or out of tensors and arrays"
        )
    objects: list[StoredObject] = []
    blocks: dict[str, list[StoredBlock]] = {}
    for part in parts:
        for each in part.blocks:
            kind = (each.dtype, each.shape)
            if (wanted := expected.get(each.tensor, kind)) != kind:
                raise ReplicasDifferError(
                    f"{each.tensor} is {wanted} on rank 0 and {kind} on another; what a training function prepares has "
                    "to have the same dtype and shape on every rank"
                )
            stored = each.block.model_copy(update={"object": len(objects) + each.block.object})
            blocks.setdefault(each.tensor, []).append(stored)
        objects += part.objects
    if different := blocks.keys() ^ expected.keys():
        raise CheckpointError(f"not all that belongs to the state was written: {sorted(different)[:5]}")
    check_same(part.samples for part in parts)
    try:
        tensors = {
            name: StoredTensor(dtype=dtype, shape=shape, blocks=tuple(blocks[name]))
            for name, (dtype, shape) in expected.items()
        }
    except ValidationError as error:
        what = format_validation_error(error)
    else:
        return tuple(objects), tensors
    raise CheckpointError(f"not all that belongs to the state was written: {what}")


def flattened(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Skeletons by component, and tensors by component and place in it."""
    skeletons: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    for component, tree in state.items():
        if not isinstance(component, str) or not _COMPONENT.fullmatch(component):
            raise CheckpointError(
                f"{component!r:.80} cannot be the name of a component of the state; use letters, digits, _ and -"
            )
        try:
            skeletons[component], found = flatten(tree)
        except CheckpointError as error:
            raise CheckpointError(f"{component}.{error}") from error
        tensors |= {f"{component}.{name}": tensor for name, tensor in found.items()}
    return skeletons, tensors


def _may_differ(name: str) -> bool:
    """Whether ranks may hold different values: nothing keeps the extra state of modules equal. Rank 0 writes it."""
    return torch_internals.EXTRA_STATE in name.split(".")


def _encoded(skeletons: dict[str, Any]) -> bytes:
    """Raises a CheckpointError where it is too large to be read again."""
    try:
        encoded = json.dumps(skeletons, separators=(",", ":"), check_circular=False).encode()  # `flatten` saw to that
    except ValueError as error:  # an integer of more digits than Python writes
        raise CheckpointError(f"without its tensors the state cannot be made JSON: {error}") from error
    count = num_values(encoded)
    if len(encoded) > MAX_SKELETON_BYTES or count > MAX_SKELETON_VALUES:
        raise CheckpointError(
            f"without its tensors the state has {len(encoded)} bytes and {count} values as JSON, and may "
            f"have at most {MAX_SKELETON_BYTES} and {MAX_SKELETON_VALUES}; keep large things as tensors or arrays"
        )
    return encoded


def _check_manifest(tensors: Mapping[str, torch.Tensor], num_blocks: Mapping[str, int]) -> None:
    """CheckpointError where the manifest would be too large to be read again, whatever else is in it, or would have a
    dtype that none may have: before anything is written."""
    num_bytes = count = 0
    for name, each in tensors.items():
        try:
            stored_dtype(dtype_name(each.dtype))
        except ValueError as error:
            raise CheckpointError(f"{name} has the dtype {each.dtype}, which is not kept: {error}") from error
        whole, further = _in_manifest(each.dim())
        text, num_further = json.dumps(name).encode(), num_blocks[name] - 1
        num_bytes += len(text) + len(whole) + num_further * len(further)
        count += num_values(text) - 1 + num_values(whole) + num_further * num_values(further)
    if num_bytes > MAX_MANIFEST_BYTES or count > MAX_MANIFEST_VALUES:
        raise CheckpointError(
            f"the state has {len(tensors)} tensors in {sum(num_blocks.values())} blocks on all ranks, and a manifest "
            f"that names them has {num_bytes} bytes and {count} values or more; it may have at most "
            f"{MAX_MANIFEST_BYTES} and {MAX_MANIFEST_VALUES}, which is enough for about 400,000 blocks. Keep fewer and "
            "larger tensors, such as the weights of a layer's experts in one parameter"
        )


@cache
def _in_manifest(num_dimensions: int) -> tuple[bytes, bytes]:
    """What a manifest says at the least of a tensor of one block, but for its name, and of every further block."""
    zeros = (0,) * num_dimensions
    block = StoredBlock(offsets=zeros, sizes=zeros, object=0, start=0, crc32=0)
    tensor = StoredTensor(dtype="bool", shape=zeros, blocks=(block,))
    return tensor.model_dump_json().encode(), block.model_dump_json().encode()


def _kinds_of(tensors: Mapping[str, torch.Tensor]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """What a share depends on. Nothing of where tensors are: that may be another place in every commit."""
    return (
        [*tensors],
        [each.dtype for each in tensors.values()],
        [each.shape for each in tensors.values()],
        [each.placements for each in tensors.values() if isinstance(each, DTensor)],
    )


def _packed(items: Iterable[WriteItem], object_bytes: int) -> list[list[tuple[WriteItem, int]]]:
    """Blocks in objects, each with where it begins."""
    packed: list[list[tuple[WriteItem, int]]] = []
    end = object_bytes
    for item in items:
        if end >= object_bytes:
            packed.append([])
            end = 0
        packed[-1].append((item, end))
        end += padded(num_bytes(item))
    return packed


def _end(blocks: list[tuple[WriteItem, int]]) -> int:
    item, start = blocks[-1]
    return start + padded(num_bytes(item))


def _buffers(sizes: list[int]) -> list[torch.Tensor]:
    """Memory for objects.

    Raises:
        HostMemoryError: there is not so much.
    """
    try:
        return _allocated(sizes)
    except (MemoryError, RuntimeError) as error:
        reason = format_exception(error)
    # Out here: it is kept, and with it would be what led to it.
    raise HostMemoryError(
        f"this rank does not get the {sum(sizes)} bytes of host memory that its share of the state takes: {reason}. "
        "Give each worker more memory, or have more workers share the state"
    )


def _allocated(sizes: list[int]) -> list[torch.Tensor]:
    """With a GPU pinned, as copies into it need not wait for each other then."""
    if not torch.cuda.is_available():
        memory = host_memory.Memory({str(number): ([size], torch.uint8)} for number, size in enumerate(sizes))
        return [each.zero_() for each in memory.tensors.values()]
    buffers: list[torch.Tensor] = []
    for together in in_slabs(sizes):
        buffers += torch.zeros(sum(together), dtype=torch.uint8, pin_memory=True).split(together)
    return buffers


def in_slabs(sizes: list[int]) -> list[list[int]]:
    """Objects to be put into one piece of memory each, in their order. They leave little of it, though torch takes a
    power of two of bytes for each piece of pinned memory, whatever it is asked for."""
    slabs: list[list[int]] = []
    first = 0
    while first < len(sizes):
        rest = sum(sizes[first:])
        room = _power_of_two(max(sizes[first], min(_power_of_two(rest // 2 + 1), SLAB_BYTES)))
        ends = itertools.accumulate(sizes[first:])
        count = sum(1 for _ in itertools.takewhile(lambda end: end <= room, ends))  # noqa: B023
        slabs.append(sizes[first : first + count])
        first += count
    for place in range(len(slabs)):  # one piece may take less than the several that the last ones came to
        apart, together = slabs[place:], list(itertools.chain(*slabs[place:]))
        if _power_of_two(sum(together)) <= min(SLAB_BYTES, sum(_power_of_two(sum(each)) for each in apart)):
            return [*slabs[:place], together]
    return slabs


def _power_of_two(number: int) -> int:
    """The smallest that is no less."""
    return 1 << max(0, number - 1).bit_length()


def _place_in(buffer: torch.Tensor, item: WriteItem, start: int) -> torch.Tensor:
    assert item.tensor_data is not None
    place = buffer[start : start + num_bytes(item)].view(item.tensor_data.properties.dtype)
    return place.view(item.tensor_data.chunk.sizes)
