"""Runs that a mistake in the training function blocks end with its cause and its place."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist

import elastic_ddp as ed
from elastic_ddp.errors import TrainFunctionError, WorkersFailedError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry import read_ledger
from elastic_ddp.telemetry.events import CommitSucceeded
from tests.integration import jobs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init("local", num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("endings")
    (folder / "data").mkdir()
    jobs.write_rows(str(folder / "data"))
    return folder


def fit(folder: Path, name: str, workers: int, train: Callable[[ed.Run], None], **changes: Any) -> ed.RunResult:
    config = jobs.settings(str(folder / "runs"), name, workers, **{"steps": 12, **changes})
    return ed.ElasticTrainer(train, str(folder / "data"), config).fit()


def make_train(
    after_step: Callable[[ed.Run, int], bool | None] = lambda run, step: None,
    in_batch: Callable[[ed.Run, int], object] = lambda run, step: None,
) -> Callable[[ed.Run], None]:
    """Returns a training function that calls `in_batch` in each micro-batch, and ends if `after_step` returns True."""

    def train(run: ed.Run) -> None:
        model = run.prepare(jobs.Model())
        run.prepare(torch.optim.AdamW(model.parameters(), lr=0.001))
        for step in run.steps():
            with step:
                for batch in step.micro_batches():
                    loss = jobs.loss_fn(model, batch)
                    in_batch(run, step.index)
                    step.backward(loss)
                step.optimize()
            if after_step(run, step.index):
                return

    return train


def test_a_run_that_leaves_its_loop_goes_on_with_the_same_command(
    cluster: None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calm = fit(folder, "stays", 1, make_train())
    leave = make_train(lambda run, step: step == 4)
    left = fit(folder, "leaves", 2, leave)
    assert (left.status, left.steps, left.summary["total_steps"]) == ("left", 5, 12)
    assert "run 'leaves' left its loop at step 5 of 12. The same command resumes it" in capsys.readouterr().err
    rest = fit(folder, "leaves", 1, leave)
    assert (rest.status, rest.steps) == ("finished", 12)
    assert (rest.weights_sha256, rest.samples_sha256) == (calm.weights_sha256, calm.samples_sha256)
    again = fit(folder, "leaves", 2, leave)
    assert "has finished its 12 steps" in capsys.readouterr().err and again.summary["sessions"] == 2


def evaluate_on_rank_0(folder: Path) -> Callable[[ed.Run, int], None]:
    def evaluate(run: ed.Run, step: int) -> None:
        if step == 5 and run.rank == 0:
            run.evaluate(jobs.loss_fn, str(folder / "data"), name="val")

    return evaluate


@pytest.mark.chaos
def test_an_evaluation_on_one_rank_ends_the_run_with_the_places_of_all(cluster: None, folder: Path) -> None:
    with pytest.raises(TrainFunctionError) as caught:
        fit(folder, "one-evaluates", 2, make_train(evaluate_on_rank_0(folder)))
    text = str(caught.value)
    assert "rank 0 in run.evaluate(name='val') after 6 steps, at" in text and "in evaluate; rank 1 in " in text
    assert "let step.index decide, never run.rank" in text
    events = read_ledger(Storage(str(folder / "runs" / "one-evaluates")))
    assert not any(event.event in ("hang_detected", "evaluation_finished") for event in events)
    (formed,) = (event for event in events if event.event == "generation_started")
    (failed,) = (event for event in events if event.event == "run_failed")
    assert failed.time - formed.time < 30.0, "long before hang_timeout_s"


@pytest.mark.chaos
def test_a_rank_that_returns_early_ends_the_run(cluster: None, folder: Path) -> None:
    with pytest.raises(TrainFunctionError, match="rank 1 in the final comparison of weights"):
        fit(folder, "returns", 2, make_train(lambda run, step: step == 5 and run.rank == 1))


@pytest.mark.chaos
@pytest.mark.parametrize("reduction", ["canonical", "native"])
def test_a_collective_on_one_rank_ends_the_run(cluster: None, folder: Path, reduction: str) -> None:
    def gather(run: ed.Run, step: int) -> None:
        if step == 5 and run.rank == 0:
            dist.all_gather_object([None, None], "mine")

    with pytest.raises(TrainFunctionError, match=r"rank 0 in the code after step 5, at .* in gather; rank 1 in "):
        fit(folder, f"gathers-{reduction}", 2, make_train(gather), reduction=reduction)


@pytest.mark.chaos
def test_collectives_of_unequal_micro_batches_need_even_micro_batches(cluster: None, folder: Path) -> None:
    def gather(run: ed.Run, step: int) -> None:
        dist.all_gather_object([None] * dist.get_world_size(), "mine")

    train = make_train(in_batch=gather)
    with pytest.raises(
        TrainFunctionError, match=r"4 workers have different numbers of the 6 micro-batches.*Set even_mic"
    ):
        fit(folder, "uneven", 4, train)
    settings: dict[str, Any] = {"even_micro_batches": True, "min_workers": 2}
    kill = jobs.kill_once(str(folder / "killed"), rank=0, step=5)
    result = fit(folder, "even", 3, make_train(kill, gather), **settings)
    assert result.status == "finished"
    assert {generation["world_size"] for generation in result.summary["generations"]} == {2, 3}


@pytest.mark.chaos
@pytest.mark.parametrize("workers", [1, 2])
def test_a_crash_at_the_same_step_ends_the_run_with_signal_and_stack(cluster: None, folder: Path, workers: int) -> None:
    def crash(run: ed.Run, step: int) -> None:
        if step == 7 and run.rank == 0:
            os.abort()

    with pytest.raises(WorkersFailedError) as caught:
        fit(folder, f"crashes-{workers}", workers, make_train(in_batch=crash), checkpoint={"every_steps": 1000})
    assert "failed 3 times in a row without progress" in str(caught.value)
    assert "its process exited: SIGABRT at" in str(caught.value) and 'in crash\n  File "' in str(caught.value)
    events = read_ledger(Storage(str(folder / f"runs/crashes-{workers}")))
    assert sum(event.event == "worker_failed" for event in events) < 7


@pytest.mark.chaos
def test_crashes_at_each_start_end_the_run_after_the_survivor_has_committed(cluster: None, folder: Path) -> None:
    marker = folder / "crashed"

    def crash(run: ed.Run, step: int) -> None:
        if step == 7 and run.rank == 1:
            marker.touch()
            os.abort()

    train = make_train(in_batch=crash)

    def crash_at_start(run: ed.Run) -> None:
        if marker.exists():
            os.abort()
        train(run)

    with pytest.raises(
        WorkersFailedError,
        match=r"3 times in a row .* after 7 steps. .* worker that starts on .* SIGABRT at .* crash_at",
    ):
        fit(folder, "starts", 2, crash_at_start, min_workers=2, checkpoint={"every_steps": 1000})
    events = read_ledger(Storage(str(folder / "runs" / "starts")))
    assert [event.step for event in events if isinstance(event, CommitSucceeded)] == [7]


@pytest.mark.chaos
def test_work_of_rank_0_beyond_the_hang_timeout_ends_the_run_after_three_tries(cluster: None, folder: Path) -> None:
    def work(run: ed.Run, step: int) -> None:
        begun = time.monotonic()
        while step == 3 and run.rank == 0 and time.monotonic() - begun < 100.0:
            torch.randn(200, 200) @ torch.randn(200, 200)

    with pytest.raises(TrainFunctionError, match=r"3 times in a row .* 3 steps.* hung in 'forward', at .* in work"):
        fit(folder, "works", 2, make_train(in_batch=work), hang_timeout_s=15.0, heartbeat_timeout_s=10.0)
