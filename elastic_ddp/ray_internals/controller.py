"""A Ray Train controller that adds and removes workers while the others train.

Ray Train's own controller restarts all workers if one fails or if there is capacity for more. This one removes a failed
worker and starts a replacement; the rendezvous decides which workers train together. Ray Train still decides how many
workers fit, what to request from the autoscaler, how many failures are too many, and restarts the whole group if no
worker is left.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.controller import state as states
from ray.train.v2._internal.execution.controller.controller import TrainControllerLoopIterationResult
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2._internal.execution.failure_handling.default import DefaultFailurePolicy
from ray.train.v2._internal.execution.scaling_policy import ResizeDecision
from ray.train.v2._internal.execution.worker_group import WorkerGroupPollStatus
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError, WorkerGroupError

from elastic_ddp.ray_internals.nodes import draining_nodes
from elastic_ddp.ray_internals.ray_messages import mark_messages
from elastic_ddp.ray_internals.scaling_policy import LimitedScalingPolicy, autoscaled_nodes, shorten_intervals
from elastic_ddp.ray_internals.worker_group import ElasticWorkerGroup, actor_id
from elastic_ddp.ray_internals.worker_states import WorkerStates, classify_workers, death_cause
from elastic_ddp.telemetry.events import StartFailed

if TYPE_CHECKING:
    from elastic_ddp.rendezvous.messages import WorkerDirectives

_log = logging.getLogger(__name__)

PLACEMENT_TIMEOUT_S = 10.0
"""How long a new worker waits for the capacity that Ray Train reported. Afterwards Ray Train's view counts as stale."""
DIRECTIVES_RETRY_S = 1.0
STARTING_POLL_S = 0.2
"""How often the controller polls workers while some are starting: each poll advances a start."""
DEFAULT_DRAIN_S = 60.0
"""Seconds left to a node that Ray drains without a deadline."""
MIN_DRAIN_S = 0.1
"""Seconds left to a node whose deadline has passed by this machine's clock."""
DISMISSED_EXIT_S = 5.0
"""How long a dismissed worker may take to exit, in addition to `save_within_s`."""
MAX_START_BACKOFF_S = 60.0
"""Longest pause after failed starts: 2 s after the first, then twice as long after each further one."""

_VERBOSE_LOGGERS = ("scaling_policy", "worker_group", "failure_handling.default")
"""Loggers that log each poll of the cluster, each try to start workers, and each failed worker as a failed run."""


class StartBackoff:
    """Counts failed starts in a row, and says how long no further worker is started."""

    def __init__(self) -> None:
        self.until = 0.0
        """The end of the pause, on the monotonic clock."""
        self._num_failed = 0

    def add(self, num_failed: int) -> None:
        """Counts failed starts, and begins a pause if there are any."""
        if num_failed:
            self._num_failed += num_failed
            self.until = time.monotonic() + min(2.0 ** min(self._num_failed, 10), MAX_START_BACKOFF_S)

    def reset(self) -> None:
        """A start has succeeded."""
        self._num_failed = 0

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.until


class ElasticController(TrainController):
    """Adds and removes workers one by one, as the rendezvous directs.

    Names of placement groups start with `placement_group_prefix`. A dismissed worker has `save_within_s` for its save.
    Each node with workers has `standby_workers` standbys. `environment` has the environment variables of Ray Train for
    this process and the workers.
    """

    worker_group_cls = ElasticWorkerGroup

    def __init__(
        self,
        *,
        rendezvous: Any,
        placement_group_prefix: str,
        save_within_s: float,
        standby_workers: int,
        environment: Mapping[str, str],
        **kwargs: Any,
    ) -> None:
        os.environ.update(environment)
        for module in _VERBOSE_LOGGERS:
            logging.getLogger(f"ray.train.v2._internal.execution.{module}").setLevel(logging.WARNING)
        super().__init__(**kwargs)
        mark_messages()
        logging.getLogger(TrainController.__module__).addFilter(_is_worth_logging)
        shorten_intervals()
        ElasticWorkerGroup.placement_group_prefix = placement_group_prefix
        self.rendezvous = rendezvous
        self.save_within_s = save_within_s
        self.standby_workers = standby_workers
        self._poll_interval_s = self._health_check_interval_s
        self._target: int | None = None
        """Number of workers to start up to, until it has been acted on."""
        self._query_capacity_now = False
        self._limit = 0
        self._dismissed_at: dict[str, float] = {}
        self._backoff = StartBackoff()
        self._standby_backoff = StartBackoff()
        self._trained: set[str] = set()
        self._failed_start: states.TrainControllerState | None = None
        """The state after the newest group that failed to start."""

    async def _step(self) -> TrainControllerLoopIterationResult:
        state = self.get_state()
        group = self._worker_group
        assert group is None or isinstance(group, ElasticWorkerGroup)
        running = [actor_id(worker) for worker in group.get_workers()] if group is not None else []
        num_starting = group.num_starting if group is not None else 0
        self._health_check_interval_s = min(self._poll_interval_s, STARTING_POLL_S if num_starting else math.inf)
        # Poll before asking for directives: a worker that has returned by now was dismissed, or the run is over.
        status = await self._poll_workers() if isinstance(state, states.RunningState) else None
        errors = status.errors if status is not None else {}
        try:
            draining = _draining_nodes()
            directives: WorkerDirectives | None = await self.rendezvous.supervise.remote(
                running, num_starting, draining, {running[rank]: death_cause(error) for rank, error in errors.items()}
            )
        except RayActorError:
            directives = None  # the driver killed the rendezvous: the run is over
        except RayTaskError:  # for example because the disk of its node is full
            _log.exception("the rendezvous failed to return directives, retrying in %g s", DIRECTIVES_RETRY_S)
            await asyncio.sleep(DIRECTIVES_RETRY_S)
            return self._transition(state, state)
        if directives is None:
            if not isinstance(state, states.ShuttingDownState):
                return self._transition(state, states.ShuttingDownState(next_state=states.FinishedState()))
            return await super()._step()
        ElasticWorkerGroup.avoid = directives.avoid
        self._request_resources(group, directives, draining)
        if status is None:
            self._target = None
            await asyncio.sleep(0.1)
            return self._transition(state, state) if await self._in_start_backoff(state) else await super()._step()
        assert group is not None
        return await self._apply_directives(group, status, directives)

    async def _apply_directives(
        self, group: ElasticWorkerGroup, status: WorkerGroupPollStatus, directives: WorkerDirectives
    ) -> TrainControllerLoopIterationResult:
        """Removes workers that have failed or left, and starts others; restarts the group if no worker is left."""
        state = self.get_state()
        workers = [actor_id(worker) for worker in group.get_workers()]
        ended = {rank for rank, worker_status in status.worker_statuses.items() if not worker_status.running}
        ranks = classify_workers(workers, directives, ended=ended, errors=status.errors, is_overdue=self._is_overdue)
        if ranks.run_is_over:
            group.remove(ranks.dismissed)
            self._latest_poll_time = float("-inf")  # Ray Train polls once more, without waiting
            return await super()._step()
        failed = ranks.failed
        self._reset_backoff_if_new(set(workers) - set(directives.newcomers))
        self._backoff.add(sum(workers[rank] in directives.newcomers for rank in failed))
        reasons = "\n".join(dict.fromkeys(map(str, failed.values())))
        error = WorkerGroupError(error_message=reasons, worker_failures=failed)
        decision = FailureDecision.RETRY
        # Ray Train counts decisions, so it makes none for workers that never trained while others do, and on drained
        # nodes.
        nodes = [worker.metadata.node_id for worker in group.get_workers()]
        if any(workers[rank] not in directives.newcomers and nodes[rank] not in directives.avoid for rank in failed):
            decision = self._failure_policy.make_decision(training_failed_error=error)
        if decision != FailureDecision.RETRY:
            return self._execute_failure_decision(decision, training_failed_error=error)
        replaced = self._use_standbys(group, ranks, directives)
        if failed and ranks.none_trains and not replaced:
            return self._execute_failure_decision(decision, training_failed_error=error)
        if ranks.all_exited and not replaced:
            # Ray Train cannot run an empty group. It starts another one as soon as there is capacity.
            drained = WorkerGroupError(error_message="all workers were drained", worker_failures={})
            return self._transition(state, states.RestartingState(training_failed_error=drained))
        removed = (failed.keys() | ranks.exited) - replaced
        if removed:
            group.remove(removed)
            self._query_capacity_now = True
        if not ranks.finished:  # otherwise the run is over
            going = {*directives.dismissed, *directives.leaving}
            num_staying = sum(actor_id(worker) not in going for worker in group.get_workers())
            self._start_missing(group, status, num_staying, directives.limit)
            if not replaced:
                self._keep_standbys(group, directives)
        return self._transition(state, states.RunningState())

    def _use_standbys(self, group: ElasticWorkerGroup, ranks: WorkerStates, directives: WorkerDirectives) -> set[int]:
        """Gives the places of workers that have failed or left to standbys. Returns the ranks that were replaced."""
        if not self.standby_workers or directives.is_over or ranks.finished:
            return set()
        workers = group.get_workers()
        gone = ranks.failed.keys() | ranks.exited
        going = {*directives.dismissed, *directives.leaving}
        num_staying = sum(actor_id(each) not in going for rank, each in enumerate(workers) if rank not in gone)
        usable = [rank for rank in sorted(gone) if workers[rank].metadata.node_id not in directives.avoid]
        replaced = group.replace(usable[: max(0, directives.limit - num_staying)])
        if replaced:
            self._standby_backoff.reset()
        return replaced

    def _keep_standbys(self, group: ElasticWorkerGroup, directives: WorkerDirectives) -> None:
        """Starts missing standbys while all workers train: their imports would slow down a change of membership."""
        if not self.standby_workers:
            return
        nodes = {worker.metadata.node_id: worker.metadata for worker in group.get_workers()}
        usable = {node: metadata for node, metadata in nodes.items() if node not in directives.avoid}
        may_start = directives.is_steady and not group.num_starting and self._standby_backoff.is_over
        group.standbys.keep(self.standby_workers, usable, may_start=may_start)
        self._standby_backoff.add(group.standbys.advance())

    async def _in_start_backoff(self, state: states.TrainControllerState) -> bool:
        """Whether the next group must wait because the previous one failed to start. Records that failure once."""
        reason = start_failure(state.training_failed_error) if isinstance(state, states.ReschedulingState) else None
        if reason is None:
            return False
        if state is not self._failed_start:
            self._failed_start = state
            self._backoff.add(1)
            with suppress(RayError):  # the rendezvous may be restarting; the event is only informative
                await self.rendezvous.report.remote(StartFailed(at=time.time(), error=reason), None)
        return not self._backoff.is_over

    def _reset_backoff_if_new(self, trained: set[str]) -> None:
        if trained - self._trained:
            self._backoff.reset()
        self._trained = trained

    def _request_resources(
        self, group: ElasticWorkerGroup | None, directives: WorkerDirectives, draining: Collection[str]
    ) -> None:
        """Requests resources from Ray and its autoscaler, which replaces draining nodes."""
        policy = self._scaling_policy
        if not isinstance(policy, LimitedScalingPolicy):
            return
        avoided = set(directives.avoid).difference(draining)
        alive = [node for node in ray.nodes() if node["Alive"]] if avoided else []
        avoided_resources = {node["NodeID"]: node["Resources"] for node in alive if node["NodeID"] in avoided}
        going = {*directives.failed, *directives.dismissed, *directives.leaving}
        workers = group.get_workers() if group is not None else []
        # Draining nodes are excluded here too: directives do not contain a worker that is still starting on one.
        usable = autoscaled_nodes().difference(directives.avoid, draining) if workers else set()
        nodes = [worker.metadata.node_id for worker in workers if actor_id(worker) not in going]
        nodes = [node for node in nodes if node in usable]
        if policy.update(directives.limit, nodes=nodes, avoid=directives.avoid, avoided_resources=avoided_resources):
            policy._send_resource_request()  # not at the next interval

    def _is_overdue(self, worker: str) -> bool:
        """Whether a dismissed worker has not exited in time, because it hangs in the user's code."""
        now = time.monotonic()
        return now - self._dismissed_at.setdefault(worker, now) >= DISMISSED_EXIT_S + self.save_within_s

    def _start_missing(
        self, group: ElasticWorkerGroup, status: WorkerGroupPollStatus, num_staying: int, limit: int
    ) -> None:
        """Starts workers that are missing, and moves starting ones forward."""
        self._query_capacity_now = self._query_capacity_now or limit > self._limit
        self._limit = limit
        scaling = self._scaling_policy.scaling_config
        if not scaling.elasticity_enabled or num_staying < len(group.get_workers()):
            self._target = scaling.max_workers  # Ray Train does not count the places of workers that leave
        else:
            state = group.get_worker_group_state()
            if self._query_capacity_now:  # not at the next interval
                self._scaling_policy._latest_monitor_time = float("-inf")  # type: ignore[attr-defined]
                state = dataclasses.replace(state, start_time=float("-inf"))
                self._query_capacity_now = False
            decision = self._scaling_policy.make_decision_for_running_worker_group(
                worker_group_state=state, worker_group_status=status
            )
            if isinstance(decision, ResizeDecision):
                self._target = decision.num_workers
            group.cancel_unplaced(PLACEMENT_TIMEOUT_S)
        group.limit_starting(limit - num_staying)
        num_missing = min(self._target or 0, limit) - num_staying - group.num_starting
        if num_missing > 0 and self._backoff.is_over:
            group.request(num_missing)
            self._target = None
        self._backoff.add(group.advance())

    def _transition(
        self, before: states.TrainControllerState, after: states.TrainControllerState
    ) -> TrainControllerLoopIterationResult:
        return TrainControllerLoopIterationResult(
            run_attempt_id=self._get_run_attempt_id(), previous_state=before, next_state=after
        )


def start_failure(error: TrainingFailedError) -> str | None:
    """Returns why a group did not start, or None for another error."""
    if isinstance(error, ControllerError) and isinstance(error.controller_failure, WorkerGroupStartupFailedError):
        return str(error.controller_failure)
    return None


class CountingFailurePolicy(DefaultFailurePolicy):
    """Counts a failed start against the limit of failures. Ray Train would retry it forever.

    A training function whose modules crash every worker on import would never end otherwise. A node that lacks a module
    ends the run at once.
    """

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        reason = start_failure(training_failed_error)
        if reason is not None:
            if "No module named" in reason:
                return FailureDecision.RAISE
            training_failed_error = WorkerGroupError(error_message=reason, worker_failures={})
        return super().make_decision(training_failed_error)


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """False for a group that did not start, which Ray Train logs with a traceback: the ledger has the reason."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (WorkerGroupStartupTimeoutError, WorkerGroupStartupFailedError))


def _draining_nodes() -> dict[str, float]:
    """Seconds left to each node that Ray drains, by node id."""
    now_ms = time.time() * 1000
    return {
        node: max(MIN_DRAIN_S, (deadline_ms - now_ms) / 1000) if deadline_ms else DEFAULT_DRAIN_S
        for node, deadline_ms in draining_nodes().items()
    }
