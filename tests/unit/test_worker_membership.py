"""How a worker goes from generation to generation: peers that are lost wherever it is, and changes of membership."""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from elastic_ddp.checkpoint import CheckpointStore
from elastic_ddp.distributed.process_group import Assignment, ProcessGroup
from elastic_ddp.errors import ConfigError, WorkersFailedError
from elastic_ddp.rendezvous.client import RunStopped
from elastic_ddp.rendezvous.messages import PlannedAssignment
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry.account import Account
from elastic_ddp.telemetry.stopwatch import Stopwatch
from elastic_ddp.worker.collective_tasks import Task
from elastic_ddp.worker.generation import Generation
from elastic_ddp.worker.job import COMMITS
from elastic_ddp.worker.loop import Loop
from elastic_ddp.worker.membership import RestartTraining
from elastic_ddp.worker.run import Run
from elastic_ddp.worker.seeding import seed_all
from elastic_ddp.worker.step import Step
from tests.unit.single_worker import (
    PEER_FAILURE,
    FakeClient,
    FakeFeed,
    NewRun,
    Place,
    client_of,
    prepared,
    train,
    train_and_count,
)

LIMIT_S = 20.0


def test_a_step_that_loses_a_peer_comes_again_and_ends_the_same(new_run: NewRun) -> None:
    failure: list[int] = []

    def lose_a_peer_once(step: Step) -> None:
        if step.index == 3 and not failure:
            failure.append(step.index)
            raise dist.DistNetworkError(PEER_FAILURE)

    run = new_run()
    disturbed = train(run, lose_a_peer_once)
    assert failure == [3]
    assert client_of(run).failures == [None, f"DistNetworkError: {PEER_FAILURE}"]
    assert client_of(run).joins == [(None, True), (3, True)]
    generations = [said for said in client_of(run).events if said["event"] == "generation"]
    assert [(said["generation"], said["first_step"], said["reason"]) for said in generations] == [
        (1, 0, "start"),
        (2, 3, "worker failed"),
    ]
    assert train(new_run(folder="calm")) == disturbed


def test_a_step_that_is_lost_again_and_again_ends_the_run(new_run: NewRun) -> None:
    failure: list[int] = []

    def lose_a_peer(step: Step) -> None:
        if step.index == 3:
            failure.append(step.index)
            raise dist.DistNetworkError(PEER_FAILURE)

    with pytest.raises(WorkersFailedError, match=r"step 3 failed 3 times in a row.*DistNet.*collective_timeout_s"):
        train(new_run(), lose_a_peer)
    assert failure == [3, 3, 3]


def test_a_step_in_which_one_worker_after_the_other_dies_is_made_by_those_who_are_left(new_run: NewRun) -> None:
    run, failure = new_run(), []
    client_of(run).same_members = False

    def lose_a_peer(step: Step) -> None:
        if step.index == 3 and len(failure) < 5:
            failure.append(step.index)
            raise dist.DistNetworkError(PEER_FAILURE)

    assert train(run, lose_a_peer) == train(new_run(folder="calm"))
    assert failure == [3] * 5


@pytest.mark.parametrize("where", ["optimizer", "block"])
@pytest.mark.parametrize("checkpoint", [{"every_steps": 2}, {"every_steps": 100}], ids=["a-commit", "no-commit"])
def test_a_peer_that_is_lost_amid_the_changes_of_a_step_leaves_nothing_half_made(
    new_run: NewRun, where: Place, checkpoint: dict[str, Any]
) -> None:
    failure: list[int] = []

    def lose_once(place: Place, step: int) -> None:
        if (place, step) == (where, 3) and not failure:
            failure.append(step)
            raise dist.DistNetworkError(PEER_FAILURE)

    run = new_run(checkpoint=checkpoint)
    disturbed = train_and_count(run, lose_once)
    assert failure == [3]
    assert disturbed == train_and_count(new_run(folder="calm"), lambda *_: None)
    assert disturbed[1] == list(range(6))
    assert client_of(run).joins == [(None, True), (None, True)], "it holds nothing that others could use"
    assert client_of(run).failures == [None, f"DistNetworkError: {PEER_FAILURE}"]
    assert client_of(run).steps_of("resumed") == ([2] if checkpoint["every_steps"] == 2 else [])
    ended = [said["last_step"] for said in client_of(run).events if said["event"] == "generation_ended"]
    assert ended[0] == 3, "that step was not made"


@pytest.mark.parametrize("why", ["a half-made step", "a change of a sharded run"])
def test_the_time_to_begin_again_is_none_of_the_generation_before(new_run: NewRun, why: str) -> None:
    """The longest account counts: one that went on would make it useful time."""
    run, now, accounts = new_run(), 1000.0, []
    run._loop.membership.account = Account(Stopwatch(lambda: now))
    client = client_of(run)
    join = client.join

    def remembering(**arguments: Any) -> Assignment:
        accounts.append(arguments["account"])
        return join(**arguments)

    client.join = remembering  # type: ignore[method-assign]
    model = prepared(run)
    with pytest.raises(RestartTraining):
        for step in run.steps():
            now += 1.0
            with step:
                for batch in step.micro_batches():
                    step.backward(model(batch["x"]).square().mean())
                    if why == "a change of a sharded run":
                        client.reconfigure_requested, run._state.layout = True, lambda name: None
                step.optimize()
                if why == "a half-made step":
                    raise dist.DistNetworkError(PEER_FAILURE)
    now += 20.0  # the training function begins again
    again = Run(run._loop.restart())
    assert train(again)["steps"] == 6
    again._loop.close(intact=True)
    assert [sum(account.values()) for account in accounts] == [0.0, 1.0]


@pytest.mark.parametrize("where", ["optimizer", "block"])
def test_a_step_that_is_left_half_made_again_and_again_ends_the_run(new_run: NewRun, where: Place) -> None:
    """Also where steps before it are made once more."""
    run, failure = new_run(checkpoint={"every_steps": 2}), []

    def lose(place: Place, step: int) -> None:
        if (place, step) == (where, 3):
            failure.append(step)
            raise dist.DistNetworkError(PEER_FAILURE)

    with pytest.raises(WorkersFailedError, match="step 3 failed 3 times in a row"):
        train_and_count(run, lose)
    assert failure == [3, 3, 3]


def test_a_save_under_way_ends_before_the_training_function_begins_again(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an older commit would be restored, and two saves be under way, each with a copy of the state."""
    run = new_run(checkpoint={"every_steps": 2}, drain_deadline_s=0.01)
    client, savers, failure = client_of(run), [run._loop.checkpointer._saver], []
    again, write, has_begun_again = Loop.restart, Storage.write, threading.Event()

    def lose_once(place: Place, step: int) -> None:
        if (place, step) == ("optimizer", 3) and not failure:
            failure.append(step)
            raise dist.DistNetworkError(PEER_FAILURE)

    def write_late(storage: Storage, key: str, data: bytes | memoryview) -> None:
        if key.startswith("step=2/"):
            assert has_begun_again.wait(LIMIT_S)
            time.sleep(0.2)
            assert len(client.joins) == 1, "it waits"
        write(storage, key, data)

    def begin_again(loop: Loop) -> Loop:
        has_begun_again.set()
        savers.append((next_loop := again(loop)).checkpointer._saver)
        return next_loop

    monkeypatch.setattr(Storage, "write", write_late)
    monkeypatch.setattr(Loop, "restart", begin_again)
    disturbed = train_and_count(run, lose_once)
    assert failure == [3] and client.steps_of("resumed") == [2] and client.steps_of("commit") == [2, 4, 6]
    assert len(savers) == 2 and len(set(savers)) == 1
    assert disturbed == train_and_count(new_run(folder="calm"), lambda *_: None)


def test_an_evaluation_after_a_half_made_step_is_none(new_run: NewRun) -> None:
    run = new_run()
    model = prepared(run)
    results = []
    with pytest.raises(RestartTraining):
        for step in run.steps():
            with step:
                for batch in step.micro_batches():
                    step.backward(model(batch["x"]).square().mean())
                step.optimize()
                if step.index == 1:
                    raise dist.DistNetworkError(PEER_FAILURE)
            if step.index == 1:
                assert run.position.step == 1
                results.append(run.evaluate(lambda *_: torch.zeros(()), "held-out"))
    assert len(results) == 1 and math.isnan(results[0])


def test_an_evaluation_in_the_midst_of_a_steps_block_goes_on_in_the_next_generation(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, evaluated = new_run(), []

    def evaluate(*_: Any) -> float:
        evaluated.append(run.position.step)
        if len(evaluated) == 3:
            raise dist.DistNetworkError(PEER_FAILURE)
        return 0.1

    monkeypatch.setattr("elastic_ddp.worker.run.evaluate", evaluate)
    calm = train_and_count(new_run(folder="calm"), lambda *_: None)
    run = new_run()
    assert train_and_count(run, lambda *_: None, evaluate=True) == calm
    assert client_of(run).joins == [(None, True), (3, False)]
    assert client_of(run).are_resumable == [True, False], "the rest of the block is to be done here"


@pytest.mark.parametrize("text", ["timed out waiting for the tokenizer", PEER_FAILURE, "NCCL_SOCKET_IFNAME is not set"])
def test_an_error_of_the_user_that_reads_like_a_lost_peer_comes_out_at_once(new_run: NewRun, text: str) -> None:
    tries: list[int] = []

    def impatient(step: Step) -> None:
        tries.append(step.index)
        raise RuntimeError(text)

    run = new_run()
    with pytest.raises(RuntimeError, match=re.escape(text)):
        train(run, impatient)
    assert tries == [0]
    assert client_of(run).failures == [None]


def test_a_request_to_reconfigure_ends_the_generation_at_the_step_boundary_and_changes_nothing_else(
    new_run: NewRun,
) -> None:
    run = new_run()
    generations: list[int] = []

    def ask(step: Step) -> None:
        client_of(run).reconfigure_requested = step.index == 2 or client_of(run).reconfigure_requested
        generations.append(len(client_of(run).joins))

    reconfigured = train(run, ask)
    assert generations == [1, 1, 1, 2, 2, 2]
    assert client_of(run).joins == [(None, True), (3, True)]
    assert client_of(run).failures == [None, None]
    ended = [said for said in client_of(run).events if said["event"] == "generation_ended"]
    assert [(said["generation"], said["last_step"], said["reason"]) for said in ended] == [
        (1, 3, "workers join or leave")
    ]
    begun = [said for said in client_of(run).events if said["event"] == "generation"]
    assert [(said["generation"], said["first_step"], said["reason"]) for said in begun] == [
        (1, 0, "start"),
        (2, 3, "workers joined"),
    ]
    assert train(new_run(folder="calm")) == reconfigured


def test_training_goes_on_until_the_first_rows_of_the_next_generation_are_there(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(steps=12)
    opened: list[tuple[int, FakeFeed]] = []
    make = run._loop.membership._feeds._make

    def make_slow_ones(micro_batches: tuple[int, ...], step: int, after: Callable[[], object]) -> Any:
        feed: Any = make(micro_batches, step, after)
        feed.is_ready = not opened  # the warm-up's is
        opened.append((step, feed))
        return feed

    monkeypatch.setattr(run._loop.membership._feeds, "_make", make_slow_ones)
    generations = []

    def ask(step: Step) -> None:
        generations.append(len(client_of(run).joins))
        if step.index == 2:
            client_of(run).reconfigure_requested, client_of(run).planned = True, PlannedAssignment(0, 1, step=0)
        if step.index == 5:
            opened[-1][1].is_ready = True

    slow = train(run, ask)
    assert generations == [1] * 6 + [2] * 6
    assert [step for step, _ in opened] == [0, 0, 3], "the warm-up's, the first and the next generation's"
    assert opened[-1][1].next_step == 12, "which it used"
    assert train(new_run(folder="calm", steps=12)) == slow


def test_training_does_not_wait_forever_for_the_rows_of_the_next_generation(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run()
    monkeypatch.setattr("elastic_ddp.worker.membership.PREPARE_S", 0.0)
    never_ready = property(lambda feed: False, lambda feed, value: None)

    def ask(step: Step) -> None:
        if step.index == 2:
            monkeypatch.setattr(FakeFeed, "is_ready", never_ready, raising=False)
            client_of(run).reconfigure_requested, client_of(run).planned = True, PlannedAssignment(0, 1, step=0)

    assert train(run, ask)["steps"] == 6
    assert client_of(run).joins == [(None, True), (3, True)]


def test_nobody_is_let_in_after_the_last_step(new_run: NewRun) -> None:
    run = new_run()

    def ask(step: Step) -> None:
        client_of(run).reconfigure_requested = step.index == 5

    assert train(run, ask)["steps"] == 6
    assert client_of(run).joins == [(None, True)]


def test_a_worker_that_is_presumed_dead_commits_nothing_and_asks_for_its_place(new_run: NewRun) -> None:
    run = new_run(steps=7, checkpoint={"every_steps": 3})
    client = client_of(run)
    client.presumed_dead = True
    taken = []

    def in_step(step: Step) -> None:
        taken.append(step.index)
        run._loop.checkpointer.close(60)  # of the step before
        client.presumed_dead = len(client.joins) < 2

    train(run, in_step)
    assert client.steps_of("commit") == [6, 7], "of step 3, the others made one"
    assert taken == list(range(7)), "what is done is not done again"
    assert len(client.joins) == 2 and "was presumed dead" in str(client.failures[1])


def test_what_is_drawn_between_batches_and_steps_does_not_depend_on_what_was_drawn_before(
    new_run: NewRun,
) -> None:
    """Nor does it in a worker that has just come, and so in a run that was interrupted."""

    def drawn(run: Run, until: int) -> dict[int, list[float]]:
        model = prepared(run)
        drawn: dict[int, list[float]] = {}
        for step in run.steps():
            drawn[step.index] = [random.random()]
            with step:
                for batch in step.micro_batches():
                    step.backward(model(batch["x"]).square().mean())
                drawn[step.index] += [float(torch.rand(())), np.random.random()]
                step.optimize()
            drawn[step.index].append(random.random())
            if step.index == until:
                break
        run._loop.shut_down()  # the save at hand ends before
        return drawn

    calm = drawn(new_run(steps=6, checkpoint={"every_steps": 3}), 5)
    assert len({each for numbers in calm.values() for each in numbers}) == 6 * 4, "no number comes twice"
    first = drawn(new_run(folder="other", steps=6, checkpoint={"every_steps": 3}), 3)
    seed_all(1, "another process")
    second = drawn(new_run(folder="other", steps=6, checkpoint={"every_steps": 3}), 5)
    assert set(second) == {3, 4, 5} and {**first, **second} == calm


# Outside of steps.


def lost_in_meetings(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """A peer is lost in some of the times that all ranks wait for each other, counted from 1."""
    meet, met = ProcessGroup.barrier, []

    def meet_or_lose(group: ProcessGroup) -> None:
        met.append(group.assignment.generation)
        if len(met) in numbers:
            raise dist.DistNetworkError(PEER_FAILURE)
        meet(group)

    monkeypatch.setattr(ProcessGroup, "barrier", meet_or_lose)


def train_and_evaluate(run: Run, *after: int) -> list[float]:
    """Evaluates twice after some of the steps. Returns the results."""
    model = prepared(run)
    results: list[float] = []
    for step in run.steps():
        with step:
            for batch in step.micro_batches():
                step.backward(model(batch["x"]).square().mean())
            step.optimize()
        if step.index in after:
            results += [run.evaluate(lambda *_: torch.zeros(()), "held-out") for _ in range(2)]
    assert run._loop.finish()["steps"] == 6
    return results


def commits_of(folder: Path) -> CheckpointStore:
    return CheckpointStore(Storage(folder / "run").at(COMMITS), keep=1)


def test_a_peer_that_is_lost_while_all_leave_for_a_change_costs_nobody_his_state(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run()
    lost_in_meetings(monkeypatch, 1)

    def ask(step: Step) -> None:
        client_of(run).reconfigure_requested = step.index == 2 and len(client_of(run).joins) == 1

    changed = train(run, ask)
    assert client_of(run).joins == [(None, True), (3, True)]
    assert client_of(run).failures == [None, f"DistNetworkError: {PEER_FAILURE}"]
    ended = [said["reason"] for said in client_of(run).events if said["event"] == "generation_ended"]
    assert ended == ["a worker failed"]
    assert train(new_run(folder="calm")) == changed


def test_a_peer_that_is_lost_in_the_last_commit_leaves_it_to_the_others(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = new_run()
    lost_in_meetings(monkeypatch, 1, 2)
    assert train(run) == train(new_run(folder="calm"))
    assert client_of(run).joins == [(None, True), (6, False), (6, False)]
    newest = commits_of(tmp_path).latest()
    assert newest is not None and newest.step == 6


def test_a_peer_that_is_lost_in_the_commit_of_a_stop_leaves_it_to_the_others(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = new_run()
    lost_in_meetings(monkeypatch, 1)

    def stop(step: Step) -> None:
        client_of(run).stop_requested = step.index >= 2

    with pytest.raises(RunStopped):
        train(run, stop)
    assert run.world_size == 1, "it is in a generation, and so may say how the run ended"
    assert client_of(run).joins == [(None, True), (3, True)], "they make one more step, and stop after that"
    newest = commits_of(tmp_path).latest()
    assert newest is not None and newest.step == 4


def test_a_loop_that_ends_early_ends_also_where_membership_was_about_to_change(new_run: NewRun) -> None:
    run = new_run()
    model = prepared(run)
    for step in run.steps():
        with step:
            for batch in step.micro_batches():
                step.backward(model(batch["x"]).square().mean())
            client_of(run).reconfigure_requested = step.index == 2
            step.optimize()
        if step.index == 2:
            break
    assert run._loop.finish()["steps"] == 3
    assert client_of(run).joins == [(None, True)]


@pytest.mark.parametrize("where", ["before the block", "before the data", "before optimize", "and is caught"])
def test_an_evaluation_before_a_step_is_made_is_lost_with_it_and_both_come_again(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def train_and_evaluate_first(run: Run, lost_in: int | None) -> Any:
        evaluated: list[int] = []

        def measure(generation: Generation, *_: Any) -> float:
            assert not generation.is_closed
            evaluated.append(run.position.step)
            if run.position.step == lost_in and evaluated.count(lost_in) == 1:
                raise dist.DistNetworkError(PEER_FAILURE)
            return 0.1

        def evaluate(here: str) -> None:
            if here == where:
                assert run.evaluate(lambda *_: torch.zeros(()), "held-out") == 0.1

        monkeypatch.setattr("elastic_ddp.worker.run.evaluate", measure)
        model = prepared(run)
        for step in run.steps():
            evaluate("before the block")
            with step:
                evaluate("before the data")
                for batch in step.micro_batches():
                    step.backward(model(batch["x"]).square().mean())
                evaluate("before optimize")
                with contextlib.suppress(RuntimeError):
                    evaluate("and is caught")
                step.optimize()
        return run._loop.finish(), evaluated

    calm, evaluated = train_and_evaluate_first(new_run(folder="calm"), None)
    assert evaluated == [0, 1, 2, 3, 4, 5]
    run = new_run()
    ended, evaluated = train_and_evaluate_first(run, 3)
    assert ended == calm
    again = [3, 3] if where == "before the block" else [3]  # in the generation that it led to, and for the step
    assert evaluated == [0, 1, 2, 3, *again, 4, 5]
    assert client_of(run).joins == [(None, True), (3, where != "before the block")]


def test_a_lost_step_is_told_once_however_much_is_done_together_after_it(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated: list[int] = []
    monkeypatch.setattr(
        "elastic_ddp.worker.run.evaluate", lambda generation, *_: evaluated.append(generation.number) or 1.5
    )
    run = new_run()
    model = prepared(run)
    for step in run.steps():
        with step:
            for batch in step.micro_batches():
                loss = model(batch["x"]).square().mean()
                if step.index == 3 and len(client_of(run).joins) == 1:
                    raise dist.DistNetworkError(PEER_FAILURE)
                step.backward(loss)
            step.optimize()
        if step.index == 3:
            assert [run.evaluate(lambda *_: torch.zeros(()), "held-out") for _ in range(3)] == [1.5] * 3
    assert run._loop.finish()["steps"] == 6
    assert client_of(run).joins == [(None, True), (3, False)]
    assert evaluated == [2] * 6, "after the step that was lost, and after the same step when it was made"


def test_who_has_lost_the_end_of_an_evaluation_gets_its_result_from_who_has_not(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others cannot do it once more: they are in what comes after it."""
    evaluated: list[int] = []

    def evaluate(*_: Any) -> float:
        evaluated.append(len(client_of(run).joins))
        if len(evaluated) == 1:
            raise dist.DistNetworkError(PEER_FAILURE)
        return 0.1

    def exchange(group: ProcessGroup, mine: bytes) -> list[bytes]:
        done = Task(3, False, 1, "validation_loss")
        return [mine, json.dumps([None, done, 0.7]).encode()] if mine.startswith(b"[") else [mine]

    monkeypatch.setattr("elastic_ddp.worker.run.evaluate", evaluate)
    monkeypatch.setattr(ProcessGroup, "all_gather_bytes", exchange)
    run = new_run()
    assert train_and_evaluate(run, 2) == [0.7, 0.1]
    assert evaluated == [1, 2], "the second of them is still to be done"
    assert client_of(run).joins == [(None, True), (3, False)]


def test_an_evaluation_that_not_all_ask_for_after_a_loss_is_none(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others make the next step: nobody may wait for them in it."""
    evaluated: list[int] = []

    def evaluate(*_: Any) -> float:
        evaluated.append(run.position.step)
        if len(evaluated) == 1:
            raise dist.DistNetworkError(PEER_FAILURE)
        return 0.1

    def exchange(group: ProcessGroup, mine: bytes) -> list[bytes]:
        return [mine, json.dumps([None, Task(-1, False, 0, ""), None]).encode()] if mine.startswith(b"[") else [mine]

    monkeypatch.setattr("elastic_ddp.worker.run.evaluate", evaluate)
    monkeypatch.setattr(ProcessGroup, "all_gather_bytes", exchange)
    run = new_run()
    results = train_and_evaluate(run, 2, 4)
    assert results == [pytest.approx(math.nan, nan_ok=True)] * 2 + [0.1] * 2
    assert evaluated == [3, 5, 5]


def test_one_that_has_to_go_amid_an_evaluation_commits_what_it_holds(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, committed, join = new_run(), [], FakeClient.join

    def join_briefly(client: FakeClient, **arguments: Any) -> Assignment:
        committed.append(arguments["committed"])
        if len(committed) == 3:
            raise RunStopped("it left")
        assignment = join(client, **arguments)
        return replace(assignment, handover_only=len(committed) == 2, in_collective_task=False)

    def cut(*_: Any) -> float:
        raise dist.DistNetworkError(PEER_FAILURE)

    monkeypatch.setattr(FakeClient, "join", join_briefly)
    monkeypatch.setattr("elastic_ddp.worker.run.evaluate", cut)
    with pytest.raises(RunStopped, match="it left"):
        train_and_evaluate(run, 2)
    assert committed == [None, None, 3]
    newest = commits_of(tmp_path).latest()
    assert newest is not None and newest.step == 3


@pytest.mark.parametrize(("where", "is_resumable"), [("in block", False), ("after block", True), ("end", False)])
def test_a_worker_says_whether_others_can_go_on_from_its_state(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, where: str, is_resumable: bool
) -> None:
    """Not in the midst of a step's block, whose rest they would not do, nor at the end, which is all that is left."""
    run, failure = new_run(), []

    def lose_once(*_: Any) -> float:
        if not failure:
            failure.append(run.position.step)
            raise dist.DistNetworkError(PEER_FAILURE)
        return 0.1

    def evaluate(here: str) -> None:
        if here == where and step.index == 2:
            run.evaluate(lambda *_: torch.zeros(()), "held-out")

    monkeypatch.setattr("elastic_ddp.worker.run.evaluate", lose_once)
    if where == "end":
        lost_in_meetings(monkeypatch, 1)
    model = prepared(run)
    for step in run.steps():
        with step:
            for batch in step.micro_batches():
                step.backward(model(batch["x"]).square().mean())
            step.optimize()
            evaluate("in block")
        evaluate("after block")
    assert run._loop.finish()["steps"] == 6
    assert client_of(run).are_resumable == [True, is_resumable]


def test_the_weights_that_are_compared_are_those_of_the_state_that_all_have(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that is lost in the last step leaves some a step behind, who get the others' state when all meet again."""
    run = new_run()
    hashes = iter(["of a step before", "of the last step", "of the last step"])
    monkeypatch.setattr(run._state, "weights_sha256", lambda: next(hashes))
    compared: list[bytes] = []

    def exchange(group: ProcessGroup, mine: bytes) -> list[bytes]:
        if mine.startswith(b"of"):
            compared.append(mine)
            if len(compared) == 1:
                raise dist.DistNetworkError(PEER_FAILURE)
        return [mine]

    monkeypatch.setattr(ProcessGroup, "all_gather_bytes", exchange)
    assert train(run)["weights_sha256"] == "of the last step"
    assert compared == [b"of a step before", b"of the last step"]


# A rehearsal.


def test_a_newcomer_makes_its_first_step_alone_before_others_wait_for_it(new_run: NewRun) -> None:
    """What is slow in it, such as a compiler, is done by then."""
    run = new_run()
    client_of(run).planned_join = PlannedAssignment(rank=2, world_size=3, step=4)
    model = prepared(run)
    seen: list[tuple[int, int, int, int]] = []
    made = []
    model.module.register_forward_pre_hook(
        lambda *_: seen.append((len(client_of(run).joins), run.position.step, run.rank, run.world_size))
    )
    for step in run.steps():
        if not seen:
            assert math.isnan(run.evaluate(lambda *_: torch.zeros(()), "held-out")), "others do not ask for it now"
            with pytest.raises(ConfigError, match=r"run\.register"):
                run.register("late", model.module)
            assert (step.index, step.epoch, f"{step.loss:.3f}") == (4, 0, "nan")
        with step:
            for batch in step.micro_batches():
                loss = model(batch["x"]).square().mean()
                step.log(twice=2 * loss)
                step.backward(loss)
                batch["x"].zero_()
            step.optimize()
            made.append(step.index)
    assert seen[0] == (0, 0, 2, 3) and seen[1] == (1, 0, 0, 1), "one micro-batch, before it asked to join"
    assert made == [0, 1, 2, 3, 4, 5]


def test_a_rehearsal_leaves_no_trace(new_run: NewRun) -> None:
    alone, newcomer = new_run(folder="alone"), None
    calm = train(alone)
    newcomer = new_run(folder="newcomer")
    client_of(newcomer).planned_join = PlannedAssignment(rank=1, world_size=2, step=3)
    rehearsed = train(newcomer)
    assert rehearsed["weights_sha256"] == calm["weights_sha256"]
    assert rehearsed["samples_sha256"] == calm["samples_sha256"]


def test_what_goes_wrong_in_a_rehearsal_is_the_users_to_hear(new_run: NewRun) -> None:
    run = new_run()
    client_of(run).planned_join = PlannedAssignment(rank=1, world_size=2, step=3)

    def fail(step: Step) -> None:
        raise ZeroDivisionError("the user's own")

    with pytest.raises(ZeroDivisionError):
        body_of_a_step(run, fail)
    assert not client_of(run).joins, "nobody waited for it"


def test_a_collective_of_the_users_own_ends_a_rehearsal_and_nothing_else(new_run: NewRun) -> None:
    run = new_run()
    client_of(run).planned_join = PlannedAssignment(rank=1, world_size=2, step=3)
    sizes = []

    def ask(step: Step) -> None:
        sizes.append(dist.get_world_size())

    assert train(run, ask)["steps"] == 6
    assert sizes == [1] * 6


def body_of_a_step(run: Run, body: Callable[[Step], None]) -> None:
    prepared(run)
    for step in run.steps():
        with step:
            for _ in step.micro_batches():
                body(step)
