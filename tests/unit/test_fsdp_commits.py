"""Commits of sharded and of replicated state, restored at every world size and from one to the other, to the bit."""

from __future__ import annotations

import copy
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from elastic_ddp.checkpoint import CheckpointStore
from elastic_ddp.checkpoint.manifest import ALIGNMENT, attempt_prefix
from elastic_ddp.checkpoint.parts import Part
from elastic_ddp.checkpoint.pieces import MAX_PIECE_BYTES
from elastic_ddp.checkpoint.planning import BlockPlanner
from elastic_ddp.checkpoint.writer import StateWriter
from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import ConfigError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.tensors.state_tree import flatten, gather_full
from elastic_ddp.worker import shared_read
from elastic_ddp.worker.generation import strategy_of
from elastic_ddp.worker.restore import restore
from elastic_ddp.worker.shared_read import SharedPiece, plan_pieces
from elastic_ddp.worker.train_state import Position, TrainState
from tests.ranks import run_ranks
from tests.unit.test_fsdp import OPTIMIZERS, full_state, prepared, trained

STRATEGIES = ("ddp", "fsdp")
WORLD_SIZES = (1, 2, 3, 4)
ROWS = np.array([3, 3, 3, 3])
Tensors = dict[str, np.ndarray]
Everything = tuple[str, Tensors]
"""Of a state: its skeleton, and the bytes of its tensors."""


def save(group: ProcessGroup, folder: Path, state: dict[str, Any]) -> None:
    """As `Saver` does, without its threads."""
    storage, attempt, step = Storage(folder), "a" * 32, state["position"]["step"]
    writer = StateWriter()
    writer.stage(state, rank=group.rank, world_size=group.world_size)
    part = writer.write(storage, attempt_prefix(step, attempt))
    parts = [Part.model_validate_json(each) for each in group.all_gather_bytes(part.model_dump_json().encode())]
    if group.rank == 0:
        store = CheckpointStore(storage, keep=1)
        store.complete(step=step, attempt=attempt, parts=parts, kinds=writer.kinds, record={}, fence=lambda: None)
    group.barrier()


class Kept:
    """What a user may keep beside the model."""

    def __init__(self, kept: dict[str, Any] | None = None) -> None:
        self.kept = kept or {}

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state


def _tensors_of_all_kinds() -> dict[str, torch.Tensor]:
    """Each of which FSDP takes as a buffer, and a user may keep."""
    dtypes = (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool)
    kinds = {f"of_{dtype}".replace(".", "_"): torch.randn(3, 2).mul(9).to(dtype) for dtype in dtypes}
    return {**kinds, "number": torch.randn(()), "turned": torch.randn(4, 3).t(), "nothing": torch.empty(0, 3)}


def _prepared(strategy: str, optimizer: str) -> tuple[RunConfig, TrainState]:
    config, state = prepared(strategy, optimizer)
    for name, each in _tensors_of_all_kinds().items():
        state.module.register_buffer(name, each)
        state.module.register_buffer(f"passing_{name}", each.clone(), persistent=False)
    return config, state


def everything(state: TrainState) -> Everything:
    skeleton, tensors = flatten(_in_full(state.state_dict()))
    return json.dumps(skeleton), {
        name: each.contiguous().view(-1).view(torch.uint8).numpy() for name, each in tensors.items()
    }


def _in_full(tree: Any) -> Any:
    """With every tensor whole, and by itself: also those that are tied."""
    if isinstance(tree, list):
        return [_in_full(each) for each in tree]
    if isinstance(tree, dict):
        whole_ones = copy.copy(tree)  # also what belongs to a state_dict as such
        for name, each in tree.items():
            whole_ones[name] = _in_full(each)
        return whole_ones
    return gather_full(tree).clone() if isinstance(tree, torch.Tensor) else tree


def _save_all(group: ProcessGroup, folder: Path) -> dict[tuple[str, str], Everything]:
    """Trains and saves, with every strategy and optimizer. What was saved."""
    saved = {}
    for strategy in STRATEGIES:
        for optimizer in OPTIMIZERS:
            config, state = _prepared(strategy, optimizer)
            trained(group, config, state, ROWS, range(2))
            state.registered["kept"] = Kept({**_tensors_of_all_kinds(), "plain": [1, math.nan, b"x"], "best": 0.5})
            state.position = Position(2, 24, "a" * 64)
            save(group, folder / f"{strategy}-{optimizer}", state.state_dict())
            saved[strategy, optimizer] = everything(state)
    return saved


def _restore_all(group: ProcessGroup, folders: list[Path]) -> dict[tuple[Path, str, str], Everything]:
    """By folder, and by the strategy that it was saved with and is restored into; the optimizer is that of its name."""
    found = {}
    for folder in folders:
        for strategy in STRATEGIES:
            _, _, optimizer = folder.name.partition("-")
            config, state = _prepared(strategy, optimizer)
            state.registered["kept"] = Kept()
            assert state.model is not None
            with torch.no_grad():
                for each in [*state.module.parameters(), *state.module.buffers()]:
                    each.fill_(-1)  # whatever a rank has built
            spread = strategy_of(config)(state.model, config, group)

            def layout() -> Any:
                spread.shard(state.optimizers)  # noqa: B023
                return spread.layout(state.optimizers)  # noqa: B023

            storage = Storage(folder)
            restored = restore(CheckpointStore(storage, keep=1), storage, group, layout)
            assert restored is not None
            in_shards = [each for each in _tensors(restored[1]) if isinstance(each, DTensor)]
            assert bool(in_shards) == (strategy == "fsdp")
            state.load_state_dict(restored[1])
            found[folder, strategy, optimizer] = everything(state)
    return found


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, dict):
        return [tensor for each in tree.values() for tensor in _tensors(each)]
    return [tree] if isinstance(tree, torch.Tensor) else []


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Everything]:
    """Folders with a commit each, and what is in it."""
    found = {}
    for world_size in WORLD_SIZES:
        folder = tmp_path_factory.mktemp(f"world-of-{world_size}")
        every = run_ranks(world_size, _save_all, folder)
        found |= {folder / f"{strategy}-{optimizer}": each for (strategy, optimizer), each in every[0].items()}
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(4, marks=pytest.mark.chaos)])
def test_a_commit_is_restored_at_every_world_size_and_with_either_strategy(
    saved: dict[Path, Everything], world_size: int
) -> None:
    for found in run_ranks(world_size, _restore_all, list(saved)):
        assert len(found) == len(saved) * len(STRATEGIES)
        for (folder, strategy, _), (skeleton, tensors) in found.items():
            expected_skeleton, expected = saved[folder]
            what = f"{folder.parent.name}/{folder.name} with {strategy}"
            assert skeleton == expected_skeleton, what  # also dtypes and shapes
            assert tensors.keys() == expected.keys()
            for name in expected:
                assert tensors[name].tobytes() == expected[name].tobytes(), f"{name} of {what}"


def test_each_rank_writes_its_shards_and_a_share_of_what_all_hold(tmp_path: Path) -> None:
    sizes = run_ranks(3, _written, tmp_path)
    gather_full = sum(sizes)
    assert all(0.2 * gather_full < size < 0.5 * gather_full for size in sizes), sizes


def _written(group: ProcessGroup, folder: Path) -> int:
    config, state = prepared("fsdp")
    trained(group, config, state, ROWS, range(1))
    writer = StateWriter()
    writer.stage(state.state_dict(), rank=group.rank, world_size=group.world_size)
    return sum(item.size for item in writer.write(Storage(folder), "x").objects)


def test_the_blocks_of_all_ranks_are_counted_on_each(tmp_path: Path) -> None:
    counted, written = zip(*run_ranks(3, _counted, tmp_path), strict=True)
    assert set(counted) == {sum(written)}


def _counted(group: ProcessGroup, folder: Path) -> tuple[int, int]:
    """Blocks of all ranks, and of this one."""
    config, state = prepared("fsdp")
    trained(group, config, state, ROWS, range(1))
    with mock.patch("elastic_ddp.checkpoint.writer.BlockPlanner", lambda: BlockPlanner(32)):
        writer = StateWriter()
    writer.stage(state.state_dict(), rank=group.rank, world_size=group.world_size)
    written = writer.write(Storage(folder), "x").blocks
    return sum(writer._planner.num_blocks.values()), len(written)


def test_a_rank_gets_what_it_needs_and_hardly_anything_else(tmp_path: Path) -> None:
    """And every byte leaves the storage once."""
    saved = run_ranks(2, save_large, tmp_path)[0]
    gather_full = sum(each.nbytes for each in saved.values())
    every = run_ranks(3, _restore_large, tmp_path, "SGD", 3000)
    for got, _, found in every:
        assert found.keys() == saved.keys() and all(found[name].tobytes() == saved[name].tobytes() for name in saved)
        assert got < 0.3 * gather_full, "no more than its shard"
    assert sum(got for got, _, _ in every) > 0, "a piece lies across two shards"
    assert gather_full <= sum(read for _, read, _ in every) < 1.1 * gather_full


def test_what_all_ranks_hold_draws_no_shards_along(tmp_path: Path) -> None:
    """Counts of steps lie beside shards, of which each rank is to have its own alone."""
    saved = run_ranks(2, save_large, tmp_path, "Adagrad")[0]
    every = run_ranks(2, _restore_large, tmp_path, "Adagrad", MAX_PIECE_BYTES)
    assert all(found[name].tobytes() == saved[name].tobytes() for _, _, found in every for name in saved)
    assert 0 < sum(got for got, _, _ in every) <= NUM_LARGE * ALIGNMENT


def test_what_several_ranks_need_comes_first_and_in_one_order(tmp_path: Path) -> None:
    """Each rank has shards of its own between: none may wait for what another has at the end of those."""
    run_ranks(2, save_large, tmp_path, "Adagrad")
    every = run_ranks(2, _pieces_in_order, tmp_path)
    together = [[number for number, ranks in pieces if len(ranks) > 1] for pieces in every]
    assert len(together[0]) > 1 and together[0] == together[1] == sorted(together[0])
    assert [[number for number, _ in pieces[: len(together[0])]] for pieces in every] == together
    assert any(number < together[0][-1] for number, ranks in every[0] if len(ranks) == 1), "not as they are stored"


def _pieces_in_order(group: ProcessGroup, folder: Path) -> list[tuple[int, list[int]]]:
    """Of a restore: numbers, and the ranks that need them."""
    found: list[SharedPiece] = []

    def noted(*arguments: Any) -> list[SharedPiece]:
        found.extend(pieces := plan_pieces(*arguments))
        return pieces

    with mock.patch.object(shared_read, "plan_pieces", noted):
        _restore_large(group, folder, "Adagrad", MAX_PIECE_BYTES)
    return [(each.number, each.ranks) for each in found]


NUM_LARGE = 8
"""Parameters of a model."""


def _large() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(96, 96) for _ in range(NUM_LARGE // 2)))


def save_large(group: ProcessGroup, folder: Path, optimizer: str = "SGD") -> Tensors:
    config, state = prepared("fsdp", optimizer, model=_large())
    strategy_of(config)(state.model, config, group).shard(state.optimizers)  # type: ignore[arg-type]
    with mock.patch("elastic_ddp.checkpoint.writer.BlockPlanner", lambda: BlockPlanner(1024)):
        save(group, folder, state.state_dict())
    return {name: each.numpy() for name, each in full_state(state).items()}


def _restore_large(
    group: ProcessGroup, folder: Path, optimizer: str = "SGD", piece_bytes: int = 3000
) -> tuple[int, int, Tensors]:
    """Bytes of pieces that came from other ranks, and from the storage, and the state."""
    got = read = 0
    irecv = dist.irecv

    def counted_irecv(tensor: torch.Tensor, *place: Any, **options: Any) -> Any:
        nonlocal got
        got += tensor.numel()
        return irecv(tensor, *place, **options)

    class Counting(Storage):
        def read_into(self, key: str, start: int, buffer: memoryview) -> int:
            nonlocal read
            read += len(buffer)
            return super().read_into(key, start, buffer)

    config, state = prepared("fsdp", optimizer, model=_large())
    assert state.model is not None
    spread = strategy_of(config)(state.model, config, group)

    def layout() -> Any:
        spread.shard(state.optimizers)
        return spread.layout(state.optimizers)

    storage = Counting(folder)
    with (
        mock.patch("elastic_ddp.checkpoint.pieces.MAX_PIECE_BYTES", piece_bytes),
        mock.patch("torch.distributed.irecv", counted_irecv),
    ):
        restored = restore(CheckpointStore(storage, keep=1), storage, group, layout)
    assert restored is not None
    state.load_state_dict(restored[1])
    return got, read, {name: each.numpy() for name, each in full_state(state).items()}


class Slow(Storage):
    """Takes as long for each piece as a store does that is far away."""

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        time.sleep(0.02)
        return super().read_into(key, start, buffer)


def shards_restored_to(group: ProcessGroup, folder: Path, device: str) -> list[bool]:
    """Of each parameter that `save_large` has saved, whether this rank's shard is right, on a mesh of such devices."""
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, device)
    likes = {
        f"model.{name}": distribute_tensor(each.detach().to(device), mesh, [Shard(0)], src_data_rank=None)
        for name, each in _large().named_parameters()
    }
    storage = Slow(folder)
    with mock.patch("elastic_ddp.checkpoint.pieces.MAX_PIECE_BYTES", 3000):
        found = restore(CheckpointStore(storage, keep=1), storage, group, lambda: likes.get)
    assert found is not None and found[1]["model"].keys() == {name.partition(".")[2] for name in likes}
    shards = {f"model.{name}": each.to_local() for name, each in found[1]["model"].items()}
    return [torch.equal(shards[name], like.to_local()) for name, like in likes.items()]


def _replicated(group: ProcessGroup, folder: Path) -> tuple[int, list[list[float]], bool]:
    """How many blocks this rank writes of a tensor that a mesh replicates; that one and another as they are restored;
    and whether it is replicated again where it is to be."""
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    replicated = distribute_tensor(torch.arange(6.0), mesh, [Replicate()])
    cut = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    with mock.patch("elastic_ddp.checkpoint.writer.BlockPlanner", lambda: BlockPlanner(8)):
        writer = StateWriter()
        save(group, folder, {"x": {"replicated": replicated, "cut": cut}, "position": {"step": 0}})
    writer.stage({"x": replicated}, rank=group.rank, world_size=group.world_size)
    storage = Storage(folder)
    found = restore(CheckpointStore(storage, keep=1), storage, group, lambda: {"x.replicated": replicated}.get)
    assert found is not None
    again, other = found[1]["x"]["replicated"], found[1]["x"]["cut"]
    blocks = len(writer.write(storage, "y").blocks)
    return blocks, [again.to_local().tolist(), other.tolist()], again.placements == replicated.placements


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_a_mesh_replicates_is_shared_out_like_a_plain_tensor(world_size: int, tmp_path: Path) -> None:
    every = run_ranks(world_size, _replicated, tmp_path)
    assert [blocks for blocks, _, _ in every] == [
        3 // world_size + (rank < 3 % world_size) for rank in range(world_size)
    ]
    for _, found, is_replicated in every:
        assert found == [[*range(6)]] * 2 and is_replicated


DTYPES = (torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int64, torch.uint8, torch.bool)
SHAPES = ((7,), (5, 3), (1, 4), (4, 2, 3), (0, 2))
"""Of which some ranks have less than others, and some nothing."""


def _shards_of_all_kinds() -> dict[str, DTensor]:
    assert dist.group.WORLD is not None
    mesh, random = DeviceMesh.from_group(dist.group.WORLD, "cpu"), torch.Generator().manual_seed(0)
    found = {}
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        bits = torch.randint(256, (math.prod(shape), dtype.itemsize), generator=random, dtype=torch.uint8)
        bits = bits % 2 if dtype == torch.bool else bits
        found[f"{dtype} {shape}"] = distribute_tensor(
            bits.view(dtype).reshape(shape), mesh, [Shard(0)], src_data_rank=None
        )
    return found


def _save_shards(group: ProcessGroup, folder: Path) -> None:
    with mock.patch("elastic_ddp.checkpoint.writer.BlockPlanner", lambda: BlockPlanner(8)):
        save(group, folder, {"x": _shards_of_all_kinds(), "position": {"step": 0}})


def _same_shards(group: ProcessGroup, folder: Path) -> dict[str, bool]:
    """Whether this rank's have the same bits when they are restored."""
    expected, storage = _shards_of_all_kinds(), Storage(folder)
    layout = {f"x.{name}": each for name, each in expected.items()}.get
    restored = restore(CheckpointStore(storage, keep=1), storage, group, lambda: layout)
    assert restored is not None
    found = {name: (each.to_local(), restored[1]["x"][name].to_local()) for name, each in expected.items()}
    return {
        name: (a.shape, a.dtype) == (b.shape, b.dtype)
        and a.contiguous().flatten().view(torch.uint8).equal(b.contiguous().flatten().view(torch.uint8))
        for name, (a, b) in found.items()
    }


@pytest.mark.parametrize("saved_on", WORLD_SIZES)
def test_shards_of_every_dtype_have_the_same_bits_at_every_world_size(saved_on: int, tmp_path: Path) -> None:
    run_ranks(saved_on, _save_shards, tmp_path)
    for world_size in WORLD_SIZES:
        for same in run_ranks(world_size, _same_shards, tmp_path):
            assert len(same) == len(DTYPES) * len(SHAPES) and all(same.values()), same


class Average:
    """Of the weights, in shards like theirs."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.mean: dict[str, torch.Tensor] = {}
        self.is_whole = True

    def update(self) -> None:
        for name, each in self.module.named_parameters():
            self.mean.setdefault(name, each.detach().clone()).lerp_(each.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {name: gather_full(each) if self.is_whole else each for name, each in self.mean.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        like = dict(self.module.named_parameters())
        self.mean = {
            name: distribute_tensor(each, like[name].device_mesh, like[name].placements)  # type: ignore[attr-defined]
            for name, each in state.items()
        }


def _averaged(group: ProcessGroup, folder: Path) -> tuple[str, bool]:
    """What is said of an average in shards, and whether one that is given whole goes on where it was."""
    averages: list[Average] = []
    for at in range(2):
        config, state = prepared("fsdp")
        assert state.model is not None
        average = Average(state.module)
        averages.append(average)
        state.registered["average"] = average
        strategy = strategy_of(config)(state.model, config, group)

        def layout() -> Any:
            strategy.shard(state.optimizers)  # noqa: B023
            state.layout = strategy.layout(state.optimizers)  # noqa: B023
            return state.layout  # noqa: B023

        if at == 0:
            layout()
            average.update()
            save(group, folder, state.state_dict())
            average.is_whole = False
            with pytest.raises(ConfigError) as refused:
                state.state_dict()
        else:
            storage = Storage(folder)
            restored = restore(CheckpointStore(storage, keep=1), storage, group, layout)
            assert restored is not None
            state.load_state_dict(restored[1])
        average.update()
    first, second = ({name: gather_full(each) for name, each in average.mean.items()} for average in averages)
    return str(refused.value), all(torch.equal(first[name], second[name]) for name in first)


def test_registered_state_is_given_whole(tmp_path: Path) -> None:
    for said, goes_on in run_ranks(2, _averaged, tmp_path):
        assert "run.register holds shards: user.average.embed.weight" in said and "full_tensor()" in said
        assert goes_on
