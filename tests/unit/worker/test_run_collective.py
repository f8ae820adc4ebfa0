"""Tasks that all ranks do together outside of steps: evaluations and the last commit, when a peer fails in them."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from elastic_ddp.checkpoint import CommitCatalog
from elastic_ddp.distributed.assignment import Assignment
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import WorkersFailedError
from elastic_ddp.rendezvous.client import RunStopped
from elastic_ddp.rendezvous.members import JoinRequest
from elastic_ddp.worker.collective_tasks import Task
from elastic_ddp.worker.generation import Generation
from elastic_ddp.worker.run import Run
from elastic_ddp.worker.step import Step
from elastic_ddp.worker.worker_membership import ConsecutiveFailures, RestartTraining
from tests.inside_run import finish, state_of
from tests.unit.single_worker import (
    PEER_FAILURE,
    FakeClient,
    NewRun,
    PeerFailures,
    break_down,
    client_of,
    compute_gradients,
    evaluate,
    evaluate_with,
    prepared,
    take_steps,
    train,
    train_and_count,
)
from tests.unit.worker.commit_helpers import commits_in


def fail_in_barriers(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """A peer fails in some of the barriers, counted from 1."""
    barrier, count = ProcessGroup.barrier, [0]

    def count_and_fail(group: ProcessGroup) -> None:
        count[0] += 1
        if count[0] in numbers:
            raise dist.DistNetworkError(PEER_FAILURE)
        barrier(group)

    monkeypatch.setattr(ProcessGroup, "barrier", count_and_fail)


def newest_step(folder: Path) -> int | None:
    newest = CommitCatalog(commits_in(folder)).latest()
    return newest.step if newest is not None else None


def train_and_evaluate(run: Run, *after: int) -> list[float]:
    """Evaluates twice after some of the steps. Returns the results."""
    results = list[float]()

    def after_block(step: Step) -> None:
        if step.index in after:
            results.extend(evaluate(run) for _ in range(2))

    assert train(run, after_block=after_block)["steps"] == 6
    return results


def exchange_with(monkeypatch: pytest.MonkeyPatch, done: Task, result: Any) -> None:
    """Another rank, which is in no task, has done `done` last."""
    other = json.dumps([None, done, result]).encode()

    def all_gather(group: ProcessGroup, own: bytes) -> list[bytes]:
        return [own, other] if own.startswith(b"[") else [own]

    monkeypatch.setattr(ProcessGroup, "all_gather_bytes", all_gather)


# The end of the run.


def test_the_survivors_repeat_a_last_commit_in_which_a_peer_failed(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = new_run()
    fail_in_barriers(monkeypatch, 1, 2)
    assert train(run) == train(new_run(folder="undisturbed"))
    assert client_of(run).joins == [(None, True), (6, False), (6, False)]
    assert newest_step(tmp_path) == 6


def test_the_survivors_repeat_the_commit_of_a_stop_after_one_more_step(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = new_run()
    fail_in_barriers(monkeypatch, 1)

    def stop(step: Step) -> None:
        client_of(run).stop_requested = step.index >= 2

    with pytest.raises(RunStopped):
        train(run, stop)
    assert run.world_size == 1, "it is in a generation, and reports the outcome"
    assert client_of(run).joins == [(None, True), (3, True)] and newest_step(tmp_path) == 4


def test_ranks_compare_the_weights_of_the_state_that_all_have(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that fails in the last step leaves some ranks a step behind. They receive the state when they rejoin."""
    run, compared = new_run(), list[bytes]()
    hashes = iter(["of the step before", "of the last step", "of the last step"])
    monkeypatch.setattr(state_of(run), "weights_sha256", lambda: next(hashes))

    def all_gather(group: ProcessGroup, own: bytes) -> list[bytes]:
        if own.startswith(b"of"):
            compared.append(own)
            if len(compared) == 1:
                raise dist.DistNetworkError(PEER_FAILURE)
        return [own]

    monkeypatch.setattr(ProcessGroup, "all_gather_bytes", all_gather)
    assert train(run)["weights_sha256"] == "of the last step"
    assert compared == [b"of the step before", b"of the last step"]


# Evaluations.


def test_an_evaluation_inside_the_block_is_repeated_in_the_next_generation(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = train_and_count(new_run(folder="undisturbed"), lambda *_: None)
    run, fail = new_run(), PeerFailures(3)

    def fail_once(_: Generation) -> float:
        fail(run.position.step)
        return 0.1

    evaluate_with(monkeypatch, fail_once)
    assert train_and_count(run, lambda *_: None, evaluates=True) == undisturbed
    assert client_of(run).joins == [(None, True), (3, False)]
    assert client_of(run).are_resumable == [True, False], "only this worker can do the rest of the block"


@pytest.mark.parametrize("where", ["before the block", "before the data", "before optimize", "and is caught"])
def test_an_evaluation_before_optimize_is_repeated_with_its_step(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def train_and_evaluate_first(run: Run, fail: PeerFailures) -> Any:
        evaluated: list[int] = []

        def measure(generation: Generation) -> float:
            assert not generation.is_closed
            evaluated.append(run.position.step)
            fail(run.position.step)
            return 0.1

        def evaluate_at(place: str) -> None:
            if place == where:
                assert evaluate(run) == 0.1

        evaluate_with(monkeypatch, measure)
        model = prepared(run)
        for step in run.steps():
            evaluate_at("before the block")
            with step:
                evaluate_at("before the data")
                compute_gradients(step, model)
                evaluate_at("before optimize")
                with contextlib.suppress(RuntimeError):
                    evaluate_at("and is caught")
                step.optimize()
        return finish(run), evaluated

    undisturbed, evaluated = train_and_evaluate_first(new_run(folder="undisturbed"), PeerFailures())
    assert evaluated == [0, 1, 2, 3, 4, 5]
    run = new_run()
    outcome, evaluated = train_and_evaluate_first(run, PeerFailures(3))
    assert outcome == undisturbed
    repeated = [3, 3] if where == "before the block" else [3]  # in the next generation, and again for the step
    assert evaluated == [0, 1, 2, 3, *repeated, 4, 5]
    assert client_of(run).joins == [(None, True), (3, where != "before the block")]


def test_several_evaluations_after_a_failed_step_rejoin_once(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run, in_generation, fail = new_run(), list[int](), PeerFailures(3)

    def measure(generation: Generation) -> float:
        in_generation.append(generation.number)
        return 1.5

    def after_block(step: Step) -> None:
        if step.index == 3:
            assert [evaluate(run) for _ in range(3)] == [1.5] * 3

    evaluate_with(monkeypatch, measure)
    assert train(run, lambda step: fail(step.index), after_block=after_block)["steps"] == 6
    assert client_of(run).joins == [(None, True), (3, False)]
    assert in_generation == [2] * 6, "after the failed step, and after its repetition"


@pytest.fixture
def evaluations(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[Run, list[tuple[int, int]]]]:
    """A run whose first evaluation fails, and the generation and step of each evaluation."""

    def start() -> tuple[Run, list[tuple[int, int]]]:
        run, evaluated = new_run(), list[tuple[int, int]]()

        def measure(generation: Generation) -> float:
            evaluated.append((generation.number, run.position.step))
            if len(evaluated) == 1:
                raise dist.DistNetworkError(PEER_FAILURE)
            return 0.1

        evaluate_with(monkeypatch, measure)
        return run, evaluated

    return start


def test_a_rank_that_missed_the_end_of_an_evaluation_receives_its_result(
    evaluations: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks have gone on, and cannot repeat it."""
    run, evaluated = evaluations()
    exchange_with(monkeypatch, Task(3, False, 1, "validation_loss"), 0.7)
    assert train_and_evaluate(run, 2) == [0.7, 0.1]
    assert evaluated == [(1, 3), (2, 3)], "the second one is still to be done"
    assert client_of(run).joins == [(None, True), (3, False)]


def test_an_evaluation_that_not_all_survivors_repeat_is_nan(
    evaluations: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, evaluated = evaluations()
    exchange_with(monkeypatch, Task(-1, False, 0, ""), None)
    assert train_and_evaluate(run, 2, 4) == [pytest.approx(math.nan, nan_ok=True)] * 2 + [0.1] * 2
    assert [step for _, step in evaluated] == [3, 5, 5]


def test_a_worker_that_must_leave_during_an_evaluation_commits_its_state(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, committed, join = new_run(), list[int | None](), FakeClient.join

    def join_for_handover(client: FakeClient, request: JoinRequest, **facts: Any) -> Assignment:
        committed.append(request.committed)
        if len(committed) == 3:
            raise RunStopped("it left")
        assignment = join(client, request, **facts)
        return replace(assignment, handover_only=len(committed) == 2, in_collective_task=False)

    def fail(_: Generation) -> float:
        raise dist.DistNetworkError(PEER_FAILURE)

    monkeypatch.setattr(FakeClient, "join", join_for_handover)
    evaluate_with(monkeypatch, fail)
    with pytest.raises(RunStopped, match="it left"):
        train_and_evaluate(run, 2)
    assert committed == [None, None, 3] and newest_step(tmp_path) == 3


@pytest.mark.parametrize(("where", "is_resumable"), [("after block", True), ("end", False)])
def test_a_worker_reports_whether_others_can_continue_from_its_state(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, where: str, is_resumable: bool
) -> None:
    """At the end no step follows."""
    run, fail = new_run(), PeerFailures(where)

    def measure(_: Generation) -> float:
        fail(where)
        return 0.1

    evaluate_with(monkeypatch, measure)
    if where == "end":
        fail_in_barriers(monkeypatch, 1)

    def after_block(step: Step) -> None:
        if (where, step.index) == ("after block", 2):
            evaluate(run)

    assert train(run, after_block=after_block)["steps"] == 6
    assert client_of(run).are_resumable == [True, is_resumable]


def test_an_evaluation_after_a_torn_step_is_nan(new_run: NewRun) -> None:
    run, results = new_run(), list[float]()
    with pytest.raises(RestartTraining):
        take_steps(run, in_block=break_down, after_block=lambda step: results.append(evaluate(run)))
    assert run.position.step == 0 and len(results) == 1 and math.isnan(results[0])


def test_failures_at_steps_after_an_earlier_one_start_a_new_count() -> None:
    """The run goes back to a commit after each failure, and gets further each time."""
    failures = ConsecutiveFailures()
    for failed, repeated in ((100, range(50, 60)), (60, range(55, 70)), (50, range(50, 80)), (80, ())):
        failures.record(failed, f"step {failed}", "a peer failed")
        for step in repeated:
            failures.record_success(step)
    failures.record(79.5, "'evaluation'", "a peer failed")
    with pytest.raises(WorkersFailedError, match="step 80 failed 3 times"):
        failures.record(80, "step 80", "a peer failed")
