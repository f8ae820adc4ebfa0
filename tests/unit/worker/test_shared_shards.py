"""Restores of sharded state: which rank reads which piece, and what ranks send each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from elastic_ddp.checkpoint import CheckpointStore
from elastic_ddp.checkpoint.manifest import ALIGNMENT
from elastic_ddp.checkpoint.pieces import MAX_PIECE_BYTES
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.generation import strategy_of
from elastic_ddp.worker.restore import restore
from tests.ranks import run_ranks
from tests.unit.checkpoint.test_fsdp_commits import Tensors, save
from tests.unit.distributed.test_fsdp import full_state, prepared
from tests.unit.faulty_reads import CountingReads

NUM_PARAMETERS = 8


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(96, 96) for _ in range(NUM_PARAMETERS // 2)))


def save_shards(group: ProcessGroup, folder: Path, optimizer: str = "SGD") -> Tensors:
    config, state = prepared("fsdp", optimizer, model=make_model())
    assert state.model is not None
    strategy_of(config)(state.model, config, group).shard(state.optimizers)
    with mock.patch("elastic_ddp.checkpoint.planning.BLOCK_BYTES", 1024):
        save(group, folder, state.state_dict())
    return {name: tensor.numpy() for name, tensor in full_state(state).items()}


def restore_shards(
    group: ProcessGroup, folder: Path, optimizer: str = "SGD", piece_bytes: int = 3000
) -> tuple[int, int, Tensors]:
    """The bytes that this rank receives from other ranks, the bytes that it reads, and the full state."""
    received = 0
    irecv = dist.irecv

    def counted_irecv(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        nonlocal received
        received += tensor.numel()
        return irecv(tensor, *args, **options)

    config, state = prepared("fsdp", optimizer, model=make_model())
    assert state.model is not None
    strategy = strategy_of(config)(state.model, config, group)

    def make_layout() -> Any:
        strategy.shard(state.optimizers)
        return strategy.layout(state.optimizers)

    storage = CountingReads(str(folder))
    with (
        mock.patch("elastic_ddp.checkpoint.pieces.MAX_PIECE_BYTES", piece_bytes),
        mock.patch("torch.distributed.irecv", counted_irecv),
    ):
        restored = restore(CheckpointStore(storage, keep=1), storage, group, make_layout)
    assert restored is not None
    state.load_state_dict(restored[1])
    return received, storage.num_bytes, {name: tensor.numpy() for name, tensor in full_state(state).items()}


def are_equal(tensors: Tensors, expected: Tensors) -> bool:
    return tensors.keys() == expected.keys() and all(
        tensors[name].tobytes() == expected[name].tobytes() for name in expected
    )


def test_a_rank_receives_hardly_more_than_it_needs_and_each_byte_is_read_once(tmp_path: Path) -> None:
    saved = run_ranks(2, save_shards, tmp_path)[0]
    num_bytes = sum(tensor.nbytes for tensor in saved.values())
    results = run_ranks(3, restore_shards, tmp_path, "SGD", 3000)
    for received, _, tensors in results:
        assert are_equal(tensors, saved)
        assert received < 0.3 * num_bytes, "no more than its shard"
    assert sum(received for received, _, _ in results) > 0, "a piece lies across two shards"
    assert num_bytes <= sum(read for _, read, _ in results) < 1.1 * num_bytes


def test_replicated_tensors_between_shards_do_not_share_their_pieces(tmp_path: Path) -> None:
    """Step counts, which every rank needs, are stored between shards."""
    saved = run_ranks(2, save_shards, tmp_path, "Adagrad")[0]
    results = run_ranks(2, restore_shards, tmp_path, "Adagrad", MAX_PIECE_BYTES)
    assert all(are_equal(tensors, saved) for _, _, tensors in results)
    assert 0 < sum(received for received, _, _ in results) <= NUM_PARAMETERS * ALIGNMENT


def shards_restored_to(group: ProcessGroup, folder: Path, device: str) -> list[bool]:
    """For each parameter of `save_shards`, whether this rank's shard is restored to a device mesh."""
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, device)
    likes = {
        f"model.{name}": distribute_tensor(parameter.detach().to(device), mesh, [Shard(0)], src_data_rank=None)
        for name, parameter in make_model().named_parameters()
    }
    storage = Storage(folder)
    with mock.patch("elastic_ddp.checkpoint.pieces.MAX_PIECE_BYTES", 3000):
        restored = restore(CheckpointStore(storage, keep=1), storage, group, lambda: likes.get)
    assert restored is not None and restored[1]["model"].keys() == {name.partition(".")[2] for name in likes}
    shards = {f"model.{name}": shard.to_local() for name, shard in restored[1]["model"].items()}
    return [torch.equal(shards[name], like.to_local()) for name, like in likes.items()]


def test_shards_are_restored_to_a_device_mesh(tmp_path: Path) -> None:
    run_ranks(2, save_shards, tmp_path)
    assert run_ranks(3, shards_restored_to, tmp_path, "cpu") == [[True] * NUM_PARAMETERS] * 3
