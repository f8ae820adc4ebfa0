"""How a worker ends, for each way in which the training function ends."""

from __future__ import annotations

import asyncio
import errno
import gc
import io
import os
import pdb
import re
import signal
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_ddp.checkpoint import CheckpointStore
from elastic_ddp.data.order import FeedPlan
from elastic_ddp.errors import DataError, StorageError, WorkersFailedError
from elastic_ddp.rendezvous.members import Member
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker import main
from elastic_ddp.worker.job import COMMITS, WorkerContext
from elastic_ddp.worker.loop import Loop
from elastic_ddp.worker.run import Run
from tests.inside_run import job_of, rendezvous_client_of, wait_for_save
from tests.unit.inprocess_rendezvous import InProcessRendezvous
from tests.unit.rendezvous_harness import OPTIONS
from tests.unit.single_worker import (
    CPU,
    PEER_FAILURE,
    FakeClient,
    FakeFeed,
    FakeIndex,
    Model,
    NewRun,
    PeerFailures,
    compute_gradients,
    prepared,
)
from tests.workers import running

Train = Callable[[Run], Any]
LIMIT_S = 20.0
MEMBER = Member(id="m", group_size=1, rank_in_group=0, node="203.0.113.1", node_id="n", pid=1)
CONTEXT = WorkerContext(MEMBER, CPU, {"CPU": 4.0})


@pytest.fixture(autouse=True)
def _shared_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker does not change the process of the tests."""
    monkeypatch.setattr(main.signals, "on_sigterm", lambda act: None)
    monkeypatch.setattr(main, "_set_up_process", lambda config, context: None)


@pytest.fixture
def outcome_of(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> Callable[[Train], dict[str, Any]]:
    """Runs a worker with a training function, and returns the outcome that it reports."""
    reported: list[dict[str, Any]] = []
    monkeypatch.setattr(FakeClient, "end", lambda client, **outcome: reported.append(outcome) or True, raising=False)
    monkeypatch.setattr(FakeClient, "close", lambda client: None, raising=False)

    def end_of(train: Train, session: str = "") -> dict[str, Any]:
        run = new_run()
        job: Any = job_of(run)
        object.__setattr__(job, "train", train)
        object.__setattr__(job, "session", session)
        monkeypatch.setattr(main, "RendezvousClient", lambda *_: rendezvous_client_of(run))
        main.work(job, None, CONTEXT)
        (outcome,) = reported
        return outcome

    return end_of


@pytest.mark.parametrize(("rank", "size", "owned"), [(0, 1, (0, 1, 2, 3)), (1, 2, (2, 3)), (4, 5, (0, 1, 2, 3))])
def test_rows_are_read_while_the_training_function_builds_its_model(
    outcome_of: Callable[[Train], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    size: int,
    owned: tuple[int, ...],
) -> None:
    """Those of the place in the group that starts; alone if the group is larger than a generation can be."""
    plans: list[FeedPlan] = []

    class Feed(FakeFeed):
        def __init__(self, index: FakeIndex, plan: FeedPlan, **options: Any) -> None:
            plans.append(plan)
            super().__init__(index, plan, **options)

    def train(run: Run) -> None:
        assert [(plan.micro_batches, plan.first_step) for plan in plans] == [(owned, 0)]
        model = prepared(run)
        for step in run.steps():
            with step:
                compute_gradients(step, model)
                step.optimize()

    monkeypatch.setattr("elastic_ddp.worker.generation.MicroBatchFeed", Feed)
    monkeypatch.setattr(FakeClient, "member", replace(MEMBER, rank_in_group=rank, group_size=size))
    assert outcome_of(train)["status"] == "finished"
    assert len(plans) == (1 if len(owned) == 4 else 2), "the first generation uses what was read for it"


@pytest.mark.parametrize(("leave_at", "status"), [(None, "finished"), (2, "left"), (0, "left")])
def test_a_loop_that_is_left_before_the_last_step_does_not_finish_the_run(
    outcome_of: Callable[[Train], dict[str, Any]], leave_at: int | None, status: str
) -> None:
    def train(run: Run) -> None:
        model = prepared(run)
        for step in run.steps():
            if step.index == leave_at:
                return
            with step:
                compute_gradients(step, model)
                step.optimize()

    outcome = outcome_of(train)
    assert (outcome["status"], outcome["steps"]) == (status, outcome["total_steps"] if leave_at is None else leave_at)
    assert outcome["weights_sha256"]


def raising(error: Exception) -> Train:
    def train(run: Run) -> None:
        prepared(run)
        for step in run.steps():
            with step:
                raise error

    return train


def in_a_thread(call: Callable[[], Any]) -> Train:
    def train(run: Run) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(call).result()

    return train


class MuteError(RuntimeError):
    def __str__(self) -> str:
        raise TypeError("no text")


NO_GROUP = "no process group before the first step"
ERRORS: dict[str, tuple[Train, str]] = {
    "a rank too early": (lambda run: dist.get_rank(), NO_GROUP),
    "a barrier too early": (lambda run: dist.barrier(), NO_GROUP),
    "a group too early": (lambda run: dist.new_group([0]), NO_GROUP),
    "no text": (raising(MuteError()), "in train\n    raise error"),
    "module": (lambda run: run.prepare(Model()).module, "your own model, without a wrapper. Write `model`"),
    "no_sync": (lambda run: run.prepare(Model()).no_sync, "your own model, without a wrapper. Leave out `no_sync`"),
    "a signal": (
        in_a_thread(lambda: signal.signal(signal.SIGUSR1, signal.SIG_DFL)),
        "only the main thread can handle signals. Leave the",
    ),
    "an event loop": (in_a_thread(asyncio.get_event_loop), "which has no event loop. Use asyncio.run"),
    "a debugger": (
        in_a_thread(lambda: pdb.Pdb(stdin=io.StringIO(), stdout=io.StringIO()).set_trace()),
        "Call trainer.debug() instead of trainer.fit()",
    ),
}
"""Training functions, and a part of the reported error."""


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_of_the_training_function_is_reported_with_its_place_and_advice(
    outcome_of: Callable[[Train], dict[str, Any]], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    train, text = ERRORS[case]
    outcome = outcome_of(train)
    assert (outcome["status"], outcome["kind"]) == ("failed", "TrainFunctionError")
    assert "Traceback" in outcome["error"] and text in outcome["error"]


def test_errors_of_this_package_are_reported_with_their_kind(outcome_of: Callable[[Train], dict[str, Any]]) -> None:
    outcome = outcome_of(raising(DataError("the transform raised KeyError('label')")))
    assert (outcome["kind"], outcome["error"]) == ("DataError", "rank 0: the transform raised KeyError('label')")


def test_a_training_function_whose_decorator_makes_it_a_generator_is_an_error(
    outcome_of: Callable[[Train], dict[str, Any]],
) -> None:
    outcome = outcome_of(lambda run: (None for _ in ()))
    assert outcome["kind"] == "ConfigError" and "returned a generator" in outcome["error"]


def test_a_worker_on_a_node_without_the_runs_storage_reports_it_before_it_trains(
    outcome_of: Callable[..., dict[str, Any]],
) -> None:
    outcome = outcome_of(lambda run: pytest.fail("it trains"), session="today")
    assert outcome["kind"] == "ConfigError"
    assert re.search(r"^node .* does not see storage=.*a folder that they share, or a bucket", outcome["error"])


def test_the_outcome_of_a_failed_run_has_the_steps_and_samples_that_were_done(
    outcome_of: Callable[[Train], dict[str, Any]],
) -> None:
    def fail(run: Run) -> None:
        model = prepared(run)
        for step in run.steps():
            with step:
                compute_gradients(step, model)
                if step.index == 2:
                    raise ValueError("bad row")
                step.optimize()

    outcome = outcome_of(fail)
    assert (outcome["status"], outcome["steps"], outcome["samples"]) == ("failed", 2, 16)


def exit_at_step_2(run: Run) -> None:
    model = prepared(run)
    for step in run.steps():
        with step:
            compute_gradients(step, model)
            step.optimize()
        if step.index == 1 and run.rank == 1:
            os._exit(3)


def test_a_worker_that_ends_its_process_is_reported_with_status_rank_and_step(tmp_path: Path) -> None:
    sizes = {"steps": 4, "global_batch_size": 4, "micro_batch_size": 2}
    with running(tmp_path, exit_at_step_2, CPU, 2, **sizes) as workers:
        workers.finish(LIMIT_S * 2)
        lost = workers.rendezvous.events("worker_failed")[0]
    place = f"{__file__}:{exit_at_step_2.__code__.co_firstlineno + 7} in exit_at_step_2"
    assert lost.error.startswith(f"its process exited: os._exit(3) called by rank 1 at step 2 at {place}\n")


def put(run: Run) -> None:
    torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2))


def test_an_operation_with_other_bits_each_time_ends_the_run_and_is_named(tmp_path: Path) -> None:
    with running(tmp_path, put, CPU, 1, steps=1, global_batch_size=2, micro_batch_size=2) as workers:
        assert workers.rendezvous.has_ended.wait(LIMIT_S * 2)
        failed: Any = workers.rendezvous.actor._coordinator.event_log.outcome
    assert "put_ does not have a deterministic" in failed["error"] and "warn_only=True) at the beg" in failed["error"]


def test_a_restart_of_the_training_function_frees_what_it_had_built(
    outcome_of: Callable[[Train], dict[str, Any]],
) -> None:
    class CyclicModel(Model):
        """Refers to itself, as modules with FSDP do."""

        def __init__(self) -> None:
            super().__init__()
            self.itself = [self]

    built: list[weakref.ref[CyclicModel]] = []

    def train(run: Run) -> None:
        assert not any(reference() for reference in built[1:]), "the fixture keeps the first one"
        model = prepared(run, CyclicModel())
        built.append(weakref.ref(model))
        for step in run.steps():
            with step:
                compute_gradients(step, model)
                step.optimize()
                if step.index == len(built) and len(built) < 3:
                    raise dist.DistNetworkError(PEER_FAILURE)

    gc.disable()  # a collection might free it by chance
    try:
        assert outcome_of(train)["status"] == "finished" and len(built) == 3
    finally:
        gc.enable()


def test_a_worker_whose_training_function_raises_a_peer_failure_is_replaced(
    outcome_of: Callable[[Train], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(run: Run) -> None:
        prepared(run)
        for _ in run.steps():
            monkeypatch.setattr(Loop, "world_size", 2)
            raise dist.DistNetworkError(PEER_FAILURE)

    with pytest.raises(WorkersFailedError, match="raised the failure of another worker"):
        outcome_of(train)


@pytest.fixture
def worked(
    new_run: NewRun, inprocess_rendezvous: Callable[..., InProcessRendezvous]
) -> Callable[..., tuple[InProcessRendezvous, CheckpointStore]]:
    """Runs a worker with a training function. Returns its rendezvous, in this process, and the run's commits."""

    def work(
        train: Callable[[Run, InProcessRendezvous], Any], **changes: Any
    ) -> tuple[InProcessRendezvous, CheckpointStore]:
        job = job_of(new_run(**changes))
        rendezvous = inprocess_rendezvous(replace(OPTIONS, max_failed_saves=job.config.checkpoint.max_failed_saves))
        object.__setattr__(job, "train", lambda run: train(run, rendezvous))
        main.work(job, rendezvous, CONTEXT)
        return rendezvous, CheckpointStore(job.storage.at(COMMITS), keep=1)

    return work


def test_a_running_save_ends_although_the_training_function_fails(
    worked: Callable[..., tuple[InProcessRendezvous, CheckpointStore]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is reported first."""
    write = Storage.write

    def train(run: Run, rendezvous: InProcessRendezvous) -> None:
        def write_after_the_end(storage: Storage, key: str, data: bytes | memoryview) -> None:
            assert not key.startswith("step=") or rendezvous.has_ended.wait(LIMIT_S)
            write(storage, key, data)

        monkeypatch.setattr(Storage, "write", write_after_the_end)
        model = prepared(run)
        for step in run.steps():
            assert step.index < 3, "the loss is NaN"
            with step:
                compute_gradients(step, model)
                step.optimize()

    rendezvous, commits = worked(train, checkpoint={"every_steps": 2})
    outcome = rendezvous.actor._coordinator.event_log.outcome
    assert outcome is not None and outcome["status"] == "failed" and "the loss is NaN" in outcome["error"]
    newest = commits.latest()
    assert newest is not None and newest.step == 2
    assert [event.step for event in rendezvous.events("commit_succeeded")] == [2]
    assert not rendezvous.events("commit_failed")
    assert not rendezvous.actor._coordinator.driver_update(0).is_saving


def test_too_many_failed_saves_end_the_run_with_an_error_that_names_the_cause(
    worked: Callable[..., tuple[InProcessRendezvous, CheckpointStore]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the training function restarts meanwhile."""
    write, fail_in_block = Storage.write, PeerFailures(4)

    def fail(storage: Storage, key: str, data: bytes | memoryview) -> None:
        if key.startswith("step=") and not key.startswith(("step=1/", "step=2/")):
            raise StorageError(f"cannot write {key!r}: no space left") from OSError(errno.ENOSPC, "no space left")
        write(storage, key, data)

    def train(run: Run, rendezvous: InProcessRendezvous) -> None:
        model = prepared(run)
        for step in run.steps():
            wait_for_save(run, LIMIT_S)
            with step:
                compute_gradients(step, model)
                step.optimize()
                fail_in_block(step.index)
            if fail_in_block.raised and step.index == 3:
                assert rendezvous.has_ended.wait(LIMIT_S)

    monkeypatch.setattr(Storage, "write", fail)
    rendezvous, _ = worked(train, checkpoint={"every_steps": 1, "max_failed_saves": 2})
    outcome = rendezvous.actor._coordinator.event_log.outcome
    assert fail_in_block.raised and outcome is not None
    assert (outcome["status"], outcome["kind"]) == ("failed", "StorageError")
    message = r"^3 saves in a row failed \(checkpoint\.max_failed_saves=2\).*step=3.*no space left.* commit: step 2"
    assert re.search(message, outcome["error"])
