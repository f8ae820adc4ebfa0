"""fp16: the loss is scaled, ranks agree on overflow, and the scale belongs to the state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import NonFiniteError
from elastic_ddp.worker import loss_scale
from elastic_ddp.worker.loss_scale import MIN_SCALE, LossScale
from elastic_ddp.worker.run import Run
from elastic_ddp.worker.step import Step
from tests.inside_run import finish, state_of
from tests.ranks import run_ranks
from tests.unit.rank_steps import config_of, run_steps
from tests.unit.single_worker import Model, NewRun, client_of

OVERFLOWS = {2: 1e3, 3: 1e3}
"""Factors of the loss, by step, with which gradients overflow float16 at a scale of 2^16."""
TINY = 1e-7
"""A factor of the loss with which gradients underflow float16 without a scale."""


def compute(step: Step, model: Any, factor: float) -> None:
    for batch in step.micro_batches():
        step.backward(factor * model(batch["x"]).square().mean())


def train(run: Run, factors: dict[int, float], default: float = 0.01) -> dict[str, Any]:
    """Trains with the loss times `factors[step]`. Returns the outcome, and which steps were skipped."""
    model: Any = run.prepare(Model())
    run.prepare(torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-16))
    skipped = []
    for step in run.steps():
        with step:
            compute(step, model, factors.get(step.index, default))
            step.optimize()
        if step.skipped:
            skipped.append(step.index)
    return {**finish(run), "skipped": skipped}


def test_the_scale_follows_the_rule_of_torchs_grad_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 3)
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight])
    ours, overflows = LossScale(), [0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]
    for overflow in overflows:
        scaler.scale(weight.sum() * 0).backward()
        weight.grad = torch.tensor([math.inf if overflow else 1.0])
        scaler.step(optimizer)
        scaler.update()
        ours = ours.after(overflow=bool(overflow))
        assert ours.scale == scaler.get_scale()


def test_the_scale_keeps_gradients_that_float16_would_round_to_zero(new_run: NewRun) -> None:
    run = new_run(precision="fp16", log_every_steps=1, clip_grad_norm=1.0)
    train(run, {}, TINY)
    full = new_run(precision="fp32", log_every_steps=1, clip_grad_norm=1.0, folder="full")
    train(full, {}, TINY)
    logged = [client_of(each).events_of("steps_completed") for each in (run, full)]
    norms, expected = ([event["metrics"]["grad_norm"] for event in events] for events in logged)
    losses, expected_losses = ([event["loss"] for event in events] for events in logged)
    assert norms[0] > 0 and norms[0] == pytest.approx(expected[0], rel=1e-2)
    assert losses[0] == pytest.approx(expected_losses[0], rel=1e-2)


def test_a_step_whose_gradients_overflow_is_skipped_and_counted(new_run: NewRun) -> None:
    run = new_run(precision="fp16", log_every_steps=1)
    assert train(run, OVERFLOWS)["skipped"] == [2, 3]
    events = client_of(run).events_of("step_skipped")
    assert [(event["step"], event["loss_scale"]) for event in events] == [(3, 2.0**15), (4, 2.0**14)]
    assert "gradients overflow at a loss scale of 65536" in events[0]["reason"]
    scales = [event["metrics"]["loss_scale"] for event in client_of(run).events_of("steps_completed")]
    assert scales == [2.0**16] * 3 + [2.0**15] + [2.0**14] * 2


def test_a_resumed_run_has_the_scale_and_the_bits_of_one_that_was_not_stopped(new_run: NewRun) -> None:
    expected = train(new_run(precision="fp16", folder="straight"), OVERFLOWS)
    train(new_run(precision="fp16", steps=4), OVERFLOWS)
    resumed = new_run(precision="fp16", steps=6)
    outcome = train(resumed, OVERFLOWS)
    assert state_of(resumed).loss_scale == LossScale(2.0**14, growth_tracker=2)
    assert outcome["weights_sha256"] == expected["weights_sha256"]


def test_a_loss_that_is_not_finite_is_no_overflow(new_run: NewRun) -> None:
    run = new_run(precision="fp16")
    with pytest.raises(NonFiniteError, match=r"step 1: the loss of micro-batch 0 is nan.*above 65504 \(use bf16\)"):
        train(run, {1: math.nan})


def test_gradients_that_overflow_at_the_smallest_scale_stop_the_run(new_run: NewRun) -> None:
    run = new_run(precision="fp16")
    state_of(run).loss_scale = LossScale(2 * MIN_SCALE)
    with pytest.raises(NonFiniteError, match=r"step 2: the gradient of .*weight.* is NaN or infinite"):
        train(run, {1: 1e30, 2: 1e30})


def on_a_rank(group: ProcessGroup, config: RunConfig) -> dict[str, Any]:
    torch.manual_seed(7)

    def body(step: Step, model: Any) -> bool:
        compute(step, model, OVERFLOWS.get(step.index, 0.001))
        step.optimize()
        return step.skipped

    return run_steps(group, config, Model(), body)


def test_ranks_agree_on_overflow_and_have_the_same_bits_at_every_world_size() -> None:
    config = config_of(precision="fp16", clip_grad_norm=0.5)
    [expected] = run_ranks(1, on_a_rank, config)
    assert expected["returned"] == [False, False, True, True, False]
    assert expected["loss_scale"] == LossScale(2.0**14, growth_tracker=1)
    for world_size in (2, 3):
        assert run_ranks(world_size, on_a_rank, config) == [expected] * world_size


def with_both_strategies(group: ProcessGroup) -> list[dict[str, Any]]:
    settings = {"precision": "fp16", "reduction": "native"}
    return [on_a_rank(group, config_of(strategy=strategy, **settings)) for strategy in ("ddp", "fsdp")]


def test_fp16_also_scales_with_the_native_reduction() -> None:
    expected = run_ranks(1, on_a_rank, config_of())[0]["losses"]  # fp32
    for result in (result for results in run_ranks(2, with_both_strategies) for result in results):
        assert result["returned"] == [False, False, True, True, False]
        assert result["losses"][:2] == pytest.approx(expected[:2], rel=1e-2)
