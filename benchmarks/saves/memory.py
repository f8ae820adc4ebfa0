"""Peak memory of a save and a restore: the high-water mark of the resident set beyond that before."""

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
    """The peak of resident bytes beyond the current number."""

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
    """Returns the peaks of the first save and of the second, on this rank. A small save loads the modules before."""
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
    """Returns the peak of a restore to full tensors or to this rank's shards, and the bytes restored."""
    storage = Storage(f"{uri}/small")
    assert restore(CommitCatalog(storage), storage, group) is not None
    shard = shard_of_any() if sharded else None
    storage = Storage(f"{uri}/commits-{size_mib}")
    dist.barrier()
    peak = Peak()
    restored = restore(CommitCatalog(storage), storage, group, lambda: lambda name: shard)
    assert restored is not None
    tensors = tensors_of(restored[1])
    assert all(isinstance(tensor, DTensor) == sharded for tensor in tensors)
    num_restored = sum(tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes for tensor in tensors)
    return {"peak": peak.so_far(), "state": num_restored}


def measure(uri: str, *, size_mib: int) -> dict[str, Any]:
    """Returns the peaks of the rank with the highest one, for a state and for one of half its size."""
    results: dict[str, Any] = {"save": {}, "restore": {}, "restore_sharded": {}}
    for size in (size_mib // 2, size_mib):
        saves = run_ranks(WORLD_SIZE, save_twice, uri, size)
        results["save"][size] = max(saves, key=lambda peaks: peaks["both"])
        for name, sharded in (("restore", False), ("restore_sharded", True)):
            restores = run_ranks(WORLD_SIZE, restore_once, uri, size, sharded)
            results[name][size] = max(restores, key=lambda peaks: peaks["peak"])
    return results
