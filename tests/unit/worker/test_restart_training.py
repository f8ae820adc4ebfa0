"""Restarts of the training function: after a torn step, a membership change with FSDP, or a loop that ended early."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_ddp.distributed.assignment import Assignment
from elastic_ddp.errors import ConfigError, StorageError, WorkersFailedError
from elastic_ddp.rendezvous.members import JoinRequest
from elastic_ddp.rendezvous.messages import PlannedAssignment
from elastic_ddp.seeding import seed_all
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.generation import Generation
from elastic_ddp.worker.loop import Loop
from elastic_ddp.worker.run import Run
from elastic_ddp.worker.state_sharing import GenerationInputs
from elastic_ddp.worker.step import Step
from elastic_ddp.worker.worker_membership import RestartTraining
from tests.inside_run import finish, leave, restart, set_clock, state_of, wait_for_save
from tests.unit.single_worker import (
    PEER_FAILURE,
    FakeClient,
    Model,
    NewRun,
    PeerFailures,
    Place,
    break_down,
    client_of,
    compute_gradients,
    evaluate,
    evaluate_with,
    prepared,
    restarting,
    take_steps,
    train,
    train_and_count,
)

LIMIT_S = 20.0

# A peer fails while a step changes the state.


@pytest.mark.parametrize("where", ["optimizer", "block"])
@pytest.mark.parametrize("every_steps", [2, 100], ids=["a commit", "no commit"])
def test_a_torn_step_is_repeated_from_the_newest_commit_or_from_the_start(
    new_run: NewRun, where: Place, every_steps: int
) -> None:
    run, fail = new_run(checkpoint={"every_steps": every_steps}), PeerFailures((where, 3))
    disturbed = train_and_count(run, lambda *place: fail(place))
    assert fail.raised == [(where, 3)]
    assert disturbed == train_and_count(new_run(folder="undisturbed"), lambda *_: None)
    assert disturbed[1] == list(range(6))
    assert client_of(run).joins == [(None, True), (None, True)], "it has no state that others could use"
    assert client_of(run).failures == [None, f"DistNetworkError: {PEER_FAILURE}"]
    assert client_of(run).steps_of("resumed") == ([2] if every_steps == 2 else [])
    assert client_of(run).events_of("generation_ended")[0]["last_step"] == 3, "the torn step does not count"


@pytest.mark.parametrize("where", ["optimizer", "block"])
def test_a_step_that_is_torn_three_times_in_a_row_ends_the_run(new_run: NewRun, where: Place) -> None:
    """Steps before it are repeated meanwhile."""
    run, fail = new_run(checkpoint={"every_steps": 2}), PeerFailures((where, 3), times=9)
    with pytest.raises(WorkersFailedError, match="step 3 failed 3 times in a row"):
        train_and_count(run, lambda *place: fail(place))
    assert fail.raised == [(where, 3)] * 3


def test_a_running_save_ends_before_the_training_function_restarts(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise an older commit would be restored, and two saves would run, each with a copy of the state."""
    run, fail = new_run(checkpoint={"every_steps": 2}, drain_deadline_s=0.01), PeerFailures(("optimizer", 3))
    client = client_of(run)
    restart_loop, write, is_restarting = Loop.restart, Storage.write, threading.Event()

    def write_late(storage: Storage, key: str, data: bytes | memoryview) -> None:
        if key.startswith("step=2/"):
            assert is_restarting.wait(LIMIT_S)
            time.sleep(0.2)
            assert len(client.joins) == 1, "it waits"
        write(storage, key, data)

    def note_restart(loop: Loop) -> None:
        is_restarting.set()
        restart_loop(loop)

    monkeypatch.setattr(Storage, "write", write_late)
    monkeypatch.setattr(Loop, "restart", note_restart)
    disturbed = train_and_count(run, lambda *place: fail(place))
    assert client.steps_of("resumed") == [2] and client.steps_of("commit_succeeded") == [2, 4, 6]
    assert disturbed == train_and_count(new_run(folder="undisturbed"), lambda *_: None)


@pytest.mark.parametrize("why", ["a torn step", "a failure of a sharded run"])
def test_the_time_of_a_restart_does_not_belong_to_the_generation_before(new_run: NewRun, why: str) -> None:
    """The rendezvous keeps the longest account, and would count it as useful time."""
    run, now, accounts = new_run(), 1000.0, []
    set_clock(run, lambda: now)
    client = client_of(run)
    join = client.join

    def note_account(request: JoinRequest, **facts: Any) -> Assignment:
        accounts.append(request.account)
        return join(request, **facts)

    client.join = note_account  # type: ignore[method-assign]

    def pass_time(step: Step) -> None:
        nonlocal now
        now += 1.0
        if why == "a failure of a sharded run":
            state_of(run).layout = lambda name: None

    with pytest.raises(RestartTraining):
        take_steps(run, pass_time, in_block=break_down)
    now += 20.0
    again = restart(run)
    assert train(again)["steps"] == 6
    leave(again)
    assert [sum(account.values()) for account in accounts] == [0.0, 1.0]


def test_a_worker_whose_peer_dies_with_its_shard_restarts_and_keeps_its_place(new_run: NewRun) -> None:
    """All were to continue from memory. The next generation starts from the newest commit, so from step 0 here."""
    run = new_run(strategy="fsdp")
    client = client_of(run)
    join = client.join

    def lose_a_shard(request: JoinRequest, **facts: Any) -> Assignment:
        assignment = join(request, **facts)
        if request.shards is None:
            return assignment
        assert request.shards == (1, (0,)) and request.step == 1
        return replace(assignment, source=None, receivers=(), first_step=None, resharding=None)

    client.join = lose_a_shard  # type: ignore[method-assign]
    with pytest.raises(RestartTraining):
        take_steps(run, lambda step: setattr(client, "reconfigure_requested", True))
    again = restart(run)
    client.reconfigure_requested = False
    assert train(again)["steps"] == 6
    assert len(client.joins) == 2


def test_a_sharded_run_refuses_a_model_that_is_already_sharded(new_run: NewRun) -> None:
    run, module, fail = new_run(strategy="fsdp", checkpoint={"every_steps": 1}), Model(), PeerFailures(2)
    client_of(run).same_members = False
    model: Any = run.prepare(module)
    run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RestartTraining):
        take_steps(run, model=model, in_block=lambda step: fail(step.index))
    again = restart(run)
    with pytest.raises(ConfigError, match=r"already sharded: 0\.weight"):
        again.prepare(module)
    leave(again, intact=False)


# A loop that ends before its last step is done.


def train_until(run: Run, last: int, fail: Callable[[int], None], *, evaluates: str = "never") -> dict[str, Any]:
    """A training function that leaves the loop after step `last`. Restarts like a worker."""
    while True:
        seed_all(0, 0, "init")
        model = prepared(run)
        for step in run.steps():
            if evaluates == "before the block":
                evaluate(run)
            with step:
                for batch in step.micro_batches():
                    fail(step.index)
                    step.backward(model(batch["x"]).square().mean())
                step.optimize()
            if evaluates == "after the block":
                evaluate(run)
            if step.index == last:
                break
        try:
            return finish(run)
        except RestartTraining:
            run = restart(run)
        finally:
            leave(run, intact=False)


def test_a_loop_that_ends_with_a_torn_step_restarts(new_run: NewRun) -> None:
    with pytest.raises(RestartTraining):
        train(new_run(), in_block=break_down, last=0)


@pytest.mark.parametrize("evaluates", ["never", "before the block", "after the block"])
def test_a_loop_that_ends_with_a_failed_step_repeats_it(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, evaluates: str
) -> None:
    run, fail = new_run(), PeerFailures(3)

    def measure(_: Generation) -> float:
        if evaluates == "before the block":
            fail(run.position.step)
        return 0.1

    evaluate_with(monkeypatch, measure)
    fail_in_step = fail if evaluates != "before the block" else lambda _: None
    outcome = train_until(run, 3, fail_in_step, evaluates=evaluates)
    assert fail.raised == [3] and outcome == train_until(new_run(folder="undisturbed"), 3, lambda _: None)
    if evaluates == "never":
        assert client_of(run).steps_of("resumed") == [3], "from a commit of its own state"


@pytest.mark.parametrize("is_newcomer", [True, False])
def test_a_loop_that_ends_with_the_step_that_others_are_in_restarts(new_run: NewRun, is_newcomer: bool) -> None:
    """For a newcomer it was a warm-up step. After a restart there is no warm-up."""
    run, others = new_run(), PlannedAssignment(rank=0, world_size=1, step=3)
    client, fail = client_of(run), PeerFailures(3)
    client.planned_join = others if is_newcomer else None

    def fail_and_plan(index: int) -> None:
        if index == 3 and not is_newcomer:
            client.planned_join = others
            fail(index)

    assert train_until(run, 3, fail_and_plan) == train_until(new_run(folder="undisturbed"), 3, lambda _: None)


def test_a_last_step_that_fails_three_times_on_the_same_workers_ends_the_run(new_run: NewRun) -> None:
    fail = PeerFailures(3, times=9)
    with pytest.raises(WorkersFailedError, match="step 3 failed 3 times in a row"):
        train_until(new_run(), 3, fail)
    assert fail.raised == [3] * 3


# What counts as failing again and again.


def test_an_evaluation_that_fails_after_each_restart_of_a_sharded_run_ends_the_run(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each restart resumes from the newest commit, and does steps and an evaluation before."""
    run, steps = new_run(strategy="fsdp", checkpoint={"every_steps": 2}), list[int]()
    join = FakeClient.join

    def lose_a_shard(client: FakeClient, request: JoinRequest, **facts: Any) -> Assignment:
        assignment = join(client, request, **facts)
        lost: dict[str, Any] = {"source": None, "first_step": None, "resharding": None}
        return assignment if request.failure is None else replace(assignment, **lost)

    monkeypatch.setattr(FakeClient, "join", lose_a_shard)

    def measure(_: Generation) -> float:
        if run.position.step == 5:
            raise dist.DistNetworkError(PEER_FAILURE)
        return 0.5

    evaluate_with(monkeypatch, measure)

    def after_block(step: Step) -> None:
        steps.append(step.index)
        wait_for_save(run)
        if step.index in (2, 4):
            evaluate(run)

    with pytest.raises(WorkersFailedError, match="'validation_loss' after 5 steps failed 3 times in a row"):
        for _ in range(9):
            try:
                take_steps(run, after_block=after_block)
            except RestartTraining:
                run = restart(run)
    leave(run, intact=False)
    assert steps == [0, 1, 2, 3, 4, 4, 4]


@pytest.mark.parametrize("is_sharded", [False, True], ids=["replicated", "sharded"])
def test_a_generation_that_never_forms_ends_the_run(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, is_sharded: bool
) -> None:
    """Also if the training function restarts each time."""

    def fail(inputs: GenerationInputs, *_: Any) -> None:
        inputs.state.layout = (lambda name: None) if is_sharded else None
        raise dist.DistNetworkError(PEER_FAILURE)

    monkeypatch.setattr(Generation, "open", fail)
    run = new_run()
    client = client_of(run)
    with pytest.raises(WorkersFailedError, match="failed to form 10 times in a row"):
        restarting(run, train)
    assert len(client.joins) == 11


def test_failed_commits_in_generations_for_handover_do_not_end_the_run(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run below min_workers forms such generations."""
    times = 12
    join, write, fail = FakeClient.join, Storage.write, PeerFailures(3)

    def is_handover(client: FakeClient) -> bool:
        return 2 <= len(client.joins) < 2 + times

    def join_for_handover(client: FakeClient, request: JoinRequest, **facts: Any) -> Assignment:
        return replace(join(client, request, **facts), handover_only=is_handover(client))

    def fail_write(storage: Storage, key: str, data: Any) -> None:
        if key.startswith("step=") and is_handover(client_of(run)):
            raise StorageError("no space left") from OSError(errno.ENOSPC, "no space left")
        write(storage, key, data)

    monkeypatch.setattr("elastic_ddp.worker.commit_schedule.SAVE_BACKOFF_S", 0.001)
    monkeypatch.setattr("elastic_ddp.worker.commit_schedule.MAX_SAVE_BACKOFF_S", 0.01)
    monkeypatch.setattr(FakeClient, "join", join_for_handover)
    monkeypatch.setattr(Storage, "write", fail_write)
    run = new_run(checkpoint={"every_steps": 100})
    assert train(run, lambda step: fail(step.index))["steps"] == 6
    assert client_of(run).steps_of("commit_failed") == [3] * times and len(client_of(run).joins) == 2 + times


@pytest.mark.parametrize("peer_fails", [False, True])
def test_a_newcomer_that_warmed_up_and_finds_no_state_restarts_and_keeps_its_place(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, peer_fails: bool
) -> None:
    """Its peers wait in the generation meanwhile. If one of them fails, it asks for another place."""
    run = new_run()
    client, model = client_of(run), prepared(run)
    client.planned_join = PlannedAssignment(1, 2, 0)
    with pytest.raises(RestartTraining):
        for step in run.steps():
            with step:
                client.planned_join = None  # the others die
                compute_gradients(step, model)
                step.optimize()
    again = restart(run)
    if peer_fails:
        aborts = iter([True])
        monkeypatch.setattr(client, "set_abort", lambda abort: abort() if abort and next(aborts, False) else None)
    torch.manual_seed(0)  # as `new_run` does
    assert train(again) == train(new_run(folder="undisturbed"))
    assert [failure is not None for failure in client.failures] == ([False, True] if peer_fails else [False])
    assert [event["generation"] for event in client.events_of("generation_started")] == [2 if peer_fails else 1]
