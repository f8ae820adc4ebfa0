"""Ranks whose replicated tensors differ make no commit: each save compares a sample."""

from __future__ import annotations

import copy
import random
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ddp.checkpoint import CheckpointStore, Commit
from elastic_ddp.checkpoint.manifest import attempt_prefix
from elastic_ddp.checkpoint.planning import plan_blocks
from elastic_ddp.checkpoint.replica_check import (
    MAX_PIECES,
    SAMPLE_BYTES,
    SAMPLE_PIECE_BYTES,
    _piece_of,
    check_replicas,
    draw_samples,
)
from elastic_ddp.checkpoint.writer import StateWriter
from elastic_ddp.errors import ReplicasDifferError
from elastic_ddp.storage.storage import Storage
from tests.saving import Ranks
from tests.unit.checkpoint.test_checkpoint import make_state


def draw(tensors: dict[str, torch.Tensor], seed: str = "a") -> Any:
    """Returns the sample of a rank that holds these tensors."""
    return draw_samples(plan_blocks(tensors), tensors, seed)


def test_every_bit_of_a_small_state_is_compared() -> None:
    names = ["a", "b", "c", *map(str, range(MAX_PIECES - 3))]  # as many as a small model has
    state = {name: torch.randn(4, 3, generator=torch.Generator().manual_seed(1)) for name in names}
    for name in ("a", "b", "c"):
        for place in (0, 5, 11):
            other = copy.deepcopy(state)
            other[name].view(-1).view(torch.int32)[place] ^= 1
            for odd in range(3):
                samples = [draw(other if rank == odd else state) for rank in range(3)]
                with pytest.raises(ReplicasDifferError, match=f"rank {odd} holds other values of {name} than"):
                    check_replicas(samples)
            with pytest.raises(ReplicasDifferError, match=f"ranks 0 and 1 hold different values of {name},"):
                check_replicas([draw(state), draw(other)])
    check_replicas([draw(state), draw(copy.deepcopy(state))])
    check_replicas([()])


def test_each_save_samples_another_bounded_part_of_a_large_state() -> None:
    state = {f"layer{number}": torch.zeros(1 << 20) for number in range(40)}  # 160 MiB
    drawn = [draw(state, str(seed)) for seed in range(3)]
    names = [{sample.tensor for sample in samples} for samples in drawn]
    assert all(len(samples) == SAMPLE_BYTES // SAMPLE_PIECE_BYTES for samples in drawn)
    assert len(set(map(frozenset, names))) == 3


@pytest.mark.parametrize("shape", [(), (1,), (300_000,), (3, 400, 500), (2, 1, 3, 100_000), (1 << 20, 3)], ids=str)
def test_pieces_have_about_the_largest_size_and_cover_the_tensor(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=torch.float64)
    draw = random.Random(0)
    for _ in range(400):
        piece = _piece_of(tensor, draw)
        assert min(tensor.nbytes, SAMPLE_PIECE_BYTES // 2) <= piece.nbytes <= SAMPLE_PIECE_BYTES
        piece.fill_(1.0)
    assert tensor.sum() > 0.9 * tensor.numel() or tensor.numel() > 400 * SAMPLE_PIECE_BYTES / 8 / 4


def test_samples_do_not_depend_on_the_memory_format() -> None:
    image = torch.randn(8, 3, 20, 20)
    assert draw({"w": image}) == draw({"w": image.contiguous(memory_format=torch.channels_last)})


def test_state_of_rank_0_and_single_ranks_are_not_sampled() -> None:
    state = {"model": {"w": torch.ones(3)}, "user": {"of this rank": torch.ones(3)}}
    writer = StateWriter(of_rank_0=frozenset({"user"}))
    storage = Storage(f"memory://{uuid.uuid4().hex}")
    writer.stage(state, rank=0, world_size=2, seed="a")
    assert [sample.tensor for sample in writer.write(storage, "step=1/attempt=a").samples] == ["model.w"]
    writer.stage(state, rank=0, world_size=1, seed="a")
    assert writer.write(storage, "step=1/attempt=b").samples == ()


def test_a_save_of_ranks_that_differ_leaves_nothing(tmp_path: Path) -> None:
    ranks = Ranks(lambda rank: Storage(tmp_path), 3)
    ranks.begin(1)
    assert isinstance(ranks.wait(), Commit)
    before = Storage(tmp_path).list()
    attempt, other = uuid.uuid4().hex, make_state(2)
    other["model"]["weight"].view(-1)[-1] += 1.0
    ranks.begin(2, of=[0, 2], attempt=attempt)
    ranks.begin(2, of=[1], attempt=attempt, state=other)
    outcome = ranks.wait()
    assert isinstance(outcome, ReplicasDifferError) and "rank 1 holds other values of model.weight than" in str(outcome)
    assert Storage(tmp_path).list() == before
    newest = CheckpointStore(Storage(tmp_path), keep=2).latest()
    assert newest is not None and newest.step == 1


def test_extra_state_of_modules_is_not_sampled() -> None:
    def samples(value: float) -> Any:
        writer = StateWriter()
        model = {"w": torch.ones(3), "layer._extra_state": {"scale": torch.tensor(value)}}
        writer.stage({"model": model}, rank=0, world_size=2, seed="a")
        return writer.write(Storage(f"memory://{uuid.uuid4().hex}"), "step=1/attempt=a").samples

    check_replicas([samples(1.0), samples(2.0)])
    assert [sample.tensor for sample in samples(1.0)] == ["model.w"]


def test_ranks_with_different_tensors_are_reported() -> None:
    one, other = draw({"a": torch.ones(3), "b": torch.ones(2)}), draw({"a": torch.ones(3)})
    with pytest.raises(ReplicasDifferError, match="rank 1 does not hold the same tensors"):
        check_replicas([one, other])


def test_extra_state_of_modules_is_saved_from_rank_0(tmp_path: Path) -> None:
    """Its shapes may differ between ranks. Shares of other tensors do not depend on it."""
    storage, attempt = Storage(tmp_path), uuid.uuid4().hex
    extra = [
        {"history": torch.zeros(4), "scale": torch.tensor(0.0)},
        {"history": torch.ones(5), "scale": torch.tensor(1.0), "more": torch.ones(2, 2)},
        {},
    ]
    parts = []
    writers = [StateWriter(of_rank_0=frozenset({"user"})) for _ in extra]
    for rank, (writer, extra_state) in enumerate(zip(writers, extra, strict=True)):
        model = {"a": torch.arange(40.0), "layer._extra_state": extra_state, "z": torch.arange(90.0)}
        state = {
            "model": model,
            "position": {"step": 1},
            "user": {"copy.l": {"_extra_state": extra_state}, "n": torch.ones(3)},
        }
        writer.stage(state, rank=rank, world_size=len(extra), seed=attempt)
        parts.append(writer.write(storage, attempt_prefix(1, attempt)))
    store, kinds = CheckpointStore(storage, keep=1), writers[0].kinds
    commit = store.complete(step=1, attempt=attempt, parts=parts, kinds=kinds, record={}, fence=lambda: None)
    restored = store.load(commit)["model"]
    assert torch.equal(restored["a"], torch.arange(40.0)) and torch.equal(restored["z"], torch.arange(90.0))
    assert restored["layer._extra_state"].keys() == extra[0].keys()
    assert all(torch.equal(value, extra[0][name]) for name, value in restored["layer._extra_state"].items())


def test_a_tensor_of_different_shape_on_another_rank_is_not_committed(tmp_path: Path) -> None:
    storage, attempt = Storage(tmp_path), uuid.uuid4().hex
    parts = []
    writers = [StateWriter(), StateWriter()]
    for rank, writer in enumerate(writers):
        model = {"a": torch.zeros(100), "b": torch.zeros(9 + rank)}
        writer.stage({"model": model}, rank=rank, world_size=2, seed=attempt)
        parts.append(writer.write(storage, attempt_prefix(1, attempt)).model_copy(update={"samples": ()}))
    assert [*parts[1].tensors] == ["model.b"]
    with pytest.raises(ReplicasDifferError, match=r"model\.b is \('float32', \(9,\)\) on rank 0 and .*\(10,\)"):
        CheckpointStore(storage, keep=1).complete(
            step=1, attempt=attempt, parts=parts, kinds=writers[0].kinds, record={}, fence=lambda: None
        )
    assert storage.list() == []
