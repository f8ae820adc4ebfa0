"""Throughput of saves and restores compared with bare parallel writes and reads of the same bytes, and the bytes that a
restore reads.

Ranks are processes over gloo. A save is measured from when all ranks have copied their shares, because a bare write
begins with bytes in memory, and also from its begin. A restore is measured until all ranks have the state. Local files
are read from the disk, not from the page cache, into new memory.

    bare     each rank reads its share of the bytes
    whole    each rank reads all bytes
    sent     each rank reads its share and broadcasts it
    ours     a restore: each rank has all bytes, or its shards of a commit with as many shards
"""

from __future__ import annotations

import itertools
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from elastic_ddp.checkpoint import CommitCatalog
from elastic_ddp.checkpoint.manifest import Commit
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.storage.storage import Storage
from elastic_ddp.tensors.host_memory import empty_bytes
from elastic_ddp.worker.restore import restore
from elastic_ddp.worker.shared_read import PIECES_IN_FLIGHT
from saves.state import MIB, in_shards, make_state, num_bytes, shard_of_any, tensors_of
from saves.stores import (
    PIECE_BYTES,
    Bare,
    Limit,
    LimitedStorage,
    OurSaves,
    evict,
    memory_ready,
    return_large_memory,
)
from saves.turns import turns
from tests.ranks import run_ranks

SAVES_ON = (1, 2)
RESTORES_ON = (1, 2, 3)
SHARDS_ON = (2, 3)
"""World sizes."""


def timed(*actions: Callable[[], object]) -> list[float]:
    """Returns the seconds from the begin of each action until all ranks have finished all actions."""
    begins = []
    for action in actions:
        dist.barrier()
        begins.append(time.perf_counter())
        action()
    dist.barrier()
    end = time.perf_counter()
    return [end - begin for begin in begins]


def save_in_turns(
    group: ProcessGroup, uri: str, size_mib: int, tensor_kib: int, rounds: int, limit_mibs: float | None
) -> dict[str, Any]:
    """Returns MiB/s of saves and of bare writes by round, without the first round."""
    state = make_state(size_mib, tensor_kib)
    share = bytearray(num_bytes(state) // group.world_size)
    for start in range(0, len(share), 4096):  # a disk may not write zeros
        share[start : start + 8] = start.to_bytes(8, "little")
    address = group.assignment.store_host, group.assignment.store_port
    limit = Limit(limit_mibs)
    storage = LimitedStorage(f"{uri}/saved-by-{group.world_size}", limit)
    ours = OurSaves(storage, group.rank, group.world_size, address)
    bare = Bare(f"{uri}/bare", limit)

    def save(step: int) -> dict[str, float]:
        from_begin, from_copy = timed(lambda: ours.begin(state, step), ours.wait)
        return {"ours": from_copy, "from begin": from_begin}

    def put(step: int) -> dict[str, float]:
        [bare_s] = timed(lambda: bare.put(f"rank{group.rank}", memoryview(share)))
        return {"bare": bare_s}

    rates: dict[str, list[float]] = {"ours": [], "from begin": [], "bare": []}
    for step in range(1, rounds + 2):
        for side in (save, put) if step % 2 else (put, save):
            for name, seconds in side(step).items():
                rates[name].append(num_bytes(state) / MIB / seconds)
            ours.wait_for_cleanup()
            if group.rank == 0:
                bare.remove()
            os.sync()  # otherwise the next side waits for the removal
    return {name: rate[1:] for name, rate in rates.items()}


def save_shards(group: ProcessGroup, folder: str, size_mib: int, tensor_kib: int) -> None:
    """Saves a commit of a sharded state."""
    address = group.assignment.store_host, group.assignment.store_port
    ours = OurSaves(Storage(folder), group.rank, group.world_size, address)
    ours.begin(in_shards(make_state(size_mib, tensor_kib)), 1)
    ours.wait()
    dist.barrier()


def restore_in_turns(
    group: ProcessGroup, folder: str, rounds: int, limit_mibs: float | None, shards_of_kib: int | None = None
) -> dict[str, Any]:
    """Returns MiB/s of the state by side and round, CPU seconds, and the bytes that a restore reads on this rank.

    Args:
        group: the open process group.
        folder: of the commit.
        rounds: of each side.
        limit_mibs: the limit of this rank's MiB/s from the storage.
        shards_of_kib: restore only this rank's shards of tensors of this size.
    """
    return_large_memory()
    limit = Limit(limit_mibs)
    storage, bare = LimitedStorage(folder, limit), Bare(folder, limit)
    commit = CommitCatalog(storage).latest()
    assert isinstance(commit, Commit)
    pieces = [(stored.key, *bounds) for stored in commit.objects for bounds in even_pieces(stored.size)]
    like = None if shards_of_kib is None else shard_of_any(shards_of_kib)
    read: list[int] = []

    def restored() -> None:
        storage.num_bytes = 0
        result = restore(CommitCatalog(storage), storage, group, lambda: lambda name: like)
        assert result is not None and result[0] == commit
        assert all(isinstance(tensor, DTensor) == (like is not None) for tensor in tensors_of(result[1]))
        read.append(storage.num_bytes)

    all_sides: dict[str, Callable[[], object]] = {
        "ours": restored,
        "bare": lambda: [*bare.get(pieces[group.rank :: group.world_size])],
    }
    if like is None:
        all_sides |= {"whole": lambda: [*bare.get(pieces)], "sent": lambda: sent(bare, pieces, group)}
    rates: dict[str, list[float]] = {name: [] for name in all_sides}
    processor_s: dict[str, list[float]] = {name: [] for name in all_sides}
    for _, name in turns([*all_sides], rounds + 1):
        dist.barrier()
        if group.rank == 0:
            evict(folder)
        with memory_ready(2 * commit.num_bytes):
            begin = time.process_time()
            rates[name] += [commit.num_bytes / MIB / seconds for seconds in timed(all_sides[name])]
            processor_s[name].append(time.process_time() - begin)
    return {
        **{name: rate[1:] for name, rate in rates.items()},
        "processor_s": {name: seconds[1:] for name, seconds in processor_s.items()},
        "read_bytes": max(read),
        "commit_bytes": commit.num_bytes,
    }


def even_pieces(size: int) -> list[tuple[int, int]]:
    """Returns begin and end of equal pieces of about 16 MiB of an object."""
    count = max(1, round(size / PIECE_BYTES))
    return list(itertools.pairwise(size * number // count for number in range(count + 1)))


def sent(bare: Bare, pieces: Sequence[tuple[str, int, int]], group: ProcessGroup) -> list[torch.Tensor]:
    """Returns all pieces: each rank reads its share and broadcasts it, several at a time."""
    own = bare.get(pieces[group.rank :: group.world_size])
    tensors: list[torch.Tensor] = []
    in_flight: deque[Any] = deque()
    for number, (_, start, end) in enumerate(pieces):
        reader = number % group.world_size
        data = next(own) if reader == group.rank else empty_bytes(end - start)
        with warnings.catch_warnings(action="ignore"):  # bytes from S3 are read-only, and are only sent
            tensors.append(torch.frombuffer(data, dtype=torch.uint8))
        in_flight.append(dist.broadcast(tensors[-1], reader, async_op=True))
        if len(in_flight) >= PIECES_IN_FLIGHT:
            in_flight.popleft().wait()
    for work in in_flight:
        work.wait()
    return tensors


def measure(
    uri: str, *, size_mib: int, tensor_kib: int, rounds: int, limit_mibs: float | None = None
) -> dict[str, Any]:
    """Returns the rates by world size. `limit_mibs` limits a rank's MiB/s to and from the storage, on every side."""
    saves = {
        size: run_ranks(size, save_in_turns, uri, size_mib, tensor_kib, rounds, limit_mibs)[0] for size in SAVES_ON
    }
    restores, to_shards = {}, {}
    for size in RESTORES_ON:
        results = run_ranks(size, restore_in_turns, f"{uri}/saved-by-{SAVES_ON[-1]}", rounds, limit_mibs)
        restores[size] = combined(results)
    for size in SHARDS_ON:
        run_ranks(size, save_shards, folder := f"{uri}/shards-of-{size}", size_mib, tensor_kib)
        to_shards[size] = combined(run_ranks(size, restore_in_turns, folder, rounds, limit_mibs, tensor_kib))
    return {"save": saves, "restore": restores, "restore to shards": to_shards}


def combined(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the result of all ranks: rates are equal on all, bytes and CPU seconds are summed."""
    all_processor_s = [result["processor_s"] for result in results]
    return {
        **results[0],
        "read_bytes": sum(result["read_bytes"] for result in results),
        "processor_s": {
            name: [
                sum(of_a_round)
                for of_a_round in zip(*(processor_s[name] for processor_s in all_processor_s), strict=True)
            ]
            for name in all_processor_s[0]
        },
    }
