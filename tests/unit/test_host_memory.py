"""Tensors that lie side by side are tensors like any other, and the kernel is asked for huge pages for large ones."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import pytest
import torch

from elastic_ddp import host_memory

LARGE = host_memory.LARGE_BYTES


DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.complex128, torch.int64]
SHAPES = [(), (0,), (3, 0, 2), (5, 7), (LARGE,), (3, 1, LARGE // 3 + 1)]


@pytest.mark.parametrize("together", [True, False])
def test_they_are_tensors_like_torchs_own(together: bool) -> None:
    wanted = {f"{shape} of {dtype}": (shape, dtype) for shape in SHAPES for dtype in DTYPES}
    groups = [wanted] if together else [{name: each} for name, each in wanted.items()]
    tensors = host_memory.Memory(groups).tensors
    assert [*tensors] == [*wanted]
    for number, tensor in enumerate(tensors.values()):
        tensor.fill_(number)
    for number, (name, tensor) in enumerate(tensors.items()):
        shape, dtype = wanted[name]
        other = torch.full(shape, number, dtype=dtype)
        assert (tensor.shape, tensor.dtype, tensor.device) == (other.shape, other.dtype, other.device)
        assert tensor.stride() == other.stride()
        assert tensor.data_ptr() % host_memory.ALIGNMENT == 0 or not tensor.numel()
        assert torch.equal(tensor, other), name
        assert tensor.nbytes == math.prod(shape) * dtype.itemsize
        assert tensor.untyped_storage().nbytes() == tensor.nbytes  # what is kept of it, if it is


@pytest.mark.parametrize("size", [100, LARGE])
def test_those_of_a_group_follow_each_other_and_can_be_filled_at_once(size: int) -> None:
    shapes = {"a": ([size], torch.uint8), "b": ([10], torch.float32), "c": ([3, 5], torch.int64)}
    memory = host_memory.Memory([shapes, {"apart": ([size], torch.uint8)}])
    a, b, c, apart = memory.tensors.values()
    at_b, at_c = -(-size // 64) * 64, -(-size // 64) * 64 + 64
    assert (b.data_ptr() - a.data_ptr(), c.data_ptr() - a.data_ptr()) == (at_b, at_c)
    for tensor in (a, b, c, apart):
        tensor.zero_()
    whole = memory.at(a.data_ptr(), at_c + 120)
    assert whole is not None
    whole[:] = bytes([1]) * len(whole)
    for tensor in (a, b, c):
        assert set(tensor.view(torch.uint8).flatten().tolist()) == {1}
    assert not apart.any()
    part = memory.at(b.data_ptr(), 40)
    assert part is not None
    part[:] = bytes(40)
    assert (a.all(), b.any(), c.all()) == (True, False, True)
    assert memory.at(a.data_ptr(), at_c + 128) is not None
    assert memory.at(a.data_ptr(), at_c + 129) is None
    assert memory.at(a.data_ptr() - 1, 1) is None or apart.data_ptr() < a.data_ptr()
    assert memory.at(apart.data_ptr(), size) is not None
    assert host_memory.Memory([]).at(a.data_ptr(), 1) is None


def test_memory_stays_as_long_as_a_tensor_or_bytes_of_it() -> None:
    memory = host_memory.Memory([{"a": ([LARGE], torch.uint8), "b": ([LARGE], torch.uint8)}])
    tensor = memory.tensors["b"].fill_(7)
    data = memory.at(tensor.data_ptr(), LARGE)
    del memory
    assert tensor[-1] == 7
    del tensor
    assert data is not None and data[-1] == 7


def test_bytes_can_be_read_into_and_read() -> None:
    data = host_memory.empty_bytes(LARGE)
    data[:] = bytes(LARGE)
    assert (len(data), data.readonly, data.contiguous) == (LARGE, False, True)
    assert len(host_memory.empty_bytes(0)) == 0


def test_the_kernel_is_asked_for_huge_pages_from_the_size_on_that_is_large() -> None:
    tensors = host_memory.Memory([{f"{number}": ([LARGE], torch.uint8) for number in range(16)}]).tensors
    assert tensors["0"].data_ptr() % host_memory.HUGE_PAGE_BYTES == 0
    assert all(has_huge_pages(each.data_ptr()) for each in tensors.values())
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
