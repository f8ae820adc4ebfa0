"""States are cut into blocks, and written by any number of ranks."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elastic_ddp.checkpoint import writer
from elastic_ddp.checkpoint.parts import Part, assemble
from elastic_ddp.checkpoint.planning import BLOCK_BYTES, blocks_of, plan_blocks
from elastic_ddp.checkpoint.writer import SLAB_BYTES, BlockWriter, StateWriter, slabs_of
from elastic_ddp.errors import CheckpointError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.tensors.state_tree import flatten, unflatten
from tests.unit.checkpoint.blocks import PREFIX, SHAPES, commit_of, kinds_in, read, same, some_tensors, write


@given(SHAPES, st.sampled_from([1, 2, 8]), st.integers(1, 300))
def test_blocks_cover_the_tensor_are_contiguous_and_at_most_of_the_given_size(
    shape: torch.Size, element_bytes: int, block_bytes: int
) -> None:
    blocks = list(blocks_of(shape, element_bytes, block_bytes))
    covered = torch.zeros(shape, dtype=torch.int64)
    for offsets, sizes in blocks:
        box = covered[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
        assert box.shape == sizes and (box.is_contiguous() or not box.numel())
        box += 1
        assert math.prod(sizes) * element_bytes <= max(block_bytes, element_bytes)
    assert bool((covered == 1).all()) and len(blocks) >= 1
    num_bytes = covered.numel() * element_bytes
    assert num_bytes > block_bytes or len(blocks) == 1


@pytest.mark.parametrize(
    ("shape", "element_bytes", "count"),
    [((2, 64 << 20), 4, 32), ((8, 4096, 14336), 2, 64), ((1, 1, 64 << 20), 4, 16), ((70_000, 1024), 4, 18)],
    ids=str,
)
def test_rows_larger_than_a_block_are_cut(shape: tuple[int, ...], element_bytes: int, count: int) -> None:
    sizes = [math.prod(block) * element_bytes for _, block in blocks_of(torch.Size(shape), element_bytes, BLOCK_BYTES)]
    assert len(sizes) == count and max(sizes) <= BLOCK_BYTES


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_tensors_written_at_any_world_size_are_read_bit_for_bit(tmp_path: Path, world_size: int) -> None:
    storage, tensors = Storage(tmp_path), some_tensors()
    parts = write(storage, tensors, world_size)
    commit = commit_of(parts, tensors)
    restored = read(storage, commit)
    assert restored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same(restored[name], tensor), name
    assert sum(entry.size for entry in storage.listing().values()) == sum(item.size for item in commit.objects)


def test_ranks_share_the_writing_of_replicated_tensors(tmp_path: Path) -> None:
    tensors = {"large": torch.zeros(4000, 4), "small": torch.zeros(10)}
    wide = {"wide": torch.zeros(2, 8000)}
    mixed = {"cut": torch.zeros(3 * 256), **{str(number): torch.zeros(64) for number in range(10)}}
    for state in (tensors, wide, mixed):
        parts = write(Storage(tmp_path), state, 4, block_bytes=1024)
        written = [sum(item.size for item in part.objects) for part in parts]
        assert max(written) - min(written) <= 1024 + 64


def test_objects_have_about_the_requested_size(tmp_path: Path) -> None:
    [part] = write(Storage(tmp_path), {"large": torch.zeros(4000, 4)}, block_bytes=1024, object_bytes=10_000)
    assert len(part.objects) == 7 and {item.size for item in part.objects[:-1]} == {10_240}


def test_host_memory_is_reused_and_the_state_may_change_after_staging(tmp_path: Path) -> None:
    storage, weight = Storage(tmp_path), torch.arange(100.0)
    writer = BlockWriter()
    memory = set()
    for number in range(3):
        weight += number
        tensors = {"weight": weight}
        writer.stage(plan_blocks(tensors), tensors)
        expected = weight.clone()
        weight.zero_()
        part = writer.write(storage, PREFIX, str(number))
        assert same(read(storage, commit_of([part], ["weight"]))["weight"], expected)
        weight.copy_(expected)
        memory |= {buffer.data_ptr() for buffer in writer._buffers}
    assert len(memory) == 1


class Allocated(TorchDispatchMode):
    """Counts the bytes that operations allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes, self._before = 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and (memory := leaf.untyped_storage()).data_ptr() not in known:
                self.num_bytes += memory.nbytes()
        return result


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_staging_allocates_only_the_share_of_a_rank_in_any_memory_format(
    tmp_path: Path, layout: torch.memory_format
) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = {
        f"{number}": torch.randn(16, 8, 4, 4, generator=generator).contiguous(memory_format=layout)
        for number in range(8)
    }
    storage, parts = Storage(tmp_path), []
    for rank in range(4):
        writer = StateWriter()
        with Allocated() as first:
            writer.stage({"model": weights}, rank=rank, world_size=4)
        with Allocated() as second:
            writer.stage({"model": weights}, rank=rank, world_size=4)
        share = 2 * 16 * 8 * 4 * 4 * 4
        # Only the samples of tensors in another format are copied for a moment; a small state is sampled completely.
        samples = 0 if layout is torch.contiguous_format else 8 * 16 * 8 * 4 * 4 * 4
        assert (first.num_bytes, second.num_bytes) == (share + samples, samples)
        parts.append(writer.write(storage, PREFIX))
    names = [f"model.{name}" for name in weights]
    restored = read(storage, commit_of(parts, names))
    assert all(torch.equal(restored[f"model.{name}"], weight) for name, weight in weights.items())
    on_disk = np.concatenate([np.fromfile(tmp_path / key, np.float32) for part in parts for key in keys_in(part)])
    expected = np.concatenate([weights[str(k)].numpy().reshape(-1) for rank in range(4) for k in (rank, rank + 4)])
    assert np.array_equal(on_disk, expected), "row-major"


def test_arrays_are_flattened_without_a_copy() -> None:
    array = np.arange(1 << 20, dtype=np.float32)
    frozen = np.arange(3)
    frozen.flags.writeable = False
    tree = {"array": array, "turned": array.reshape(4, -1).T, "frozen": frozen, "at": np.array("2026-01-01", "M8[D]")}
    skeleton, tensors = flatten(tree)
    assert tensors["array"].data_ptr() == array.ctypes.data and tensors["array"].dtype == torch.uint8
    restored = unflatten(skeleton, tensors)
    assert all(np.array_equal(restored[name], tree[name]) and restored[name].dtype == tree[name].dtype for name in tree)


def keys_in(part: Part) -> list[str]:
    return [item.key for item in part.objects]


def test_states_that_change_between_commits_are_saved_correctly(tmp_path: Path) -> None:
    """Changes of memory, dtype, shape and names."""
    generator, writer = torch.Generator().manual_seed(1), StateWriter()

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    kept, memory = some(4, 6), some(40, 5)
    states = [
        {"kept": kept, "other": some(5)},
        {"kept": kept, "other": some(5)},  # in other memory
        {"kept": kept.add_(1), "other": some(5)},
        {"kept": kept, "other": some(5).double()},
        {"kept": kept, "other": some(5, 1).double()},
        {"kept": kept.t(), "other": some(5, 1).double()},
        {"kept": some(4, 6).t(), "other": some(5, 1).double()},  # of the same shape, with other strides
        {"kept": memory[:6, :4], "other": memory[6:11, :1]},
        {"kept": memory[6:12, 1:], "other": memory[:5, 4:]},
        {"other": some(5), "kept": some(6, 4)},
        {"kept": some(6, 4), "other": some(5), "new": some(1)},
        {"kept": some(6, 4)},
        {"kept": some(6, 4).requires_grad_()},
    ]
    for number, state in enumerate(states):
        expected = {f"model.{name}": tensor.clone() for name, tensor in state.items()}
        writer.prepare({"model": state})
        writer.stage({"model": state}, rank=0, world_size=1)
        with torch.no_grad():
            for tensor in state.values():
                tensor.zero_()  # as in the next step
        part = writer.write(Storage(tmp_path / str(number)), PREFIX)
        restored = read(Storage(tmp_path / str(number)), commit_of([part], expected))
        assert all(same(restored[name], tensor) for name, tensor in expected.items()), number
        with torch.no_grad():
            for name, tensor in state.items():
                tensor.copy_(expected[f"model.{name}"])


@given(st.lists(st.integers(0, 48 << 20), max_size=300))
def test_pinned_slabs_hold_all_objects_in_order(sizes: list[int]) -> None:
    slabs = slabs_of(sizes)
    assert list(itertools.chain(*slabs)) == sizes and all(slabs)
    taken = sum(1 << max(0, sum(slab) - 1).bit_length() for slab in slabs)
    assert taken <= 2 * sum(sizes) + len(slabs)  # an empty slab counts one byte here
    assert all(len(slab) == 1 or sum(slab) <= SLAB_BYTES for slab in slabs)


@pytest.mark.parametrize(("share_mib", "most"), [(90, 1.5), (300, 1.4), (1000, 1.2), (4000, 1.12)])
def test_pinned_slabs_waste_little_memory(share_mib: int, most: float) -> None:
    draw = random.Random(share_mib)
    sizes: list[int] = []
    while sum(sizes) < share_mib << 20:
        sizes.append(draw.randrange(32 << 20, 48 << 20))
    taken = sum(1 << (sum(slab) - 1).bit_length() for slab in slabs_of(sizes))
    assert taken <= most * sum(sizes)


def test_a_share_staged_in_pinned_memory_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a GPU, with memory that is not pinned."""
    taken: list[int] = []
    zeros = torch.zeros

    def not_pinned(size: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        taken.append(size)
        return zeros(size, dtype=dtype)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.zeros", not_pinned)
    monkeypatch.setattr(writer, "SLAB_BYTES", 2000)
    tensors = some_tensors()
    parts = write(Storage(tmp_path), tensors, object_bytes=500, block_bytes=128)
    assert len(parts[0].objects) > len(taken) > 1 and sum(taken) == sum(item.size for item in parts[0].objects)
    restored = read(Storage(tmp_path), commit_of(parts, tensors))
    assert all(same(restored[name], tensor) for name, tensor in tensors.items())


def test_a_writer_does_not_keep_the_state_alive() -> None:
    """The state may be replaced before the next commit, and there may be no memory for both."""
    weight, writer = torch.nn.Parameter(torch.ones(5)), StateWriter()
    memory = StorageWeakRef(weight.untyped_storage())
    for world_size in (1, 2, 2):
        writer.prepare({"model": {"weight": weight}})
        writer.stage({"model": {"weight": weight}}, rank=0, world_size=world_size)
    del weight
    assert memory.expired()


@pytest.mark.parametrize("dtype", [torch.uint4, torch.bits8], ids=str)
def test_an_unsupported_dtype_is_refused_before_training(dtype: torch.dtype) -> None:
    state = {"model": {"weight": torch.ones(2), "codes": torch.empty(4, dtype=dtype)}}
    with pytest.raises(CheckpointError, match=r"codes"):
        StateWriter().prepare(state)


def test_an_integer_too_large_to_print_is_refused_before_training() -> None:
    with pytest.raises(CheckpointError, match="cannot be written as JSON"):
        StateWriter().prepare({"user": {"count": 10**5000}})


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_state_of_too_many_blocks_is_refused_before_training(
    monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    state = {"model": {**some_tensors(), "large": torch.zeros(5 << 20)}}
    num_blocks = len(some_tensors()) + 2
    monkeypatch.setattr(writer, "MAX_BLOCKS", num_blocks)
    StateWriter().prepare(state)
    monkeypatch.setattr(writer, "MAX_BLOCKS", num_blocks - 1)
    for refuse in (
        lambda: StateWriter().prepare(state),
        lambda: StateWriter().stage(state, rank=world_size - 1, world_size=world_size),
    ):
        with pytest.raises(CheckpointError, match=rf"{num_blocks} blocks .* {num_blocks - 1}"):
            refuse()


def test_padding_is_zero_in_reused_memory(tmp_path: Path) -> None:
    """The second layout reuses the memory of the first, as their objects are of equal size."""
    storage, writer = Storage(tmp_path), BlockWriter()
    for number, (ones, others) in enumerate([(16, 16), (3, 5)]):
        tensors = {"a": torch.full((ones,), 1.5), "b": torch.full((others,), 2.5)}
        writer.stage(plan_blocks(tensors), tensors)
        [item] = writer.write(storage, f"{number}", "0").objects
    values = np.frombuffer(storage.read(item.key), np.float32).tolist()
    assert values == [1.5] * 3 + [0.0] * 13 + [2.5] * 5 + [0.0] * 11


def test_parts_with_missing_or_repeated_blocks_are_not_assembled(tmp_path: Path) -> None:
    tensors = some_tensors()
    parts = write(Storage(tmp_path), tensors, 3)
    kinds = kinds_in(parts)
    for missing in range(3):
        with pytest.raises(CheckpointError, match=r"missing|exactly once"):
            assemble(parts[:missing] + parts[missing + 1 :], kinds)
    with pytest.raises(CheckpointError, match=r"missing|exactly once"):
        assemble([*parts, parts[0]], kinds)
    with pytest.raises(CheckpointError, match="another"):
        assemble(parts, {**kinds, "another": ("float32", (1,))})
