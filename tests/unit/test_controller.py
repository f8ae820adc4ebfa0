"""What the controller decides without a cluster: who goes, how long it waits, and for how many workers it asks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from ray.exceptions import ActorDiedError
from ray.train import FailureConfig, ScalingConfig
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.controller.state import ReschedulingState, RestartingState, RunningState
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2._internal.execution.scaling_policy import (
    NoopDecision,
    ResizeDecision,
)
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2.api.exceptions import ControllerError

from elastic_ddp.ray_internals import controller as controller_module
from elastic_ddp.ray_internals import worker_group
from elastic_ddp.ray_internals.controller import (
    LEAVE_WITHIN_S,
    PAUSES_S,
    ROOM_WITHIN_S,
    ElasticController,
    counts_as_failure,
)
from elastic_ddp.ray_internals.scaling import LimitedScalingPolicy
from elastic_ddp.ray_internals.starting import CountingFailurePolicy
from elastic_ddp.ray_internals.worker_group import ElasticWorkerGroup
from elastic_ddp.rendezvous.messages import WorkerDirectives

NOBODY = WorkerDirectives(failed={}, newcomers=[], dismissed=[], leaving=[], avoid=[], limit=3, is_over=False)
START = RunningState()


class Clock:
    """Time goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    return clock


class FakeGroup:
    """Workers by name, and how many are on their way."""

    def __init__(self, workers: str) -> None:
        self.workers = [a_worker(name) for name in workers]
        self.num_newcomers = 0
        self.fail = 0
        self.withdrawn: list[float] = []

    def get_workers(self) -> list[Any]:
        return self.workers

    def get_worker_group_state(self) -> Any:
        return mock.sentinel.state

    def remove(self, ranks: Collection[int]) -> None:
        self.workers = [each for rank, each in enumerate(self.workers) if rank not in ranks]

    def request(self, num_workers: int) -> None:
        self.num_newcomers += num_workers

    def keep_newcomers(self, number: int) -> None:
        self.num_newcomers = min(self.num_newcomers, max(0, number))

    def withdraw(self, waiting_s: float) -> None:
        self.withdrawn.append(waiting_s)

    def advance(self) -> int:
        failed, self.fail = self.fail, 0
        self.num_newcomers -= failed
        return failed

    def __str__(self) -> str:
        return "".join(each.actor._actor_id.hex() for each in self.workers)


def a_worker(name: str, node_id: str = "healthy") -> Any:
    actor = SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: name))
    return SimpleNamespace(actor=actor, metadata=SimpleNamespace(node_id=node_id))


@pytest.fixture
def controller(clock: Clock) -> Any:
    """One of a run on exactly three workers, whose failure policy always has another try."""
    controller: Any = object.__new__(ElasticController)
    controller._num_failed, controller._have_trained, controller._not_before = 0, set(), 0.0
    controller._failed_start = None
    controller._wanted, controller._hurry, controller._limit, controller._dismissed_at = None, False, 0, {}
    controller._scaling_policy = SimpleNamespace(scaling_config=ScalingConfig(num_workers=3))
    controller._failure_policy = mock.Mock(make_decision=mock.Mock(return_value=FailureDecision.RETRY))
    controller._execute_failure_decision = mock.Mock(return_value=mock.sentinel.failure)
    controller.get_state = lambda: START
    controller._get_run_attempt_id = lambda: "run"
    return controller


def look(controller: Any, group: FakeGroup, orders: WorkerDirectives, *, done: str = "", failed: str = "") -> Any:
    """One look at the workers. The next state, or what the decision about a failure led to."""
    names = str(group)
    errors = {rank: RuntimeError("died") for rank, name in enumerate(names) if name in failed}
    statuses = {rank: SimpleNamespace(running=name not in done + failed) for rank, name in enumerate(names)}
    result = asyncio.run(controller._turn_over(group, SimpleNamespace(worker_statuses=statuses, errors=errors), orders))
    return getattr(result, "next_state", result)


def test_a_lost_worker_is_taken_out_and_another_asked_for(controller: Any) -> None:
    group = FakeGroup("abc")
    assert isinstance(look(controller, group, NOBODY, failed="b"), RunningState)
    assert str(group) == "ac" and group.num_newcomers == 1
    controller._failure_policy.make_decision.assert_called_once()
    look(controller, group, NOBODY)
    assert group.num_newcomers == 1, "it is on its way"


def test_what_happens_to_newcomers_and_on_drained_nodes_does_not_use_up_the_failures_of_a_run(controller: Any) -> None:
    group = FakeGroup("abc")
    group.workers[2] = a_worker("c", "drained")
    look(controller, group, NOBODY._replace(newcomers=["b"], avoid=["drained"]), failed="bc")
    assert str(group) == "a"
    controller._failure_policy.make_decision.assert_not_called()


def test_the_group_restarts_when_the_last_who_trains_is_lost(controller: Any) -> None:
    group = FakeGroup("ab")
    orders = NOBODY._replace(dismissed=["a"])
    assert look(controller, group, orders, failed="b") is mock.sentinel.failure
    (decision,), arguments = controller._execute_failure_decision.call_args
    assert decision is FailureDecision.RETRY
    assert arguments["training_failed_error"].worker_failures.keys() == {1}


def test_a_failure_too_many_ends_the_run_though_others_train(controller: Any) -> None:
    controller._failure_policy.make_decision.return_value = FailureDecision.RAISE
    assert look(controller, FakeGroup("abc"), NOBODY, failed="b") is mock.sentinel.failure
    assert controller._execute_failure_decision.call_args.args == (FailureDecision.RAISE,)


def test_one_that_was_let_go_is_taken_out_when_it_has_returned_or_its_time_is_up(controller: Any, clock: Clock) -> None:
    group = FakeGroup("abc")
    orders = NOBODY._replace(dismissed=["a", "b"], limit=1)
    look(controller, group, orders, done="a")
    assert str(group) == "bc"
    controller.save_within_s = 30.0
    clock.now = LEAVE_WITHIN_S + 29.9
    look(controller, group, orders)
    assert str(group) == "bc"
    clock.now = LEAVE_WITHIN_S + 30.0
    look(controller, group, orders)
    assert str(group) == "c" and group.num_newcomers == 0
    controller._failure_policy.make_decision.assert_not_called()


def test_a_group_that_was_drained_as_a_whole_starts_again(controller: Any) -> None:
    group = FakeGroup("ab")
    orders = NOBODY._replace(dismissed=["a", "b"])
    assert isinstance(look(controller, group, orders, done="a"), RunningState)
    assert str(group) == "b"
    assert isinstance(look(controller, group, orders, done="b"), RestartingState)


def test_nobody_is_asked_for_while_workers_return_at_the_end_of_a_run(controller: Any) -> None:
    group = FakeGroup("abc")
    over = NOBODY._replace(is_over=True)
    look(controller, group, over, done="a", failed="b")
    assert str(group) == "ac" and group.num_newcomers == 0


def test_at_the_end_ray_train_takes_over_from_those_who_were_not_let_go(
    controller: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = FakeGroup("abc")
    monkeypatch.setattr(ElasticController.__base__, "_step", mock.AsyncMock(return_value=mock.sentinel.over))
    over = NOBODY._replace(is_over=True, dismissed=["b"])
    assert look(controller, group, over, done="ac") is mock.sentinel.over
    assert str(group) == "ac"
    assert controller._latest_poll_time == float("-inf")


def test_as_many_are_asked_for_as_are_missing_beside_those_who_stay(controller: Any) -> None:
    group = FakeGroup("abc")
    look(controller, group, NOBODY._replace(leaving=["c"]))
    assert group.num_newcomers == 1, "whose place is to be taken counts as gone"
    look(controller, group, NOBODY._replace(leaving=["c"], limit=2))
    assert group.num_newcomers == 0, "the run may have no more than those who stay"


def test_a_newcomer_that_fails_to_start_is_not_replaced_at_once(controller: Any, clock: Clock) -> None:
    group = FakeGroup("ab")
    look(controller, group, NOBODY)
    assert group.num_newcomers == 1
    group.fail = 1
    look(controller, group, NOBODY)
    assert group.num_newcomers == 0
    clock.now = PAUSES_S[0] - 0.1
    look(controller, group, NOBODY)
    assert group.num_newcomers == 0
    clock.now = PAUSES_S[0]
    look(controller, group, NOBODY)
    assert group.num_newcomers == 1


def test_an_elastic_run_asks_for_what_ray_train_sees_room_for(controller: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataclasses.replace", lambda state, **changes: changes)
    decide = mock.Mock(return_value=NoopDecision())
    controller._scaling_policy = SimpleNamespace(
        scaling_config=ScalingConfig(num_workers=(1, 4)), make_decision_for_running_worker_group=decide
    )
    group = FakeGroup("ab")
    controller._limit = 4
    look(controller, group, NOBODY._replace(limit=4))
    assert group.num_newcomers == 0 and group.withdrawn == [ROOM_WITHIN_S]
    assert decide.call_args.kwargs["worker_group_state"] is mock.sentinel.state, "at Ray Train's own pace"
    decide.return_value = ResizeDecision(num_workers=9, resources_per_worker={})
    look(controller, group, NOBODY._replace(limit=4))
    assert group.num_newcomers == 2, "no more than the run may have"


def test_an_elastic_run_looks_for_room_at_once_when_it_has_lost_one_or_may_have_more(
    controller: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataclasses.replace", lambda state, **changes: changes)
    decide = mock.Mock(return_value=NoopDecision())
    policy = SimpleNamespace(
        scaling_config=ScalingConfig(num_workers=(1, 4)),
        make_decision_for_running_worker_group=decide,
        _latest_monitor_time=0.0,
    )
    controller._scaling_policy, controller._limit = policy, 2
    at_once = {"start_time": float("-inf")}
    group = FakeGroup("abc")
    look(controller, group, NOBODY._replace(limit=2), failed="c")
    assert decide.call_args.kwargs["worker_group_state"] == at_once
    assert policy._latest_monitor_time == float("-inf")
    policy._latest_monitor_time = 0.0
    look(controller, group, NOBODY._replace(limit=2))
    assert decide.call_args.kwargs["worker_group_state"] is mock.sentinel.state
    look(controller, group, NOBODY._replace(limit=3))
    assert decide.call_args.kwargs["worker_group_state"] == at_once


def test_the_more_newcomers_are_lost_the_longer_the_pause(controller: Any) -> None:
    pauses = []
    for _ in range(2000):
        controller._wait_after(1)
        pauses.append(controller._not_before)
    assert tuple(pauses[: len(PAUSES_S)]) == PAUSES_S
    assert set(pauses[len(PAUSES_S) :]) == {PAUSES_S[-1]}


def test_one_that_gets_to_train_ends_that(controller: Any) -> None:
    controller._see_who_has_trained({"a"})
    controller._wait_after(4)
    controller._see_who_has_trained({"a"})
    controller._wait_after(1)
    assert controller._not_before == PAUSES_S[4]
    controller._see_who_has_trained({"a", "b"})
    controller._wait_after(1)
    assert controller._not_before == PAUSES_S[0]
    controller._see_who_has_trained({"b"})
    controller._wait_after(1)
    assert controller._not_before == PAUSES_S[1], "a loss is none that trains"


@pytest.mark.parametrize("dies", ["when it is made", "when it is told its place", "when its function begins"])
def test_a_worker_that_dies_while_all_start_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch, dies: str) -> None:
    """Of two, neither of which is left behind, nor is its room."""
    group: Any = object.__new__(ElasticWorkerGroup)
    group._worker_group_state, group._newcomers, group._world_rank_to_ongoing_poll = None, [], {}
    room, state = mock.Mock(), mock.Mock()
    group._rooms = {"one": room}
    removed: list[Any] = []
    monkeypatch.setattr(worker_group, "remove_placement_group", removed.append)

    def start(_: Any, builder: Any) -> None:
        if dies == "when it is made":
            raise ActorDiedError
        group._worker_group_state = state
        if dies == "when it is told its place":
            raise WorkerGroupStartupFailedError("one died") from ActorDiedError()
        raise ActorDiedError

    monkeypatch.setattr(WorkerGroup, "_start_impl", start)
    with pytest.raises(WorkerGroupStartupFailedError, match="while all of them started") as caught:
        group._start_impl(mock.sentinel.builder)
    policy, error = CountingFailurePolicy(FailureConfig(max_failures=2)), ControllerError(caught.value)
    decisions = [policy.make_decision(error) for _ in range(3)]
    assert decisions == [FailureDecision.RETRY, FailureDecision.RETRY, FailureDecision.RAISE]
    has_state = dies != "when it is made"
    assert state.shutdown.called is has_state
    assert removed == ([room] if has_state else [])  # Ray Train removes the others itself
    assert not group.has_started()


def test_a_group_that_could_not_be_started_is_recorded_once_and_the_next_one_waits(
    controller: Any, clock: Clock
) -> None:
    async def take(messages: list[dict[str, Any]], _: Any) -> None:
        said.extend(each["error"] for each in messages)
        if len(said) == 2:
            raise ActorDiedError

    def is_too_soon(state: Any) -> bool:
        return asyncio.run(controller._is_too_soon(state))

    said: list[str] = []
    controller.rendezvous = SimpleNamespace(take=SimpleNamespace(remote=take))
    died = [ReschedulingState(ControllerError(WorkerGroupStartupFailedError(f"number {each}"))) for each in (1, 2)]
    assert is_too_soon(died[0]) and is_too_soon(died[0])
    clock.now += PAUSES_S[0]
    assert not is_too_soon(died[0]) and is_too_soon(died[1])
    clock.now += PAUSES_S[0]
    assert is_too_soon(died[1]), "the longer, the more were in a row"
    assert not is_too_soon(ReschedulingState(ControllerError(WorkerGroupStartupTimeoutError(2)))), "there was no room"
    assert not is_too_soon(START)
    assert said == ["number 1", "number 2"]


def test_newcomers_and_what_goes_with_a_drained_node_are_no_failures_of_the_run() -> None:
    orders = NOBODY._replace(newcomers=["new"], avoid=["drained"])
    counted = {
        (name, node): counts_as_failure(a_worker(name, node), orders)
        for name in ("old", "new")
        for node in ("healthy", "drained")
    }
    assert [place for place, counts in counted.items() if counts] == [("old", "healthy")]


def test_room_is_asked_for_where_those_are_who_stay(controller: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("one", "two", "cut", "gone", "draining", "by hand")
    nodes = [{"NodeID": name, "Alive": name != "gone", "Resources": {"CPU": 2.0}} for name in names]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    monkeypatch.setattr(controller_module, "managed_nodes", lambda: {"one", "two", "cut", "draining"})
    policy = controller._scaling_policy = LimitedScalingPolicy(ScalingConfig(num_workers=(1, 4)))
    ask = mock.Mock()
    monkeypatch.setattr(policy, "ask", ask)
    group = FakeGroup("")
    group.workers = [a_worker("a", "one"), a_worker("b", "two"), a_worker("c", "two"), a_worker("d", "cut")]
    group.workers += [a_worker("starts", "draining"), a_worker("e", "by hand"), a_worker("f", "gone")]
    orders = NOBODY._replace(failed={"b": "SIGKILL"}, leaving=["d"], avoid=["cut", "gone", "draining"])
    controller._ask_for_room(group, orders, {"draining": 30.0})
    assert ask.call_count == 1
    assert policy._request.nodes == ("one", "two") and policy.num_out_of_use == 2
    controller._ask_for_room(group, orders, {"draining": 20.0})
    assert ask.call_count == 1, "nothing is new"
    controller._ask_for_room(group, orders._replace(dismissed=["c"], limit=2), {})
    assert ask.call_count == 2 and policy._request.nodes == ("one",)
    controller._ask_for_room(None, orders, {})
    assert ask.call_count == 3 and policy._request.nodes == ()
