"""A NaN or infinite loss or gradient: every rank notices it in the step, and no commit holds what it would cause."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ddp.checkpoint.manifest import committed_steps
from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import NonFiniteError
from elastic_ddp.telemetry.event import parse
from elastic_ddp.telemetry.summary import summarize
from elastic_ddp.worker.run import Run
from elastic_ddp.worker.step import Step
from tests.inside_run import finish, micro_batch_of, state_of, wait_for_save
from tests.ranks import run_ranks
from tests.unit.rank_steps import config_of, run_steps
from tests.unit.single_worker import Model, NewRun, client_of
from tests.unit.worker.commit_helpers import commits_in

Fault = Callable[[torch.Tensor, Any], torch.Tensor]
"""Changes the loss of a micro-batch, given the model."""


def nan_loss(loss: torch.Tensor, model: Any) -> torch.Tensor:
    return loss * math.nan


def infinite_loss(loss: torch.Tensor, model: Any) -> torch.Tensor:
    return loss + math.inf


def nan_gradient(loss: torch.Tensor, model: Any) -> torch.Tensor:
    """Keeps the value of the loss: the derivative of the square root is infinite at zero."""
    return loss + (0 * model.get_parameter("3.bias")).sum().sqrt()


def compute(step: Step, model: Any, fault: Fault, at: tuple[int, int] = (2, 1)) -> None:
    """Computes the gradients of a step, with a fault in one micro-batch of one step."""
    for batch in step.micro_batches():
        loss = model(batch["x"]).square().mean()
        step.backward(fault(loss, model) if (step.index, micro_batch_of(step)) == at else loss)


def train(run: Run, fault: Fault) -> dict[str, Any]:
    """Returns the state after each step, which `fault` breaks in step 2."""
    model: Any = run.prepare(Model())
    optimizer = run.prepare(torch.optim.AdamW(model.parameters(), lr=0.1))
    run.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9))
    states = []
    for step in run.steps():
        with step:
            compute(step, model, fault)
            step.optimize()
        tensors = {name: value.clone() for name, value in model.state_dict().items()}
        states.append((tensors, optimizer.param_groups[0]["lr"], step.skipped))
    return {**finish(run), "states": states}


@pytest.mark.parametrize(
    ("fault", "clip_grad_norm", "what"),
    [
        (nan_loss, None, r"the loss of micro-batch 1 is nan\. It has rows 17, 21 of the data set\. The weights"),
        (infinite_loss, 0.5, "the loss of micro-batch 1 is inf"),
        (nan_gradient, None, "the gradient of 3.bias is NaN or infinite"),
        (nan_gradient, 0.5, "the gradient of 3.bias is NaN or infinite"),
    ],
)
def test_a_value_that_is_not_finite_stops_the_run_before_it_changes_anything(
    new_run: NewRun, fault: Fault, clip_grad_norm: float | None, what: str
) -> None:
    run = new_run(clip_grad_norm=clip_grad_norm)
    with pytest.raises(NonFiniteError, match=f"^step 2: {what}") as caught:
        train(run, fault)
    assert 'on_nonfinite = "skip"' in str(caught.value) and "For other data, " in str(caught.value)
    assert run.position.step == 2
    assert state_of(run).nonfinite_parameters() == []


@pytest.mark.parametrize(("fault", "clip_grad_norm"), [(nan_loss, 0.5), (infinite_loss, None), (nan_gradient, 0.5)])
def test_a_skipped_step_changes_nothing_but_the_position_and_is_counted(
    new_run: NewRun, fault: Fault, clip_grad_norm: float | None
) -> None:
    run = new_run(on_nonfinite="skip", clip_grad_norm=clip_grad_norm)
    outcome = train(run, fault)
    (before, lr_before, _), (after, lr_after, skipped) = outcome["states"][1:3]
    assert [state[2] for state in outcome["states"]] == [False, False, True, False, False, False]
    assert skipped and lr_before == lr_after
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (outcome["steps"], outcome["samples"]) == (6, 48)
    assert all(value.isfinite().all() for value in outcome["states"][-1][0].values())
    [event] = client_of(run).events_of("step_skipped")
    assert event["step"] == 3 and event["reason"].startswith("the ")
    assert summarize(map(parse, client_of(run).events))["skipped_steps"] == 1


def steep(loss: torch.Tensor, model: Any) -> torch.Tensor:
    """Adds a gradient of 1e30, whose square float32 cannot hold."""
    return loss + (model.get_parameter("3.bias") * 1e30).sum() * 4


def test_large_finite_gradients_are_an_error_only_where_they_are_clipped(new_run: NewRun) -> None:
    assert len(train(new_run(folder="large", clip_grad_norm=None), steep)["states"]) == 6
    with pytest.raises(NonFiniteError, match="cannot be clipped"):
        train(new_run(folder="clipped", clip_grad_norm=1.0), steep)


def test_nothing_is_checked_on_request(new_run: NewRun) -> None:
    run = new_run(on_nonfinite="ignore")
    outcome = train(run, nan_loss)
    assert outcome["steps"] == 6 and outcome["states"][-1][0]["3.bias"].isnan().all()


def test_weights_that_the_optimizer_made_infinite_are_not_committed(new_run: NewRun, tmp_path: Path) -> None:
    """The gradient is finite, so only the next step would notice, after a commit that displaces the good ones."""
    run = new_run(checkpoint={"every_steps": 1, "keep": 1})
    model = run.prepare(torch.nn.Linear(3, 1))
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(NonFiniteError, match="after 4 steps the weights of weight, bias are NaN or infinite"):
        for step in run.steps():
            with step:
                wait_for_save(run)
                for batch in step.micro_batches():
                    step.backward(1e3 * model(batch["x"]).mean())
                optimizer.param_groups[0]["lr"] = 3e38 if step.index == 3 else 0.1
                step.optimize()
    wait_for_save(run)
    assert committed_steps(commits_in(tmp_path).listing()) == [3]


def on_a_rank(
    group: ProcessGroup, config: RunConfig, at: tuple[int, int] = (2, 0), fault: Fault = nan_gradient
) -> dict[str, Any]:
    torch.manual_seed(7)

    def body(step: Step, model: Any) -> bool:
        compute(step, model, fault, at)
        step.optimize()
        return step.skipped

    return run_steps(group, config, Model(), body)


def with_two_faults(group: ProcessGroup, config: RunConfig) -> list[dict[str, Any]]:
    return [on_a_rank(group, config, at) for at in ((2, 0), (3, 5))]


def test_ranks_skip_the_same_steps_and_have_the_same_bits_at_every_world_size() -> None:
    config = config_of(on_nonfinite="skip")
    [expected] = run_ranks(1, with_two_faults, config)
    assert [result["returned"].index(True) for result in expected] == [2, 3]
    for world_size in (2, 3):
        assert run_ranks(world_size, with_two_faults, config) == [expected] * world_size


def on_two_ranks_of_fsdp(group: ProcessGroup) -> list[list[bool]]:
    settings: dict[str, Any] = {"on_nonfinite": "skip", "strategy": "fsdp"}
    return [on_a_rank(group, config_of(clip_grad_norm=norm, **settings))["returned"] for norm in (None, 0.5)]


def test_ranks_of_fsdp_skip_a_step_when_the_shard_of_one_is_not_finite() -> None:
    assert run_ranks(2, on_two_ranks_of_fsdp) == [[[False, False, True, False, False]] * 2] * 2


def messages(group: ProcessGroup) -> list[str]:
    found = []
    for strategy, fault in (("ddp", nan_loss), ("ddp", nan_gradient), ("fsdp", nan_gradient)):
        with pytest.raises(NonFiniteError) as caught:
            on_a_rank(group, config_of(strategy=strategy), fault=fault)
        found.append(str(caught.value))
    return found


def test_every_rank_names_the_rows_or_the_parameter_with_a_value_that_is_not_finite() -> None:
    for of_loss, *of_gradients in run_ranks(2, messages):
        assert of_loss.startswith("step 2: the loss of micro-batch 0 is nan. It has rows 24, 30 of the data set. ")
        assert all("step 2: the gradient of 3.bias is NaN" in message for message in of_gradients)
