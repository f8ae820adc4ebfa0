"""`free_bytes`: how much memory a device has free."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import torch

from elastic_ddp.tensors.host_memory import total_bytes

_IN_USE = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")
_STATISTICS = ("/sys/fs/cgroup/memory.stat", "/sys/fs/cgroup/memory/memory.stat")
"""Of this process's container, in cgroup v2 and v1."""


def free_bytes(device: torch.device) -> int:
    """Returns how much memory this process could still get on a device. For a CPU, all processes of the node share it.

    Of a GPU, it counts what torch's allocator holds and does not use; of a CPU, what the page cache can give back.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    free = total_bytes()
    with suppress(OSError, TypeError):  # on other systems than Linux there are no such files
        free = _number("/proc/meminfo", r"MemAvailable:\s+(\d+) kB") * 1024
    for in_use, statistics in zip(_IN_USE, _STATISTICS, strict=True):
        with suppress(OSError, TypeError, ValueError):
            used = int(Path(in_use).read_text()) - _number(statistics, r"(?m)^(?:total_)?inactive_file (\d+)")
            free = min(free, total_bytes() - used)
    return free


def _number(file: str, pattern: str) -> int:
    """Returns the number that a pattern finds in a file. Raises TypeError if it finds none."""
    return int(re.search(pattern, Path(file).read_text())[1])  # type: ignore[index]
