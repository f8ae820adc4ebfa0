"""Memory for large tensors is a tensor like any other, and the kernel is asked for huge pages for it."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import pytest
import torch

from elastic_ddp import host_memory

LARGE = host_memory.LARGE_BYTES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex128, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5, 7), (LARGE,), (3, 1, LARGE // 3 + 1)], ids=str)
def test_it_is_a_tensor_like_torchs_own(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor, other = host_memory.empty(shape, dtype), torch.empty(shape, dtype=dtype)
    assert (tensor.shape, tensor.dtype, tensor.device) == (other.shape, other.dtype, other.device)
    assert tensor.stride() == other.stride()
    assert tensor.data_ptr() % host_memory.ALIGNMENT == 0
    assert torch.equal(tensor.fill_(1), other.fill_(1))
    assert tensor.nbytes == math.prod(shape) * dtype.itemsize


def test_bytes_can_be_read_into_and_read() -> None:
    data = host_memory.empty_bytes(LARGE)
    data[:] = bytes(LARGE)
    assert (len(data), data.readonly, data.contiguous) == (LARGE, False, True)
    assert len(host_memory.empty_bytes(0)) == 0


def test_the_kernel_is_asked_for_huge_pages_from_the_size_on_that_is_large() -> None:
    assert has_huge_pages(host_memory.empty([16 * LARGE], torch.uint8).data_ptr() + 8 * LARGE)
    assert not has_huge_pages(torch.empty(16 * LARGE, dtype=torch.uint8).data_ptr() + 8 * LARGE)


def has_huge_pages(address: int) -> bool:
    """Whether they were asked for, for the mapping with this address: whether there are any is the kernel's affair."""
    is_it = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_it = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif is_it and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError(f"nothing is mapped at {address:x}")


def test_a_container_has_no_more_memory_than_it_may_use(tmp_path: Path) -> None:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    (unlimited := tmp_path / "memory.max").write_text("max\n")
    assert host_memory.total_bytes([unlimited, tmp_path / "missing"]) == machine
    (limited := tmp_path / "memory.limit_in_bytes").write_text("1073741824\n")
    assert host_memory.total_bytes([unlimited, limited]) == 2**30 < machine
