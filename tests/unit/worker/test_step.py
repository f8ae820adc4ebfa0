"""A step: its results, and the errors of wrong uses."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import StepLR

from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.data.order import EpochShape
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import ConfigError
from elastic_ddp.worker.run import Run
from elastic_ddp.worker.step import Step
from tests.inside_run import finish, rows_of_rank
from tests.ranks import run_ranks
from tests.unit.rank_steps import config_of, run_steps
from tests.unit.single_worker import (
    PEER_FAILURE,
    Model,
    NewRun,
    client_of,
    compute_gradients,
    expect_config_error,
    prepared,
)

# Results.


def test_a_loop_over_micro_batches_may_end_after_the_last_batch_with_rows(new_run: NewRun) -> None:
    shape = EpochShape(18, 4, 4)
    with_rows = [int(np.count_nonzero(shape.rows(step))) for step in range(6)]
    assert with_rows == [4, 2, 4, 2, 4, 2]  # the second step of an epoch has rows in two of its micro-batches

    def trained(ends_early: bool) -> dict[str, Any]:
        run = new_run(num_rows=18, global_batch_size=16, micro_batch_size=4, folder=str(ends_early))
        model = run.prepare(torch.nn.Linear(3, 1))  # a BatchNorm would refuse a single row
        run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in run.steps():
            with step:
                for place, batch in enumerate(step.micro_batches(), start=1):
                    step.backward(model(batch["x"]).square().mean())
                    if ends_early and place == with_rows[step.index]:
                        break
                step.optimize()
        return finish(run)

    complete, early = trained(False), trained(True)
    assert early == complete


def test_optimize_steps_optimizers_and_schedulers_and_clears_gradients(new_run: NewRun) -> None:
    run = new_run(steps=3)
    net = Model()
    model = run.prepare(net)
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    run.prepare(StepLR(optimizer, 1, 0.5))
    weight = net[0].weight
    moved = []
    for step in run.steps():
        before = weight.detach().clone()
        with step:
            compute_gradients(step, model)
            assert weight.grad is not None
            change = 0.1 * 0.5**step.index * weight.grad
            step.optimize()
        moved.append(bool(change.any()) and torch.allclose(before - weight, change, atol=1e-6))
        assert all(parameter.grad is None for parameter in model.parameters())
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5 ** (step.index + 1))
    assert moved == [True, True, True]


def test_an_error_names_parameters_that_change_inside_the_loop(new_run: NewRun) -> None:
    def unfreeze(model: torch.nn.Module) -> None:
        next(model.parameters()).requires_grad_(True)

    def add(model: torch.nn.Module) -> None:
        model.register_parameter("added", torch.nn.Parameter(torch.zeros(1)))

    for change, name in ((unfreeze, next(iter(dict(Model().named_parameters())))), (add, "added")):
        run = new_run(steps=3)
        module = Model()
        next(module.parameters()).requires_grad_(change is not unfreeze)
        model: Any = run.prepare(module)
        run.prepare(torch.optim.AdamW(filter(lambda parameter: parameter.requires_grad, model.parameters()), lr=0.1))
        with pytest.raises(ConfigError, match=rf"parameters {name} were added.*give them a param_group.*LambdaLR"):
            for step in run.steps():
                if step.index == 1:
                    change(model)
                with step:
                    compute_gradients(step, model)
                    step.optimize()


def test_metrics_are_complete_in_every_step_that_the_ledger_records(new_run: NewRun) -> None:
    run = new_run(steps=6, log_every_steps=2)
    model = prepared(run)
    accuracies = []
    for step in run.steps():
        with step:
            for batch in step.micro_batches():
                step.log(accuracy=0.5)
                step.backward(model(batch["x"]).square().mean())
            assert math.isnan(step.metrics["accuracy"])
            step.optimize()
            step.log(rate=0.1)
            assert step.metrics["rate"] == 0.1
            accuracies.append(step.metrics["accuracy"])
    assert accuracies == pytest.approx([0.5, math.nan, 0.5, math.nan, 0.5, 0.5], nan_ok=True)


def test_loss_and_logged_values_are_means_over_the_global_batch(new_run: NewRun) -> None:
    run = new_run(num_rows=26, steps=2, global_batch_size=16, micro_batch_size=4, log_every_steps=1)
    model = prepared(run)
    losses = []
    for step in run.steps():
        expected = weight = 0.0
        with step:
            for batch in step.micro_batches():
                rows = len(batch["x"])
                loss = model(batch["x"]).square().mean()
                step.log(loss_again=loss, rows=float(rows))
                expected, weight = expected + loss.item() * rows, weight + rows
                step.backward(loss)
            step.optimize()
            step.log(learning_rate=0.5)
        losses.append(step.loss)
        assert step.loss == pytest.approx(expected / weight, rel=1e-6)
        assert step.metrics["loss_again"] == pytest.approx(step.loss, rel=1e-6)
        assert (step.metrics["learning_rate"], math.isnan(step.metrics["accuracy"])) == (0.5, True)
    events = client_of(run).events_of("steps_completed")
    assert [event["loss"] for event in events] == losses
    assert [event["metrics"]["loss_again"] for event in events] == pytest.approx(losses, rel=1e-6)
    assert [event["metrics"]["learning_rate"] for event in events] == [0.5, 0.5]
    assert [event["metrics"]["rows"] for event in events] == [4.0, (3 * 3 + 3 * 3 + 2 * 2 + 2 * 2) / 10]
    assert [event["samples"] for event in events] == [16, 26]


def log_after_the_loop(group: ProcessGroup, config: RunConfig) -> list[dict[str, float]]:
    def body(step: Step, model: Any) -> dict[str, float]:
        losses = []
        for batch in step.micro_batches():
            loss = model(batch["x"]).square().mean()
            step.backward(loss)
            losses.append(loss.item() * len(batch["x"]))
        rows = rows_of_rank(step, group.rank)
        step.log(own_mean=sum(losses) / rows if rows else math.nan, lr=0.1)
        step.optimize()
        return {**step.metrics, "loss": step.loss}

    torch.manual_seed(7)
    returned: list[dict[str, float]] = run_steps(group, config, torch.nn.Linear(3, 1), body, num_rows=26)["returned"]
    return returned


def test_a_value_that_each_rank_logs_after_the_loop_is_averaged_over_their_rows() -> None:
    first, *others = run_ranks(3, log_after_the_loop, config_of(steps=3))
    assert others == [first] * 2  # in the last step only rank 0 has rows
    for metrics in first:
        assert metrics["own_mean"] == pytest.approx(metrics["loss"], rel=1e-6)
        assert metrics["lr"] == 0.1


# Wrong uses of a step. Each function is the body of `with step`.


def backward_twice(step: Step, model: torch.nn.Module) -> None:
    for batch in step.micro_batches():
        loss = model(batch["x"]).mean()
        step.backward(loss)
        step.backward(loss)


def backward_before_the_first_batch(step: Step, model: torch.nn.Module) -> None:
    step.backward(model(torch.ones(2, 3)).mean())


def loss_of_each_row(step: Step, model: torch.nn.Module) -> None:
    for batch in step.micro_batches():
        step.backward(model(batch["x"]))


def batch_without_backward(step: Step, model: torch.nn.Module) -> None:
    for place, batch in enumerate(step.micro_batches()):
        if place != 1:
            step.backward(model(batch["x"]).mean())


def optimized_early(step: Step, model: torch.nn.Module) -> None:
    for place, batch in enumerate(step.micro_batches()):
        step.backward(model(batch["x"]).mean())
        if place == 1:
            break
    step.optimize()


def optimized_twice(step: Step, model: torch.nn.Module) -> None:
    compute_gradients(step, model)
    step.optimize()
    step.optimize()


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (backward_twice, ["step.backward", "once"]),
        (backward_before_the_first_batch, ["step.backward", "once"]),
        (loss_of_each_row, ["step.backward", "(2, 1)", "mean"]),
        (batch_without_backward, ["step 0", "micro-batch 1", "step.backward(loss)"]),
        (optimized_early, ["step 0", "[2, 3]", "step.micro_batches()"]),
        (optimized_twice, ["step.optimize", "twice in step 0"]),
        (compute_gradients, ["step 0", "step.optimize()"]),
    ],
)
def test_an_error_about_a_wrongly_used_step_names_the_fix(
    new_run: NewRun, body: Callable[[Step, torch.nn.Module], None], names: list[str]
) -> None:
    def training(run: Run) -> None:
        model = prepared(run)
        for step in run.steps():
            with step:
                body(step, model)

    expect_config_error(new_run(), training, *names)


def test_a_skipped_step_is_refused(new_run: NewRun) -> None:
    def training(run: Run) -> None:
        prepared(run)
        for _ in run.steps():
            continue

    expect_config_error(new_run(), training, "step 0", "`with step`")


def test_a_method_of_the_model_that_calls_the_model_computes_the_same_loss(new_run: NewRun) -> None:
    class Net(torch.nn.Linear):
        def loss(self, x: torch.Tensor) -> torch.Tensor:
            return self(x).square().mean()

    weights = []
    for how in ("method", "call"):
        run = new_run(folder=how)
        torch.manual_seed(0)
        model = run.prepare(Net(3, 1))
        run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in run.steps():
            with step:
                for batch in step.micro_batches():
                    step.backward(model.loss(batch["x"]) if how == "method" else model(batch["x"]).square().mean())
                step.optimize()
        weights.append(model.weight)
    assert torch.equal(*weights)


def catch_errors_of_backward(step: Step, model: torch.nn.Module, error: Exception) -> None:
    """The backward of one micro-batch raises `error`, and the training function continues."""
    for place, batch in enumerate(step.micro_batches()):
        loss = model(batch["x"]).mean()
        if place == 1:
            loss.register_hook(lambda gradient: fail(error))
        with suppress(Exception):
            step.backward(loss)
    step.optimize()


def fail(error: Exception) -> None:
    raise error


def test_a_step_in_which_an_error_is_caught_is_not_done(new_run: NewRun) -> None:
    run = new_run()
    model = prepared(run)
    with pytest.raises(ConfigError, match=r"step 0: .*MemoryError: no memory"):
        for step in run.steps():
            with step:
                catch_errors_of_backward(step, model, MemoryError("no memory"))
    assert run.position.step == 0


def test_a_peer_failure_that_is_caught_still_repeats_the_step(new_run: NewRun) -> None:
    run = new_run(steps=2)
    model = prepared(run)
    failed = []
    for step in run.steps():
        with step:
            if not failed:
                failed.append(step.index)
                catch_errors_of_backward(step, model, dist.DistNetworkError(PEER_FAILURE))
            else:
                compute_gradients(step, model)
                step.optimize()
    assert run.position.step == 2
    assert client_of(run).joins == [(None, True), (0, True)]


@pytest.mark.parametrize("value", [np.zeros(3), "high"])
def test_log_takes_single_numbers_only(new_run: NewRun, value: Any) -> None:
    run = new_run()
    prepared(run)
    step = next(iter(run.steps()))
    step.log(one=np.ones(1))
    shown = "high" if isinstance(value, str) else "(3,)"
    expect_config_error(run, lambda run: step.log(accuracy=value), "accuracy", shown)


def test_a_step_outside_of_its_block_is_refused(new_run: NewRun) -> None:
    run = new_run()
    model = prepared(run)
    step = next(iter(run.steps()))
    expect_config_error(run, lambda run: compute_gradients(step, model), "step 0", "`with step:`")


def test_code_between_the_last_micro_batch_and_optimize_does_not_wait_for_data(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("elastic_ddp.worker.phase_clock.time.perf_counter", lambda: now[0])
    run = new_run(steps=4)
    model = prepared(run)
    for step in run.steps():
        with step:
            compute_gradients(step, model)
            now[0] += 5.0
            if step.index == 3:
                taken = step.generation.clock.phases.take()
                assert taken["num_steps"] == 1, "the first two steps are not measured, and this one is not done"
                assert (taken["phases"]["data"], taken["phases"]["other"]) == (0.0, 5.0)
            step.optimize()
