"""Storages of a measurement: a folder of this machine, or a bucket of an S3 server."""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from elastic_ddp.checkpoint.saver import Save, Saver
from elastic_ddp.checkpoint.store import CheckpointStore
from elastic_ddp.distributed.torch_store import StoreConnection, StoreMailbox
from elastic_ddp.storage.storage import Storage
from elastic_ddp.tensors.host_memory import empty_bytes

CONCURRENCY = 8
"""Parallel requests of a bare write or read."""
PIECE_BYTES = 16 << 20
_M_MMAP_THRESHOLD = -3
"""A parameter of glibc's mallopt. It grows unless it is set."""
LATER_BYTES, LATER_PARTS, LATER_EVERY_S = 128 << 20, 10, 0.1
"""A rank frees this many parts of this size at this interval. Three ranks free twice what they need to restore from
Ceph on the same machine."""


@contextmanager
def s3_folder(where: str) -> Iterator[str]:
    """Yields the URI of an empty folder: below a given one, or on a server ("ceph", "moto") that runs for the block.

    The environment has the server's address and keys for the ranks.
    """
    if where.startswith("s3://"):
        name = f"elastic-ddp-bench-{uuid.uuid4().hex[:12]}"
        try:
            yield f"{where.rstrip('/')}/{name}"
        finally:
            Storage(where).delete_tree(name)
        return
    import boto3

    from tests.s3 import ceph, moto

    os.environ |= {
        "AWS_ACCESS_KEY_ID": ceph.USER.access,
        "AWS_SECRET_ACCESS_KEY": ceph.USER.secret,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with _ceph() if where == "ceph" else moto.running() as endpoint:
        os.environ["AWS_ENDPOINT_URL"] = endpoint
        boto3.client("s3").create_bucket(Bucket="bench")
        yield "s3://bench/folder"


@contextmanager
def _ceph() -> Iterator[str]:
    from tests.s3 import ceph

    with ceph.running(memory_bytes=8 << 30) as server:
        yield server.endpoint


class Limit:
    """Limits the throughput of a rank to and from the storage, like a network, without using the CPU.

    Args:
        mib_per_s: None for no limit.
    """

    def __init__(self, mib_per_s: float | None) -> None:
        self._bytes_per_s = math.inf if mib_per_s is None else mib_per_s * (1 << 20)
        self._lock, self._free_at = threading.Lock(), 0.0

    @contextmanager
    def throttle(self, num_bytes: int) -> Iterator[None]:
        """Ends no sooner than these bytes would be transferred, after those of other threads."""
        with self._lock:
            done_at = self._free_at = max(self._free_at, time.monotonic()) + num_bytes / self._bytes_per_s
        yield
        time.sleep(max(0.0, done_at - time.monotonic()))


class LimitedStorage(Storage):
    """Counts the bytes that are read, within a throughput limit."""

    def __init__(self, uri: str, limit: Limit) -> None:
        super().__init__(uri)
        self._limit, self.num_bytes = limit, 0

    def write(self, key: str, data: bytes | memoryview) -> None:
        with self._limit.throttle(len(data)):
            super().write(key, data)

    def read(self, key: str) -> bytes:
        data = super().read(key)
        with self._limit.throttle(len(data)):
            self.num_bytes += len(data)
        return data

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        with self._limit.throttle(len(buffer)):
            num_bytes = super().read_into(key, start, buffer)
        self.num_bytes += num_bytes  # from several threads; a lost update shows as less than the commit
        return num_bytes


class OurSaves:
    """Saves of a run's rank, as the run makes them, to a folder of a storage."""

    def __init__(self, storage: Storage, rank: int, world_size: int, store_address: tuple[str, int]) -> None:
        self._rank, self._world_size = rank, world_size
        self._saver = Saver(storage, CheckpointStore(storage, keep=1))
        self._mailbox = StoreMailbox(StoreConnection(), store_address, lambda: store_address, "saves")
        self._ended: list[Any] = []
        self._has_ended = threading.Event()

    def begin(self, state: dict[str, Any], step: int) -> None:
        save = Save(
            step=step,
            attempt=f"{step:032x}",
            world_size=self._world_size,
            rank=self._rank,
            mailbox=self._mailbox if self._world_size > 1 else None,
            record={},
            fence=lambda: None,
            on_end=self._end,
        )
        self._has_ended.clear()
        self._saver.begin(state, save)

    def _end(self, outcome: Any) -> None:
        self._ended.append(outcome)
        self._has_ended.set()

    def wait(self) -> None:
        """Waits until this rank has written its share and, on rank 0, until the commit is durable."""
        if self._rank == 0:
            self._has_ended.wait()
        else:
            self._saver.wait()
        if self._ended and isinstance(self._ended[-1], Exception):
            raise self._ended[-1]

    def wait_for_cleanup(self) -> None:
        """Waits until the previous commit is removed, too."""
        self._saver.wait()


class Bare:
    """Parallel writes and reads of whole buffers, and nothing else."""

    def __init__(self, uri: str, limit: Limit) -> None:
        self._is_s3, self._uri, self._limit = uri.startswith("s3://"), uri, limit
        if self._is_s3:
            from fsspec.core import url_to_fs

            self._fs, self._base = url_to_fs(uri, use_listings_cache=False)
        else:
            self._base = uri
            Path(uri).mkdir(parents=True, exist_ok=True)

    def put(self, name: str, data: memoryview) -> None:
        """Writes a buffer as a few objects, which are durable when this returns."""
        pieces = {f"{name}-{start}": data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)}
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            list(pool.map(self._put, pieces.keys(), pieces.values()))

    def _put(self, key: str, data: memoryview) -> None:
        with self._limit.throttle(len(data)):
            if self._is_s3:
                self._fs.pipe_file(f"{self._base}/{key}", bytes(data))
                return
            with open(f"{self._base}/{key}", "wb", buffering=0) as file:
                file.write(data)
                os.fsync(file.fileno())

    def get(self, ranges: Sequence[tuple[str, int, int]]) -> Iterator[bytes | memoryview]:
        """Yields the bytes of ranges of objects, in order."""
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            yield from pool.map(lambda key_range: self._get(*key_range), ranges)

    def _get(self, key: str, start: int, end: int) -> bytes | memoryview:
        with self._limit.throttle(end - start):
            return self._read(key, start, end)

    def _read(self, key: str, start: int, end: int) -> bytes | memoryview:
        if self._is_s3:
            return self._fs.cat_file(f"{self._base}/{key}", start=start, end=end)
        data = empty_bytes(end - start)  # as in a restore
        with open(f"{self._base}/{key}", "rb", buffering=0) as file:
            file.seek(start)
            assert file.readinto(data) == len(data)
        return data

    def remove(self) -> None:
        """Removes everything in the folder."""
        storage = Storage(self._uri)
        for key in storage.list():
            storage.delete(key)


def return_large_memory() -> None:
    """Makes glibc return allocations of 4 MiB and more to the kernel when they are freed, so that every round of every
    side reads into new memory, like a new process."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 4 << 20)


@contextmanager
def memory_ready(num_bytes: int) -> Iterator[None]:
    """Keeps free memory in the machine while a rank runs the block: this much at first, and more at intervals.

    Some hosts take free memory of a virtual machine back within a second, and touching it again is twenty times as
    slow. A side that needs more memory, or more time, would then look slow. Collective.
    """
    first, later = _touched(num_bytes), [_touched(LATER_BYTES) for _ in range(LATER_PARTS)]
    has_ended = threading.Event()

    def free_parts() -> None:
        while later and not has_ended.wait(LATER_EVERY_S):
            later.pop()

    dist.barrier()  # all ranks have touched theirs before one frees it
    del first
    freeing = threading.Thread(target=free_parts)
    freeing.start()
    try:
        yield
    finally:
        has_ended.set()
        freeing.join()


def _touched(num_bytes: int) -> np.ndarray:
    memory = np.empty(num_bytes, dtype=np.uint8)
    memory[::4096] = 1
    return memory


def evict(uri: str) -> None:
    """Evicts the files of a folder from the page cache."""
    if uri.startswith("s3://"):
        return
    for path in Path(uri).rglob("*.bin"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
