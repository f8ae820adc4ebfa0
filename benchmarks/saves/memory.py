"""What memory a save and a restore take, beyond what a process has before: the high-water mark of its resident set."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from elastic_ddp.checkpoint import CommitCatalog
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.restore import restore
from saves.state import make_state, num_bytes, shard_of_any, tensors_of
from saves.stores import OurSaves
from tests.ranks import run_ranks

WORLD_SIZE = 2


class Peak:
    """Resident bytes beyond those of now."""

    def __init__(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status("VmRSS")

    def so_far(self) -> int:
        return _status("VmHWM") - self._before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def save_twice(group: ProcessGroup, uri: str, size_mib: int) -> dict[str, int]:
    """Peaks of a first save and of the one after, on this rank, after a small one that loads what saving needs, in
    which each rank has a tensor to write."""
    address = group.assignment.store_host, group.assignment.store_port
    small = OurSaves(Storage(f"{uri}/small"), group.rank, group.world_size, address)
    small.begin({"model": {str(rank): torch.zeros(8) for rank in range(group.world_size)}, "user": {"step": 1}}, 1)
    small.wait()
    state = make_state(size_mib)
    ours = OurSaves(Storage(f"{uri}/commits-{size_mib}"), group.rank, group.world_size, address)
    peak = Peak()
    peaks = []
    for step in (2, 3):
        dist.barrier()
        ours.begin(state, step)
        ours.wait()
        peaks.append(peak.so_far())
    return {"first": peaks[0], "both": peaks[1], "share": num_bytes(state) // group.world_size}


def restore_once(group: ProcessGroup, uri: str, size_mib: int, sharded: bool) -> dict[str, int]:
    """Peak of a restore to whole tensors or to this rank's shards of them, and the bytes of what it has then."""
    storage = Storage(f"{uri}/small")
    assert restore(CommitCatalog(storage), storage, group) is not None
    shard = shard_of_any() if sharded else None
    storage = Storage(f"{uri}/commits-{size_mib}")
    dist.barrier()
    peak = Peak()
    found = restore(CommitCatalog(storage), storage, group, lambda: lambda name: shard)
    assert found is not None
    tensors = tensors_of(found[1])
    assert all(isinstance(each, DTensor) == sharded for each in tensors)
    held = sum(each.to_local().nbytes if isinstance(each, DTensor) else each.nbytes for each in tensors)
    return {"peak": peak.so_far(), "state": held}


def measure(uri: str, *, size_mib: int) -> dict[str, Any]:
    """Of the rank that takes most, for a state and for one of half its size."""
    results: dict[str, Any] = {"save": {}, "restore": {}, "restore_sharded": {}}
    for size in (size_mib // 2, size_mib):
        saves = run_ranks(WORLD_SIZE, save_twice, uri, size)
        results["save"][size] = max(saves, key=lambda each: each["both"])
        for name, sharded in (("restore", False), ("restore_sharded", True)):
            restores = run_ranks(WORLD_SIZE, restore_once, uri, size, sharded)
            results[name][size] = max(restores, key=lambda each: each["peak"])
    return results
