"""The metrics in the commits of a run, and which commits are kept for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from elastic_ddp.worker.run import Run
from tests.inside_run import checkpointer_of, finish, leave, restart, state_of, wait_for_save
from tests.unit.single_worker import (
    PEER_FAILURE,
    NewRun,
    Place,
    client_of,
    prepared,
    take_steps,
    train,
    train_and_count,
)
from tests.unit.worker.commit_helpers import break_storage, metrics_by_step, newest_record, wait_for_saves


@pytest.fixture(autouse=True)
def _evaluate_returns_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "elastic_ddp.worker.evaluation.evaluate", lambda generation, job, loss_fn, *_: float(loss_fn(None, None))
    )


def train_and_evaluate(run: Run, values: dict[int, float], *, before_step: bool = False) -> None:
    """Evaluates after the steps of `values`, or before them. The save of each step ends before the next step."""

    def evaluate(value: float) -> None:
        run.evaluate(lambda *_: torch.tensor(value), "held-out")

    model = prepared(run)
    for step in run.steps():
        wait_for_save(run)
        if before_step and step.index in values:
            evaluate(values[step.index])
        with step:
            for batch in step.micro_batches():
                step.backward(model(batch["x"]).square().mean())
                step.log(index=float(step.index))
            step.optimize()
        if not before_step and step.index in values:
            evaluate(values[step.index])
    finish(run)


def test_a_commit_has_the_newest_value_of_every_metric(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run(checkpoint={"every_steps": 1, "keep": 9}, log_every_steps=2)
    train_and_evaluate(run, {1: 0.5, 3: float("nan"), 4: 0.25})
    metrics = metrics_by_step(tmp_path)
    assert [metrics[step].get("validation_loss") for step in sorted(metrics)] == [
        None,
        {"value": 0.5, "step": 2},
        {"value": 0.5, "step": 2},
        None,  # JSON has no NaN
        {"value": 0.25, "step": 5},
        {"value": 0.25, "step": 5},
    ]
    assert [metrics[step]["index"] for step in sorted(metrics)] == [
        {"value": value, "step": step} for value, step in [(0.0, 1), (0.0, 1), (2.0, 3), (2.0, 3), (4.0, 5), (5.0, 6)]
    ]
    assert [metrics[step]["loss"]["step"] for step in sorted(metrics)] == [1, 2, 3, 4, 5, 6]


def test_with_best_metric_the_last_commit_comes_after_the_last_evaluation(new_run: NewRun, tmp_path: Path) -> None:
    settings = {"every_steps": 3, "keep": 1, "keep_best": 1, "best_metric": "validation_loss"}
    train_and_evaluate(new_run(checkpoint=settings), {2: 0.5, 5: 0.125})
    assert {step: metrics["validation_loss"]["value"] for step, metrics in metrics_by_step(tmp_path).items()} == {
        6: 0.125
    }


def test_without_best_metric_an_error_after_the_last_step_loses_no_commit(
    new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(checkpoint={"every_steps": 3, "keep": 9})
    take_steps(run, wait_for_saves(run))
    leave(run, intact=False)
    wait_for_save(run)
    assert sorted(metrics_by_step(tmp_path)) == [3, 6]


def test_the_commits_with_the_best_values_are_kept(new_run: NewRun, tmp_path: Path) -> None:
    settings = {"every_steps": 1, "keep": 1, "keep_best": 2, "best_metric": "validation_loss", "keep_every_steps": 4}
    train_and_evaluate(new_run(checkpoint=settings), {0: 0.9, 1: 0.3, 2: 0.6, 4: 0.5})
    assert sorted(metrics_by_step(tmp_path)) == [2, 4, 5, 6], "4 as a multiple, and 6 as the newest"


def test_an_evaluation_that_follows_a_commit_counts_for_the_next_commit(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run(checkpoint={"every_steps": 1, "keep": 1, "keep_best": 1, "best_metric": "validation_loss"})
    train_and_evaluate(run, {1: 0.9, 2: 0.3, 3: 0.6, 4: 0.5, 5: 0.7}, before_step=True)
    assert sorted(metrics_by_step(tmp_path)) == [3, 6]


def test_a_resumed_run_knows_the_metrics_of_its_commit(new_run: NewRun, tmp_path: Path) -> None:
    train_and_evaluate(new_run(checkpoint={"keep": 9}), {5: 0.5})
    train_and_evaluate(new_run(checkpoint={"keep": 9, "every_steps": 1}, steps=7), {})
    assert metrics_by_step(tmp_path)[7]["validation_loss"] == {"value": 0.5, "step": 6}


def test_a_best_metric_without_a_value_is_warned_about_once(new_run: NewRun) -> None:
    run = new_run(checkpoint={"every_steps": 1, "keep_best": 1, "best_metric": "accuracy"})
    train(run, wait_for_saves(run))
    [warning] = client_of(run).events_of("warned")
    assert "best_metric='accuracy' has no value" in warning["text"] and "have one: loss. " in warning["text"]


def test_the_first_commit_with_other_metrics_warns_about_the_best_metric(new_run: NewRun) -> None:
    run = new_run(checkpoint={"every_steps": 6, "keep_best": 1, "best_metric": "val_loss"})
    train_and_evaluate(run, {2: 0.5})
    [warning] = client_of(run).events_of("warned")
    assert "best_metric='val_loss' has no value" in warning["text"]
    assert "have one: index, loss, validation_loss. " in warning["text"]


def test_a_restart_from_step_0_forgets_the_metrics_of_the_steps_that_it_repeats(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, failed = new_run(checkpoint={"every_steps": 2}), list[int]()
    break_storage(monkeypatch, lambda: not failed)

    def fail(place: Place, step: int) -> None:
        if (place, step) == ("optimizer", 3) and not failed:
            checkpointer_of(run).metrics.update(step, {"accuracy": 0.5})
            wait_for_save(run)
            failed.append(step)
            raise dist.DistNetworkError(PEER_FAILURE)

    train_and_count(run, fail)
    assert client_of(run).steps_of("commit_failed") == [2] and client_of(run).steps_of("commit_succeeded")[0] == 2
    assert set(newest_record(tmp_path)["metrics"]) == {"loss"}


def test_a_restart_with_the_state_of_a_peer_keeps_the_metrics(new_run: NewRun) -> None:
    run = new_run(checkpoint={"every_steps": 2})
    train(run)
    checkpointer, schedule = checkpointer_of(run), checkpointer_of(run).schedule
    checkpointer.metrics.update(6, {"accuracy": 0.5})
    restart(run)
    assert checkpointer._record(state_of(run), 1)["metrics"]["accuracy"] == {"value": 0.5, "step": 6}
    assert schedule.step == 6 and not schedule.should_commit(7) and schedule.should_commit(8)
