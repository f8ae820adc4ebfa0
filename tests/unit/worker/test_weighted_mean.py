"""`step.backward(loss, weight=n)`: the mean over the global batch is weighted by n, at any world size."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.data.order import EpochShape
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import ConfigError
from elastic_ddp.tensors.state_tree import gather_full
from elastic_ddp.worker.loss_scale import LossScale
from elastic_ddp.worker.step import Step
from tests.inside_run import finish, micro_batch_of, state_of
from tests.ranks import run_ranks
from tests.unit.rank_steps import config_of, run_steps
from tests.unit.single_worker import Model, NewRun, client_of, fake_feed, prepared

EMPTY = {(1, 0), (1, 5), (2, 1), (2, 2), (2, 3)}
"""Step and micro-batch of those whose tokens are all masked; their mean is NaN."""


class Net(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def mask_of(x: torch.Tensor, is_empty: bool) -> torch.Tensor:
    """Which of the tokens count: a number that differs from batch to batch."""
    return torch.zeros_like(x[:, :1]) if is_empty else (x[:, :1] > -0.5).float() + (x[:, 1:2] > 0).float() * 3 + 1


def masked_mean(model: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (model(x).square() * mask).sum() / mask.sum()


def weighted_step(step: Step, model: Any) -> list[float]:
    for batch in step.micro_batches():
        mask = mask_of(batch["x"], (step.index, micro_batch_of(step)) in EMPTY)
        step.backward(masked_mean(model, batch["x"], mask), weight=mask.sum())
    gradient = torch.cat([gather_full(parameter.grad).reshape(-1) for parameter in model.parameters()])
    step.optimize()
    return gradient.tolist()


def on_a_rank(group: ProcessGroup, config: RunConfig, num_rows: int) -> dict[str, Any]:
    torch.manual_seed(7)
    return run_steps(group, config, Net(), weighted_step, num_rows=num_rows)


def on_data_of_both_sizes(group: ProcessGroup, configs: list[RunConfig]) -> list[list[dict[str, Any]]]:
    """The last steps of the short epochs have micro-batches of one row, and of none."""
    return [[on_a_rank(group, config, num_rows) for num_rows in (1000, 45)] for config in configs]


def expected_step(num_rows: int) -> tuple[float, list[float]]:
    """The loss and the gradient of the first step, over all tokens of the global batch at once."""
    torch.manual_seed(7)
    model = Net()
    batches = [batch for batch in fake_feed(EpochShape(num_rows, 6, 2), range(6)).step(0) if batch.num_rows]
    x = torch.cat([batch.rows["x"] for batch in batches])
    loss = masked_mean(model, x, torch.cat([mask_of(batch.rows["x"], False) for batch in batches]))
    loss.backward()
    return loss.item(), torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).tolist()


def test_weighted_steps_have_the_same_bits_at_every_world_size() -> None:
    clipped: dict[str, Any] = {"clip_grad_norm": 0.1, "ddp": {"find_unused_parameters": True}}
    configs = [config_of(), config_of(**clipped)]
    [expected] = run_ranks(1, on_data_of_both_sizes, configs)
    for world_size in (2, 3):
        assert run_ranks(world_size, on_data_of_both_sizes, configs) == [expected] * world_size
    for results in expected:
        for num_rows, result in zip((1000, 45), results, strict=True):
            loss, gradient = expected_step(num_rows)
            assert result["losses"][0] == pytest.approx(loss, rel=1e-6)
            assert result["returned"][0] == pytest.approx(gradient, rel=1e-4, abs=1e-7)
            assert np.isfinite(result["losses"]).all()


WAYS: list[dict[str, Any]] = [
    {"reduction": "native", "ddp": {"bucket_cap_mb": 0.0001}},
    {"reduction": "native", "ddp": {"bucket_cap_mb": 0.0001, "static_graph": True}},
    {"strategy": "fsdp"},
]


def in_every_way(group: ProcessGroup) -> list[dict[str, Any]]:
    return [on_a_rank(group, config_of(**changes), 1000) for changes in WAYS]


def test_every_way_to_reduce_gives_the_weighted_mean() -> None:
    loss, gradient = expected_step(1000)
    [canonical] = run_ranks(1, on_a_rank, config_of(), 1000)
    for result in (result for results in run_ranks(2, in_every_way) for result in results):
        assert result["losses"][0] == pytest.approx(loss, rel=1e-5)
        assert result["returned"][0] == pytest.approx(gradient, rel=1e-5, abs=1e-6)
        # In step 1, the last micro-batch of one of the ranks has a weight of 0 and a loss of NaN.
        assert result["losses"] == pytest.approx(canonical["losses"], rel=1e-4)


TOKENS = 3_000_000
"""Tokens of a micro-batch for each that the mask counts."""


def step_of_many_tokens(step: Step, model: Any, empty: range = range(0)) -> bool:
    for batch in step.micro_batches():
        mask = mask_of(batch["x"], step.index == 0 and micro_batch_of(step) in empty)
        step.backward(0.01 * masked_mean(model, batch["x"], mask), weight=TOKENS * mask.sum())
    step.optimize()
    return step.skipped


def with_many_tokens(group: ProcessGroup, config: RunConfig, empty: range = range(0)) -> dict[str, Any]:
    torch.manual_seed(7)
    return run_steps(group, config, Net(), partial(step_of_many_tokens, empty=empty))


def test_fp16_steps_weighted_by_numbers_of_tokens_are_not_skipped() -> None:
    config = config_of(precision="fp16")
    [expected] = run_ranks(1, with_many_tokens, config)
    assert not any(expected["returned"])
    assert expected["loss_scale"] == LossScale(growth_tracker=5, weight_unit=2.0**23)
    assert run_ranks(3, with_many_tokens, config) == [expected] * 3
    assert expected["losses"][0] == pytest.approx(0.01 * expected_step(1000)[0], rel=1e-2)


COMPRESSED = {"reduction": "native", "ddp": {"comm_hook": "fp16"}}


@pytest.mark.parametrize("changes", [{"precision": "fp16", "strategy": "fsdp"}, COMPRESSED])
def test_large_weights_fit_float16_in_every_way_to_reduce(changes: dict[str, Any]) -> None:
    for result in run_ranks(2, with_many_tokens, config_of(**changes)):
        assert not any(result["returned"])
        assert result["losses"][0] == pytest.approx(0.01 * expected_step(1000)[0], rel=1e-2)


def with_empty_beginnings(group: ProcessGroup, config: RunConfig) -> list[dict[str, Any]]:
    """The first weight is 0, or all weights of the first step are."""
    return [with_many_tokens(group, config, empty) for empty in (range(1), range(6))]


def test_a_first_weight_of_0_costs_an_fp16_run_one_step_at_most() -> None:
    config = config_of(precision="fp16", steps=4)
    [expected] = run_ranks(1, with_empty_beginnings, config)
    skipped = [[True, False, False, False], [True, True, False, False]]
    assert [result["returned"] for result in expected] == skipped
    for result in expected:
        assert result["loss_scale"].scale == 2.0**15 and result["loss_scale"].weight_unit >= 2.0**22
    others = run_ranks(3, with_empty_beginnings, config)
    assert [repr(other) for other in others] == [repr(expected)] * 3  # NaN is the loss of an empty step


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_first_weight_of_0_costs_a_float16_hook_nothing(world_size: int) -> None:
    for results in run_ranks(world_size, with_empty_beginnings, config_of(**COMPRESSED)):
        for result, skipped in zip(results, ([], [0]), strict=True):
            assert [step for step, is_skipped in enumerate(result["returned"]) if is_skipped] == skipped
            assert np.isfinite(result["losses"][1:]).all()


def test_a_resumed_fp16_run_keeps_the_unit_of_its_weights(new_run: NewRun) -> None:
    def train(steps: int, folder: str) -> str:
        run = new_run(precision="fp16", steps=steps, folder=folder)
        model: Any = run.prepare(Net())
        run.prepare(torch.optim.AdamW(model.parameters(), lr=0.1))
        for step in run.steps():
            with step:
                assert not step_of_many_tokens(step, model)
        assert state_of(run).loss_scale is not None and state_of(run).loss_scale.weight_unit > 1000
        return str(finish(run)["weights_sha256"])

    train(2, "resumed")
    assert train(4, "resumed") == train(4, "straight")


def test_a_step_whose_weights_are_all_zero_is_skipped(new_run: NewRun) -> None:
    run = new_run(steps=3)
    model: Any = run.prepare(Net())
    run.prepare(torch.optim.AdamW(model.parameters(), lr=0.1))
    skipped = []
    for step in run.steps():
        with step:
            weighted_step_of_nothing = step.index == 1
            for batch in step.micro_batches():
                mask = mask_of(batch["x"], weighted_step_of_nothing)
                step.backward(masked_mean(model, batch["x"], mask), mask.sum())
            step.optimize()
        skipped.append(step.skipped)
    assert skipped == [False, True, False]
    assert client_of(run).events_of("step_skipped")[0]["reason"] == "the weights of all micro-batches are 0"


@pytest.mark.parametrize("weight", [-1, math.nan, torch.ones(2), "all"])
def test_a_weight_is_one_finite_number_that_is_not_negative(new_run: NewRun, weight: Any) -> None:
    run = new_run()
    model = prepared(run)
    message = r"step.backward got weight=.*finite number that is not negative"
    with pytest.raises(ConfigError, match=message), next(run.steps()) as step:
        for batch in step.micro_batches():
            step.backward(model(batch["x"]).mean(), weight=weight)


def mixed(group: ProcessGroup, config: RunConfig) -> str:
    def body(step: Step, model: Any) -> None:
        for batch in step.micro_batches():
            step.backward(model(batch["x"]).mean(), weight=None if micro_batch_of(step) == 0 else 2)
        step.optimize()

    with pytest.raises(ConfigError) as caught:
        run_steps(group, config, Model(), body)
    return str(caught.value)


def test_weights_for_some_micro_batches_only_are_refused_on_every_rank() -> None:
    for message in run_ranks(2, mixed, config_of()):
        assert "a weight for some micro-batches, and none for [0]" in message
