"""Commits of sharded and of replicated state, restored at every world size and from one to the other, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from elastic_ddp.checkpoint import CheckpointStore
from elastic_ddp.checkpoint.commits import attempt_prefix
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
