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
ALIGNMENT = 64
"""Of torch's own tensors."""
_Piece = npt.NDArray[np.uint8]


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
    """Tensors on the CPU, without values. Those of a group lie side by side in one piece of memory, which is let go
    with the last of them: one alone of 4 MiB begins and ends in the midst of huge pages, and has half of it in small
    ones.

    Args:
        groups: shape and dtype by name.

    Attributes:
        tensors: by name, in that order.
    """

    def __init__(self, groups: Iterable[Mapping[str, tuple[Sequence[int], torch.dtype]]]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._pieces: list[_Piece] = []
        for group in groups:
            sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in group.values()]
            *starts, size = itertools.accumulate(map(_aligned, sizes), initial=0)
            piece = _empty(size)
            if size:
                self._pieces.append(piece)
            for (name, (shape, dtype)), start, num_bytes in zip(group.items(), starts, sizes, strict=True):
                memory = torch.from_numpy(piece[start : start + num_bytes])
                self.tensors[name] = memory.view(dtype).view(shape) if num_bytes else torch.empty(shape, dtype=dtype)
        self._pieces.sort(key=_address)

    def at(self, address: int, size: int) -> memoryview | None:
        """So many bytes from an address on, if they are in a piece, be they a tensor's or between two."""
        place = bisect.bisect(self._pieces, address, key=_address) - 1
        if place < 0:
            return None
        piece = self._pieces[place]
        start = address - _address(piece)
        return piece[start : start + size].data if start + size <= len(piece) else None


def _empty(size: int) -> _Piece:
    if size < LARGE_BYTES:
        return torch.empty(size, dtype=torch.uint8).numpy()
    memory = np.empty(size + HUGE_PAGE_BYTES, dtype=np.uint8)
    start = -_address(memory) % HUGE_PAGE_BYTES
    return memory[start : start + size]


def _address(memory: _Piece) -> int:
    return memory.ctypes.data


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def empty_bytes(size: int) -> memoryview:
    """So many bytes, without values."""
    return _empty(size).data
