"""Commits of sharded and of replicated state, restored at every world size and from one to the other, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from elastic_ddp.checkpoint import CheckpointStore
from elastic_ddp.checkpoint.commits import attempt_prefix
from elastic_ddp.checkpoint.planning import BlockPlanner
from elastic_ddp.checkpoint.writing import Part, StateWriter
from elastic_ddp.generation import strategy_of
from elastic_ddp.parallel.process_group import ProcessGroup
from elastic_ddp.restoring import restore
from elastic_ddp.storage import Storage
from tests.ranks import run_ranks
from tests.unit.test_fsdp import OPTIMIZERS, prepared, trained, whole_state

STRATEGIES = ("ddp", "fsdp")
WORLD_SIZES = (1, 2, 3, 4)
ROWS = np.array([3, 3, 3, 3])
Tensors = dict[str, np.ndarray]


def save(group: ProcessGroup, folder: Path, state: dict[str, Any]) -> None:
    """As `Saver` does, without its threads."""
    storage, attempt = Storage(folder), "a" * 32
    writer = StateWriter()
    writer.stage(state, rank=group.rank, world_size=group.world_size)
    part = writer.write(storage, attempt_prefix(2, attempt))
    parts = [Part.model_validate_json(each) for each in group.all_gather_bytes(part.model_dump_json().encode())]
    if group.rank == 0:
        store = CheckpointStore(storage, keep=1)
        store.complete(step=2, attempt=attempt, parts=parts, names=writer.names, record={}, fence=lambda: None)
    group.meet()


def _save_all(group: ProcessGroup, folder: Path) -> dict[tuple[str, str], Tensors]:
    """Trains and saves, with every strategy and optimizer. What was saved."""
    saved = {}
    for strategy in STRATEGIES:
        for optimizer in OPTIMIZERS:
            config, state = prepared(strategy, optimizer)
            trained(group, config, state, ROWS, range(2))
            save(group, folder / f"{strategy}-{optimizer}", state.state_dict())
            saved[strategy, optimizer] = {name: each.numpy() for name, each in whole_state(state).items()}
    return saved


def _restore_all(group: ProcessGroup, folders: list[Path]) -> dict[tuple[Path, str, str], Tensors]:
    """By folder, and by the strategy that it was saved with and is restored into; the optimizer is that of its name."""
    found = {}
    for folder in folders:
        for strategy in STRATEGIES:
            _, _, optimizer = folder.name.partition("-")
            config, state = prepared(strategy, optimizer)
            assert state.model is not None
            with torch.no_grad():
                for each in state.module.parameters():
                    each.fill_(-1.0)  # whatever a rank has built
            spread = strategy_of(config)(state.model, config, group)

            def layout() -> Any:
                spread.spread(state.optimizers)  # noqa: B023
                return spread.layout(state.optimizers)  # noqa: B023

            storage = Storage(folder)
            restored = restore(CheckpointStore(storage, keep=1), storage, group, layout)
            assert restored is not None
            in_shards = [each for each in _tensors(restored[1]) if isinstance(each, DTensor)]
            assert bool(in_shards) == (strategy == "fsdp")
            state.load_state_dict(restored[1])
            found[folder, strategy, optimizer] = {name: each.numpy() for name, each in whole_state(state).items()}
    return found


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, dict):
        return [tensor for each in tree.values() for tensor in _tensors(each)]
    return [tree] if isinstance(tree, torch.Tensor) else []


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Tensors]:
    """Folders with a commit each, and what is in it."""
    found = {}
    for world_size in WORLD_SIZES:
        folder = tmp_path_factory.mktemp(f"world-of-{world_size}")
        every = run_ranks(world_size, _save_all, folder)
        found |= {folder / f"{strategy}-{optimizer}": each for (strategy, optimizer), each in every[0].items()}
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_commit_is_restored_at_every_world_size_and_with_either_strategy(
    saved: dict[Path, Tensors], world_size: int
) -> None:
    for found in run_ranks(world_size, _restore_all, list(saved)):
        assert len(found) == len(saved) * len(STRATEGIES)
        for (folder, strategy, _), tensors in found.items():
            expected = saved[folder]
            assert tensors.keys() == expected.keys()
            for name in expected:
                what = f"{name} of {folder.parent.name}/{folder.name} with {strategy}"
                assert tensors[name].dtype == expected[name].dtype, what
                assert tensors[name].tobytes() == expected[name].tobytes(), what


def test_each_rank_writes_its_shards_and_a_share_of_what_all_hold(tmp_path: Path) -> None:
    sizes = run_ranks(3, _written, tmp_path)
    whole = sum(sizes)
    assert all(0.2 * whole < size < 0.5 * whole for size in sizes), sizes


def _written(group: ProcessGroup, folder: Path) -> int:
    config, state = prepared("fsdp")
    trained(group, config, state, ROWS, range(1))
    writer = StateWriter()
    writer.stage(state.state_dict(), rank=group.rank, world_size=group.world_size)
    return sum(item.size for item in writer.write(Storage(folder), "x").objects)


def test_a_rank_gets_what_it_needs_and_hardly_anything_else(tmp_path: Path) -> None:
    """And every byte leaves the storage once."""
    saved = run_ranks(2, _save_large, tmp_path)[0]
    whole = sum(each.nbytes for each in saved.values())
    every = run_ranks(3, _restore_large, tmp_path)
    for got, _, found in every:
        assert found.keys() == saved.keys() and all(found[name].tobytes() == saved[name].tobytes() for name in saved)
        assert got < 0.3 * whole, "no more than its shard"
    assert sum(got for got, _, _ in every) > 0, "a piece lies across two shards"
    assert whole <= sum(read for _, read, _ in every) < 1.1 * whole


def _large() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(96, 96) for _ in range(4)))


def _save_large(group: ProcessGroup, folder: Path) -> Tensors:
    config, state = prepared("fsdp", "SGD", model=_large())
    strategy_of(config)(state.model, config, group).spread(state.optimizers)  # type: ignore[arg-type]
    with mock.patch("elastic_ddp.checkpoint.writing.BlockPlanner", lambda: BlockPlanner(1024)):
        save(group, folder, state.state_dict())
    return {name: each.numpy() for name, each in whole_state(state).items()}


def _restore_large(group: ProcessGroup, folder: Path) -> tuple[int, int, Tensors]:
    """Bytes that came from other ranks, and from the storage, and the state."""
    got = read = 0
    broadcast, irecv = dist.broadcast, dist.irecv

    def counted_broadcast(tensor: torch.Tensor, source: int, **options: Any) -> Any:
        nonlocal got
        got += tensor.numel() if source != group.rank and options else 0  # but for what is read before
        return broadcast(tensor, source, **options)

    def counted_irecv(tensor: torch.Tensor, *place: Any, **options: Any) -> Any:
        nonlocal got
        got += tensor.numel()
        return irecv(tensor, *place, **options)

    class Counting(Storage):
        def read_into(self, key: str, start: int, buffer: memoryview) -> int:
            nonlocal read
            read += len(buffer)
            return super().read_into(key, start, buffer)

    config, state = prepared("fsdp", "SGD", model=_large())
    assert state.model is not None
    spread = strategy_of(config)(state.model, config, group)

    def layout() -> Any:
        spread.spread(state.optimizers)
        return spread.layout(state.optimizers)

    storage = Counting(folder)
    with (
        mock.patch("elastic_ddp.checkpoint.reading.PIECE_BYTES", 3000),
        mock.patch("torch.distributed.broadcast", counted_broadcast),
        mock.patch("torch.distributed.irecv", counted_irecv),
    ):
        restored = restore(CheckpointStore(storage, keep=1), storage, group, layout)
    assert restored is not None
    state.load_state_dict(restored[1])
    return got, read, {name: each.numpy() for name, each in whole_state(state).items()}
