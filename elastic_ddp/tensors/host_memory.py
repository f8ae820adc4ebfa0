"""Memory of the host for what is large and is filled at once."""

from __future__ import annotations

import bisect
import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

LARGE_BYTES = 4 << 20
"""From here on NumPy asks the kernel for huge pages (`madvise`), which torch does not. To touch new memory for the
first time takes several times as long as to fill it, and with them a fraction of that."""
HUGE_PAGE_BYTES = 2 << 20
SMALL_BYTES = 64 << 10
"""A tensor of less has memory of its own: one that stays, as an optimizer's counts of steps do on the CPU, would keep
all that it lies in."""
MOST_GAPS = 1 / 64
"""Of a slab, what may be gaps for such ones."""
ALIGNMENT = 64
"""Of torch's own tensors."""

_Slab = npt.NDArray[np.uint8]

_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""A container's limit, of version 2 and of version 1."""


def total_bytes(cgroups: Sequence[str | os.PathLike[str]] = _CGROUPS) -> int:
    """Of this machine, or of the container that this process is in."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in cgroups:
        with suppress(OSError, ValueError):  # there is none, or it is "max"
            limits.append(int(Path(file).read_text()))
    return min(limits)


class Memory:
    """Tensors on the CPU, without values. Those of a group lie side by side in a slab of memory: several can be filled
    at once, and huge pages hold more of them than of one alone, which begins and ends in the midst of such pages.

    A slab is let go with the last of its tensors. Small ones are apart, and have a gap in it, unless that would be too
    much of it; then large ones have slabs of their own.

    Args:
        groups: shape and dtype by name.

    Attributes:
        tensors: by name.
        places: by name, the address where a tensor is in its slab, or its gap if it is apart.
    """

    def __init__(self, groups: Iterable[Mapping[str, tuple[Sequence[int], torch.dtype]]]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.places: dict[str, int] = {}
        self._slabs: list[_Slab] = []
        for group in groups:
            sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in group.items()}
            memory = self._laid_out(sizes)
            for name, (shape, dtype) in group.items():
                if name in memory and sizes[name] >= SMALL_BYTES:
                    tensor = torch.from_numpy(memory[name]).view(dtype).view(shape)
                else:
                    tensor = torch.empty(shape, dtype=dtype)
                self.tensors[name] = tensor
                self.places[name] = _address(memory[name]) if name in memory else tensor.data_ptr()
        self._slabs.sort(key=_address)

    def is_apart(self, name: str) -> bool:
        """Whether a tensor is not at its place."""
        return self.tensors[name].data_ptr() != self.places[name]

    def at(self, address: int, size: int) -> memoryview | None:
        """So many bytes from an address on, if they are all in one slab. Whoever fills them answers for what lies
        there, and between."""
        place = bisect.bisect(self._slabs, address, key=_address) - 1
        if place < 0:
            return None
        slab = self._slabs[place]
        start = address - _address(slab)
        return slab[start : start + size].data if start + size <= len(slab) else None

    def _laid_out(self, sizes: Mapping[str, int]) -> dict[str, _Slab]:
        """Memory for those of a group that are in slabs."""
        total = sum(map(_aligned, sizes.values()))
        gaps = sum(_aligned(size) for size in sizes.values() if size < SMALL_BYTES)
        together = [[*sizes]] if gaps <= MOST_GAPS * total else [[name] for name in sizes]
        memory: dict[str, _Slab] = {}
        for names in together:
            *starts, end = itertools.accumulate((_aligned(sizes[name]) for name in names), initial=0)
            if end >= LARGE_BYTES:
                self._slabs.append(slab := _empty(end))
                memory |= {name: slab[start : start + sizes[name]] for name, start in zip(names, starts, strict=True)}
        return memory


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


def empty_bytes(size: int) -> memoryview:
    """So many bytes, without values."""
    return _empty(size).data
