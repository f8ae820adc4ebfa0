"""States cut into blocks, written by any number of ranks, and read by any other number."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
import random
import tracemalloc
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zlib_ng import zlib_ng

from elastic_ddp import host_memory
from elastic_ddp.checkpoint import Commit, reading, writing
from elastic_ddp.checkpoint.manifest import Skeleton, StoredBlock, StoredObject, StoredTensor, num_values
from elastic_ddp.checkpoint.planning import BLOCK_BYTES, BlockPlanner, blocks_of, share_of
from elastic_ddp.checkpoint.reading import Piece, Targets, pieces_of, read_pieces, state_to_fill
from elastic_ddp.checkpoint.writing import (
    OBJECT_BYTES,
    SLAB_BYTES,
    BlockWriter,
    Part,
    StateWriter,
    in_slabs,
    put_together,
)
from elastic_ddp.errors import CheckpointError
from elastic_ddp.state import flatten, unflatten
from elastic_ddp.storage import Storage
from tests.unit.forging import kinds_in
from tests.whole import WholeStore

ATTEMPT = "0" * 32
PREFIX = f"step=7/attempt={ATTEMPT}"
SHAPES = st.lists(st.integers(0, 9), max_size=4).map(torch.Size)


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(37, 5, generator=generator)
    return {
        "weight": weight,
        "bf16": weight.to(torch.bfloat16),
        "fp16": weight.to(torch.float16),
        "float8": weight.to(torch.float8_e4m3fn),
        "int64": torch.arange(1000),
        "bool": weight > 0,
        "complex": torch.complex(weight, weight),
        "scalar": torch.tensor(3.25, dtype=torch.float64),
        "one": torch.ones(1, 1, 7),
        "nothing": torch.empty(0, 4),
        "transposed": weight.t(),
        "strided": torch.arange(30)[::3],
    }


def write(
    storage: Storage,
    tensors: dict[str, torch.Tensor],
    world_size: int = 1,
    *,
    block_bytes: int = 64,
    object_bytes: int = 200,
) -> list[Part]:
    """What each of some ranks, all of which hold all of it, writes."""
    planner = BlockPlanner(block_bytes)
    planner.set_up_planner(tensors)
    parts = []
    for rank in range(world_size):
        share = share_of(planner, rank=rank, world_size=world_size, is_for_rank_0=lambda name: False)
        writer = BlockWriter(object_bytes=object_bytes)
        writer.stage(share, planner)
        parts.append(writer.write(storage, PREFIX, str(rank)))
    return parts


def commit_of(parts: list[Part], names: Any) -> Commit:
    kinds = kinds_in(parts)
    assert kinds.keys() == set(names)
    objects, tensors = put_together(parts, kinds)
    state = Skeleton(key=f"{PREFIX}/state.json", size=0, crc32=0)
    return Commit(step=7, attempt=ATTEMPT, state=state, objects=objects, tensors=tensors, record={})


def read(storage: Storage, commit: Commit) -> dict[str, torch.Tensor]:
    found, targets = state_to_fill(commit)
    for _ in read_pieces(storage, pieces_of(commit, found), targets):
        pass
    return found


@contextmanager
def in_slabs_from(small_bytes: int) -> Iterator[None]:
    """Tensors of so many bytes lie together, others have memory of their own and a gap, whatever their size."""
    with (
        patch.object(host_memory, "LARGE_BYTES", 1),
        patch.object(host_memory, "SMALL_BYTES", small_bytes),
        patch.object(host_memory, "MOST_GAPS", 1),
    ):
        yield


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the bit."""
    raw = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*raw)


@given(SHAPES, st.sampled_from([1, 2, 8]), st.integers(1, 300))
def test_blocks_make_up_the_tensor_and_are_contiguous_and_small_but_for_single_elements(
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
    stored = [{"offsets": [*at], "sizes": [*sizes], "object": 0, "start": 0, "crc32": 0} for at, sizes in blocks]
    StoredTensor.model_validate_json(json.dumps({"dtype": "int8", "shape": [*shape], "blocks": stored}))


@pytest.mark.parametrize(
    ("shape", "element_bytes", "count"),
    [((2, 64 << 20), 4, 32), ((8, 4096, 14336), 2, 64), ((1, 1, 64 << 20), 4, 16), ((70_000, 1024), 4, 18)],
    ids=str,
)
def test_large_rows_are_cut_too(shape: tuple[int, ...], element_bytes: int, count: int) -> None:
    sizes = [math.prod(each) * element_bytes for _, each in blocks_of(torch.Size(shape), element_bytes, BLOCK_BYTES)]
    assert len(sizes) == count and max(sizes) <= BLOCK_BYTES


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_what_any_number_of_ranks_wrote_comes_back_to_the_bit(tmp_path: Path, world_size: int) -> None:
    storage, tensors = Storage(tmp_path), some_tensors()
    parts = write(storage, tensors, world_size)
    commit = commit_of(parts, tensors)
    found = read(storage, commit)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same(found[name], tensor), name
    assert sum(storage.sizes().values()) == sum(item.size for item in commit.objects)


def test_ranks_share_what_they_all_hold(tmp_path: Path) -> None:
    tensors = {"large": torch.zeros(4000, 4), "small": torch.zeros(10)}
    wide = {"wide": torch.zeros(2, 8000)}
    mixed = {"cut": torch.zeros(3 * 256), **{str(number): torch.zeros(64) for number in range(10)}}
    for each in (tensors, wide, mixed):
        parts = write(Storage(tmp_path), each, 4, block_bytes=1024)
        written = [sum(item.size for item in part.objects) for part in parts]
        assert max(written) - min(written) <= 1024 + 64


def test_objects_are_of_a_sensible_size(tmp_path: Path) -> None:
    [part] = write(Storage(tmp_path), {"large": torch.zeros(4000, 4)}, block_bytes=1024, object_bytes=10_000)
    assert len(part.objects) == 7 and {item.size for item in part.objects[:-1]} == {10_240}


def test_host_memory_is_used_again_and_the_state_may_change_after_the_copy(tmp_path: Path) -> None:
    storage, weight = Storage(tmp_path), torch.arange(100.0)
    writer, planner = BlockWriter(), BlockPlanner()
    memory = set()
    for number in range(3):
        weight += number
        planner.set_up_planner({"weight": weight})
        share = share_of(planner, rank=0, world_size=1, is_for_rank_0=lambda name: False)
        writer.stage(share, planner)
        expected = weight.clone()
        weight.zero_()
        part = writer.write(storage, PREFIX, str(number))
        assert same(read(storage, commit_of([part], ["weight"]))["weight"], expected)
        weight.copy_(expected)
        memory |= {buffer.data_ptr() for buffer in writer._buffers}
    assert len(memory) == 1


class Allocated(TorchDispatchMode):
    """Counts the bytes of memory that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes, self._before = 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {each.untyped_storage().data_ptr() for each in tree_leaves(args) if isinstance(each, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and (memory := each.untyped_storage()).data_ptr() not in known:
                self.num_bytes += memory.nbytes()
        return result


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_save_copies_no_more_than_the_share_of_its_rank_however_tensors_lie_in_memory(
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
        share, sample = 2 * 16 * 8 * 4 * 4 * 4, 8 * 16 * 8 * 4 * 4 * 4  # of so small a state, all
        assert (first.num_bytes, second.num_bytes) == (share + sample, 0)
        parts.append(writer.write(storage, PREFIX))
    names = [f"model.{name}" for name in weights]
    found = read(storage, commit_of(parts, names))
    assert all(torch.equal(found[f"model.{name}"], weight) for name, weight in weights.items())
    on_disk = np.concatenate([np.fromfile(tmp_path / key, np.float32) for part in parts for key in keys_in(part)])
    expected = np.concatenate([weights[str(k)].numpy().reshape(-1) for rank in range(4) for k in (rank, rank + 4)])
    assert np.array_equal(on_disk, expected), "row-major"


def test_arrays_are_copied_once_as_tensors_are() -> None:
    array = np.arange(1 << 20, dtype=np.float32)
    frozen = np.arange(3)
    frozen.flags.writeable = False
    tree = {"array": array, "turned": array.reshape(4, -1).T, "frozen": frozen, "at": np.array("2026-01-01", "M8[D]")}
    skeleton, tensors = flatten(tree)
    assert tensors["array"].data_ptr() == array.ctypes.data and tensors["array"].dtype == torch.uint8
    found = unflatten(skeleton, tensors)
    assert all(np.array_equal(found[name], tree[name]) and found[name].dtype == tree[name].dtype for name in tree)


def keys_in(part: Part) -> list[str]:
    return [item.key for item in part.objects]


def test_what_changed_since_the_commit_before_is_noticed(tmp_path: Path) -> None:
    """As where tensors lie, what they are and which there are."""
    generator, writer = torch.Generator().manual_seed(1), StateWriter()

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    kept, memory = some(4, 6), some(40, 5)
    states = [
        {"kept": kept, "other": some(5)},
        {"kept": kept, "other": some(5)},  # at another place
        {"kept": kept.add_(1), "other": some(5)},
        {"kept": kept, "other": some(5).double()},
        {"kept": kept, "other": some(5, 1).double()},
        {"kept": kept.t(), "other": some(5, 1).double()},
        {"kept": some(4, 6).t(), "other": some(5, 1).double()},  # as large, and laid out in another way
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
                tensor.zero_()  # the next step
        part = writer.write(Storage(tmp_path / str(number)), PREFIX)
        found = read(Storage(tmp_path / str(number)), commit_of([part], expected))
        assert all(same(found[name], tensor) for name, tensor in expected.items()), number
        with torch.no_grad():
            for name, tensor in state.items():
                tensor.copy_(expected[f"model.{name}"])


@given(st.lists(st.integers(0, 48 << 20), max_size=300))
def test_objects_are_put_into_pieces_of_pinned_memory_in_their_order(sizes: list[int]) -> None:
    slabs = in_slabs(sizes)
    assert list(itertools.chain(*slabs)) == sizes and all(slabs)
    taken = sum(1 << max(0, sum(each) - 1).bit_length() for each in slabs)
    assert taken <= 2 * sum(sizes) + len(slabs)  # an empty one takes a byte here
    assert all(len(each) == 1 or sum(each) <= SLAB_BYTES for each in slabs)


@pytest.mark.parametrize(("share_mib", "most"), [(90, 1.5), (300, 1.4), (1000, 1.2), (4000, 1.12)])
def test_shares_of_usual_objects_take_little_more_than_themselves(share_mib: int, most: float) -> None:
    draw = random.Random(share_mib)
    sizes: list[int] = []
    while sum(sizes) < share_mib << 20:
        sizes.append(draw.randrange(32 << 20, 48 << 20))
    taken = sum(1 << (sum(each) - 1).bit_length() for each in in_slabs(sizes))
    assert taken <= most * sum(sizes)


def test_what_was_staged_in_pinned_memory_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a GPU, but that the memory is not pinned here."""
    taken: list[int] = []
    zeros = torch.zeros

    def not_pinned(size: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        taken.append(size)
        return zeros(size, dtype=dtype)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.zeros", not_pinned)
    tensors = some_tensors()
    parts = write(Storage(tmp_path), tensors, object_bytes=500, block_bytes=128)
    assert len(parts[0].objects) > len(taken) > 1 and sum(taken) == sum(each.size for each in parts[0].objects)
    found = read(Storage(tmp_path), commit_of(parts, tensors))
    assert all(same(found[name], tensor) for name, tensor in tensors.items())


def test_a_writer_keeps_nothing_of_a_state() -> None:
    """It may be one that is replaced before the next commit, and there is no memory for two."""
    weight, writer = torch.nn.Parameter(torch.ones(5)), StateWriter()
    memory = StorageWeakRef(weight.untyped_storage())
    for world_size in (1, 2, 2):
        writer.prepare({"model": {"weight": weight}})
        writer.stage({"model": {"weight": weight}}, rank=0, world_size=world_size)
    del weight
    assert memory.expired()


@pytest.mark.parametrize("dtype", [torch.uint4, torch.bits8], ids=str)
def test_a_dtype_that_is_not_kept_is_refused_before_training(dtype: torch.dtype) -> None:
    state = {"model": {"weight": torch.ones(2), "codes": torch.empty(4, dtype=dtype)}}
    with pytest.raises(CheckpointError, match=r"codes"):
        StateWriter().prepare(state)


def test_an_integer_that_python_does_not_write_is_refused_before_training() -> None:
    with pytest.raises(CheckpointError, match=r"without its tensors the state cannot be made JSON"):
        StateWriter().prepare({"user": {"count": 10**5000}})


def test_planning_is_done_before_the_first_commit_as_far_as_ranks_have_no_part_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned: list[str] = []
    items = BlockPlanner._items

    def counted(planner: BlockPlanner, name: str, tensor: torch.Tensor) -> Any:
        planned.append(name)
        return items(planner, name, tensor)

    monkeypatch.setattr(BlockPlanner, "_items", counted)
    writer, model = StateWriter(), {"a": torch.ones(3), "b": torch.ones(4)}
    writer.prepare({"model": model})
    assert planned == ["model.a", "model.b"]
    for rank, world_size in [(0, 1), (1, 2), (2, 3)]:  # in one generation after the other
        writer.stage({"model": model, "optimizer": {"a": torch.ones(3)}}, rank=rank, world_size=world_size)
    assert planned == ["model.a", "model.b", "optimizer.a"]


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_state_whose_manifest_would_be_too_large_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    state = {"model": {**some_tensors(), "a,[{name": torch.ones(3), "large": torch.zeros(5 << 20)}}
    commit = WholeStore(Storage(tmp_path / "one"), keep=1).save(state, step=7, record={})
    empty = WholeStore(Storage(tmp_path / "none"), keep=1).save({"model": {}}, step=7, record={})
    count, nothing = (num_values(each.to_bytes()) for each in (commit, empty))
    of_objects = len(commit.objects) * 3
    blocks = sum(len(each.blocks) for each in commit.tensors.values())
    assert blocks == len(commit.tensors) + 1
    monkeypatch.setattr(writing, "MAX_MANIFEST_VALUES", count - nothing)
    StateWriter().stage(state, rank=0, world_size=world_size)
    monkeypatch.setattr(writing, "MAX_MANIFEST_VALUES", count - nothing - of_objects)  # these are not known beforehand
    for refuse in (
        lambda: StateWriter().prepare(state),
        lambda: StateWriter().stage(state, rank=world_size - 1, world_size=world_size),
    ):
        with pytest.raises(
            CheckpointError,
            match=rf"14 tensors in {blocks} blocks .*have at most \d+ and {count - nothing - of_objects}",
        ):
            refuse()
    monkeypatch.undo()
    monkeypatch.setattr(writing, "MAX_MANIFEST_BYTES", 1000)
    with pytest.raises(CheckpointError, match="it may have at most 1000 and 4194304"):
        StateWriter().prepare(state)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 4), st.tuples(st.integers(1, 9), st.integers(1, 6), st.integers(1, 6)), st.data()
)
def test_any_part_of_a_tensor_can_be_read_whoever_wrote_it(
    tmp_path_factory: pytest.TempPathFactory,
    writers: int,
    readers: int,
    shape: tuple[int, int, int],
    data: st.DataObject,
) -> None:
    storage = Storage(tmp_path_factory.mktemp("any"))
    whole = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    commit = commit_of(write(storage, {"w": whole}, writers, block_bytes=data.draw(st.integers(8, 200))), ["w"])
    axis, first = data.draw(st.sampled_from([0, 1, 2])), 0
    for part in whole.tensor_split(readers, axis):
        place = torch.Size([first if dimension == axis else 0 for dimension in range(3)])
        first += part.shape[axis]
        if not part.numel():
            continue
        with in_slabs_from(data.draw(st.sampled_from([1, 10_000]))):
            memory = host_memory.Memory([{"w": (part.shape, part.dtype)}])
        target = memory.tensors["w"].fill_(-1.0)
        targets = Targets({"w": (commit.tensors["w"], place)}, memory)
        for _ in read_pieces(storage, pieces_of(commit, ["w"]), targets):
            pass
        assert torch.equal(target, part)


SIZES = st.integers(0, 200).map(lambda length: torch.Size([length]))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([torch.uint8, torch.float32, torch.float64]), SIZES | SHAPES), min_size=2, max_size=6
    ),
    st.integers(1, 3),
    st.integers(1, 100) | st.just(1 << 20),
    st.sampled_from([1, 200, 2000]),
    st.sampled_from([1, 50, 10_000]),
    st.booleans(),
    st.integers(0, 2**32),
)
@example([(torch.uint8, torch.Size([111])), (torch.uint8, torch.Size([13]))], 3, 40, 2000, 1, False, 0)
@example([(torch.uint8, torch.Size([4])), (torch.uint8, torch.Size([1]))], 1, 1, 1, 1, False, 0)
def test_a_state_comes_back_to_the_bit_whether_pieces_fit_its_tensors_or_not(
    kinds: list[tuple[torch.dtype, torch.Size]],
    writers: int,
    block_bytes: int,
    object_bytes: int,
    small_bytes: int,
    apart: bool,
    seed: int,
) -> None:
    """Pieces are read one by one, so that whatever one of them overwrites is not written again."""
    storage = Storage(f"memory://{uuid.uuid4().hex}")
    generator = torch.Generator().manual_seed(1)
    tensors = {
        f"{number}": torch.randint(1, 100, shape, generator=generator).to(dtype)
        for number, (dtype, shape) in enumerate(kinds)
    }
    parts = write(storage, tensors, writers, block_bytes=block_bytes, object_bytes=object_bytes)
    commit = commit_of(parts, tensors)
    with in_slabs_from(small_bytes), patch.object(reading, "LARGE_BYTES", 1 if apart else reading.LARGE_BYTES):
        found, targets = state_to_fill(commit)
        pieces = pieces_of(commit, found)
    order = random.Random(seed).sample(pieces, len(pieces)) if seed else pieces
    for piece in order:
        for _ in read_pieces(storage, [piece], targets):
            pass
    for name, tensor in tensors.items():
        assert same(found[name], tensor), name


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_large_tensor_whose_blocks_need_padding_leaves_the_next_one_alone(tmp_path: Path, world_size: int) -> None:
    storage = Storage(tmp_path)
    tensors = {"head.weight": torch.randn(100, 50257), "head.bias": torch.randn(20_000)}
    parts = write(storage, tensors, world_size, block_bytes=BLOCK_BYTES, object_bytes=OBJECT_BYTES)
    commit = commit_of(parts, tensors)
    assert len(commit.tensors["head.weight"].blocks) == 2
    for _ in range(4):  # several are read at a time
        found = read(storage, commit)
        assert all(same(found[name], tensor) for name, tensor in tensors.items())


def test_padding_is_zeros_whatever_was_saved_before(tmp_path: Path) -> None:
    """In another layout, in memory that was kept as its objects are as large."""
    storage, writer = Storage(tmp_path), BlockWriter()
    for number, (ones, others) in enumerate([(16, 16), (3, 5)]):
        planner = BlockPlanner()
        planner.set_up_planner({"a": torch.full((ones,), 1.5), "b": torch.full((others,), 2.5)})
        writer.stage(planner.create_local_plan(), planner)
        [item] = writer.write(storage, f"{number}", "0").objects
    found = np.frombuffer(storage.read(item.key), np.float32).tolist()
    assert found == [1.5] * 3 + [0.0] * 13 + [2.5] * 5 + [0.0] * 11


def some_layers(width: int) -> dict[str, torch.Tensor]:
    return {
        f"optimizer.{number}.{name}": tensor
        for number in range(20)
        for name, tensor in {"step": torch.tensor(1.0), "odd": torch.ones(7), "w": torch.rand(width, 10)}.items()
    }


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("small_bytes", [1, 100])
def test_neighbours_are_read_into_their_tensors_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, small_bytes: int
) -> None:
    tensors, storage = some_layers(40), Storage(tmp_path)
    parts = write(storage, tensors, world_size, block_bytes=BLOCK_BYTES, object_bytes=8000)
    commit = commit_of(parts, tensors)
    with in_slabs_from(small_bytes):
        found, targets = state_to_fill(commit)
    monkeypatch.setattr(Piece, "empty", lambda piece: pytest.fail(f"{piece} is copied"))
    pieces = pieces_of(commit, found)
    assert len(pieces) == len(commit.objects) < len(tensors) / 5
    for _ in read_pieces(storage, pieces, targets):
        pass
    assert all(same(found[name], tensor) for name, tensor in tensors.items())


def test_that_is_so_by_default_where_tensors_are_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, storage = some_layers(20_000), Storage(tmp_path)
    commit = commit_of(write(storage, tensors, block_bytes=BLOCK_BYTES, object_bytes=OBJECT_BYTES), tensors)
    monkeypatch.setattr(Piece, "empty", lambda piece: pytest.fail(f"{piece} is copied"))
    found = read(storage, commit)
    assert all(same(found[name], tensor) for name, tensor in tensors.items())


def test_a_block_that_is_wanted_in_part_leaves_the_next_tensor_alone(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    tensors = {"w": torch.arange(80.0).reshape(10, 8), "v": torch.arange(200.0)}
    commit = commit_of(write(storage, tensors, block_bytes=BLOCK_BYTES, object_bytes=OBJECT_BYTES), tensors)
    with in_slabs_from(1), patch.object(reading, "LARGE_BYTES", 1):
        memory = host_memory.Memory([{"w": ([5, 8], torch.float32), "v": ([200], torch.float32)}])
        pieces = pieces_of(commit, tensors)
    origins = {"w": torch.Size([0, 0]), "v": torch.Size([0])}
    targets = Targets({name: (commit.tensors[name], origin) for name, origin in origins.items()}, memory)
    assert [piece.blocks[0][0] for piece in pieces] == ["w", "v"]
    for piece in reversed(pieces):
        for _ in read_pieces(storage, [piece], targets):
            pass
    assert same(memory.tensors["w"], tensors["w"][:5]) and same(memory.tensors["v"], tensors["v"])


def test_shards_that_are_no_ranges_of_the_whole_come_to_their_places(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    whole = torch.arange(32.0, dtype=torch.float64).reshape(4, 8)
    shards = [whole[:, :4].contiguous(), whole[:, 4:].contiguous()]
    data = [bytes(shard.view(torch.uint8).numpy().data) for shard in shards]
    blocks = tuple(
        StoredBlock(offsets=(0, 4 * number), sizes=(4, 4), object=0, start=128 * number, crc32=zlib_ng.crc32(each))
        for number, each in enumerate(data)
    )
    key = f"{PREFIX}/0-0.bin"
    storage.write(key, b"".join(data))
    commit = Commit(
        step=7,
        attempt=ATTEMPT,
        state=Skeleton(key=f"{PREFIX}/state.json", size=0, crc32=0),
        objects=(StoredObject(key=key, size=256),),
        tensors={"w": StoredTensor(dtype="float64", shape=(4, 8), blocks=blocks)},
        record={},
    )
    for large_bytes in (1, 1 << 20):
        with in_slabs_from(1), patch.object(reading, "LARGE_BYTES", large_bytes):
            assert same(read(storage, commit)["w"], whole)


def test_what_is_kept_of_a_component_keeps_nothing_of_another_and_counts_of_steps_keep_nothing(tmp_path: Path) -> None:
    tensors = {
        f"{component}.{name}": tensor
        for component in ("model", "optimizer")
        for name, tensor in {"w": torch.rand(2000, 1000), "step": torch.tensor(1.0)}.items()
    }
    commit = commit_of(write(Storage(tmp_path), tensors, object_bytes=OBJECT_BYTES, block_bytes=BLOCK_BYTES), tensors)
    found, targets = state_to_fill(commit)
    slabs = [weakref.ref(each.base) for each in targets._memory._slabs]
    del targets
    assert len(slabs) == 2 and all(each() is not None for each in slabs)
    kept = found.pop("model.w")
    steps = [found.pop("model.step"), found.pop("optimizer.step")]
    del found
    assert sum(each() is not None for each in slabs) == 1
    del kept
    assert sum(each() is not None for each in slabs) == 0 and len(steps) == 2


def test_a_commit_is_not_made_where_something_of_it_was_not_written(tmp_path: Path) -> None:
    tensors = some_tensors()
    parts = write(Storage(tmp_path), tensors, 3)
    kinds = kinds_in(parts)
    for missing in range(3):
        with pytest.raises(CheckpointError, match="not all that belongs to the state was written"):
            put_together(parts[:missing] + parts[missing + 1 :], kinds)
    with pytest.raises(CheckpointError, match="not all that belongs to the state was written"):
        put_together([*parts, parts[0]], kinds)
    with pytest.raises(CheckpointError, match=r"not all that belongs to the state was written: \['another'\]"):
        put_together(parts, {**kinds, "another": ("float32", (1,))})


def test_every_flipped_bit_of_every_object_is_noticed_and_where_is_said(tmp_path: Path) -> None:
    storage, tensors = Storage(tmp_path), some_tensors()
    commit = commit_of(write(storage, tensors, 2), tensors)
    for item in commit.objects:
        pieces = [piece for piece in pieces_of(commit, tensors) if piece.key == item.key]
        file = tmp_path / item.key
        good = file.read_bytes()
        for position in range(0, item.size, 11):
            bad = bytearray(good)
            bad[position] ^= 1 << position % 8
            file.write_bytes(bad)
            with pytest.raises(CheckpointError, match=f"{item.key} does not have the checksum .* in bytes"):
                list(read_pieces(storage, pieces))
        file.write_bytes(good[:-1])
        with pytest.raises(CheckpointError, match=f"{item.key} ends before byte"):
            list(read_pieces(storage, pieces))
        file.unlink()
        with pytest.raises(CheckpointError, match=f"{item.key} is missing"):
            list(read_pieces(storage, pieces))
        file.write_bytes(good)
    read(storage, commit)


def _body(tmp_path: Path) -> dict[str, Any]:
    tensors = {"w": torch.zeros(6, 4), "b": torch.zeros(3)}
    commit = commit_of(write(Storage(tmp_path), tensors, object_bytes=10_000, block_bytes=32), tensors)
    body: dict[str, Any] = json.loads(commit.to_bytes())
    del body["sha256"]
    return body


def _signed(body: Any) -> bytes:
    """With a right checksum, as whoever forges a manifest would write it."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps({**body, "sha256": hashlib.sha256(canonical.encode()).hexdigest()}).encode()


def _edited(body: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    edited = copy.deepcopy(body)
    *way, last = [int(part) if part.isdecimal() else part for part in path.split("/")]
    place: Any = edited
    for part in way:
        place = place[part]
    place[last] = value
    return edited


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("tensors/w/shape", [6, 5], "do not make it up"),
        ("tensors/w/shape", [2**40, 4], "do not make it up"),
        ("tensors/w/shape", [2**60, 4], "less than or equal"),
        ("tensors/w/shape", [4, 4], "outside of a tensor"),
        ("tensors/w/shape", [24], "another number of dimensions"),
        ("tensors/w/shape", [6, -4], "greater than or equal"),
        ("tensors/w/shape", [1] * 65, "at most 64"),
        ("tensors/w/dtype", "complex128", "follow each other"),
        ("tensors/w/dtype", "load", "not a dtype"),
        ("tensors/w/dtype", "qint8", "not a dtype"),
        ("tensors/w/dtype", "float31", "not a dtype"),
        ("tensors/w/blocks", [], "at least 1"),
        ("tensors/w/blocks/0/offsets", [2, 0], "do not make it up"),
        ("tensors/w/blocks/0/offsets", [5, 0], "outside of a tensor"),
        ("tensors/w/blocks/0/sizes", [1, 4], "do not make it up"),
        ("tensors/w/blocks/0/start", 16, "follow each other"),
        ("tensors/w/blocks/0/start", 2**47, "follow each other"),
        ("tensors/w/blocks/0/object", 1, "no object 1"),
        ("tensors/w/blocks/0/object", -1, "greater than or equal"),
        ("tensors/w/blocks/0/crc32", 2**32, "less than"),
        ("objects/0/size", 2**47, "have 256 bytes and it has"),
        ("objects/0/key", "../../etc/passwd", "is not in"),
        ("objects/0/key", f"{PREFIX}/state.json", "listed twice"),
        ("state/key", f"{PREFIX}/../x", "is not in"),
        ("tensors/w/surprise", 1, "not permitted"),
    ],
)
def test_a_forged_manifest_is_refused(tmp_path: Path, path: str, value: Any, message: str) -> None:
    body = _body(tmp_path)
    assert Commit.from_bytes("commits/7.json", _signed(body)).step == 7
    with pytest.raises(CheckpointError, match=rf"commits/7\.json is not the manifest of a commit: .*{message}"):
        Commit.from_bytes("commits/7.json", _signed(_edited(body, path, value)))


def test_overlapping_blocks_of_the_right_volume_are_refused() -> None:
    def block(offsets: list[int], start: int) -> dict[str, Any]:
        return {"offsets": offsets, "sizes": [2, 2], "object": 0, "start": start, "crc32": 0}

    good = [block([a, b], 0) for a in (0, 2) for b in (0, 2)]
    assert StoredTensor.model_validate_json(json.dumps({"dtype": "int8", "shape": [4, 4], "blocks": good}))
    bad = [block([0, 0], 0), block([1, 1], 0), block([2, 2], 0), block([2, 0], 0)]
    with pytest.raises(ValueError, match="do not make it up"):
        StoredTensor.model_validate_json(json.dumps({"dtype": "int8", "shape": [4, 4], "blocks": bad}))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_whatever_a_manifest_says_it_is_read_or_refused_and_allocates_little(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A value anywhere in it is replaced, and it is signed again."""
    body = _BODY or _BODY.update(_body(tmp_path_factory.mktemp("fuzz"))) or _BODY
    path = data.draw(st.sampled_from(_paths(body)))
    value = data.draw(JSON | st.sampled_from([0, 1, 2**31, 2**47, 2**63, [], {}, "float64", [2**40] * 8]))
    tracemalloc.start()
    try:
        Commit.from_bytes("commits/7.json", _signed(_edited(body, path, value)))
    except CheckpointError as error:
        assert "commits/7.json" in str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 20 << 20


_BODY: dict[str, Any] = {}


def _paths(value: Any, before: str = "") -> list[str]:
    if not isinstance(value, dict | list):
        return [before]
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    below = [path for key, each in inner for path in _paths(each, f"{before}/{key}" if before else str(key))]
    return [*([before] if before else []), *below]


def test_a_deep_manifest_is_refused() -> None:
    deep = b'{"format": 3, "record": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(CheckpointError, match="is not the manifest of a commit"):
        Commit.from_bytes("commits/7.json", deep)


def test_an_object_swapped_with_that_of_another_step_is_noticed(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    store = WholeStore(storage, keep=2)
    commits = [store.save({"model": {"w": torch.full((4, 4), float(n))}}, step=n, record={}) for n in (1, 2)]
    one, two = (each.objects[0].key for each in commits)
    first, second = storage.read(one), storage.read(two)
    storage.write(one, second)
    storage.write(two, first)
    with pytest.raises(CheckpointError, match=two):
        store.verify(commits[1])
    assert store.load_latest() is None and len(store.rejected) == 2
