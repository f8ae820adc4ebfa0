"""Measures devices, the storage, and the network between nodes. No Ray: `cluster` calls it on each node."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from elastic_ddp.distributed.assignment import Assignment
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.distributed.store import StoreConnection
from elastic_ddp.doctor.facts import Gpu, Link, Reduced, Speed
from elastic_ddp.storage.storage import Storage

FORM_S = 20.0
"""How long ranks wait for each other, and how long a collective may take."""
_ATTEMPT = 3
"""Gloo may take 2**3 s to connect the ranks, as in the fourth attempt of a run."""
MAX_ROUNDS = 15
"""Rounds of pairs: all pairs of 16 nodes, or 15 links of each node on a larger cluster."""
_ELEMENTS = 1 << 18
_MESSAGE_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
_ROUND_TRIPS, _TRANSFERS = 20, 3
_MATMUL_S = 0.3
_SIDE_ON_CPU, _SIDE_ON_GPU = 512, 8192
_OBJECT_BYTES = 16 << 20
_MIB = 1 << 20
_CPU = torch.device("cpu")


def matmul_speeds(gpus: Sequence[Gpu], cpu_model: str) -> tuple[Speed, ...]:
    """Returns the speed of a matrix product: on each of the GPUs in float16, or else on one CPU in float32."""
    if not gpus:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # comparable between nodes with different numbers of CPUs
        try:
            return (Speed(device="CPU", model=cpu_model, tflops=_matmul_tflops(_CPU)),)
        finally:
            torch.set_num_threads(threads)
    return tuple(
        Speed(device=f"GPU {gpu.index}", model=gpu.model, tflops=_matmul_tflops(torch.device("cuda", gpu.index)))
        for gpu in gpus
    )


def _matmul_tflops(device: torch.device) -> float:
    """Returns the best of several products: other work on the device only makes some of them slower."""
    is_gpu = device.type == "cuda"
    side = _SIDE_ON_GPU if is_gpu else _SIDE_ON_CPU
    dtype = torch.float16 if is_gpu else torch.float32
    left, right = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    product = left @ right  # the first one also loads the library
    best, end = float("inf"), time.perf_counter() + _MATMUL_S
    while time.perf_counter() < end:
        best = min(best, _seconds(lambda: torch.matmul(left, right, out=product), device))
    return 2 * side**3 / best / 1e12


def _seconds(function: Callable[[], object], device: torch.device = _CPU) -> float:
    _synchronize(device)
    start = time.perf_counter()
    function()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def write_speed(storage: Storage, key: str) -> float:
    """Writes an object, which the caller deletes. Returns MiB/s."""
    data = os.urandom(_OBJECT_BYTES)  # which no file system compresses
    return _OBJECT_BYTES / _MIB / _seconds(lambda: storage.write(key, data))


def read_speed(storage: Storage, key: str) -> float:
    """Reads an object that another node wrote, and which is therefore not in this one's memory. Returns MiB/s."""
    return storage.size(key) / _MIB / _seconds(lambda: storage.read(key))


def pairs(num_ranks: int, max_rounds: int = MAX_ROUNDS) -> list[list[tuple[int, int]]]:
    """Returns rounds of disjoint pairs, in which each pair of ranks comes once: the circle method of tournaments."""
    circle: list[int | None] = [*range(num_ranks), *([None] if num_ranks % 2 else [])]
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        matches = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in matches if a is not None and b is not None])
        circle.insert(1, circle.pop())
    return rounds[:max_rounds]


class Network:
    """This node's rank in a process group, formed as workers form it."""

    def __init__(self, store: tuple[str, int], device: torch.device) -> None:
        """Connects to the store at an address, over which the ranks find each other.

        Raises:
            torch.distributed.DistError: the store cannot be reached.
        """
        self._device, self._address = device, store
        self._store = StoreConnection()
        self._store.connect(*store)
        self._names: Sequence[str] = ()
        self._rank = 0
        self._group: ProcessGroup | None = None

    def all_reduce(self, names: Sequence[str], rank: int, generation: int) -> Reduced:
        """Forms the group, and adds up a tensor in which rank r has r + 1 everywhere.

        Collective. `names` are those of the nodes, in rank order. `generation` must be new to the store.

        Raises:
            Exception: the group does not form, or the all-reduce fails.
        """
        self._names, self._rank = names, rank
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        assignment = Assignment(
            generation=generation,
            rank=rank,
            world_size=len(names),
            store_host=self._address[0],
            store_port=self._address[1],
            reason="doctor",
        )
        self._group = ProcessGroup.form(
            assignment, store=self._store, device=self._device, timeout_s=FORM_S, attempt=_ATTEMPT
        )
        values = torch.full((_ELEMENTS,), self._rank + 1.0, device=self._device)
        dist.all_reduce(values)
        return Reduced(smallest=float(values.min()), largest=float(values.max()))

    def links(self) -> list[Link]:
        """Measures messages to other ranks, pair by pair. Collective. The lower rank of each pair returns the link."""
        assert self._group is not None, "the all-reduce has succeeded on every rank"
        found = []
        for matches in pairs(len(self._names)):
            for pair in matches:
                if self._rank in pair:
                    latency_s, mib_per_s = self._exchange(pair)
                    if self._rank == pair[0]:
                        found.append(
                            Link(
                                backend="nccl" if self._device.type == "cuda" else "gloo",
                                nodes=(self._names[pair[0]], self._names[pair[1]]),
                                latency_ms=latency_s * 1e3,
                                mib_per_s=mib_per_s,
                            )
                        )
            self._group.barrier()  # a pair of the next round would share the link of one that is not done
        return found

    def _exchange(self, pair: tuple[int, int]) -> tuple[float, float]:
        """Returns the latency one way in seconds, and the bandwidth in MiB/s."""
        small = torch.zeros(1, device=self._device)
        large = torch.zeros(_MESSAGE_BYTES[self._device.type] // 4, device=self._device)
        for tensor in (small, large):  # the first messages also connect the ranks
            self._round_trip(tensor, pair)
        latency_s = statistics.median(self._round_trip(small, pair) for _ in range(_ROUND_TRIPS)) / 2
        transfer_s = min(self._round_trip(large, pair) for _ in range(_TRANSFERS)) / 2
        return latency_s, large.nbytes / _MIB / transfer_s

    def _round_trip(self, tensor: torch.Tensor, pair: tuple[int, int]) -> float:
        """Sends a tensor to and fro. Returns the seconds."""
        assert self._group is not None
        group, is_first = self._group, self._rank == pair[0]
        peer = pair[1] if is_first else pair[0]

        def play() -> None:
            for sends in (is_first, not is_first):
                begin = group.begin_send if sends else group.begin_receive
                begin(tensor, peer, 0).wait()

        return _seconds(play, self._device)

    def close(self, *, intact: bool) -> None:
        """Leaves the group; `intact` if every rank has succeeded, and closes it too."""
        if self._group is not None:
            if intact:
                self._group.barrier()
            self._group.close(intact=intact)
        self._group = None
