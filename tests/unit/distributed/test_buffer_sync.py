"""Buffers of a model during a step, and their combination over ranks."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from elastic_ddp.distributed.buffer_sync import StepBuffers, _differ, resolve_views
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.distributed.reduction_tree import micro_batch_ranges, processing_order
from elastic_ddp.errors import ConfigError
from elastic_ddp.tensors.state_tree import ravel
from elastic_ddp.torch_internals import modules_of
from tests.ranks import run_ranks, single_rank_group

ALONE = single_rank_group()
RULES = {"partly": "mean", "first": "first", "average": "mean", "cache": "mean", "number": "first"}
CONSTANT = [0.1, 1 / 3, float("inf"), float("-inf"), -0.0, 5e-324, 3.0]


class Model(torch.nn.Module):
    """Floating-point and other buffers, some of which change."""

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
    """Makes a step on one rank. The weight of a micro-batch without rows is 0."""
    weights = weights or [1.0] * num_micro_batches
    num_leaves = sum(weight > 0 for weight in weights)
    ranges = micro_batch_ranges(num_micro_batches, group.world_size)
    buffers = StepBuffers(model, RULES)
    buffers.begin()
    owned = processing_order(ranges[group.rank])
    for micro_batch in [m for m in owned if weights[m]] or owned[-1:]:
        model.compute(micro_batch)
        buffers.end_micro_batch(micro_batch, weights[micro_batch] or None)
    if list(model.buffers()):  # all ranks, also one that computed no micro-batch with rows
        buffers.combine(ranges=ranges, num_leaves=num_leaves, divisor=sum(weights), group=group)
    return buffers


def bits(model: torch.nn.Module) -> dict[str, bytes]:
    return {name: buffer.contiguous().numpy().tobytes() for name, buffer in model.named_buffers()}


SHORT = [1.0, 1.0, 1.0, 0.5, 0.0, 0.0]


def two_steps_for_several_m(group: ProcessGroup) -> dict[str, dict[str, bytes]]:
    results = {}
    for name, num_micro_batches, weights in [("3", 3, None), ("7", 7, None), ("short", 6, SHORT)]:
        model = Model()
        for _ in range(2):
            step(model, num_micro_batches, group, weights)
        results[name] = bits(model)
    return results


def test_buffers_have_the_same_bits_at_every_world_size() -> None:
    [expected] = run_ranks(1, two_steps_for_several_m)
    assert expected["3"]["norm.running_mean"] != bits(Model())["norm.running_mean"]
    assert run_ranks(3, two_steps_for_several_m) == [expected] * 3


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_a_buffer_that_nothing_changes_keeps_its_bits(num_micro_batches: int) -> None:
    model = Model()
    for _ in range(3):
        step(model, num_micro_batches, ALONE)
    assert bits(model)["constant"] == bits(Model())["constant"]
    assert bits(model)["mask"] == bits(Model())["mask"]
    # Unchanged elements of a changed buffer keep their bits too.
    assert bits(model)["partly"][4:] == bits(Model())["partly"][4:]
    assert model.partly[0].item() == pytest.approx(3 * (num_micro_batches + 1) / 2)


def test_statistics_are_the_row_weighted_mean_over_micro_batches() -> None:
    weights = [1.0, 1.0, 0.25]
    means = []
    for micro_batch in range(3):
        alone = Model()
        alone.compute(micro_batch)
        means.append(alone.norm.running_mean)
    model = Model()
    step(model, 3, ALONE, weights)
    expected = sum(weight * mean for weight, mean in zip(weights, means, strict=True)) / 2.25
    assert torch.allclose(model.norm.running_mean, expected)


def test_every_micro_batch_starts_from_the_buffers_of_the_step() -> None:
    model = Model()
    model.norm.running_mean.fill_(0.5)
    before = bits(model)
    buffers = StepBuffers(model, RULES)
    buffers.begin()
    for micro_batch in range(3):
        model.compute(micro_batch)
        assert bits(model) != before
        buffers.end_micro_batch(micro_batch, 1.0)
        assert bits(model) == before
    assert buffers.changed
    buffers.begin()
    model.compute(4)
    buffers.end_micro_batch(4, None)  # it has no rows
    assert bits(model) == before and not buffers.changed


def test_integer_buffers_are_those_of_micro_batch_0() -> None:
    model = Model()
    for steps in range(1, 3):
        step(model, 5, ALONE)
        assert model.first.tolist() == [0]
        assert model.norm.num_batches_tracked.item() == steps


def test_a_step_that_is_repeated_after_an_interruption_has_the_same_result() -> None:
    uninterrupted, model = Model(), Model()
    step(uninterrupted, 3, ALONE)
    buffers = StepBuffers(model, RULES)
    buffers.begin()
    model.compute(0)
    buffers.end_micro_batch(0, 1.0)
    model.compute(1)  # a peer fails here
    buffers.revert()
    assert bits(model) == bits(Model())
    step(model, 3, ALONE)
    assert bits(model) == bits(uninterrupted)


def test_a_model_without_buffers_or_in_eval_mode_reports_no_changes() -> None:
    for model in (torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3).eval()):
        buffers = StepBuffers(model)
        buffers.begin()
        model(torch.ones(2, 3))
        buffers.end_micro_batch(0, 1.0)
        assert not buffers.changed


class FilledLater(torch.nn.Module):
    """A model whose first forward fills a cache."""

    def __init__(self, empty: torch.Tensor | None) -> None:
        super().__init__()
        self.register_buffer("cache", empty)

    def compute(self, micro_batch: int) -> None:
        self.cache = torch.full((2,), float(micro_batch))


class Registering(Model):
    """A model that registers a cache in a forward, or makes it longer."""

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
def test_a_buffer_that_is_registered_in_training_raises_an_error(where: str) -> None:
    """A worker that resumes would not have it."""
    model = Registering(where)
    buffers = StepBuffers(model, RULES)
    problem = r".*\(2,\) to \(3,\)" if where == "longer" else ""
    with pytest.raises(ConfigError, match=f"buffer 'cache' of Registering {problem}.*in __init__"):
        for _ in range(2):
            buffers.begin()
            for micro_batch in range(2):
                model.compute(micro_batch)
                buffers.end_micro_batch(micro_batch, 1.0)
            buffers.combine(ranges=[range(2)], num_leaves=2, divisor=2.0, group=ALONE)
            if where == "between steps":
                model.register_buffer("cache", torch.zeros(1))  # as an evaluation may do


@pytest.mark.parametrize("empty", [None, torch.empty(0)], ids=["None", "empty"])
def test_a_buffer_that_a_forward_fills_raises_an_error(empty: torch.Tensor | None) -> None:
    with pytest.raises(ConfigError, match="buffer 'cache' of FilledLater was None or empty"):
        step(FilledLater(empty), 2, ALONE)  # type: ignore[arg-type]


def test_a_step_can_be_reverted_for_an_expanded_buffer() -> None:
    class Masked(Model):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("causal", torch.ones(1, 3).expand(2, 3))
            self.register_buffer("allowed", torch.ones(1, 3, dtype=torch.bool).expand(2, 3))

    model = Masked()
    resolve_views(model)
    buffers = StepBuffers(model, RULES)
    buffers.begin()
    model.compute(0)
    buffers.revert()
    step(model, 2, ALONE)
    assert model.causal.sum() == 6 and model.allowed.all()


class Rotated(torch.nn.Module):
    """Lazily conjugated and negated buffers. A forward assigns a conjugated buffer."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.polar(torch.ones(3), torch.arange(3.0)).conj()
        self.register_buffer("table", table)
        self.register_buffer("sine", table.imag)
        self.register_buffer("average", table.clone())

    def compute(self, micro_batch: int) -> None:
        self.average = (self.average * self.table).conj()


def test_lazily_conjugated_and_negated_buffers_train_and_are_sent_as_what_they_show() -> None:
    lazy, plain = Rotated(), Rotated()
    resolve_views(lazy)
    expected = torch.polar(torch.ones(3), torch.arange(3.0)).resolve_conj()
    assert not any(t.is_conj() or t.is_neg() for t in lazy.state_dict().values())
    assert torch.equal(lazy.table, expected.conj()) and torch.equal(lazy.sine, -expected.imag)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in lazy.state_dict().items())
    step(cast(Any, lazy), 2, ALONE)
    assert torch.allclose(lazy.average, expected**2) and torch.equal(lazy.sine, plain.sine)
    assert ravel(plain.table).view(torch.int64).tolist() == ravel(lazy.table).view(torch.int64).tolist()


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.complex128], ids=str)
def test_buffers_are_compared_bit_by_bit(dtype: torch.dtype) -> None:
    for shape in [(), (3,), (2, 3)]:
        one = torch.ones(shape, dtype=dtype)
        other = one.clone()
        assert not _differ(one, other)
        other.view(-1)[-1] = 0
        assert _differ(one, other) and _differ(one.to(torch.float32), other)
    row = torch.ones(1, 3, dtype=dtype)
    assert not _differ(row[:, 1], row[:, 2].clone()) and _differ(row[:, 1], row[:, 2] * 0)


class Decaying(torch.nn.Module):
    """Each micro-batch flips the sign of a zero."""

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


def test_modules_are_listed_once_each_and_in_the_order_of_torch() -> None:
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()), torch.nn.BatchNorm1d(2))
    model.again, model.absent = model[0], None
    model.register_module("empty", None)
    model[0].append(model[1])
    assert modules_of(model) == list(model.modules())
