"""Epochs in a training function: schedulers stepped once in each, commits and evaluations at their end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, ExponentialLR, ReduceLROnPlateau, SequentialLR, StepLR

from elastic_ddp.errors import CheckpointError
from elastic_ddp.worker.run import Run
from elastic_ddp.worker.step import Step
from tests.loops import finish
from tests.ranks import run_ranks
from tests.unit.commit_helpers import wait_for_saves
from tests.unit.rank_steps import config_of, run_steps
from tests.unit.single_worker import (
    Model,
    NewRun,
    PeerFailures,
    client_of,
    compute_gradients,
    evaluate_with,
    expect_config_error,
    train,
)

ROWS = 24
"""Three steps of eight rows in each epoch."""


def rates_of(run: Run) -> list[float]:
    """Trains with a scheduler that halves the learning rate after each epoch. Returns it in each step."""
    model: Any = run.prepare(Model())
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    run.prepare(ExponentialLR(optimizer, 0.5), every="epoch")
    rates = []
    for step in run.steps():
        with step:
            rates.append(optimizer.param_groups[0]["lr"])
            compute_gradients(step, model)
            step.optimize()
    finish(run)
    return rates


def test_a_scheduler_of_epochs_is_stepped_after_the_last_step_of_each_also_across_a_resume(new_run: NewRun) -> None:
    assert rates_of(new_run(ROWS, steps=4)) == [1.0, 1.0, 1.0, 0.5]
    assert rates_of(new_run(ROWS, steps=None, epochs=3)) == [0.5, 0.5, 0.25, 0.25, 0.25]


def test_an_epoch_whose_last_step_is_skipped_counts_for_its_scheduler(new_run: NewRun) -> None:
    run = new_run(ROWS, steps=4, on_nonfinite="skip")
    model: Any = run.prepare(Model())
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    run.prepare(ExponentialLR(optimizer, 0.5), every="epoch")
    skipped = []
    for step in run.steps():
        with step:
            for batch in step.micro_batches():
                step.backward(model(batch["x"]).square().mean() * (float("inf") if step.index == 2 else 1.0))
            step.optimize()
        skipped.append(step.skipped)
    assert skipped == [False, False, True, False]
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_scheduler_that_becomes_one_of_epochs_is_an_error(new_run: NewRun) -> None:
    def train_by_steps(run: Run) -> None:
        model: Any = run.prepare(Model())
        optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
        run.prepare(ExponentialLR(optimizer, 0.5))
        for step in run.steps():
            with step:
                compute_gradients(step, model)
                step.optimize()
        finish(run)

    train_by_steps(new_run(ROWS, steps=7))
    with pytest.raises(CheckpointError, match=r"every='step' in the commit, .* every='epoch' in the code"):
        rates_of(new_run(ROWS, steps=10))


def test_the_end_of_an_epoch_is_known_in_its_last_step(new_run: NewRun) -> None:
    run, last = new_run(ROWS, steps=7), list[int]()
    assert run.steps_per_epoch == 3
    train(run, lambda step: last.append(step.index) if step.is_last_of_epoch else None)
    assert last == [2, 5]


def test_a_run_commits_at_the_end_of_every_so_many_epochs(new_run: NewRun) -> None:
    run = new_run(ROWS, steps=8, checkpoint={"every_epochs": 1})
    train(run, wait_for_saves(run))
    assert client_of(run).steps_of("commit_succeeded") == [3, 6, 8]


def test_every_is_for_schedulers_and_is_step_or_epoch(new_run: NewRun) -> None:
    def prepare(every: Any, scheduler: bool) -> Callable[[Run], Any]:
        def body(run: Run) -> None:
            model: Any = run.prepare(Model())
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            run.prepare(optimizer, **({} if scheduler else {"every": every}))
            run.prepare(StepLR(optimizer, 1), every=every)

        return body

    expect_config_error(new_run(), prepare("batch", True), "every='batch'", "StepLR", "'step' or 'epoch'")
    expect_config_error(new_run(), prepare("epoch", False), "every='epoch' with a SGD", "leave it out")


# Steps by the training function.


def stepping(in_block: Callable[[Any, Any], None], after_block: Callable[[Any, Any], None]) -> Callable[[Run], Any]:
    """A training function that calls these with its optimizer and scheduler."""

    def body(run: Run) -> None:
        model: Any = run.prepare(Model())
        optimizer = run.prepare(torch.optim.AdamW(model.parameters(), lr=1.0))
        constant = [ConstantLR(optimizer), ConstantLR(optimizer)]
        scheduler = run.prepare(SequentialLR(optimizer, constant, [3]))
        for step in run.steps():
            with step:
                compute_gradients(step, model)
                step.optimize()
                in_block(optimizer, scheduler)
            after_block(optimizer, scheduler)
        finish(run)

    return body


def nothing(optimizer: Any, scheduler: Any) -> None: ...


def step_optimizer(optimizer: Any, scheduler: Any) -> None:
    optimizer.step()


def step_scheduler(optimizer: Any, scheduler: Any) -> None:
    scheduler.step()


@pytest.mark.parametrize(
    ("in_block", "after_block", "message"),
    [
        (step_optimizer, nothing, ["prepared AdamW", "Remove optimizer.step()"]),
        (nothing, step_optimizer, ["prepared AdamW", "Remove optimizer.step()"]),
        (step_scheduler, nothing, ["prepared SequentialLR", "Remove scheduler.step()", 'every="epoch"']),
        (nothing, step_scheduler, ["prepared SequentialLR", "Remove scheduler.step()", 'every="epoch"']),
    ],
)
def test_a_second_step_of_an_optimizer_or_scheduler_is_an_error(
    new_run: NewRun, in_block: Any, after_block: Any, message: list[str]
) -> None:
    run = new_run(checkpoint={"every_steps": 1})
    expect_config_error(run, stepping(in_block, after_block), *message)
    assert client_of(run).steps_of("commit_succeeded") == [], "a state that was stepped twice is not committed"


def test_an_optimizer_may_be_stepped_before_the_loop_and_one_that_is_not_prepared_in_it(new_run: NewRun) -> None:
    run = new_run()
    model: Any = run.prepare(Model())
    optimizer = run.prepare(torch.optim.AdamW(model.parameters(), lr=1.0))
    optimizer.step()
    own = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    for step in run.steps():
        with step:
            compute_gradients(step, model)
            step.optimize()
            own.step()


# A scheduler that needs a metric.


def train_with_plateau(run: Run) -> tuple[str, list[float]]:
    """Steps a ReduceLROnPlateau in the block, with the result of an evaluation after each epoch."""
    model: Any = run.prepare(Model())
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    run.register("plateau", plateau)
    rates = []
    for step in run.steps():
        with step:
            compute_gradients(step, model)
            step.optimize()
            if step.is_last_of_epoch:
                plateau.step(run.evaluate(lambda *_: torch.zeros(()), "held-out"))
        rates.append(optimizer.param_groups[0]["lr"])
    return finish(run)["weights_sha256"], rates


def test_a_plateau_scheduler_has_the_same_bits_across_a_resume_and_a_failure_in_its_evaluation(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail = PeerFailures()

    def measure(generation: Any) -> float:
        fail(generation.state.position.step)
        return 1.0

    evaluate_with(monkeypatch, measure)
    weights, rates = train_with_plateau(new_run(ROWS, steps=12, folder="calm"))
    assert rates == [0.1] * 5 + [0.05] * 3 + [0.025] * 3 + [0.0125]
    fail = PeerFailures(6)
    train_with_plateau(new_run(ROWS, steps=7))
    assert fail.raised == [6]
    assert train_with_plateau(new_run(ROWS, steps=12)) == (weights, rates[7:])


def _plateau_on_ranks(group: Any) -> tuple[str, list[float]]:
    rates: list[float] = []
    plateau: list[ReduceLROnPlateau] = []

    def body(step: Step, model: Any) -> None:
        [optimizer] = step._state.optimizers
        if not plateau:
            plateau.append(ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5))
        compute_gradients(step, model)
        step.optimize()
        plateau[0].step(step.loss)
        rates.append(optimizer.param_groups[0]["lr"])

    torch.manual_seed(0)
    return run_steps(group, config_of(steps=6), Model(), body)["weights"], rates


def test_a_plateau_scheduler_on_the_training_loss_has_the_same_bits_at_every_world_size() -> None:
    [(weights, rates)] = run_ranks(1, _plateau_on_ranks)
    assert len(set(rates)) > 2
    for world_size in (2, 3):
        assert run_ranks(world_size, _plateau_on_ranks) == [(weights, rates)] * world_size
