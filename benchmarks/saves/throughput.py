"""How fast commits are saved and restored, beside a bare parallel put or get of the same bytes, and what of a store is
read to restore one.

Ranks are processes over gloo. A save counts from its begin to its commit, a restore until the state is there on all
ranks; local files are read from the disk, not from the kernel's memory of them. After a bare get each rank has its
share of the bytes, and after "whole" each has all of them, as after a restore.
"""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from elastic_ddp.checkpoint import CommitCatalog
from elastic_ddp.checkpoint.manifest import Commit
from elastic_ddp.parallel.process_group import ProcessGroup
from elastic_ddp.restoring import restore
from saves.state import MIB, make_state, num_bytes
from saves.stores import PIECE_BYTES, Bare, Limit, LimitedStorage, OurSaves, forget
from saves.turns import turns
from tests.ranks import run_ranks

SAVES_ON = (1, 2)
RESTORES_ON = (1, 2, 3)
"""World sizes."""


def timed(action: Any) -> float:
    """Seconds until all ranks are through."""
    dist.barrier()
    begin = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - begin


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

    def save(step: int) -> None:
        ours.begin(state, step)
        ours.wait()

    rates: dict[str, list[float]] = {"ours": [], "bare": []}
    for step in range(1, rounds + 2):
        pair = {
            "ours": lambda step=step: save(step),
            "bare": lambda: bare.put(f"rank{group.rank}", memoryview(share)),
        }
        for name in sorted(pair, reverse=step % 2 == 0):
            rates[name].append(num_bytes(state) / MIB / timed(pair[name]))
            ours.settle()
        if group.rank == 0:
            bare.remove()
    return {name: rate[1:] for name, rate in rates.items()}


def restore_in_turns(group: ProcessGroup, folder: str, rounds: int, limit_mibs: float | None) -> dict[str, Any]:
    """MiB/s of the state, for restores and bare gets by round, and what a restore reads of the store on this rank."""
    limit = Limit(limit_mibs)
    storage, bare = LimitedStorage(folder, limit), Bare(folder, limit)
    commit = CommitCatalog(storage).latest()
    assert isinstance(commit, Commit)
    pieces = [
        (item.key, start, min(start + PIECE_BYTES, item.size))
        for item in commit.objects
        for start in range(0, item.size, PIECE_BYTES)
    ]
    read: list[int] = []

    def restored() -> None:
        storage.num_bytes = 0
        found = restore(CommitCatalog(storage), storage, group)
        assert found is not None and found[0] == commit
        read.append(storage.num_bytes)

    all_sides = {
        "ours": restored,
        "bare": lambda: bare.get(pieces[group.rank :: group.world_size]),
        "whole": lambda: bare.get(pieces),
    }
    rates: dict[str, list[float]] = {name: [] for name in all_sides}
    for _, name in turns([*all_sides], rounds + 1):
        dist.barrier()
        if group.rank == 0:
            forget(folder)
        rates[name].append(commit.num_bytes / MIB / timed(all_sides[name]))
    return {
        **{name: rate[1:] for name, rate in rates.items()},
        "read_bytes": max(read),
        "commit_bytes": commit.num_bytes,
    }


def measure(
    uri: str, *, size_mib: int, tensor_kib: int, rounds: int, limit_mibs: float | None = None
) -> dict[str, Any]:
    """By world size. With a limit a rank carries no more MiB/s to and from the store, whichever side it is."""
    saves = {
        size: run_ranks(size, save_in_turns, uri, size_mib, tensor_kib, rounds, limit_mibs)[0] for size in SAVES_ON
    }
    restores = {}
    for size in RESTORES_ON:
        results = run_ranks(size, restore_in_turns, f"{uri}/saved-by-{SAVES_ON[-1]}", rounds, limit_mibs)
        restores[size] = {**results[0], "read_bytes": sum(each["read_bytes"] for each in results)}
    return {"save": saves, "restore": restores}
