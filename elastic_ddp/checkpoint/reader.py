"""Reads a commit: its pieces into tensors, and the state that they form."""

from __future__ import annotations

import itertools
import json
import logging
import math
import platform
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from elastic_ddp.checkpoint.manifest import Commit, padded
from elastic_ddp.checkpoint.pieces import MAX_PIECE_BYTES, Piece, Targets
from elastic_ddp.checkpoint.planning import local_boxes
from elastic_ddp.errors import CheckpointError, ConfigError, StorageError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.tensors import host_memory
from elastic_ddp.tensors.dtensor import is_dtensor, shard_of
from elastic_ddp.tensors.state_tree import Layout, dtype_of, unflatten

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_log = logging.getLogger(__name__)

PIECES_READ_AHEAD = 8
"""Pieces that are being read, or were read and are not used yet."""
MEMORY_BYTES = host_memory.total_bytes()

Item = TypeVar("Item")
Result = TypeVar("Result")


def read_twice(storage: Storage, key: str, read: Callable[[], Result]) -> Result:
    """Returns what `read` does with the object or folder `key`; if it fails, calls it again.

    Bits flip in transit, and mounts can be stale. One object that cannot be read, as in a bad sector, makes its commit
    bad; an outage of the storage does not.

    Raises:
        CheckpointError: the object does not verify, or cannot be read although the storage answers.
        StorageError: the storage does not answer; the commit may be good.
    """
    try:
        return read()
    except StorageError as error:
        first = error.with_traceback(None)  # its frames hold what was read
    _log.warning("%s; reading it again", first)
    if not isinstance(first, CheckpointError):
        others = [manifest for manifest in storage.list("commits") if manifest != key]
        with suppress(FileNotFoundError, IndexError):  # removed since it was listed; there are no others
            storage.read_into(others[-1], 0, memoryview(bytearray(1)))
    try:
        return read()
    except CheckpointError:
        raise
    except StorageError as error:
        raise CheckpointError(f"{key} cannot be read although the storage answers: {error}") from error


class ReadAhead(Iterator[tuple[Item, memoryview]]):
    """Reads items in threads and yields each with its bytes, in order.

    Reading begins at once; up to `PIECES_READ_AHEAD` items are read ahead. An error of `read` is raised in order and
    ends the iterator. Close it unless it is exhausted.
    """

    def __init__(self, items: Iterable[Item], read: Callable[[Item], memoryview]) -> None:
        self._items = iter(items)
        self._read = read
        self._pool = ThreadPoolExecutor(PIECES_READ_AHEAD, thread_name_prefix="block-reader")
        self._pending: deque[tuple[Item, Future[memoryview]]] = deque()
        self._submit()

    def __next__(self) -> tuple[Item, memoryview]:
        self._submit()
        if not self._pending:
            self.close()
            raise StopIteration
        item, data = self._pending.popleft()
        try:
            return item, data.result()
        except BaseException:
            self.close()
            raise

    def _submit(self) -> None:
        for item in itertools.islice(self._items, PIECES_READ_AHEAD - len(self._pending)):
            self._pending.append((item, self._pool.submit(self._read, item)))

    def close(self) -> None:
        """Cancels pending reads and waits for running ones, which write into memory that other threads may send."""
        self._items = iter(())
        self._pending.clear()
        self._pool.shutdown(cancel_futures=True)


def read_pieces(storage: Storage, pieces: Iterable[Piece], targets: Targets | None = None) -> ReadAhead[Piece]:
    """Returns an iterator over pieces and their bytes, like `read_piece`."""
    return ReadAhead(pieces, lambda piece: read_piece(storage, piece, targets))


def read_piece(storage: Storage, piece: Piece, targets: Targets | None = None) -> memoryview:
    """Returns the verified bytes of a piece, after a second try if needed, and fills the targets from them.

    Raises:
        CheckpointError: the object is missing, is not what was committed, or cannot be read.
        StorageError: the storage does not answer.
    """
    buffer = piece.empty() if targets is None else targets.buffer_for(piece)

    def read() -> None:
        try:
            num_bytes = storage.read_into(piece.key, piece.start, buffer) if buffer else 0
        except FileNotFoundError as error:
            raise CheckpointError(f"{piece.key} is missing") from error
        if num_bytes != len(buffer):
            raise CheckpointError(f"{piece.key} ends before byte {piece.end}, where it should not")
        piece.verify(buffer)

    read_twice(storage, piece.key, read)
    if targets is not None:
        targets.fill(piece, buffer)
    return buffer


def allocate_state(
    commit: Commit,
    components: Collection[str] | None = None,
    layout: Layout = lambda name: None,
) -> tuple[dict[str, torch.Tensor], Targets]:
    """Returns uninitialized CPU tensors for a commit, or for this rank's part of it, and the targets that fill them.

    This rank holds a shard of the tensors for which `layout` has a DTensor of the stored shape.

    Raises:
        ConfigError: this machine has too little memory for the tensors.
    """
    metas = meta_tensors(commit, components)
    likes = _likes(commit, metas, layout)
    parts = local_boxes({name: likes.get(name, meta) for name, meta in metas.items()})
    stored_bytes = sum(
        padded(commit.tensors[name].num_bytes(block)) for name in metas for block in commit.tensors[name].blocks
    )
    # Besides the tensors, pieces that were read ahead and pieces between ranks take memory.
    piece_bytes = min(stored_bytes, 2 * PIECES_READ_AHEAD * MAX_PIECE_BYTES)
    tensor_bytes = sum(math.prod(part.sizes) * metas[name].element_size() for name, part in parts.items())
    kinds = {name: (part.sizes, metas[name].dtype) for name, part in parts.items()}
    with _checking_memory(commit, tensor_bytes + piece_bytes):
        memory = host_memory.Memory({name: kinds[name] for name in names} for names in _as_stored(commit, metas))
    targets = Targets({name: (commit.tensors[name], part) for name, part in parts.items()}, memory)
    return {name: memory.tensors[name] for name in metas}, targets


def as_sharded(commit: Commit, tensors: Mapping[str, torch.Tensor], layout: Layout) -> dict[str, torch.Tensor]:
    """Returns the filled tensors of `allocate_state`, as DTensors where the layout has one."""
    likes = _likes(commit, tensors, layout)
    return {name: shard_of(tensor, likes[name]) if name in likes else tensor for name, tensor in tensors.items()}


def _likes(commit: Commit, names: Iterable[str], layout: Layout) -> dict[str, DTensor]:
    """Returns the layout's DTensors that have the shape of the stored tensors, by name."""
    likes = ((name, layout(name)) for name in names)
    return {
        name: like
        for name, like in likes
        if like is not None and is_dtensor(like) and like.shape == commit.tensors[name].shape
    }


def _as_stored(commit: Commit, names: Iterable[str]) -> list[list[str]]:
    """Groups tensors that begin in the same object, in their order there.

    Two components never share a group, and so never share memory: one may be kept longer than the other.
    """
    groups: dict[tuple[int, str], list[tuple[int, int, str]]] = {}
    for name in names:
        tensor = commit.tensors[name]
        first = min(tensor.blocks, key=lambda block: block.offsets)
        group = groups.setdefault((first.object, name.partition(".")[0]), [])
        group.append((first.start, tensor.num_bytes(first), name))
    return [[name for _, _, name in sorted(group)] for group in groups.values()]


def meta_tensors(commit: Commit, components: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Returns the tensors of a commit, or of some components, on the meta device."""
    return {
        name: torch.empty(stored.shape, dtype=dtype_of(stored.dtype), device="meta")
        for name, stored in commit.tensors.items()
        if components is None or name.partition(".")[0] in components
    }


@contextmanager
def _checking_memory(commit: Commit, num_bytes: int) -> Iterator[None]:
    """Raises ConfigError if this machine cannot have so much memory, or if an allocation in the block fails.

    Linux overcommits memory and kills the process that uses it, so the size is checked first.
    """
    try:
        if num_bytes > MEMORY_BYTES:
            raise MemoryError(f"this machine or container has {MEMORY_BYTES} bytes")
        torch.empty(num_bytes, dtype=torch.uint8)
        yield
    except (MemoryError, RuntimeError) as error:
        raise ConfigError(
            f"{commit.key} needs {num_bytes} bytes of memory on {platform.node()}: {error}. The commit may be good and "
            'is not skipped. Give each worker more memory, shard the state (strategy="fsdp"), or remove the commit.'
        ) from error


def build_state(
    skeleton: bytes, tensors: Mapping[str, torch.Tensor], components: Collection[str] | None = None
) -> dict[str, Any]:
    """Returns a state by component, from the skeleton of its commit and its tensors by name."""
    by_component: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        component, _, path = name.partition(".")
        by_component.setdefault(component, {})[path] = tensor
    skeletons = json.loads(skeleton)
    names = skeletons if components is None else components
    return {name: unflatten(skeletons[name], by_component.get(name, {})) for name in names}
