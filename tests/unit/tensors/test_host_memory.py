"""Tensors in slabs of host memory: they behave like other tensors, and large ones get huge pages."""

from __future__ import annotations

import math
import mmap
import os
import re
import weakref
from pathlib import Path

import pytest
import torch

from elastic_ddp.tensors import host_memory

LARGE = host_memory.LARGE_BYTES


DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.complex128, torch.int64]
SHAPES = [(), (0,), (3, 0, 2), (5, 7), (LARGE,), (3, 1, LARGE // 3 + 1)]


@pytest.mark.parametrize("grouped", [True, False])
def test_tensors_in_slabs_behave_like_tensors_of_torch(grouped: bool) -> None:
    wanted = {f"{shape} of {dtype}": (shape, dtype) for shape in SHAPES for dtype in DTYPES}
    groups = [wanted] if grouped else [{name: kind} for name, kind in wanted.items()]
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
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, "torch.save writes the whole storage"


def test_large_tensors_of_a_group_are_contiguous_with_gaps_for_small_ones() -> None:
    shapes = {"a": ([LARGE + 1], torch.uint8), "b": ([10], torch.float32), "c": ([LARGE // 8, 2], torch.int64)}
    memory = host_memory.Memory([shapes, {"other": ([LARGE], torch.uint8)}])
    a, b, c, other = (memory.tensors[name] for name in ("a", "b", "c", "other"))
    places = {name: memory.addresses[name] - a.data_ptr() for name in ("a", "b", "c")}
    assert places == {"a": 0, "b": LARGE + 64, "c": LARGE + 128}
    assert [name for name in memory.tensors if memory.is_apart(name)] == ["b"]
    for tensor in (a, b, c, other):
        tensor.zero_()
    slab = memory.bytes_at(a.data_ptr(), LARGE + 128 + c.nbytes)
    assert slab is not None
    slab[:] = bytes([1]) * len(slab)
    assert a.all() and not b.any() and c.all() and not other.any()
    part = memory.bytes_at(c.data_ptr(), 40)
    assert part is not None
    part[:] = bytes(40)
    assert not c.flatten()[:5].any() and c.flatten()[5:].all() and a.all()
    assert memory.bytes_at(a.data_ptr(), LARGE + 128 + c.nbytes + 1) is None
    assert memory.bytes_at(min(a.data_ptr(), other.data_ptr()) - 1, 1) is None
    assert memory.bytes_at(other.data_ptr(), LARGE) is not None
    assert memory.bytes_at(b.data_ptr(), 40) is None
    assert host_memory.Memory([]).bytes_at(a.data_ptr(), 1) is None


def test_large_tensors_get_their_own_slabs_where_gaps_would_be_too_large() -> None:
    small = {f"{number}": ([1000], torch.uint8) for number in range(LARGE // 1000)}
    memory = host_memory.Memory([{"large": ([LARGE], torch.uint8), **small}])
    assert not any(map(memory.is_apart, memory.tensors))
    assert memory.bytes_at(memory.addresses["large"], LARGE) is not None
    assert memory.bytes_at(memory.addresses["large"], LARGE + 1) is None
    assert all(memory.bytes_at(memory.addresses[name], 1) is None for name in small)


def test_a_slab_is_freed_with_its_last_large_tensor_or_view_of_bytes() -> None:
    kinds = {"a": ([LARGE], torch.uint8), "b": ([LARGE], torch.uint8), "step": ([], torch.float32)}
    memory = host_memory.Memory([kinds])
    [slab] = [weakref.ref(slab.base) for slab in memory._slabs]
    tensor, step = memory.tensors["b"].fill_(7), memory.tensors["step"]
    data = memory.bytes_at(tensor.data_ptr(), LARGE)
    del memory
    assert tensor[-1] == 7
    del tensor
    assert data is not None and data[-1] == 7 and slab() is not None
    del data
    assert slab() is None and step.fill_(3) == 3


def test_empty_bytes_are_writable_and_contiguous() -> None:
    data = host_memory.empty_bytes(LARGE)
    data[:] = bytes(LARGE)
    assert (len(data), data.readonly, data.contiguous) == (LARGE, False, True)
    assert len(host_memory.empty_bytes(0)) == 0


def test_huge_pages_are_requested_from_the_large_size_on() -> None:
    tensors = host_memory.Memory([{f"{number}": ([LARGE], torch.uint8) for number in range(16)}]).tensors
    assert tensors["0"].data_ptr() % host_memory.HUGE_PAGE_BYTES == 0
    assert all(has_huge_pages(tensor.data_ptr()) for tensor in tensors.values())
    plain = torch.frombuffer(mmap.mmap(-1, 16 * LARGE), dtype=torch.uint8)  # the heap may reuse memory with huge pages
    assert not has_huge_pages(plain.data_ptr() + 8 * LARGE)


def has_huge_pages(address: int) -> bool:
    """Whether they were requested for the mapping with this address; the kernel decides whether it has any."""
    is_mapping = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_mapping = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif is_mapping and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError(f"nothing is mapped at {address:x}")


def test_the_memory_of_a_container_is_its_limit(tmp_path: Path) -> None:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    (unlimited := tmp_path / "memory.max").write_text("max\n")
    assert host_memory.total_bytes([unlimited, tmp_path / "missing"]) == machine
    (limited := tmp_path / "memory.limit_in_bytes").write_text("1073741824\n")
    assert host_memory.total_bytes([unlimited, limited]) == 2**30 < machine
