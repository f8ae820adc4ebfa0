"""A Ray Train controller that changes the number of its workers in place.

Ray Train's own restarts every worker when one is lost or when there is room for more. This one takes a lost worker out,
asks for another, and lets those that have come join; who trains with whom is for the rendezvous to say. What remains
Ray Train's: how many workers there is room for, what is asked of the autoscaler, how many failures are too many, and
the restart of the whole group when nobody is left.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from ray.data._internal.stats import get_or_create_stats_actor
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.controller.controller import TrainControllerLoopIterationResult
from ray.train.v2._internal.execution.controller.state import (
    FinishedState,
    RestartingState,
    RunningState,
    ShuttingDownState,
    TrainControllerState,
)
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2._internal.execution.scaling_policy import ResizeDecision
from ray.train.v2._internal.execution.scaling_policy.elastic import ElasticScalingPolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroupPollStatus
from ray.train.v2._internal.execution.worker_group.worker import Worker
from ray.train.v2.api.exceptions import WorkerGroupError

from elastic_ddp.ray_internals.scaling import NODE_ID, LimitedScalingPolicy, managed_nodes, shorten_intervals
from elastic_ddp.ray_internals.starting import CountingFailurePolicy, why_not_started_before
from elastic_ddp.ray_internals.turnover import classify_workers
from elastic_ddp.ray_internals.worker_group import ElasticWorkerGroup, actor_id, release_placement_groups
from elastic_ddp.telemetry.events import StartFailed

if TYPE_CHECKING:
    from elastic_ddp.rendezvous.messages import WorkerDirectives

_log = logging.getLogger(__name__)

ROOM_WITHIN_S = 10.0
"""How long a worker that Ray Train saw room for waits for it, before that was a stale view."""
ASK_AGAIN_S = 1.0
BUSY_S = 0.5
"""How often workers are looked after while others are on their way: every look takes those a step further."""
PAUSES_S = (2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
"""How long no worker is started after one that was lost before it trained; the longer, the more were in a row."""
NO_DEADLINE_S = 60.0
"""What a node is taken to have left if Ray says that it drains, and not until when."""
MOMENT_S = 0.1
"""What is left where the deadline has passed, by this machine's clock."""
LEAVE_WITHIN_S = 5.0
"""How long a worker that was let go may take to leave, beside what it may take to end its save."""

_OF_NO_USE = ("PlacementGroupCleanerCallback", "DatasetsCallback")
"""Callbacks of Ray Train, see `ElasticTorchTrainer`."""
_CHATTERS = ("scaling_policy", "worker_group", "failure_handling.default")
"""They tell of every look at the cluster and every try to start workers, and of every lost one as if the run had
failed."""


class ElasticController(TrainController):
    """See the module. Subclasses set `rendezvous`, what the names of placement groups begin with, and how long a
    worker that was let go may take to end its save."""

    worker_group_cls = ElasticWorkerGroup
    rendezvous: Any = None
    rooms = ""
    save_within_s = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for module in _CHATTERS:
            logging.getLogger(f"ray.train.v2._internal.execution.{module}").setLevel(logging.WARNING)
        super().__init__(*args, **kwargs)
        logging.getLogger(TrainController.__module__).addFilter(_is_news)
        shorten_intervals()
        ElasticWorkerGroup.rooms = self.rooms
        self._calm_interval_s = self._health_check_interval_s
        self._wanted: int | None = None
        """How many workers there should be, if that has been seen since it was acted on."""
        self._hurry = False
        self._limit = 0
        self._dismissed_at: dict[str, float] = {}
        self._num_failed = 0
        """Newcomers that were lost, since one has trained."""
        self._have_trained: set[str] = set()
        self._not_before = 0.0
        """When another worker may be started."""
        self._failed_start: TrainControllerState | None = None
        """The state that the newest group which could not be started led to."""

    async def _step(self) -> TrainControllerLoopIterationResult:
        state = self.get_state()
        group = self._worker_group
        assert group is None or isinstance(group, ElasticWorkerGroup)
        started = [actor_id(worker) for worker in group.get_workers()] if group is not None else []
        starting = group.num_newcomers if group is not None else 0
        self._health_check_interval_s = min(self._calm_interval_s, BUSY_S) if starting else self._calm_interval_s
        # Before the orders: a worker that has returned was dismissed by then, or the run is over.
        status = await self._poll_workers() if isinstance(state, RunningState) else None
        try:
            draining = _draining()
            orders: WorkerDirectives | None = await self.rendezvous.supervise.remote(started, starting, draining)
        except RayActorError:
            orders = None  # the driver ended it, and with it the run
        except RayTaskError:  # the disk of its node is full, perhaps
            _log.exception("the rendezvous could not say what is to be done")
            await asyncio.sleep(ASK_AGAIN_S)
            return self._to(state, state)
        if orders is None and not isinstance(state, ShuttingDownState):
            return self._to(state, ShuttingDownState(next_state=FinishedState()))
        if orders is not None:
            ElasticWorkerGroup.avoid = orders.avoid
            self._ask_for_room(group, orders, draining)
        if status is None or orders is None:
            self._wanted = None
            await asyncio.sleep(0.1)
            if orders is not None and await self._is_too_soon(state):
                return self._to(state, state)
            return await super()._step()
        assert group is not None
        return await self._turn_over(group, status, orders)

    async def _turn_over(
        self, group: ElasticWorkerGroup, status: WorkerGroupPollStatus, orders: WorkerDirectives
    ) -> TrainControllerLoopIterationResult:
        """Takes out of the group who has gone, and asks for others; or ends the group, if nobody is left in it."""
        state = self.get_state()
        workers = [actor_id(worker) for worker in group.get_workers()]
        done = {rank for rank, each in status.worker_statuses.items() if not each.running}
        turnover = classify_workers(workers, orders, done=done, errors=status.errors, is_overdue=self._has_had_time)
        if turnover.is_over:
            group.remove(turnover.dismissed)
            self._latest_poll_time = float("-inf")  # Ray Train polls once more, and at once
            return await super()._step()
        failed = turnover.failed
        self._see_who_has_trained(set(workers) - set(orders.newcomers))
        self._wait_after(sum(workers[rank] in orders.newcomers for rank in failed))
        if failed:
            error = WorkerGroupError(error_message="workers were lost", worker_failures=failed)
            decision = FailureDecision.RETRY
            if any(
                counts_as_failure(group.get_workers()[rank], orders) for rank in failed
            ):  # Ray Train counts decisions
                decision = self._failure_policy.make_decision(training_failed_error=error)
            if decision != FailureDecision.RETRY or turnover.nobody_trains:
                return self._execute_failure_decision(decision, training_failed_error=error)
        if turnover.all_have_left:
            # Ray Train looks after no group that is empty: it starts another, as soon as there is room.
            everyone = WorkerGroupError(error_message="all workers were drained", worker_failures={})
            return self._to(state, RestartingState(training_failed_error=everyone))
        if gone := failed.keys() | turnover.left:
            group.remove(gone)
            self._hurry = True
        if not turnover.through:  # otherwise the run is over
            going = {*orders.dismissed, *orders.leaving}
            staying = sum(actor_id(worker) not in going for worker in group.get_workers())
            self._adjust(group, status, staying, orders.limit)
        return self._to(state, RunningState())

    async def _is_too_soon(self, state: TrainControllerState) -> bool:
        """Whether a group is to wait that follows one which could not be started; that one goes on record."""
        if (why := why_not_started_before(state)) is None:
            return False
        if state is not self._failed_start:
            self._failed_start = state
            self._wait_after(1)
            with suppress(RayError):  # the rendezvous may be dead for a moment, and it is only for the record
                await self.rendezvous.take.remote([StartFailed(at=time.time(), error=why)], None)
        return time.monotonic() < self._not_before

    def _see_who_has_trained(self, workers: set[str]) -> None:
        """One who had not before ends the row of newcomers that were lost."""
        if workers - self._have_trained:
            self._num_failed = 0
        self._have_trained = workers

    def _wait_after(self, num_lost: int) -> None:
        """The more newcomers are lost, the longer it takes until there is another."""
        if num_lost:
            self._num_failed += num_lost
            self._not_before = time.monotonic() + PAUSES_S[min(self._num_failed, len(PAUSES_S)) - 1]

    def _ask_for_room(
        self, group: ElasticWorkerGroup | None, orders: WorkerDirectives, draining: Collection[str]
    ) -> None:
        """Has Ray, and its autoscaler, look for room for as many workers as there may be, and keep no more of it.

        Args:
            draining: nodes that Ray takes away; its autoscaler looks for others in their place.
        """
        policy = self._scaling_policy
        if not isinstance(policy, LimitedScalingPolicy):
            return
        stay = set(orders.avoid).difference(draining)
        alive = {each["NodeID"]: each["Resources"] for each in ray.nodes() if each["Alive"]} if stay else {}
        out_of_use = {node: resources for node, resources in alive.items() if node in stay}
        going = {*orders.failed, *orders.dismissed, *orders.leaving}
        workers = group.get_workers() if group is not None else []
        # A worker that starts on a node which is drained is in none of the orders yet.
        kept = managed_nodes().difference(orders.avoid, draining) if workers else set()
        nodes = [node for each in workers if actor_id(each) not in going and (node := each.metadata.node_id) in kept]
        if policy.is_news(orders.limit, nodes=nodes, avoid=orders.avoid, out_of_use=out_of_use):
            policy.ask()

    def _has_had_time(self, worker: str) -> bool:
        """Whether a worker that was dismissed is overdue, stuck in a user's code."""
        now = time.monotonic()
        return now - self._dismissed_at.setdefault(worker, now) >= LEAVE_WITHIN_S + self.save_within_s

    def _adjust(self, group: ElasticWorkerGroup, status: WorkerGroupPollStatus, staying: int, limit: int) -> None:
        """Asks for workers that are missing, and takes those on their way a step further.

        Args:
            staying: workers of the group that are not about to go.
            limit: workers that there may be.
        """
        self._hurry = self._hurry or limit > self._limit
        self._limit = limit
        scaling = self._scaling_policy.scaling_config
        if not scaling.elasticity_enabled or staying < len(group.get_workers()):
            self._wanted = scaling.max_workers  # whose place is to be taken is in the way of Ray Train's arithmetic
        else:
            state = group.get_worker_group_state()
            if self._hurry:  # look for room now, not at the next interval
                self._scaling_policy._latest_monitor_time = float("-inf")  # type: ignore[attr-defined]
                state, self._hurry = dataclasses.replace(state, start_time=float("-inf")), False
            decision = self._scaling_policy.make_decision_for_running_worker_group(
                worker_group_state=state, worker_group_status=status
            )
            if isinstance(decision, ResizeDecision):
                self._wanted = decision.num_workers
            group.withdraw(ROOM_WITHIN_S)
        group.keep_newcomers(limit - staying)
        missing = min(self._wanted or 0, limit) - staying - group.num_newcomers
        if missing > 0 and time.monotonic() >= self._not_before:
            group.request(missing)
            self._wanted = None
        self._wait_after(group.advance())

    def _to(self, before: TrainControllerState, after: TrainControllerState) -> TrainControllerLoopIterationResult:
        return TrainControllerLoopIterationResult(
            run_attempt_id=self._get_run_attempt_id(), previous_state=before, next_state=after
        )


def counts_as_failure(worker: Worker, orders: WorkerDirectives) -> bool:
    """Whether a lost worker is a failure of the run: not if it never trained while others do, nor if it went with a
    node that is drained."""
    return actor_id(worker) not in orders.newcomers and worker.metadata.node_id not in orders.avoid


def _is_news(record: logging.LogRecord) -> bool:
    """False for a group that did not start, which Ray Train logs with a traceback: the ledger has the reason."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (WorkerGroupStartupTimeoutError, WorkerGroupStartupFailedError))


def _draining() -> dict[str, float]:
    """Nodes that Ray is about to take away (a spot notice, the autoscaler, `ray drain-node`), and the seconds left."""
    deadlines: dict[str, int] = ray._private.state.state.get_draining_nodes()
    now_ms = time.time() * 1000
    return {
        node: max(MOMENT_S, (deadline - now_ms) / 1000) if deadline else NO_DEADLINE_S
        for node, deadline in deadlines.items()
    }


class ElasticTorchTrainer(TorchTrainer):
    """Ray Train's trainer with a controller that resizes in place, and without two of its callbacks.

    The cleaner of placement groups asks the dashboard, which `ray[train]` does not bring, and complains every second
    that it is not there. Ours are freed at the end of `fit`, however that comes. The other one hands out shards of data
    sets, of which Ray Train knows none here, in a process of its own for every worker that is added.

    Args:
        rendezvous: the run's rendezvous.
        save_within_s: how long a worker that was let go may take to end its save.
        on_controller: told of the controller actor, with which all workers end.
    """

    def __init__(
        self,
        *args: Any,
        rendezvous: Any,
        save_within_s: float,
        on_controller: Callable[[Any], None],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._rendezvous, self._save_within_s = rendezvous, save_within_s
        self._on_controller = on_controller

    def _create_default_callbacks(self) -> list[Any]:
        callbacks: list[Any] = super()._create_default_callbacks()  # type: ignore[misc]
        return [callback for callback in callbacks if type(callback).__name__ not in _OF_NO_USE]

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        get_or_create_stats_actor()  # Ray Data's first pipeline would, on a worker's node, which then is never idle
        rooms = f"elastic_ddp-{uuid.uuid4().hex}-"
        attributes = {"rendezvous": self._rendezvous, "rooms": rooms, "save_within_s": self._save_within_s}
        controller_class: Any = type("ElasticController", (ElasticController,), attributes)
        arguments["failure_policy"] = CountingFailurePolicy(arguments["failure_policy"].failure_config)
        if isinstance(policy := arguments["scaling_policy"], ElasticScalingPolicy):
            arguments["scaling_policy"] = LimitedScalingPolicy(policy.scaling_config)
        here = {NODE_ID: ray.get_runtime_context().get_node_id()}
        environment = {**get_env_vars_to_propagate(), "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0"}
        options = {"num_cpus": 0, "label_selector": here, "runtime_env": {"env_vars": environment}}
        controller: Any = ray.remote(controller_class).options(**options).remote(**arguments)
        self._on_controller(controller)
        try:
            ray.get(controller.run.remote())
            return ray.get(controller.get_result.remote())
        finally:
            release_placement_groups(rooms)
