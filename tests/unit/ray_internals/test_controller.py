"""Decisions of the controller, without a cluster: which workers to remove, how many to start, and when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
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

from elastic_ddp.data.user_code import import_failure
from elastic_ddp.ray_internals import controller as controller_module
from elastic_ddp.ray_internals import worker_group
from elastic_ddp.ray_internals.controller import (
    DISMISSED_EXIT_S,
    MAX_START_BACKOFF_S,
    PLACEMENT_TIMEOUT_S,
    CountingFailurePolicy,
    ElasticController,
    StartBackoff,
)
from elastic_ddp.ray_internals.scaling_policy import LimitedScalingPolicy
from elastic_ddp.ray_internals.standbys import Standbys, StartingWorker
from elastic_ddp.ray_internals.worker_group import ElasticWorkerGroup
from elastic_ddp.rendezvous.messages import WorkerDirectives
from elastic_ddp.telemetry.events import StartFailed

NONE = WorkerDirectives(failed={}, newcomers=[], dismissed=[], leaving=[], avoid=[], limit=3, is_over=False)
START = RunningState()
FIRST_BACKOFF_S = 2.0


class Clock:
    """A clock that is set by the test."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    return clock


class FakeStandbys:
    def __init__(self) -> None:
        self.waiting = 0
        self.fail = 0
        self.kept: list[tuple[list[str], bool]] = []
        """The nodes of each call of `keep`, and whether standbys could start."""

    def keep(self, num_per_node: int, nodes: Mapping[str, Any], *, may_start: bool) -> None:
        self.kept.append((sorted(nodes), may_start))

    def advance(self) -> int:
        failed, self.fail = self.fail, 0
        return failed


class FakeGroup:
    """A worker group without processes: workers by name, and the number of starting ones."""

    def __init__(self, workers: str) -> None:
        self.workers = [a_worker(name) for name in workers]
        self.num_starting = 0
        self.fail = 0
        self.cancelled: list[float] = []
        self.standbys = FakeStandbys()

    def get_workers(self) -> list[Any]:
        return self.workers

    def get_worker_group_state(self) -> Any:
        return mock.sentinel.state

    def remove(self, ranks: Collection[int]) -> None:
        self.workers = [each for rank, each in enumerate(self.workers) if rank not in ranks]

    def replace(self, ranks: Collection[int]) -> set[int]:
        """Standbys have the names of the workers whose places they take, in capitals."""
        replaced = set()
        for rank in ranks:
            if self.standbys.waiting:
                self.standbys.waiting -= 1
                self.workers[rank] = a_worker(self.workers[rank].actor._actor_id.hex().upper())
                replaced.add(rank)
        return replaced

    def request(self, num_workers: int) -> None:
        self.num_starting += num_workers

    def limit_starting(self, number: int) -> None:
        self.num_starting = min(self.num_starting, max(0, number))

    def cancel_unplaced(self, timeout_s: float) -> None:
        self.cancelled.append(timeout_s)

    def advance(self) -> int:
        failed, self.fail = self.fail, 0
        self.num_starting -= failed
        return failed

    def __str__(self) -> str:
        return "".join(each.actor._actor_id.hex() for each in self.workers)


def a_worker(name: str, node_id: str = "healthy") -> Any:
    actor = SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: name))
    return SimpleNamespace(actor=actor, metadata=SimpleNamespace(node_id=node_id))


@pytest.fixture
def controller(clock: Clock) -> Any:
    """The controller of a run with exactly three workers, whose failure policy always retries."""
    controller: Any = object.__new__(ElasticController)
    controller._backoff, controller._standby_backoff, controller._trained = StartBackoff(), StartBackoff(), set()
    controller._failed_start, controller.save_within_s, controller.standby_workers = None, 0.0, 0
    controller._target, controller._query_capacity_now, controller._limit, controller._dismissed_at = None, False, 0, {}
    controller._scaling_policy = SimpleNamespace(scaling_config=ScalingConfig(num_workers=3))
    controller._failure_policy = mock.Mock(make_decision=mock.Mock(return_value=FailureDecision.RETRY))
    controller._execute_failure_decision = mock.Mock(return_value=mock.sentinel.failure)
    controller.get_state = lambda: START
    controller._get_run_attempt_id = lambda: "run"
    return controller


def poll(controller: Any, group: FakeGroup, directives: WorkerDirectives, *, done: str = "", failed: str = "") -> Any:
    """Polls the workers once. Returns the next state, or the result of the decision about a failure."""
    names = str(group)
    errors = {rank: RuntimeError("died") for rank, name in enumerate(names) if name in failed}
    statuses = {rank: SimpleNamespace(running=name not in done + failed) for rank, name in enumerate(names)}
    result = asyncio.run(
        controller._apply_directives(group, SimpleNamespace(worker_statuses=statuses, errors=errors), directives)
    )
    return getattr(result, "next_state", result)


def test_a_failed_worker_is_removed_and_a_replacement_started(controller: Any) -> None:
    group = FakeGroup("abc")
    assert isinstance(poll(controller, group, NONE, failed="b"), RunningState)
    assert str(group) == "ac" and group.num_starting == 1
    controller._failure_policy.make_decision.assert_called_once()
    poll(controller, group, NONE)
    assert group.num_starting == 1, "the replacement is already starting"


def test_failures_of_newcomers_and_on_drained_nodes_do_not_count(controller: Any) -> None:
    group = FakeGroup("abc")
    group.workers[2] = a_worker("c", "drained")
    poll(controller, group, NONE._replace(newcomers=["b"], avoid=["drained"]), failed="bc")
    assert str(group) == "a" and group.num_starting == 0, "after a pause"
    controller._failure_policy.make_decision.assert_not_called()


def test_the_group_restarts_when_the_last_training_worker_fails(controller: Any) -> None:
    group = FakeGroup("ab")
    directives = NONE._replace(dismissed=["a"])
    assert poll(controller, group, directives, failed="b") is mock.sentinel.failure
    (decision,), arguments = controller._execute_failure_decision.call_args
    assert decision is FailureDecision.RETRY
    assert arguments["training_failed_error"].worker_failures.keys() == {1}


def test_a_dismissed_worker_is_removed_when_it_has_returned_or_is_overdue(controller: Any, clock: Clock) -> None:
    group = FakeGroup("abc")
    directives = NONE._replace(dismissed=["a", "b"], limit=1)
    poll(controller, group, directives, done="a")
    assert str(group) == "bc"
    controller.save_within_s = 30.0
    clock.now = DISMISSED_EXIT_S + 29.9
    poll(controller, group, directives)
    assert str(group) == "bc"
    clock.now = DISMISSED_EXIT_S + 30.0
    poll(controller, group, directives)
    assert str(group) == "c" and group.num_starting == 0
    controller._failure_policy.make_decision.assert_not_called()


def test_a_group_whose_workers_were_all_drained_starts_again(controller: Any) -> None:
    group = FakeGroup("ab")
    directives = NONE._replace(dismissed=["a", "b"])
    assert isinstance(poll(controller, group, directives, done="a"), RunningState)
    assert str(group) == "b"
    assert isinstance(poll(controller, group, directives, done="b"), RestartingState)


def test_no_worker_is_started_while_workers_return_at_the_end_of_a_run(controller: Any) -> None:
    group = FakeGroup("abc")
    over = NONE._replace(is_over=True)
    poll(controller, group, over, done="a", failed="b")
    assert str(group) == "ac" and group.num_starting == 0


def test_at_the_end_of_a_run_ray_train_handles_the_workers_that_were_not_dismissed(
    controller: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = FakeGroup("abc")
    monkeypatch.setattr(ElasticController.__base__, "_step", mock.AsyncMock(return_value=mock.sentinel.over))
    over = NONE._replace(is_over=True, dismissed=["b"])
    assert poll(controller, group, over, done="ac") is mock.sentinel.over
    assert str(group) == "ac"
    assert controller._latest_poll_time == float("-inf")


def test_missing_workers_are_started_up_to_the_limit(controller: Any) -> None:
    group = FakeGroup("abc")
    poll(controller, group, NONE._replace(leaving=["c"]))
    assert group.num_starting == 1, "a leaving worker is replaced"
    poll(controller, group, NONE._replace(leaving=["c"], limit=2))
    assert group.num_starting == 0, "the limit allows no more than the workers that stay"


def test_a_worker_that_fails_to_start_is_replaced_after_a_backoff(controller: Any, clock: Clock) -> None:
    group = FakeGroup("ab")
    poll(controller, group, NONE)
    assert group.num_starting == 1
    group.fail = 1
    poll(controller, group, NONE)
    assert group.num_starting == 0
    clock.now = FIRST_BACKOFF_S - 0.1
    poll(controller, group, NONE)
    assert group.num_starting == 0
    clock.now = FIRST_BACKOFF_S
    poll(controller, group, NONE)
    assert group.num_starting == 1


def test_an_elastic_run_starts_the_workers_that_ray_train_has_capacity_for(
    controller: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataclasses.replace", lambda state, **changes: changes)
    decide = mock.Mock(return_value=NoopDecision())
    controller._scaling_policy = SimpleNamespace(
        scaling_config=ScalingConfig(num_workers=(1, 4)), make_decision_for_running_worker_group=decide
    )
    group = FakeGroup("ab")
    controller._limit = 4
    poll(controller, group, NONE._replace(limit=4))
    assert group.num_starting == 0 and group.cancelled == [PLACEMENT_TIMEOUT_S]
    assert decide.call_args.kwargs["worker_group_state"] is mock.sentinel.state, "at Ray Train's own interval"
    decide.return_value = ResizeDecision(num_workers=9, resources_per_worker={})
    poll(controller, group, NONE._replace(limit=4))
    assert group.num_starting == 2, "no more than the limit"


def test_capacity_is_queried_at_once_after_a_failure_or_a_raised_limit(
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
    immediately = {"start_time": float("-inf")}
    group = FakeGroup("abc")
    poll(controller, group, NONE._replace(limit=2), failed="c")
    assert decide.call_args.kwargs["worker_group_state"] == immediately
    assert policy._latest_monitor_time == float("-inf")
    policy._latest_monitor_time = 0.0
    poll(controller, group, NONE._replace(limit=2))
    assert decide.call_args.kwargs["worker_group_state"] is mock.sentinel.state
    poll(controller, group, NONE._replace(limit=3))
    assert decide.call_args.kwargs["worker_group_state"] == immediately


# Standbys.


@pytest.fixture
def with_standbys(controller: Any) -> Any:
    controller.standby_workers = 1
    return controller


def test_a_standby_takes_the_place_of_a_failed_worker(with_standbys: Any) -> None:
    group = FakeGroup("abc")
    group.standbys.waiting = 1
    poll(with_standbys, group, NONE, failed="bc")
    assert str(group) == "aB" and group.num_starting == 1, "the other one is replaced by a new worker"
    with_standbys._failure_policy.make_decision.assert_called_once()


def test_the_group_does_not_restart_if_a_standby_replaces_its_last_worker(with_standbys: Any) -> None:
    group = FakeGroup("ab")
    group.standbys.waiting = 1
    assert isinstance(poll(with_standbys, group, NONE, failed="ab"), RunningState)
    assert str(group) == "A"


def test_a_standby_takes_the_place_of_a_worker_that_was_asked_to_leave(with_standbys: Any) -> None:
    group = FakeGroup("abc")
    group.standbys.waiting = 2
    poll(with_standbys, group, NONE._replace(leaving=["b"]))
    assert str(group) == "abc" and group.num_starting == 1
    kept = len(group.standbys.kept)
    poll(with_standbys, group, NONE._replace(dismissed=["b"], is_steady=True), done="b")
    assert str(group) == "aBc" and group.num_starting == 0
    assert len(group.standbys.kept) == kept, "the next standby does not start before this one has joined"
    poll(with_standbys, group, NONE._replace(dismissed=["c"], limit=2), done="c")
    assert str(group) == "aB", "after a resize its place is not free"


@pytest.mark.parametrize("change", [{"avoid": ["healthy"]}, {"is_over": True}, {"limit": 2}])
def test_no_standby_is_used_on_a_drained_node_at_the_end_or_above_the_limit(
    with_standbys: Any, change: dict[str, Any]
) -> None:
    group = FakeGroup("abc")
    group.standbys.waiting = 1
    poll(with_standbys, group, NONE._replace(**change), failed="c")
    assert str(group) == "ab"


def test_one_failure_too_many_ends_the_run_although_others_train_and_a_standby_waits(with_standbys: Any) -> None:
    with_standbys._failure_policy.make_decision.return_value = FailureDecision.RAISE
    group = FakeGroup("abc")
    group.standbys.waiting = 1
    assert poll(with_standbys, group, NONE, failed="b") is mock.sentinel.failure
    assert with_standbys._execute_failure_decision.call_args.args == (FailureDecision.RAISE,) and str(group) == "abc"


def test_standbys_start_on_undrained_nodes_while_all_workers_train(with_standbys: Any) -> None:
    steady, group = NONE._replace(is_steady=True), FakeGroup("ab")
    group.workers.append(a_worker("c", "drained"))
    poll(with_standbys, group, steady)
    poll(with_standbys, group, steady._replace(avoid=["drained"]))
    poll(with_standbys, group, NONE)
    group.workers.pop()
    poll(with_standbys, group, steady)
    assert group.num_starting == 1
    expected = [(["drained", "healthy"], True), (["healthy"], True), (["drained", "healthy"], False)]
    assert group.standbys.kept == [*expected, (["healthy"], False)], "not while a worker starts"


def test_a_failed_standby_delays_the_next_one_and_no_worker(with_standbys: Any, clock: Clock) -> None:
    steady, group = NONE._replace(is_steady=True), FakeGroup("abc")
    group.standbys.fail = 1
    for clock.now in (0.0, FIRST_BACKOFF_S - 0.1, FIRST_BACKOFF_S):
        poll(with_standbys, group, steady)
    assert [may_start for _, may_start in group.standbys.kept] == [True, False, True]
    assert with_standbys._backoff.is_over
    with_standbys._failure_policy.make_decision.assert_not_called()


def test_the_backoff_doubles_with_each_failed_start_up_to_its_maximum(controller: Any) -> None:
    pauses = []
    for _ in range(2000):
        controller._backoff.add(1)
        pauses.append(controller._backoff.until)
    assert pauses[:5] == [2.0, 4.0, 8.0, 16.0, 32.0]
    assert set(pauses[5:]) == {MAX_START_BACKOFF_S}


def test_a_worker_that_trains_for_the_first_time_resets_the_backoff(controller: Any) -> None:
    controller._reset_backoff_if_new({"a"})
    controller._backoff.add(4)
    controller._reset_backoff_if_new({"a"})
    controller._backoff.add(1)
    assert controller._backoff.until == 32.0
    controller._reset_backoff_if_new({"a", "b"})
    controller._backoff.add(1)
    assert controller._backoff.until == FIRST_BACKOFF_S
    controller._reset_backoff_if_new({"b"})
    controller._backoff.add(1)
    assert controller._backoff.until == 4.0, "a worker that is gone does not reset it"


def test_a_standby_takes_over_the_placement_group_of_the_worker_that_it_replaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[Any] = []
    monkeypatch.setattr(worker_group.ray, "kill", killed.append)
    group: Any = object.__new__(ElasticWorkerGroup)
    workers = {name: a_worker(name) for name in "abS"}
    group.get_workers = lambda: [workers["a"], workers["b"]]
    group._placement_groups = {"a": mock.sentinel.of_a, "b": mock.sentinel.of_b}
    group.standbys = mock.Mock(take=mock.Mock(side_effect=[None, workers["S"]]))
    group._set_workers = mock.Mock()
    assert group.replace([0, 1]) == {1}
    group._set_workers.assert_called_once_with([workers["a"], workers["S"]])
    assert group._placement_groups == {"a": mock.sentinel.of_a, "S": mock.sentinel.of_b}
    assert killed == [workers["a"].actor, workers["b"].actor], "before their GPUs are used again"


def test_a_standby_takes_the_place_of_a_worker_that_has_just_begun_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[Any] = []
    monkeypatch.setattr(worker_group.ray, "kill", killed.append)
    monkeypatch.setattr(worker_group.ray, "wait", lambda refs, timeout: (refs, []))
    monkeypatch.setattr(worker_group.ray, "get", lambda ref: ref)
    group: Any = object.__new__(ElasticWorkerGroup)
    standby = a_worker("S")
    group.standbys = mock.Mock(take=mock.Mock(return_value=standby))
    starting = StartingWorker(
        mock.Mock(), 0.0, placed_at=1.0, actor=mock.sentinel.actor, pending=mock.sentinel.metadata
    )
    group._starting, group._placement_groups, started = [starting], {}, list[Any]()
    group.get_workers, group._set_workers = list, started.extend
    assert group.advance() == 0
    group.standbys.take.assert_called_once_with(mock.sentinel.metadata)
    assert started == [standby] and killed == [mock.sentinel.actor]
    assert group._placement_groups == {"S": starting.placement_group} and group.num_starting == 0


@pytest.mark.parametrize("dies", ["when its actor starts", "when it gets its context", "when its function starts"])
def test_a_worker_that_dies_during_the_start_of_its_group_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    """No worker and no placement group is left behind."""
    group: Any = object.__new__(ElasticWorkerGroup)
    group._worker_group_state, group._starting, group._world_rank_to_ongoing_poll = None, [], {}
    group.standbys = Standbys(mock.Mock(), mock.Mock())
    placement_group, state = mock.Mock(), mock.Mock()
    group._placement_groups = {"one": placement_group}
    removed: list[Any] = []
    monkeypatch.setattr(worker_group, "remove_placement_group", removed.append)

    def start(_: Any, builder: Any) -> None:
        if dies == "when its actor starts":
            raise ActorDiedError
        group._worker_group_state = state
        if dies == "when it gets its context":
            raise WorkerGroupStartupFailedError("one died") from ActorDiedError()
        raise ActorDiedError

    monkeypatch.setattr(WorkerGroup, "_start_impl", start)
    with pytest.raises(WorkerGroupStartupFailedError, match="during the start of its group") as caught:
        group._start_impl(mock.sentinel.builder)
    policy, error = CountingFailurePolicy(FailureConfig(max_failures=2)), ControllerError(caught.value)
    decisions = [policy.make_decision(error) for _ in range(3)]
    assert decisions == [FailureDecision.RETRY, FailureDecision.RETRY, FailureDecision.RAISE]
    has_state = dies != "when its actor starts"
    assert state.shutdown.called is has_state
    assert removed == ([placement_group] if has_state else [])  # Ray Train removes the others itself
    assert not group.has_started()


def test_a_node_that_lacks_a_module_ends_the_run_at_once() -> None:
    cause = WorkerGroupStartupFailedError("failed to import: ModuleNotFoundError: No module named 'elastic_ddp'")
    policy = CountingFailurePolicy(FailureConfig(max_failures=2))
    assert policy.make_decision(ControllerError(cause)) == FailureDecision.RAISE
    assert "some node: No module named 'elastic_ddp'. " in str(import_failure(ControllerError(cause)))
    assert import_failure(ValueError("other")) is None


def test_a_failed_start_is_recorded_once_and_delays_the_next_one(controller: Any, clock: Clock) -> None:
    async def report(event: StartFailed, _: Any) -> None:
        errors.append(event.error)
        if len(errors) == 2:
            raise ActorDiedError

    def in_backoff(state: Any) -> bool:
        return asyncio.run(controller._in_start_backoff(state))

    errors: list[str] = []
    controller.rendezvous = SimpleNamespace(report=SimpleNamespace(remote=report))
    failed = [
        ReschedulingState(ControllerError(WorkerGroupStartupFailedError(f"number {number}"))) for number in (1, 2)
    ]
    assert in_backoff(failed[0]) and in_backoff(failed[0])
    clock.now += FIRST_BACKOFF_S
    assert not in_backoff(failed[0]) and in_backoff(failed[1])
    clock.now += FIRST_BACKOFF_S
    assert in_backoff(failed[1]), "the backoff has doubled"
    assert not in_backoff(ReschedulingState(ControllerError(WorkerGroupStartupTimeoutError(2)))), (
        "no capacity is not a failed start"
    )
    assert not in_backoff(START)
    assert errors == ["number 1", "number 2"]


def test_resources_of_staying_workers_are_requested_on_their_nodes(
    controller: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("one", "two", "cut", "gone", "draining", "by hand")
    nodes = [{"NodeID": name, "Alive": name != "gone", "Resources": {"CPU": 2.0}} for name in names]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    monkeypatch.setattr(controller_module, "autoscaled_nodes", lambda: {"one", "two", "cut", "draining"})
    policy = controller._scaling_policy = LimitedScalingPolicy(ScalingConfig(num_workers=(1, 4)))
    send = mock.Mock()
    monkeypatch.setattr(policy, "_send_resource_request", send)
    group = FakeGroup("")
    group.workers = [a_worker("a", "one"), a_worker("b", "two"), a_worker("c", "two"), a_worker("d", "cut")]
    group.workers += [a_worker("starts", "draining"), a_worker("e", "by hand"), a_worker("f", "gone")]
    directives = NONE._replace(failed={"b": "SIGKILL"}, leaving=["d"], avoid=["cut", "gone", "draining"])
    controller._request_resources(group, directives, {"draining": 30.0})
    assert send.call_count == 1
    assert policy._request.nodes == ("one", "two") and policy.num_avoided == 2
    controller._request_resources(group, directives, {"draining": 20.0})
    assert send.call_count == 1, "nothing has changed"
    controller._request_resources(group, directives._replace(dismissed=["c"], limit=2), {})
    assert send.call_count == 2 and policy._request.nodes == ("one",)
    controller._request_resources(None, directives, {})
    assert send.call_count == 3 and policy._request.nodes == ()
