"""Commits of sharded and replicated state, restored bit for bit at every world size and with either strategy."""

from __future__ import annotations

import copy
import itertools
import json
import math
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
from elastic_ddp.checkpoint.manifest import attempt_prefix
from elastic_ddp.checkpoint.parts import Part
from elastic_ddp.checkpoint.writer import StateWriter
from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import ConfigError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.tensors.state_tree import flatten, gather_full
from elastic_ddp.worker.generation import strategy_of
from elastic_ddp.worker.restore import restore
from elastic_ddp.worker.train_state import Position, TrainState
from tests.ranks import run_ranks
from tests.unit.distributed.test_fsdp import OPTIMIZERS, prepared, trained

STRATEGIES = ("ddp", "fsdp")
WORLD_SIZES = (1, 2, 3, 4)
ROWS = np.array([3, 3, 3, 3])
Tensors = dict[str, np.ndarray]
Everything = tuple[str, Tensors]
"""The skeleton of a state, and the bytes of its tensors."""


def save(group: ProcessGroup, folder: Path, state: dict[str, Any]) -> None:
    """Saves a commit like `Saver`, without its threads."""
    storage, attempt, step = Storage(folder), "a" * 32, state["position"]["step"]
    writer = StateWriter()
    writer.stage(state, rank=group.rank, world_size=group.world_size)
    part = writer.write(storage, attempt_prefix(step, attempt))
    parts = [Part.model_validate_json(text) for text in group.all_gather_bytes(part.model_dump_json().encode())]
    if group.rank == 0:
        store = CheckpointStore(storage, keep=1)
        store.complete(step=step, attempt=attempt, parts=parts, kinds=writer.kinds, record={}, fence=lambda: None)
    group.barrier()


class UserState:
    """Registered state of a user."""

    def __init__(self, values: dict[str, Any] | None = None) -> None:
        self.values = values or {}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def _tensors_of_all_kinds() -> dict[str, torch.Tensor]:
    """Tensors that a model may have as buffers under FSDP, and a user may register."""
    dtypes = (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool)
    kinds = {f"of_{dtype}".replace(".", "_"): torch.randn(3, 2).mul(9).to(dtype) for dtype in dtypes}
    return {**kinds, "number": torch.randn(()), "transposed": torch.randn(4, 3).t(), "empty": torch.empty(0, 3)}


def _prepared(strategy: str, optimizer: str) -> tuple[RunConfig, TrainState]:
    config, state = prepared(strategy, optimizer)
    for name, tensor in _tensors_of_all_kinds().items():
        state.module.register_buffer(name, tensor)
        state.module.register_buffer(f"transient_{name}", tensor.clone(), persistent=False)
    return config, state


def everything(state: TrainState) -> Everything:
    skeleton, tensors = flatten(_in_full(state.state_dict()))
    return json.dumps(skeleton), {
        name: tensor.contiguous().view(-1).view(torch.uint8).numpy() for name, tensor in tensors.items()
    }


def _in_full(tree: Any) -> Any:
    """The tree with full tensors, and with copies of tied ones."""
    if isinstance(tree, list):
        return [_in_full(child) for child in tree]
    if isinstance(tree, dict):
        full = copy.copy(tree)  # keeps the attributes of a state_dict
        for name, child in tree.items():
            full[name] = _in_full(child)
        return full
    return gather_full(tree).clone() if isinstance(tree, torch.Tensor) else tree


def _save_all(group: ProcessGroup, folder: Path, cases: list[tuple[str, str]]) -> dict[tuple[str, str], Everything]:
    """Trains and saves with these strategies and optimizers; returns what was saved."""
    saved = {}
    for strategy, optimizer in cases:
        config, state = _prepared(strategy, optimizer)
        trained(group, config, state, ROWS, range(2))
        state.registered["kept"] = UserState({**_tensors_of_all_kinds(), "plain": [1, math.nan, b"x"], "best": 0.5})
        state.position = Position(2, 24, "a" * 64)
        save(group, folder / f"{strategy}-{optimizer}", state.state_dict())
        saved[strategy, optimizer] = everything(state)
    return saved


def _restore_all(group: ProcessGroup, folders: list[Path]) -> dict[tuple[Path, str, str], Everything]:
    """What is restored from each folder with each strategy. The name of the folder has the optimizer."""
    results = {}
    for folder in folders:
        for strategy in STRATEGIES:
            _, _, optimizer = folder.name.partition("-")
            config, state = _prepared(strategy, optimizer)
            state.registered["kept"] = UserState()
            assert state.model is not None
            with torch.no_grad():
                for tensor in [*state.module.parameters(), *state.module.buffers()]:
                    tensor.fill_(-1)
            strategy_object = strategy_of(config)(state.model, config, group)

            def layout() -> Any:
                strategy_object.shard(state.optimizers)  # noqa: B023
                return strategy_object.layout(state.optimizers)  # noqa: B023

            storage = Storage(folder)
            restored = restore(CheckpointStore(storage, keep=1), storage, group, layout)
            assert restored is not None
            sharded = [tensor for tensor in _tensors(restored[1]) if isinstance(tensor, DTensor)]
            assert bool(sharded) == (strategy == "fsdp")
            state.load_state_dict(restored[1])
            results[folder, strategy, optimizer] = everything(state)
    return results


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, dict):
        return [tensor for child in tree.values() for tensor in _tensors(child)]
    return [tree] if isinstance(tree, torch.Tensor) else []


@pytest.fixture(
    scope="module",
    params=[1, pytest.param(len(OPTIMIZERS), marks=pytest.mark.chaos)],
    ids=["one-optimizer", "each-optimizer"],
)
def saved(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[Path, Everything]:
    """The state in each folder with a commit: of each world size, each strategy and some of the optimizers.

    With one optimizer each, the optimizers take turns.
    """
    states, turns = {}, itertools.cycle(OPTIMIZERS)
    for world_size in WORLD_SIZES:
        folder = tmp_path_factory.mktemp(f"world-of-{world_size}")
        cases = [(strategy, next(turns)) for strategy in STRATEGIES for _ in range(request.param)]
        [of_rank_0, *_] = run_ranks(world_size, _save_all, folder, cases)
        states |= {folder / f"{strategy}-{optimizer}": state for (strategy, optimizer), state in of_rank_0.items()}
    assert len(states) == len(WORLD_SIZES) * len(STRATEGIES) * request.param
    assert {folder.name for folder in states} == {f"{s}-{o}" for s in STRATEGIES for o in OPTIMIZERS}
    return states


@pytest.mark.parametrize("world_size", [2, 3, *(pytest.param(size, marks=pytest.mark.chaos) for size in (1, 4))])
def test_a_commit_is_restored_at_every_world_size_and_with_either_strategy(
    saved: dict[Path, Everything], world_size: int
) -> None:
    for restored in run_ranks(world_size, _restore_all, list(saved)):
        assert len(restored) == len(saved) * len(STRATEGIES)
        for (folder, strategy, _), (skeleton, tensors) in restored.items():
            expected_skeleton, expected = saved[folder]
            case = f"{folder.parent.name}/{folder.name} with {strategy}"
            assert skeleton == expected_skeleton, case  # has dtypes and shapes
            assert tensors.keys() == expected.keys()
            for name in expected:
                assert tensors[name].tobytes() == expected[name].tobytes(), f"{name} of {case}"


def test_each_rank_writes_its_shards_and_a_share_of_replicated_tensors(tmp_path: Path) -> None:
    sizes = run_ranks(3, _written, tmp_path)
    total = sum(sizes)
    assert all(0.2 * total < size < 0.5 * total for size in sizes), sizes


def _written(group: ProcessGroup, folder: Path) -> int:
    config, state = prepared("fsdp")
    trained(group, config, state, ROWS, range(1))
    writer = StateWriter()
    writer.stage(state.state_dict(), rank=group.rank, world_size=group.world_size)
    return sum(stored.size for stored in writer.write(Storage(folder), "x").objects)


def _replicated(group: ProcessGroup, folder: Path) -> tuple[int, list[list[float]], bool]:
    """The number of blocks that this rank writes of a replicated DTensor, the values of it and of a sharded one after a
    restore, and whether it is replicated after the restore."""
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    replicated = distribute_tensor(torch.arange(6.0), mesh, [Replicate()])
    sharded = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    with mock.patch("elastic_ddp.checkpoint.planning.BLOCK_BYTES", 8):
        save(group, folder, {"x": {"replicated": replicated, "sharded": sharded}, "position": {"step": 0}})
        writer = StateWriter()
        writer.stage({"x": replicated}, rank=group.rank, world_size=group.world_size)
    storage = Storage(folder)
    restored = restore(CheckpointStore(storage, keep=1), storage, group, lambda: {"x.replicated": replicated}.get)
    assert restored is not None
    again, full = restored[1]["x"]["replicated"], restored[1]["x"]["sharded"]
    num_blocks = len(writer.write(storage, "y").tensors["x.value"].blocks)
    return num_blocks, [again.to_local().tolist(), full.tolist()], again.placements == replicated.placements


def test_ranks_share_the_writing_of_a_replicated_dtensor(tmp_path: Path) -> None:
    results = run_ranks(2, _replicated, tmp_path)
    assert [num_blocks for num_blocks, _, _ in results] == [2, 1]
    for _, values, is_replicated in results:
        assert values == [[*range(6)]] * 2 and is_replicated


DTYPES = (torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int64, torch.uint8, torch.bool)
SHAPES = ((7,), (5, 3), (1, 4), (4, 2, 3), (0, 2))
"""Some ranks have smaller shards than others, and some empty ones."""


def _shards_of_all_kinds() -> dict[str, DTensor]:
    assert dist.group.WORLD is not None
    mesh, random = DeviceMesh.from_group(dist.group.WORLD, "cpu"), torch.Generator().manual_seed(0)
    shards = {}
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        bits = torch.randint(256, (math.prod(shape), dtype.itemsize), generator=random, dtype=torch.uint8)
        bits = bits % 2 if dtype == torch.bool else bits
        shards[f"{dtype} {shape}"] = distribute_tensor(
            bits.view(dtype).reshape(shape), mesh, [Shard(0)], src_data_rank=None
        )
    return shards


def _save_shards(group: ProcessGroup, folder: Path) -> None:
    with mock.patch("elastic_ddp.checkpoint.planning.BLOCK_BYTES", 8):
        save(group, folder, {"x": _shards_of_all_kinds(), "position": {"step": 0}})


def _same_shards(group: ProcessGroup, folders: list[Path]) -> dict[str, bool]:
    """For each shard of this rank, whether it is restored bit for bit from each folder."""
    expected = _shards_of_all_kinds()
    layout = {f"x.{name}": shard for name, shard in expected.items()}.get
    same = {}
    for folder in folders:
        storage = Storage(folder)
        restored = restore(CheckpointStore(storage, keep=1), storage, group, lambda: layout)
        assert restored is not None
        for name, shard in expected.items():
            a, b = shard.to_local(), restored[1]["x"][name].to_local()
            bits = a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8)
            same[f"{name} of {folder.name}"] = (a.shape, a.dtype) == (b.shape, b.dtype) and bits[0].equal(bits[1])
    return same


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders with the shards that each world size saved."""
    folders = [tmp_path_factory.mktemp(f"shards-of-{world_size}") for world_size in WORLD_SIZES]
    for world_size, folder in zip(WORLD_SIZES, folders, strict=True):
        run_ranks(world_size, _save_shards, folder)
    return folders


@pytest.mark.parametrize("world_size", [1, 3])
def test_shards_of_every_dtype_are_restored_bit_for_bit_at_every_world_size(
    shards: list[Path], world_size: int
) -> None:
    for same in run_ranks(world_size, _same_shards, shards):
        assert len(same) == len(DTYPES) * len(SHAPES) * len(shards) and all(same.values()), same


class Average:
    """A moving average of the weights, sharded like them."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.mean: dict[str, torch.Tensor] = {}
        self.saves_full = True

    def update(self) -> None:
        for name, parameter in self.module.named_parameters():
            self.mean.setdefault(name, parameter.detach().clone()).lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {name: gather_full(mean) if self.saves_full else mean for name, mean in self.mean.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        like = dict(self.module.named_parameters())
        self.mean = {
            name: distribute_tensor(mean, like[name].device_mesh, like[name].placements)  # type: ignore[attr-defined]
            for name, mean in state.items()
        }


def _averaged(group: ProcessGroup, folder: Path) -> tuple[str, bool]:
    """The error for a sharded average, and whether a full one is restored."""
    averages: list[Average] = []
    for is_restored in (False, True):
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

        if not is_restored:
            layout()
            average.update()
            save(group, folder, state.state_dict())
            average.saves_full = False
            with pytest.raises(ConfigError) as refused:
                state.state_dict()
        else:
            storage = Storage(folder)
            restored = restore(CheckpointStore(storage, keep=1), storage, group, layout)
            assert restored is not None
            state.load_state_dict(restored[1])
        average.update()
    first, second = ({name: gather_full(mean) for name, mean in average.mean.items()} for average in averages)
    return str(refused.value), all(torch.equal(first[name], second[name]) for name in first)


def test_registered_state_has_to_be_full_tensors(tmp_path: Path) -> None:
    for error, is_restored in run_ranks(2, _averaged, tmp_path):
        assert "user.average.embed.weight of" in error and "full_tensor()" in error
        assert is_restored
