"""A commit is not made of states that differ: what ranks hold alike is compared, a sample of it in every save."""

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
from elastic_ddp.checkpoint.planning import BlockPlanner
from elastic_ddp.checkpoint.replica_check import (
    MAX_PIECES,
    SAMPLE_BYTES,
    SAMPLE_PIECE_BYTES,
    Sampler,
    _piece_of,
    check_replicas,
)
from elastic_ddp.checkpoint.writer import StateWriter
from elastic_ddp.errors import ReplicasDifferError
from elastic_ddp.storage.storage import Storage
from tests.saving import Ranks
from tests.unit.test_checkpoint import make_state


def drawn(tensors: dict[str, torch.Tensor], seed: str = "a") -> Any:
    sampler = Sampler()
    sampler.stage(BlockPlanner().plan(tensors), tensors, seed)
    return sampler.samples()


def test_of_a_small_state_every_bit_is_compared() -> None:
    names = ["a", "b", "c", *map(str, range(MAX_PIECES - 3))]  # as many as a small model and its optimizer have
    state = {name: torch.randn(4, 3, generator=torch.Generator().manual_seed(1)) for name in names}
    for name in ("a", "b", "c"):
        for place in range(12):
            other = copy.deepcopy(state)
            other[name].view(-1).view(torch.int32)[place] ^= 1
            with pytest.raises(ReplicasDifferError, match=f"ranks 0 and 2 hold different values of {name}"):
                check_replicas([drawn(state), drawn(state), drawn(other)])
    check_replicas([drawn(state), drawn(copy.deepcopy(state))])
    check_replicas([()])


def test_of_a_large_one_every_save_takes_another_part_and_no_more_than_a_bit() -> None:
    state = {f"layer{number}": torch.zeros(1 << 20) for number in range(40)}  # 160 MiB
    found = [drawn(state, str(each)) for each in range(3)]
    names = [{sample.tensor for sample in each} for each in found]
    assert (
        all(len(each) == SAMPLE_BYTES // SAMPLE_PIECE_BYTES for each in found) and len(set(map(frozenset, names))) == 3
    )
    sampler, plan = Sampler(), BlockPlanner().plan(state)
    for seed in range(5):
        sampler.stage(plan, state, str(seed))
        assert len(sampler._buffer) == SAMPLE_BYTES


@pytest.mark.parametrize("shape", [(), (1,), (300_000,), (3, 400, 500), (2, 1, 3, 100_000), (1 << 20, 3)], ids=str)
def test_a_piece_is_as_large_as_it_may_be_and_can_be_anywhere(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=torch.float64)
    draw = random.Random(0)
    for _ in range(400):
        piece = _piece_of(tensor, draw)
        assert min(tensor.nbytes, SAMPLE_PIECE_BYTES // 2) <= piece.nbytes <= SAMPLE_PIECE_BYTES
        piece.fill_(1.0)
    assert tensor.sum() > 0.9 * tensor.numel() or tensor.numel() > 400 * SAMPLE_PIECE_BYTES / 8 / 4


def test_how_a_tensor_lies_in_memory_makes_no_difference() -> None:
    image = torch.randn(8, 3, 20, 20)
    assert drawn({"w": image}) == drawn({"w": image.contiguous(memory_format=torch.channels_last)})


def test_what_rank_0_writes_alone_may_differ_and_a_rank_alone_compares_nothing() -> None:
    state = {"model": {"w": torch.ones(3)}, "user": {"of this rank": torch.ones(3)}}
    writer = StateWriter(of_rank_0=frozenset({"user"}))
    storage = Storage(f"memory://{uuid.uuid4().hex}")
    writer.stage(state, rank=0, world_size=2, seed="a")
    assert [each.tensor for each in writer.write(storage, "step=1/attempt=a").samples] == ["model.w"]
    writer.stage(state, rank=0, world_size=1, seed="a")
    assert writer.write(storage, "step=1/attempt=b").samples == ()


def test_a_save_of_ranks_that_differ_commits_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    ranks = Ranks(lambda rank: Storage(tmp_path), 3)
    ranks.begin(1)
    assert isinstance(ranks.wait(), Commit)
    there = Storage(tmp_path).list()
    attempt, other = uuid.uuid4().hex, make_state(2)
    other["model"]["weight"].view(-1)[-1] += 1.0
    ranks.begin(2, of=[0, 2], attempt=attempt)
    ranks.begin(2, of=[1], attempt=attempt, state=other)
    outcome = ranks.wait()
    assert isinstance(outcome, ReplicasDifferError) and "ranks 0 and 1 hold different values of model.weight" in str(
        outcome
    )
    assert Storage(tmp_path).list() == there
    newest = CheckpointStore(Storage(tmp_path), keep=2).latest()
    assert newest is not None and newest.step == 1


def test_what_modules_keep_beside_tensors_may_differ() -> None:
    def samples(value: float) -> Any:
        writer = StateWriter()
        model = {"w": torch.ones(3), "layer._extra_state": {"scale": torch.tensor(value)}}
        writer.stage({"model": model}, rank=0, world_size=2, seed="a")
        return writer.write(Storage(f"memory://{uuid.uuid4().hex}"), "step=1/attempt=a").samples

    check_replicas([samples(1.0), samples(2.0)])
    assert [each.tensor for each in samples(1.0)] == ["model.w"]


def test_ranks_with_other_tensors_are_told_so() -> None:
    one, other = drawn({"a": torch.ones(3), "b": torch.ones(2)}), drawn({"a": torch.ones(3)})
    with pytest.raises(ReplicasDifferError, match="rank 1 does not hold the same tensors"):
        check_replicas([one, other])


def test_what_modules_keep_beside_tensors_is_rank_0s_whatever_others_have(tmp_path: Path) -> None:
    """In other shapes, or not at all; and nobody's share of all else depends on it."""
    storage, attempt = Storage(tmp_path), uuid.uuid4().hex
    extra = [
        {"history": torch.zeros(4), "scale": torch.tensor(0.0)},
        {"history": torch.ones(5), "scale": torch.tensor(1.0), "more": torch.ones(2, 2)},
        {},
    ]
    parts = []
    writers = [StateWriter(of_rank_0=frozenset({"user"})) for _ in extra]
    for rank, (writer, each) in enumerate(zip(writers, extra, strict=True)):
        model = {"a": torch.arange(40.0), "layer._extra_state": each, "z": torch.arange(90.0)}
        state = {
            "model": model,
            "position": {"step": 1},
            "user": {"copy.l": {"_extra_state": each}, "n": torch.ones(3)},
        }
        writer.stage(state, rank=rank, world_size=len(extra), seed=attempt)
        parts.append(writer.write(storage, attempt_prefix(1, attempt)))
    store, kinds = CheckpointStore(storage, keep=1), writers[0].kinds
    commit = store.complete(step=1, attempt=attempt, parts=parts, kinds=kinds, record={}, fence=lambda: None)
    found = store.load(commit)["model"]
    assert torch.equal(found["a"], torch.arange(40.0)) and torch.equal(found["z"], torch.arange(90.0))
    assert found["layer._extra_state"].keys() == extra[0].keys()
    assert all(torch.equal(value, extra[0][name]) for name, value in found["layer._extra_state"].items())


def test_a_tensor_that_another_rank_has_in_another_shape_is_in_no_commit(tmp_path: Path) -> None:
    storage, attempt = Storage(tmp_path), uuid.uuid4().hex
    parts = []
    writers = [StateWriter(), StateWriter()]
    for rank, writer in enumerate(writers):
        model = {"a": torch.zeros(100), "b": torch.zeros(9 + rank)}
        writer.stage({"model": model}, rank=rank, world_size=2, seed=attempt)
        parts.append(writer.write(storage, attempt_prefix(1, attempt)).model_copy(update={"samples": ()}))
    assert [each.tensor for each in parts[1].blocks] == ["model.b"]
    with pytest.raises(ReplicasDifferError, match=r"model\.b is \('float32', \(9,\)\) on rank 0 and .*\(10,\)"):
        CheckpointStore(storage, keep=1).complete(
            step=1, attempt=attempt, parts=parts, kinds=writers[0].kinds, record={}, fence=lambda: None
        )
    assert storage.list() == []
