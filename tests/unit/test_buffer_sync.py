"""Buffers through the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from elastic_ddp.distributed.buffer_sync import StepBuffers, _differ, unshare_buffers
from elastic_ddp.distributed.process_group import Assignment, ProcessGroup
from elastic_ddp.distributed.reduction_tree import micro_batch_ranges, processing_order
from elastic_ddp.distributed.store import StoreConnection
from elastic_ddp.errors import ConfigError
from tests.ranks import run_ranks

ALONE = ProcessGroup(
    Assignment(generation=1, rank=0, world_size=1, store_host="", store_port=0, reason="start"),
    torch.device("cpu"),
    StoreConnection(),
)
"""A group of one has nothing to communicate."""
CONSTANT = [0.1, 1 / 3, float("inf"), float("-inf"), -0.0, 5e-324, 3.0]


class Model(torch.nn.Module):
    """Buffers that change and buffers that do not, floating-point and other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("constant", torch.tensor(CONSTANT, dtype=torch.float64))
        self.register_buffer("partly", torch.tensor([0.0, *CONSTANT]))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("first", torch.tensor([-1], dtype=torch.int32))
        self.register_buffer("nothing", torch.empty(0))

    def compute(self, micro_batch: int) -> None:
        generator = torch.Generator().manual_seed(micro_batch)
        self.norm(torch.randn(8, 3, generator=generator) * 10**micro_batch)
        self.partly[0] += micro_batch + 1
        self.first.fill_(micro_batch)


def step(
    model: torch.nn.Module, num_micro_batches: int, group: ProcessGroup, weights: list[float] | None = None
) -> StepBuffers:
    """A step on one rank; `weights` of micro-batches, 0 for one without rows."""
    weights = weights or [1.0] * num_micro_batches
    num_leaves = sum(weight > 0 for weight in weights)
    ranges = micro_batch_ranges(num_micro_batches, group.world_size)
    buffers = StepBuffers(model)
    buffers.begin()
    mine = processing_order(ranges[group.rank])
    for micro_batch in [m for m in mine if weights[m]] or mine[-1:]:
        model.compute(micro_batch)
        buffers.end_micro_batch(micro_batch, weights[micro_batch] or None)
    if list(model.buffers()):  # as the ranks agree: one of them may have computed a micro-batch without rows only
        buffers.combine(ranges=ranges, num_leaves=num_leaves, divisor=sum(weights), group=group)
    return buffers


def bits(model: torch.nn.Module) -> dict[str, bytes]:
    return {name: buffer.contiguous().numpy().tobytes() for name, buffer in model.named_buffers()}


SHORT = [1.0, 1.0, 1.0, 0.5, 0.0, 0.0]


def two_steps_for_several_m(group: ProcessGroup) -> dict[str, dict[str, bytes]]:
    found = {}
    for name, num_micro_batches, weights in [("3", 3, None), ("5", 5, None), ("7", 7, None), ("short", 6, SHORT)]:
        model = Model()
        for _ in range(2):
            step(model, num_micro_batches, group, weights)
        found[name] = bits(model)
    return found


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in the processes of `run_ranks`: another number of threads adds up a batch in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_buffers_have_the_same_bits_at_every_world_size(one_thread: None) -> None:
    calm = two_steps_for_several_m(ALONE)
    assert calm["3"]["norm.running_mean"] != bits(Model())["norm.running_mean"]
    for world_size in (2, 3):
        for found in run_ranks(world_size, two_steps_for_several_m):
            assert found == calm


@pytest.mark.parametrize("num_micro_batches", [1, 3, 5, 7])
def test_a_buffer_that_nothing_changes_keeps_its_bits(num_micro_batches: int) -> None:
    model = Model()
    for _ in range(3):
        step(model, num_micro_batches, ALONE)
    assert bits(model)["constant"] == bits(Model())["constant"]
    assert bits(model)["mask"] == bits(Model())["mask"]
    # Nor does a part of a buffer, where another part of it changes.
    assert bits(model)["partly"][4:] == bits(Model())["partly"][4:]
    assert model.partly[0].item() == pytest.approx(3 * (num_micro_batches + 1) / 2)


def test_statistics_are_the_mean_of_what_each_micro_batch_would_have_left_by_rows() -> None:
    weights = [1.0, 1.0, 0.25]
    left = []
    for micro_batch in range(3):
        alone = Model()
        alone.compute(micro_batch)
        left.append(alone.norm.running_mean)
    model = Model()
    step(model, 3, ALONE, weights)
    expected = sum(weight * mean for weight, mean in zip(weights, left, strict=True)) / 2.25
    assert torch.allclose(model.norm.running_mean, expected)


def test_every_micro_batch_starts_from_the_buffers_that_the_step_started_from() -> None:
    model = Model()
    model.norm.running_mean.fill_(0.5)
    before = bits(model)
    buffers = StepBuffers(model)
    buffers.begin()
    for micro_batch in range(3):
        model.compute(micro_batch)
        assert bits(model) != before
        buffers.end_micro_batch(micro_batch, 1.0)
        assert bits(model) == before
    assert buffers.changed


def test_integer_buffers_are_those_of_micro_batch_0() -> None:
    model = Model()
    for steps in range(1, 3):
        step(model, 5, ALONE)
        assert model.first.tolist() == [0]
        assert model.norm.num_batches_tracked.item() == steps


def test_a_micro_batch_without_rows_leaves_nothing() -> None:
    model = Model()
    buffers = StepBuffers(model)
    buffers.begin()
    model.compute(4)
    buffers.end_micro_batch(4, None)
    assert bits(model) == bits(Model())
    assert not buffers.changed


def test_an_interrupted_micro_batch_is_undone_and_a_step_that_is_redone_ends_the_same() -> None:
    calm, model = Model(), Model()
    step(calm, 3, ALONE)
    buffers = StepBuffers(model)
    buffers.begin()
    model.compute(0)
    buffers.end_micro_batch(0, 1.0)
    model.compute(1)  # the peer is lost here
    buffers.revert()
    assert bits(model) == bits(Model())
    step(model, 3, ALONE)
    assert bits(model) == bits(calm)


def test_an_unchanged_model_does_not_ask_for_a_combination() -> None:
    model = Model().eval()
    buffers = StepBuffers(model)
    buffers.begin()
    for micro_batch in range(2):
        model.norm(torch.ones(2, 3))
        buffers.end_micro_batch(micro_batch, 1.0)
    assert not buffers.changed


def test_a_model_without_buffers_has_nothing_to_do() -> None:
    class Plain(torch.nn.Linear):
        def compute(self, micro_batch: int) -> None: ...

    model: Any = Plain(2, 2)
    assert not step(model, 3, ALONE).changed


class FilledLater(torch.nn.Module):
    """A cache that the first forward makes."""

    def __init__(self, empty: torch.Tensor | None) -> None:
        super().__init__()
        self.register_buffer("cache", empty)

    def compute(self, micro_batch: int) -> None:
        self.cache = torch.full((2,), float(micro_batch))


class Registering(Model):
    """A cache that a forward registers, or makes longer."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where, self._forwards = where, 0
        if where == "longer":
            self.register_buffer("cache", torch.zeros(2), persistent=False)

    def compute(self, micro_batch: int) -> None:
        super().compute(micro_batch)
        self._forwards += 1
        if self._where in ("first", "longer") or (self._where, self._forwards) in (("later", 2), ("second step", 3)):
            self.register_buffer("cache", torch.zeros(3), persistent=False)


@pytest.mark.parametrize("where", ["first", "later", "longer", "second step", "between steps"])
def test_a_buffer_that_is_registered_in_training_is_refused_by_name(where: str) -> None:
    """Nobody who resumes has it, and so nobody could."""
    model = Registering(where)
    buffers = StepBuffers(model)
    what = r"had the shape \(2,\) before a forward made it \(3,\)" if where == "longer" else "was made by a forward"
    with pytest.raises(ConfigError, match=f"the buffer 'cache' of Registering {what}.*in __init__"):
        for _ in range(2):
            buffers.begin()
            for micro_batch in range(2):
                model.compute(micro_batch)
                buffers.end_micro_batch(micro_batch, 1.0)
            buffers.combine(ranges=[range(2)], num_leaves=2, divisor=2.0, group=ALONE)
            if where == "between steps":
                model.register_buffer("cache", torch.zeros(1))  # an evaluation, for example


@pytest.mark.parametrize("empty", [None, torch.empty(0)], ids=["None", "empty"])
def test_a_buffer_that_a_forward_makes_is_refused_by_name(empty: torch.Tensor | None) -> None:
    with pytest.raises(ConfigError, match="the buffer 'cache' of FilledLater was None or empty"):
        step(FilledLater(empty), 2, ALONE)  # type: ignore[arg-type]


def test_a_step_can_be_taken_back_with_a_buffer_whose_elements_shared_their_memory() -> None:
    class Masked(Model):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("causal", torch.ones(1, 3).expand(2, 3))
            self.register_buffer("allowed", torch.ones(1, 3, dtype=torch.bool).expand(2, 3))

    model = Masked()
    unshare_buffers(model)
    buffers = StepBuffers(model)
    buffers.begin()
    model.compute(0)
    buffers.revert()
    step(model, 2, ALONE)
    assert model.causal.sum() == 6 and model.allowed.all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.float64, torch.complex128], ids=str)
def test_what_differs_is_told_by_bits(dtype: torch.dtype) -> None:
    for shape in [(), (3,), (2, 3)]:
        one = torch.ones(shape, dtype=dtype)
        other = one.clone()
        assert not _differ(one, other)
        other.view(-1)[-1] = 0
        assert _differ(one, other) and _differ(one.to(torch.float32), other)
    row = torch.ones(1, 3, dtype=dtype)
    assert not _differ(row[:, 1], row[:, 2].clone()) and _differ(row[:, 1], row[:, 2] * 0)


class Decaying(torch.nn.Module):
    """A micro-batch leaves a zero of the other sign."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(2))

    def compute(self, micro_batch: int) -> None:
        self.average.mul_(-0.9)


def test_every_micro_batch_starts_from_zeros_of_the_same_sign() -> None:
    for num_micro_batches in (1, 2, 3):
        model = Decaying()
        step(cast(Any, model), num_micro_batches, ALONE)
        assert not model.average.signbit().any()
