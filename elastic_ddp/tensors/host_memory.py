"""Total and free memory, and uninitialized host memory with huge pages for tensors that are filled at once."""

from __future__ import annotations

import bisect
import itertools
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

LARGE_BYTES = 4 << 20
"""From this size on NumPy requests huge pages (`madvise`), which torch does not. The first touch of new memory takes
several times as long as filling it, and a fraction of that with huge pages."""
HUGE_PAGE_BYTES = 2 << 20
SMALL_BYTES = 64 << 10
"""A smaller tensor gets memory of its own: a step count stays on the CPU and would keep its slab alive."""
MAX_GAP_SHARE = 1 / 64
"""The share of a slab that gaps for small tensors may take."""
ALIGNMENT = 64
"""The alignment of torch's own tensors."""

_Slab = npt.NDArray[np.uint8]

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where cgroup v2 and v1 have a container's memory limit."""
_CGROUP_USES = (
    ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "/sys/fs/cgroup/memory/memory.stat"),
)
"""Where cgroup v2 and v1 have the used memory of a container, and the parts of the used memory."""


def total_bytes(limit_files: Sequence[str | os.PathLike[str]] = _CGROUP_LIMITS) -> int:
    """Returns the memory of this machine, or of the container that this process runs in."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in limit_files:
        with suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int(Path(file).read_text()))
    return min(limits)


def free_bytes(device: torch.device) -> int:
    """Returns how much memory this process could still get on a device. For a CPU, all processes of the node share it.

    Includes, on a GPU, unused memory of torch's allocator, and on a CPU, the reclaimable page cache.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    free = total_bytes()
    with suppress(OSError, TypeError):  # on other systems than Linux there are no such files
        free = _number("/proc/meminfo", r"MemAvailable:\s+(\d+) kB") * 1024
    for in_use, statistics in _CGROUP_USES:
        with suppress(OSError, TypeError, ValueError):
            used = int(Path(in_use).read_text()) - _number(statistics, r"(?m)^(?:total_)?inactive_file (\d+)")
            free = min(free, total_bytes() - used)
    return free


def _number(file: str, pattern: str) -> int:
    """Returns the number that a pattern finds in a file. Raises TypeError if it finds none."""
    return int(re.search(pattern, Path(file).read_text())[1])  # type: ignore[index]


class Memory:
    """Uninitialized CPU tensors. The tensors of a group are contiguous in a slab.

    Contiguous tensors can be filled by one read, and share huge pages. A slab is freed with the last of its tensors.
    A small tensor has memory of its own and leaves a gap in the slab. If gaps would take more than `MAX_GAP_SHARE` of a
    slab, each large tensor gets a slab of its own.

    Args:
        groups: for each group, shape and dtype by name.

    Attributes:
        tensors: by name.
        addresses: by name, where the tensor is, or its gap in the slab if it has memory of its own.
    """

    def __init__(self, groups: Iterable[Mapping[str, tuple[Sequence[int], torch.dtype]]]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.addresses: dict[str, int] = {}
        self._slabs: list[_Slab] = []
        for group in groups:
            sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in group.items()}
            slots = self._allocate_slots(sizes)
            for name, (shape, dtype) in group.items():
                if name in slots and sizes[name] >= SMALL_BYTES:
                    tensor = torch.from_numpy(slots[name]).view(dtype).view(shape)
                else:
                    tensor = torch.empty(shape, dtype=dtype)
                self.tensors[name] = tensor
                self.addresses[name] = _address(slots[name]) if name in slots else tensor.data_ptr()
        self._slabs.sort(key=_address)

    def is_apart(self, name: str) -> bool:
        """Whether a tensor has memory of its own, and a gap in a slab."""
        return self.tensors[name].data_ptr() != self.addresses[name]

    def bytes_at(self, address: int, size: int) -> memoryview | None:
        """Returns `size` bytes from an address on, or None if they are not in one slab.

        Writing there overwrites the tensors in that range and the gaps between them.
        """
        index = bisect.bisect(self._slabs, address, key=_address) - 1
        if index < 0:
            return None
        slab = self._slabs[index]
        start = address - _address(slab)
        return slab[start : start + size].data if start + size <= len(slab) else None

    def _allocate_slots(self, sizes: Mapping[str, int]) -> dict[str, _Slab]:
        """Allocates slabs for a group and returns the slot of each tensor that has one."""
        total = sum(map(_aligned, sizes.values()))
        gaps = sum(_aligned(size) for size in sizes.values() if size < SMALL_BYTES)
        layouts = [[*sizes]] if gaps <= MAX_GAP_SHARE * total else [[name] for name in sizes]
        slots: dict[str, _Slab] = {}
        for names in layouts:
            *starts, end = itertools.accumulate((_aligned(sizes[name]) for name in names), initial=0)
            if end >= LARGE_BYTES:
                slab = _empty(end)
                self._slabs.append(slab)
                slots |= {name: slab[start : start + sizes[name]] for name, start in zip(names, starts, strict=True)}
        return slots


def empty_bytes(size: int) -> memoryview:
    """Returns `size` uninitialized bytes."""
    return _empty(size).data


def _empty(size: int) -> _Slab:
    if size < LARGE_BYTES:
        return torch.empty(size, dtype=torch.uint8).numpy()
    memory = np.empty(size + HUGE_PAGE_BYTES, dtype=np.uint8)
    start = -_address(memory) % HUGE_PAGE_BYTES
    return memory[start : start + size]


def _address(memory: _Slab) -> int:
    return memory.ctypes.data


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
