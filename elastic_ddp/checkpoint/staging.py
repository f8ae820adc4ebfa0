"""Copies a rank's share of the state into host memory, and writes it from there as objects."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

import torch
from zlib_ng import zlib_ng

from elastic_ddp import torch_internals
from elastic_ddp.checkpoint.manifest import StoredBlock, StoredObject, padded
from elastic_ddp.checkpoint.parts import Part, WrittenBlock
from elastic_ddp.checkpoint.planning import Block, local_blocks
from elastic_ddp.errors import ElasticDDPError, format_exception
from elastic_ddp.storage.storage import Storage
from elastic_ddp.storage.watchdog import DaemonPool
from elastic_ddp.tensors import host_memory
from elastic_ddp.tensors.state_tree import dtype_name

OBJECT_BYTES = 32 << 20
"""An object of this size or more gets no further blocks."""
SLAB_BYTES = 256 << 20
"""Largest allocation of pinned memory, but for a larger object."""
PARALLEL_OBJECTS = 8
"""Objects that a rank writes at a time. A storage may also split a large object into parallel requests."""


class HostMemoryError(ElasticDDPError):
    """The host memory for this rank's share of the state cannot be allocated."""


class BlockWriter:
    """Writes a rank's blocks, for one commit after the other. It keeps host memory of the size of the share."""

    def __init__(self, *, object_bytes: int = OBJECT_BYTES) -> None:
        self._object_bytes = object_bytes
        self._blocks: list[Block] | None = None
        self._objects: list[list[tuple[Block, int]]] = []
        """The blocks in each object with their offsets; below, its bytes, and the memory of each block in them."""
        self._buffers: list[torch.Tensor] = []
        self._views: list[torch.Tensor] = []

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
            self._buffers, self._views = [], []  # freed before the new ones are allocated
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
        pool = DaemonPool(lambda write: storage.write(*write), writes, size=PARALLEL_OBJECTS)
        try:  # checksums are computed while the pool writes
            blocks = [block for number, (_, data) in enumerate(writes) for block in self._checksummed(number, data)]
        finally:
            pool.wait()
        objects = [StoredObject(key=key, size=len(view)) for key, view in writes]
        return Part(objects=tuple(objects), blocks=tuple(blocks))

    def _checksummed(self, number: int, data: memoryview) -> Iterator[WrittenBlock]:
        for block, start in self._objects[number]:
            stored = StoredBlock(
                offsets=tuple(block.offsets),
                sizes=tuple(block.sizes),
                object=number,
                start=start,
                crc32=zlib_ng.crc32(data[start : start + padded(block.num_bytes)]),
            )
            dtype, shape = dtype_name(block.dtype), tuple(block.shape)
            yield WrittenBlock(tensor=block.tensor, dtype=dtype, shape=shape, block=stored)


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
