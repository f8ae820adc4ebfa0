"""Memory of the host for what is large and is filled at once."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

LARGE_BYTES = 4 << 20
"""From here on NumPy asks the kernel for huge pages (`madvise`), which torch does not. To touch new memory for the
first time takes several times as long as to fill it, and with them a fraction of that."""
ALIGNMENT = 64
"""Of torch's own tensors."""


_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""A container's limit, of version 2 and of version 1."""


def total_bytes(cgroups: Sequence[str | os.PathLike[str]] = _CGROUPS) -> int:
    """Of this machine, or of the container that this process is in."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in cgroups:
        with suppress(OSError, ValueError):  # there is none, or it is "max"
            limits.append(int(Path(file).read_text()))
    return min(limits)


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the CPU, without values."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < LARGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    memory = np.empty(num_bytes + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape)


def empty_bytes(size: int) -> memoryview:
    """So many bytes, without values."""
    return np.empty(size, dtype=np.uint8).data
