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
from collections.abc import Callable
from typing import Any

import ray
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.controller.controller import TrainControllerLoopIterationResult
from ray.train.v2._internal.execution.controller.state import (
    FinishedState,
    RunningState,
    ShuttingDownState,
    TrainControllerState,
)
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2._internal.execution.scaling_policy import ResizeDecision
from ray.train.v2._internal.execution.worker_group import WorkerGroupPollStatus
from ray.train.v2.api.exceptions import WorkerGroupError

from elastic_ddp.ray_internals.worker_group import ElasticWorkerGroup, actor_id

ROOM_WITHIN_S = 10.0
"""How long a worker that Ray Train saw room for waits for it, before that was a stale view."""


_CHATTERS = ("scaling_policy.elastic", "failure_handling.default")
"""They tell of every look at the cluster, and of every lost worker as if the run had failed."""


class InPlaceController(TrainController):
    """See the module. Subclasses set `rendezvous`."""

    worker_group_cls = ElasticWorkerGroup
    rendezvous: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for module in _CHATTERS:
            logging.getLogger(f"ray.train.v2._internal.execution.{module}").setLevel(logging.WARNING)
        self._wanted: int | None = None
        """How many workers there should be, if that has been seen since it was acted on."""
        self._hurry = False

    async def _step(self) -> TrainControllerLoopIterationResult:
        state = self.get_state()
        group = self._worker_group
        assert group is None or isinstance(group, ElasticWorkerGroup)
        started = [actor_id(worker) for worker in group.get_workers()] if group is not None else []
        starting = group.num_newcomers if group is not None else 0
        # The rendezvous lives as long as the run: without it this fails, and so ends the workers.
        gone: dict[str, str] | None = await self.rendezvous.supervise.remote(started, starting)
        if gone is None and not isinstance(state, ShuttingDownState):
            return self._to(state, ShuttingDownState(next_state=FinishedState()))
        gone = gone or {}
        if not isinstance(state, RunningState):
            self._wanted = None
            await asyncio.sleep(0.1)
            return await super()._step()
        status = await self._poll_workers()
        if self._is_training_succeeded(status):
            self._latest_poll_time = float("-inf")  # Ray Train polls once more, and at once
            return await super()._step()
        assert group is not None
        presumed = {
            rank: RuntimeError(gone[actor_id(worker)])
            for rank, worker in enumerate(group.get_workers())
            if actor_id(worker) in gone
        }
        lost: dict[int, Exception] = {**status.errors, **presumed}
        through = {rank for rank, each in status.worker_statuses.items() if not each.running and rank not in lost}
        if lost:
            error = WorkerGroupError(error_message="workers were lost", worker_failures=lost)
            decision = self._failure_policy.make_decision(training_failed_error=error)
            nobody_left = len(lost) + len(through) == len(group.get_workers())
            if decision != FailureDecision.RETRY or nobody_left:
                return self._execute_failure_decision(decision, training_failed_error=error)
            group.remove(lost)
            self._hurry = True
        elif not through:  # otherwise the run is over
            self._adjust(group, status)
        return self._to(state, RunningState())

    def _adjust(self, group: ElasticWorkerGroup, status: WorkerGroupPollStatus) -> None:
        """Asks for workers that are missing, and takes those on their way a step further."""
        scaling = self._scaling_policy.scaling_config
        if not scaling.elasticity_enabled:
            self._wanted = scaling.max_workers
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
        missing = (self._wanted or 0) - len(group.get_workers()) - group.num_newcomers
        if missing > 0:
            group.request(missing)
            self._wanted = None
        group.advance()

    def _to(self, before: TrainControllerState, after: TrainControllerState) -> TrainControllerLoopIterationResult:
        return TrainControllerLoopIterationResult(
            run_attempt_id=self._get_run_attempt_id(), previous_state=before, next_state=after
        )


class ElasticTorchTrainer(TorchTrainer):
    """Ray Train's trainer with a controller that resizes in place, and without its cleaner of placement groups.

    The cleaner asks the dashboard, which `ray[train]` does not bring, and complains every second that it is not there.
    Our placement groups are not detached, so Ray frees them with the job.

    Args:
        rendezvous: the run's rendezvous; None restarts the whole group instead, as Ray Train does.
        on_controller: told of the controller actor, with which all workers end.
    """

    def __init__(self, *args: Any, rendezvous: Any, on_controller: Callable[[Any], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rendezvous = rendezvous
        self._on_controller = on_controller

    def _create_default_callbacks(self) -> list[Any]:
        callbacks: list[Any] = super()._create_default_callbacks()  # type: ignore[misc]
        return [callback for callback in callbacks if type(callback).__name__ != "PlacementGroupCleanerCallback"]

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        controller_class: Any = TrainController
        if self._rendezvous is not None:
            controller_class = type("ElasticController", (InPlaceController,), {"rendezvous": self._rendezvous})
        here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        environment = {**get_env_vars_to_propagate(), "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0"}
        options = {"num_cpus": 0, "label_selector": here, "runtime_env": {"env_vars": environment}}
        controller: Any = ray.remote(controller_class).options(**options).remote(**arguments)
        self._on_controller(controller)
        ray.get(controller.run.remote())
        return ray.get(controller.get_result.remote())
