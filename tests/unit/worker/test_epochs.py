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
from tests.unit.single_worker import (
    Model,
    NewRun,
    PeerFailures,
    client_of,
    evaluate,
    evaluate_with,
    expect_config_error,
    take_steps,
    train,
)
from tests.unit.worker.commit_helpers import wait_for_saves

ROWS = 24
"""Three steps of eight rows in each epoch."""


def rates_of(run: Run, every: Any = "epoch") -> list[float]:
    """Trains with a scheduler that halves the learning rate after each epoch. Returns it in each step."""
    model: Any = run.prepare(Model())
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    run.prepare(ExponentialLR(optimizer, 0.5), every=every)
    rates = list[float]()
    train(run, lambda step: rates.append(optimizer.param_groups[0]["lr"]), model=model)
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
    rates_of(new_run(ROWS, steps=7), every="step")
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


@pytest.mark.parametrize(
    ("place", "stepped", "message"),
    [
        ("in_block", "optimizer", ["prepared AdamW", "Remove optimizer.step()"]),
        ("after_block", "optimizer", ["prepared AdamW", "Remove optimizer.step()"]),
        ("in_block", "scheduler", ["prepared SequentialLR", "Remove scheduler.step()", 'every="epoch"']),
        ("after_block", "scheduler", ["prepared SequentialLR", "Remove scheduler.step()", 'every="epoch"']),
    ],
)
def test_a_second_step_of_an_optimizer_or_scheduler_is_an_error(
    new_run: NewRun, place: str, stepped: str, message: list[str]
) -> None:
    def body(run: Run) -> None:
        model: Any = run.prepare(Model())
        optimizer = run.prepare(torch.optim.AdamW(model.parameters(), lr=1.0))
        scheduler = run.prepare(SequentialLR(optimizer, [ConstantLR(optimizer), ConstantLR(optimizer)], [3]))
        by_name = {"optimizer": optimizer, "scheduler": scheduler}
        train(run, model=model, **{place: lambda step: by_name[stepped].step()})

    run = new_run(checkpoint={"every_steps": 1})
    expect_config_error(run, body, *message)
    assert client_of(run).steps_of("commit_succeeded") == [], "a state that was stepped twice is not committed"


def test_an_optimizer_may_be_stepped_before_the_loop_and_one_that_is_not_prepared_in_it(new_run: NewRun) -> None:
    run = new_run()
    model: Any = run.prepare(Model())
    optimizer = run.prepare(torch.optim.AdamW(model.parameters(), lr=1.0))
    optimizer.step()
    own = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    take_steps(run, model=model, in_block=lambda step: own.step())


# A scheduler that needs a metric.


def train_with_plateau(run: Run) -> tuple[str, list[float]]:
    """Steps a ReduceLROnPlateau in the block, with the result of an evaluation after each epoch."""
    model: Any = run.prepare(Model())
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    run.register("plateau", plateau)
    rates = list[float]()

    def in_block(step: Step) -> None:
        if step.is_last_of_epoch:
            plateau.step(evaluate(run))

    def after_block(step: Step) -> None:
        rates.append(optimizer.param_groups[0]["lr"])

    return train(run, model=model, in_block=in_block, after_block=after_block)["weights_sha256"], rates


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
