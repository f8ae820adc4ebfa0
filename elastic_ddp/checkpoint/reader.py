"""Bytes of a commit into tensors, each checked as it comes."""

from __future__ import annotations

import itertools
import json
import math
import platform
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from zlib_ng import zlib_ng

from elastic_ddp.checkpoint.manifest import (
    ALIGNMENT,
    MAX_BLOCK_BYTES,
    MAX_MANIFEST_BYTES,
    Commit,
    StoredBlock,
    StoredTensor,
    padded,
)
from elastic_ddp.checkpoint.planning import laid_out, local_boxes, narrowed
from elastic_ddp.errors import CheckpointError, ConfigError, format_exception
from elastic_ddp.storage.storage import Storage
from elastic_ddp.tensors import host_memory
from elastic_ddp.tensors.state_tree import Layout, unflatten

PIECE_BYTES = MAX_BLOCK_BYTES + (1 << 20)
"""Neighbouring blocks are read together up to so many bytes: large ones that make up a block's most, and what is small
between them, such as an optimizer's counts of steps."""
POSITION = "position"
"""The component of a run's state that has the steps behind it."""
LARGE_BYTES = 8 << 20
"""A block of so many bytes is read alone if it is not all that is wanted of its tensor: its neighbours in memory are
others than in the object, so that it would have to be copied with them. Alone it goes into its tensor."""
PARALLEL_PIECES = 8
"""Pieces that are on their way, or have come and are not used yet."""
MEMORY_BYTES = host_memory.total_bytes()

# Else padding would reach into the next tensor, and what lies together in an object not do so in memory.
assert host_memory.ALIGNMENT == ALIGNMENT


def read_manifest(storage: Storage, key: str) -> Commit:
    """The commit whose manifest is stored under `key`.

    Raises:
        CheckpointError: it is none.
        FileNotFoundError: there is no such object.
    """
    return Commit.from_bytes(key, storage.read(key, MAX_MANIFEST_BYTES))


@dataclass(frozen=True)
class Piece:
    """Neighbouring blocks in an object, which are read at once."""

    key: str
    start: int
    end: int
    blocks: tuple[tuple[str, StoredBlock], ...]
    """With the names of their tensors."""

    def empty(self) -> memoryview:
        """As many bytes as it has."""
        return host_memory.empty_bytes(self.end - self.start)


class _Place(NamedTuple):
    """Of a block in its object."""

    start: int
    end: int
    name: str
    block: StoredBlock
    kind: object
    is_alone: bool


def pieces_of(
    commit: Commit,
    names: Iterable[str],
    kind: Callable[[str, StoredBlock], object] = lambda name, block: None,
) -> list[Piece]:
    """The blocks of some of a commit's tensors, where they are stored. Those of two kinds are in two pieces."""
    wanted: list[list[_Place]] = [[] for _ in commit.objects]
    for name in names:
        tensor = commit.tensors[name]
        kinds = [kind(name, block) for block in tensor.blocks]
        counts = Counter(kinds)
        for block, each in zip(tensor.blocks, kinds, strict=True):
            size = padded(tensor.num_bytes(block))
            is_alone = size >= LARGE_BYTES and counts[each] > 1
            wanted[block.object].append(_Place(block.start, block.start + size, name, block, each, is_alone))
    pieces: list[Piece] = []
    for item, places in zip(commit.objects, wanted, strict=True):
        together: list[_Place] = []
        for place in sorted(places, key=lambda each: each[:2]):
            if together and not _go_together(together[0], together[-1], place):
                pieces.append(_piece(item.key, together))
                together = []
            together.append(place)
        if together:
            pieces.append(_piece(item.key, together))
    return pieces


def _go_together(first: _Place, last: _Place, place: _Place) -> bool:
    """Whether a block can be read with those from the first to the last."""
    follows = place.start == last.end and place.kind == last.kind
    return follows and not (place.is_alone or last.is_alone) and place.end - first.start <= PIECE_BYTES


def _piece(key: str, places: list[_Place]) -> Piece:
    return Piece(key, places[0].start, places[-1].end, tuple((each.name, each.block) for each in places))


AnyPiece = TypeVar("AnyPiece")


class Reading(Iterator[tuple[AnyPiece, memoryview]]):
    """Pieces and their bytes, in their order. Several are read at a time, from now on, so that none waits for what its
    user does before it asks for the first: up to `PARALLEL_PIECES` are being read, or have come and are not used yet.
    Close it unless it has come to its end; an error of `read` ends it, too.
    """

    def __init__(self, pieces: Iterable[AnyPiece], read: Callable[[AnyPiece], memoryview]) -> None:
        self._pieces = iter(pieces)
        self._read = read
        self._pool = ThreadPoolExecutor(PARALLEL_PIECES, thread_name_prefix="block-reader")
        self._coming: deque[tuple[AnyPiece, Future[memoryview]]] = deque()
        self._go_on()

    def __next__(self) -> tuple[AnyPiece, memoryview]:
        self._go_on()
        if not self._coming:
            self.close()
            raise StopIteration
        piece, data = self._coming.popleft()
        try:
            return piece, data.result()
        except BaseException:
            self.close()
            raise

    def _go_on(self) -> None:
        for piece in itertools.islice(self._pieces, PARALLEL_PIECES - len(self._coming)):
            self._coming.append((piece, self._pool.submit(self._read, piece)))

    def close(self) -> None:
        """Waits for what is being read."""
        self._pieces = iter(())
        for _, data in self._coming:
            data.cancel()
        self._coming.clear()
        self._pool.shutdown()


def read_pieces(storage: Storage, pieces: Iterable[Piece], targets: Targets | None = None) -> Reading[Piece]:
    """From a storage, each as `read_piece`."""
    return Reading(pieces, lambda piece: read_piece(storage, piece, targets))


def read_piece(storage: Storage, piece: Piece, targets: Targets | None = None) -> memoryview:
    """The bytes of a piece, once what targets want of it is there.

    Raises:
        CheckpointError: names the object that is missing or is not what was committed.
        StorageError: the storage failed.
    """
    data = piece.empty() if targets is None else targets.place_of(piece)
    try:
        count = storage.read_into(piece.key, piece.start, data) if data else 0
    except FileNotFoundError as error:
        raise CheckpointError(f"{piece.key} is missing") from error
    if count != len(data):
        raise CheckpointError(f"{piece.key} ends before byte {piece.end}, where it should not")
    check(piece, data)
    if targets is not None:
        targets.fill(piece, data)
    return data


def check(piece: Piece, data: memoryview) -> None:
    """CheckpointError unless these are the bytes that were committed."""
    starts = [block.start for _, block in piece.blocks] + [piece.end]
    for (name, block), start, end in zip(piece.blocks, starts, starts[1:], strict=False):
        if zlib_ng.crc32(data[start - piece.start : end - piece.start]) != block.crc32:
            raise CheckpointError(
                f"{piece.key} does not have the checksum it was committed with, in bytes {start} to {end} ({name})"
            )


class Targets:
    """Tensors on the CPU that are to be filled: whole ones, or what this rank has of them.

    Args:
        tensors: by name in the commit: how it is stored, and which part of the whole is to be filled.
        memory: what is to be filled.
    """

    def __init__(
        self, tensors: Mapping[str, tuple[StoredTensor, ChunkStorageMetadata]], memory: host_memory.Memory
    ) -> None:
        self._memory = memory
        self._copies: dict[tuple[str, tuple[int, ...]], list[ReadItem]] = {}
        self._in_place: set[tuple[str, int]] = set()
        """Key and start of the pieces whose place is in their tensors."""
        known: dict[object, dict[tuple[int, ...], list[ReadItem]]] = {}  # a model has many tensors that are alike
        for name, (stored, part) in tensors.items():
            blocks = tuple((each.offsets, each.sizes) for each in stored.blocks)
            kind = stored.shape, blocks, part.offsets, part.sizes
            if kind not in known:
                known[kind] = _copies_to_fill(stored, part)
                filled = sum(math.prod(item.lengths) for items in known[kind].values() for item in items)
                if filled != math.prod(part.sizes):  # it would keep whatever was in that memory
                    raise RuntimeError(  # and not a CheckpointError: the commit is not to blame
                        f"{name} has the shape {stored.shape}, and this rank was to have {tuple(part.sizes)} of it, "
                        f"from {tuple(part.offsets)} on, which is not all there"
                    )
            self._copies |= {(name, offsets): items for offsets, items in known[kind].items()}

    def need(self, name: str, block: StoredBlock) -> bool:
        """Whether anything in a block is of use."""
        return (name, block.offsets) in self._copies

    def place_of(self, piece: Piece) -> memoryview:
        """Where the bytes of a piece can go: to the very tensors, if these take them as they are."""
        place = self._place_in_tensors(piece)
        if place is None:
            return piece.empty()
        self._in_place.add((piece.key, piece.start))
        return place

    def _place_in_tensors(self, piece: Piece) -> memoryview | None:
        """The memory in which its blocks lie as they do in the piece, and their padding is no other element's place."""
        first = None
        for name, block in piece.blocks:
            if not math.prod(block.sizes):
                continue
            items = self._copies.get((name, block.offsets), ())
            if len(items) != 1 or tuple(items[0].lengths) != block.sizes:
                return None
            target = self._memory.tensors[name]
            part = narrowed(target, list(items[0].dest_offsets), items[0].lengths)
            offset = part.data_ptr() - target.data_ptr()
            place = self._memory.places[name] + offset
            first = place - (block.start - piece.start) if first is None else first
            fills = part.nbytes == padded(part.nbytes)
            # The slot of a tensor in a slab ends at a multiple of `ALIGNMENT`, as the padding of a block there does.
            ends = offset + part.nbytes == target.nbytes and place % ALIGNMENT == 0
            if place - (block.start - piece.start) != first or not (fills or ends) or not part.is_contiguous():
                return None
        return self._memory.at(first, piece.end - piece.start) if first is not None else None

    def fill(self, piece: Piece, data: memoryview) -> None:
        """Takes what is of use in a piece, unless it is there."""
        is_in_place = (piece.key, piece.start) in self._in_place
        for name, block in piece.blocks:
            count = math.prod(block.sizes)
            if not count:  # it may begin where another one does
                continue
            if is_in_place and not self._memory.is_apart(name):
                continue
            for item in self._copies.get((name, block.offsets), ()):
                target = self._memory.tensors[name]
                source = torch.frombuffer(data, dtype=target.dtype, count=count, offset=block.start - piece.start)
                part = narrowed(source.view(block.sizes), list(item.storage_offsets), item.lengths)
                narrowed(target, list(item.dest_offsets), item.lengths).copy_(part)


def _copies_to_fill(stored: StoredTensor, part: ChunkStorageMetadata) -> dict[tuple[int, ...], list[ReadItem]]:
    """What goes where of a tensor's blocks, by their offsets, into a part of it. The name in them is none."""
    chunks = [
        ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes))
        for each in stored.blocks
        if math.prod(each.sizes)  # others may begin where any block does, and be taken for that one
    ]
    metadata = TensorStorageMetadata(TensorProperties(stored.torch_dtype), torch.Size(stored.shape), chunks=chunks)
    copies: dict[tuple[int, ...], list[ReadItem]] = {}
    for item in create_read_items_for_chunk_list("", metadata, [part]):
        assert item.storage_index.offset is not None
        copies.setdefault(tuple(item.storage_index.offset), []).append(item)
    return copies


def state_to_fill(
    commit: Commit,
    components: Collection[str] | None = None,
    layout: Layout = lambda name: None,
) -> tuple[dict[str, torch.Tensor], Targets]:
    """What this rank is to have of the tensors of a commit, or of some components, on the CPU and without values, and
    what fills that.

    Args:
        layout: counts where the DTensor has the shape of the commit's tensor.

    Raises:
        CheckpointError: there can be no such tensors.
        ConfigError: this machine has not the memory for them.
    """
    whole = empty_tensors(commit, components)
    likes = _likes(commit, whole, layout)
    parts = local_boxes({name: likes.get(name, tensor) for name, tensor in whole.items()})
    wanted = [commit.tensors[name] for name in whole]
    stored = sum(padded(tensor.num_bytes(block)) for tensor in wanted for block in tensor.blocks)
    # Pieces are read whole, and wait for others: those that were read, and those that came from other ranks.
    waiting = min(stored, 2 * PARALLEL_PIECES * PIECE_BYTES)
    held = sum(math.prod(part.sizes) * whole[name].element_size() for name, part in parts.items())
    kinds = {name: (part.sizes, whole[name].dtype) for name, part in parts.items()}
    with _room_for(commit, held + waiting):
        memory = host_memory.Memory({name: kinds[name] for name in names} for names in _as_stored(commit, whole))
    targets = Targets({name: (commit.tensors[name], part) for name, part in parts.items()}, memory)
    return {name: memory.tensors[name] for name in whole}, targets


def sharded(commit: Commit, tensors: Mapping[str, torch.Tensor], layout: Layout) -> dict[str, torch.Tensor]:
    """Returns the tensors of `state_to_fill`, once they are filled: as DTensors where the layout has one."""
    likes = _likes(commit, tensors, layout)
    return {name: laid_out(tensor, likes.get(name, tensor)) for name, tensor in tensors.items()}


def _likes(commit: Commit, names: Iterable[str], layout: Layout) -> dict[str, torch.Tensor]:
    """By name, of those that this rank is to have only a shard of."""
    likes = ((name, layout(name)) for name in names)
    return {name: like for name, like in likes if like is not None and like.shape == commit.tensors[name].shape}


def _as_stored(commit: Commit, names: Iterable[str]) -> list[list[str]]:
    """Names of tensors that begin in the same object, in the order in which they are in it; not of two components, of
    which one may be kept for longer."""
    together: dict[tuple[int, str], list[tuple[int, int, str]]] = {}
    for name in names:
        tensor = commit.tensors[name]
        first = min(tensor.blocks, key=lambda block: block.offsets)
        group = together.setdefault((first.object, name.partition(".")[0]), [])
        group.append((first.start, tensor.num_bytes(first), name))
    return [[name for _, _, name in sorted(each)] for each in together.values()]


def empty_tensors(commit: Commit, components: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a commit, or of some components, on the meta device.

    Raises:
        CheckpointError: there can be no such tensors.
    """
    try:
        return {
            name: torch.empty(each.shape, dtype=each.torch_dtype, device="meta")
            for name, each in commit.tensors.items()
            if components is None or name.partition(".")[0] in components
        }
    except (MemoryError, RuntimeError) as error:
        raise CheckpointError(f"{commit.key} holds tensors that cannot be: {error}") from error


@contextmanager
def _room_for(commit: Commit, num_bytes: int) -> Iterator[None]:
    """ConfigError unless this process can have so much memory, or if it does not get what it asks for in the block:
    Linux promises more than there is, and ends who uses it."""
    try:
        if num_bytes > MEMORY_BYTES:
            raise MemoryError(f"this machine, or container, has {MEMORY_BYTES} bytes")
        torch.empty(num_bytes, dtype=torch.uint8)
        yield
    except (MemoryError, RuntimeError) as error:
        raise ConfigError(
            f"{commit.key} needs {num_bytes} bytes of memory on {platform.node()}: {error}. It may be good, and is not "
            'passed over: give each worker more memory, or only a share of the state (strategy="fsdp"), or remove it'
        ) from error


def state_of(
    commit: Commit, skeleton: bytes, tensors: Mapping[str, torch.Tensor], components: Collection[str] | None = None
) -> dict[str, Any]:
    """The state of a commit, or some components of it, by component.

    Raises:
        CheckpointError: skeleton and tensors do not make up one.
    """
    by_component: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        component, _, place = name.partition(".")
        by_component.setdefault(component, {})[place] = tensor
    try:
        skeletons = json.loads(skeleton.decode())  # of bytes it would guess the encoding
        state = {
            name: unflatten(skeletons[name], by_component.get(name, {}))
            for name in (skeletons if components is None else components)
        }
    except (AttributeError, KeyError, MemoryError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"{commit.prefix} is not a state: {format_exception(error)}") from error
    position = state.get(POSITION, {"step": commit.step})
    step = position.get("step") if isinstance(position, dict) else None
    if type(step) is not int or step != commit.step:
        raise CheckpointError(
            f"{commit.prefix} is not a state of step {commit.step}: its position is {position!r:.200}"
        )
    return state
