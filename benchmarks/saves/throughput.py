"""How fast commits are saved and restored, beside a bare parallel put or get of the same bytes, and what of a store is
read to restore one.

Ranks are processes over gloo. A save counts from when all ranks have copied their shares to the commit, as a bare put
begins with bytes in memory, and besides from its begin; a restore until the state is there on all ranks. Local files
are read from the disk, not from the kernel's memory of them, into memory that is new to the process. After a bare get
each rank has its share of the bytes. After a restore each has all of them, as after "whole", where each gets them from
the store, and after "sent", where each gets its share and broadcasts it. After a restore to shards, of a commit of as
many shards, each has its own.
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
    forget,
    give_large_memory_back,
    memory_ready,
)
from saves.turns import turns
from tests.ranks import run_ranks

SAVES_ON = (1, 2)
RESTORES_ON = (1, 2, 3)
SHARDS_ON = (2, 3)
"""World sizes."""


def timed(*actions: Callable[[], object]) -> list[float]:
    """Seconds from each action's begin until all ranks are through with all of them."""
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
    """MiB/s of saves and of bare puts by round; the first one of each is not counted."""
    state = make_state(size_mib, tensor_kib)
    share = bytearray(num_bytes(state) // group.world_size)
    for place in range(0, len(share), 4096):  # no zeros, which a disk may not write
        share[place : place + 8] = place.to_bytes(8, "little")
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
            ours.settle()
            if group.rank == 0:
                bare.remove()
            os.sync()  # or whoever comes next waits until the disk has let go of what was removed
    return {name: rate[1:] for name, rate in rates.items()}


def save_shards(group: ProcessGroup, folder: str, size_mib: int, tensor_kib: int) -> None:
    """A commit of a sharded state."""
    address = group.assignment.store_host, group.assignment.store_port
    ours = OurSaves(Storage(folder), group.rank, group.world_size, address)
    ours.begin(in_shards(make_state(size_mib, tensor_kib)), 1)
    ours.wait()
    dist.barrier()


def restore_in_turns(
    group: ProcessGroup, folder: str, rounds: int, limit_mibs: float | None, shards_of_kib: int | None = None
) -> dict[str, Any]:
    """MiB/s of the state, for restores and bare gets by round; what a restore reads of the store on this rank, and the
    seconds of a processor that each takes of it.

    Args:
        shards_of_kib: this rank is to have its shards alone, of tensors of that size.
    """
    give_large_memory_back()
    limit = Limit(limit_mibs)
    storage, bare = LimitedStorage(folder, limit), Bare(folder, limit)
    commit = CommitCatalog(storage).latest()
    assert isinstance(commit, Commit)
    pieces = [(item.key, *each) for item in commit.objects for each in even_pieces(item.size)]
    like = None if shards_of_kib is None else shard_of_any(shards_of_kib)
    read: list[int] = []

    def restored() -> None:
        storage.num_bytes = 0
        found = restore(CommitCatalog(storage), storage, group, lambda: lambda name: like)
        assert found is not None and found[0] == commit
        assert all(isinstance(each, DTensor) == (like is not None) for each in tensors_of(found[1]))
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
            forget(folder)
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
    """Begin and end of pieces of about 16 MiB of an object, all of one size."""
    count = max(1, round(size / PIECE_BYTES))
    return list(itertools.pairwise(size * number // count for number in range(count + 1)))


def sent(bare: Bare, pieces: Sequence[tuple[str, int, int]], group: ProcessGroup) -> list[torch.Tensor]:
    """All pieces on all ranks, of which each gets its share and broadcasts it, several on their way."""
    mine = bare.get(pieces[group.rank :: group.world_size])
    tensors: list[torch.Tensor] = []
    going: deque[Any] = deque()
    for number, (_, start, end) in enumerate(pieces):
        reader = number % group.world_size
        data = next(mine) if reader == group.rank else empty_bytes(end - start)
        with warnings.catch_warnings(action="ignore"):  # what was got from S3 is sent, and not written to
            tensors.append(torch.frombuffer(data, dtype=torch.uint8))
        going.append(dist.broadcast(tensors[-1], reader, async_op=True))
        if len(going) >= PIECES_IN_FLIGHT:
            going.popleft().wait()
    for work in going:
        work.wait()
    return tensors


def measure(
    uri: str, *, size_mib: int, tensor_kib: int, rounds: int, limit_mibs: float | None = None
) -> dict[str, Any]:
    """By world size. With a limit a rank carries no more MiB/s to and from the store, whichever side it is."""
    saves = {
        size: run_ranks(size, save_in_turns, uri, size_mib, tensor_kib, rounds, limit_mibs)[0] for size in SAVES_ON
    }
    restores, to_shards = {}, {}
    for size in RESTORES_ON:
        results = run_ranks(size, restore_in_turns, f"{uri}/saved-by-{SAVES_ON[-1]}", rounds, limit_mibs)
        restores[size] = in_all(results)
    for size in SHARDS_ON:
        run_ranks(size, save_shards, folder := f"{uri}/shards-of-{size}", size_mib, tensor_kib)
        to_shards[size] = in_all(run_ranks(size, restore_in_turns, folder, rounds, limit_mibs, tensor_kib))
    return {"save": saves, "restore": restores, "restore to shards": to_shards}


def in_all(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Rates are those of all ranks on each; what is read, and the processors' time, is each one's own."""
    all_processor_s = [each["processor_s"] for each in results]
    return {
        **results[0],
        "read_bytes": sum(each["read_bytes"] for each in results),
        "processor_s": {
            name: [sum(of_a_round) for of_a_round in zip(*(each[name] for each in all_processor_s), strict=True)]
            for name in all_processor_s[0]
        },
    }
