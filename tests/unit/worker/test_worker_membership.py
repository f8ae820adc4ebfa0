"""A worker in its generations: failures of peers in a step, and changes of membership between steps."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
import torch

from elastic_ddp.data.order import FeedPlan
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import WorkersFailedError
from elastic_ddp.rendezvous import standby_process
from elastic_ddp.rendezvous.messages import PlannedAssignment
from elastic_ddp.seeding import seed_all
from elastic_ddp.worker.run import Run
from elastic_ddp.worker.step import Step
from tests.inside_run import set_device, wait_for_save, warm_up
from tests.unit.single_worker import (
    PEER_FAILURE,
    FakeFeed,
    FakeIndex,
    NewRun,
    PeerFailures,
    client_of,
    compute_gradients,
    prepared,
    train,
)

FAILED = f"DistNetworkError: {PEER_FAILURE}"


def generations(run: Run) -> list[tuple[int, int, str]]:
    """The number, the first step, and the reason of each generation."""
    events = client_of(run).events_of("generation_started")
    return [(event["generation"], event["first_step"], event["reason"]) for event in events]


# A peer fails in a step.


def test_a_step_in_which_a_peer_fails_is_repeated_with_the_same_result(new_run: NewRun) -> None:
    run, fail = new_run(), PeerFailures(3)
    disturbed = train(run, lambda step: fail(step.index))
    assert fail.raised == [3]
    assert client_of(run).failures == [None, FAILED] and client_of(run).joins == [(None, True), (3, True)]
    assert generations(run) == [(1, 0, "start"), (2, 3, "worker failed")]
    assert train(new_run(folder="undisturbed")) == disturbed


def test_a_step_that_fails_three_times_on_the_same_workers_ends_the_run(new_run: NewRun) -> None:
    fail = PeerFailures(3, times=9)
    with pytest.raises(WorkersFailedError, match=r"step 3 failed 3 times in a row.*DistNet.*collective_timeout_s"):
        train(new_run(), lambda step: fail(step.index))
    assert fail.raised == [3, 3, 3]


def test_a_step_in_which_different_workers_die_is_repeated_by_the_survivors(new_run: NewRun) -> None:
    run, fail = new_run(), PeerFailures(3, times=5)
    client_of(run).same_members = False
    assert train(run, lambda step: fail(step.index)) == train(new_run(folder="undisturbed"))
    assert fail.raised == [3] * 5


@pytest.mark.parametrize("text", ["timed out waiting for the tokenizer", PEER_FAILURE])
def test_an_error_of_the_training_function_that_reads_like_a_peer_failure_is_raised(new_run: NewRun, text: str) -> None:
    steps: list[int] = []

    def fail(step: Step) -> None:
        steps.append(step.index)
        raise RuntimeError(text)

    run = new_run()
    with pytest.raises(RuntimeError, match=re.escape(text)):
        train(run, fail)
    assert steps == [0] and client_of(run).failures == [None]


def test_a_worker_that_was_presumed_dead_commits_nothing_and_rejoins(new_run: NewRun) -> None:
    run = new_run(steps=7, checkpoint={"every_steps": 3})
    client, steps = client_of(run), list[int]()
    client.presumed_dead = True

    def in_step(step: Step) -> None:
        steps.append(step.index)
        wait_for_save(run)
        client.presumed_dead = len(client.joins) < 2

    train(run, in_step)
    assert client.steps_of("commit_succeeded") == [6, 7], "the others committed step 3"
    assert steps == list(range(7)), "no step is repeated"
    assert len(client.joins) == 2 and "presumed dead" in str(client.failures[1])


# A standby.


def test_a_standby_warms_up_waits_for_a_place_and_reads_its_first_rows_before_it_joins(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, happened = new_run(), list[Any]()
    client = client_of(run)
    client.planned_join = PlannedAssignment(1, 2, 0)

    def wait_for_place() -> None:
        happened.append(len(client.joins))
        client.planned_join = PlannedAssignment(0, 1, 0)

    monkeypatch.setattr(standby_process, "has_place", lambda: False)
    monkeypatch.setattr(standby_process, "wait_for_place", wait_for_place)
    monkeypatch.setattr(
        FakeFeed, "wait", lambda feed: happened.append((feed.micro_batches, feed.next_step, len(client.joins)))
    )
    warmed_up = train(run)
    assert happened == [((2, 3), 0, 0), 0, ((0, 1, 2, 3), 0, 0)]
    assert warmed_up == train(new_run(folder="undisturbed"))


def test_a_standby_reads_nothing_onto_a_gpu(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run()
    client = client_of(run)
    client.planned_join = PlannedAssignment(1, 2, 0)
    prepared(run)
    set_device(run, torch.device("cuda:0"))
    monkeypatch.setattr(standby_process, "has_place", lambda: False)
    assert warm_up(run) is None, "there are no rows for a step"
    monkeypatch.setattr(standby_process, "has_place", lambda: True)
    assert warm_up(run) is not None


# Membership changes between steps.


def test_a_membership_change_happens_at_a_step_boundary_and_changes_no_bits(new_run: NewRun) -> None:
    run, in_generation = new_run(), list[int]()

    def request(step: Step) -> None:
        client_of(run).reconfigure_requested = step.index == 2 or client_of(run).reconfigure_requested
        in_generation.append(len(client_of(run).joins))

    reconfigured = train(run, request)
    assert in_generation == [1, 1, 1, 2, 2, 2]
    assert client_of(run).joins == [(None, True), (3, True)] and client_of(run).failures == [None, None]
    [ended] = client_of(run).events_of("generation_ended")
    assert (ended["generation"], ended["last_step"], ended["reason"]) == (1, 3, "workers join or leave")
    assert generations(run) == [(1, 0, "start"), (2, 3, "workers joined")]
    assert train(new_run(folder="undisturbed")) == reconfigured


def test_a_peer_that_fails_in_a_membership_change_costs_no_step(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, barrier, fail = new_run(), ProcessGroup.barrier, PeerFailures("barrier")

    def fail_once(group: ProcessGroup) -> None:
        fail("barrier")
        barrier(group)

    monkeypatch.setattr(ProcessGroup, "barrier", fail_once)

    def request(step: Step) -> None:
        client_of(run).reconfigure_requested = step.index == 2 and len(client_of(run).joins) == 1

    changed = train(run, request)
    assert client_of(run).joins == [(None, True), (3, True)] and client_of(run).failures == [None, FAILED]
    assert [event["reason"] for event in client_of(run).events_of("generation_ended")] == ["a worker failed"]
    assert train(new_run(folder="undisturbed")) == changed


def test_a_membership_change_waits_for_the_first_rows_of_the_next_generation(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(steps=12)
    opened: list[tuple[int, FakeFeed]] = []
    in_generation = []

    class SlowFeed(FakeFeed):
        def __init__(self, index: FakeIndex, plan: FeedPlan, **options: Any) -> None:
            super().__init__(index, plan, **options)
            self.is_ready = not opened
            opened.append((plan.first_step, self))

    monkeypatch.setattr("elastic_ddp.worker.generation.MicroBatchFeed", SlowFeed)

    def request(step: Step) -> None:
        in_generation.append(len(client_of(run).joins))
        if step.index == 2:
            client_of(run).reconfigure_requested, client_of(run).planned = True, PlannedAssignment(0, 1, step=0)
        if step.index == 5:
            opened[-1][1].is_ready = True

    slow = train(run, request)
    assert in_generation == [1] * 6 + [2] * 6
    assert [step for step, _ in opened] == [0, 3], "for the first and the next generation"
    assert opened[-1][1].next_step == 12, "the next generation used it"
    assert train(new_run(folder="undisturbed", steps=12)) == slow


def test_a_membership_change_does_not_wait_forever_for_rows(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run()
    monkeypatch.setattr("elastic_ddp.worker.worker_membership.PREPARE_S", 0.0)
    never_ready = property(lambda feed: False, lambda feed, value: None)

    def request(step: Step) -> None:
        if step.index == 2:
            monkeypatch.setattr(FakeFeed, "is_ready", never_ready, raising=False)
            client_of(run).reconfigure_requested, client_of(run).planned = True, PlannedAssignment(0, 1, step=0)

    assert train(run, request)["steps"] == 6
    assert client_of(run).joins == [(None, True), (3, True)]


@pytest.mark.parametrize("leaves_loop_at", [5, 2], ids=["all steps", "the loop ends early"])
def test_membership_does_not_change_after_the_last_step(new_run: NewRun, leaves_loop_at: int) -> None:
    run = new_run()

    def request(step: Step) -> None:
        client_of(run).reconfigure_requested = step.index == leaves_loop_at

    assert train(run, request, last=leaves_loop_at)["steps"] == leaves_loop_at + 1
    assert client_of(run).joins == [(None, True)]


# Random numbers.


def test_random_numbers_between_batches_and_steps_depend_only_on_the_step(new_run: NewRun) -> None:
    """Also in a worker that resumes an interrupted run."""

    def draw(run: Run, until: int) -> dict[int, list[float]]:
        model = prepared(run)
        numbers: dict[int, list[float]] = {}
        for step in run.steps():
            numbers[step.index] = [random.random()]
            with step:
                compute_gradients(step, model)
                numbers[step.index] += [float(torch.rand(())), np.random.random()]
                step.optimize()
            numbers[step.index].append(random.random())
            if step.index == until:
                break
        wait_for_save(run)
        return numbers

    expected = draw(new_run(steps=6, checkpoint={"every_steps": 3}), 5)
    assert len({number for numbers in expected.values() for number in numbers}) == 6 * 4, "no number is drawn twice"
    first = draw(new_run(folder="interrupted", steps=6, checkpoint={"every_steps": 3}), 3)
    seed_all(1, "another process")
    second = draw(new_run(folder="interrupted", steps=6, checkpoint={"every_steps": 3}), 5)
    assert set(second) == {3, 4, 5} and {**first, **second} == expected
