"""Reports a run and its workers to the API of Ray's dashboard, `/api/train/v2/runs/v1`, if a person turns that on.

Ray keeps what it returns in an actor on the head node, until the cluster ends. Ray's own dashboard does not show it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any

import ray
from ray._common.utils import env_bool
from ray.exceptions import GetTimeoutError, RayError
from ray.train.constants import RAY_TRAIN_ENABLE_STATE_TRACKING
from ray.train.v2._internal.callbacks.state_manager import StateManagerCallback
from ray.train.v2._internal.execution.controller.state import RunningState
from ray.train.v2._internal.state.schema import RunAttemptStatus, RunStatus
from ray.train.v2._internal.state.state_actor import get_state_actor
from ray.train.v2._internal.state.state_manager import TrainStateManager
from ray.train.v2._internal.state.util import current_time_ns, mark_workers_dead

from elastic_ddp.ray_internals.worker_group import actor_id

if TYPE_CHECKING:
    from ray.train.v2._internal.execution.context import TrainRunContext

_log = logging.getLogger(__name__)

_STATUS = {"finished": "FINISHED", "left": "FINISHED", "stopped": "ABORTED", "failed": "ERRORED"}
"""Ray Train's names for how a run ends."""
ANSWERS_WITHIN_S = 5.0
"""How long the actor may take to answer the driver at the end of a run."""


def is_tracked() -> bool:
    """Returns whether `RAY_TRAIN_ENABLE_STATE_TRACKING` is 1 in this process, the driver."""
    return env_bool(RAY_TRAIN_ENABLE_STATE_TRACKING, False)


def _without_failing(hook: Callable[..., None]) -> Callable[..., None]:
    """Makes a hook log its errors, with which Ray Train would end the run."""

    @functools.wraps(hook)
    def call(self: RunInStateApi, *arguments: Any) -> None:
        try:
            hook(self, *arguments)
        except Exception:
            if not self._has_failed:
                _log.warning("Ray's API cannot show this run; later errors are not logged", exc_info=True)
            self._has_failed = True

    return call


class _Manager(TrainStateManager):
    """Never waits for the actor. The driver reports the outcome, so no state is lost."""

    def _create_or_update_train_run(self, run: Any, *, block: bool = False) -> None:
        super()._create_or_update_train_run(run)

    def _create_or_update_train_run_attempt(self, run_attempt: Any, *, block: bool = False) -> None:
        super()._create_or_update_train_run_attempt(run_attempt)


class RunInStateApi(StateManagerCallback):
    """Reports a session under the run's name, with its settings, and with the workers that it has now.

    Ray Train's callback would report the workers of the start only, and the text of all arguments of the training
    function, among them values of `env`.

    Args:
        session: the id in the API.
        name, uri, settings, versions: what the API returns.
    """

    def __init__(
        self, *, session: str, name: str, uri: str, settings: Mapping[str, Any], versions: Mapping[str, str]
    ) -> None:
        super().__init__(datasets={})
        self._session, self._name, self._uri = session, name, uri
        self._settings, self._versions = dict(settings), dict(versions)
        self._group: Any = None
        self._shown: list[str] = []
        self._has_failed = False

    @_without_failing
    def after_controller_start(self, train_run_context: TrainRunContext) -> None:
        self._state_manager, self._run_id = _Manager(), self._session
        run_config = copy(train_run_context.run_config)
        run_config.name, run_config.storage_path, run_config.worker_runtime_env = self._name, self._uri, {}
        runtime = ray.get_runtime_context()
        self._state_manager.create_train_run(
            id=self._session,
            name=self._name,
            job_id=runtime.get_job_id(),
            controller_actor_id=str(runtime.get_actor_id()),
            controller_log_file_path="",
            run_config=run_config,
            train_loop_config=self._settings,
            scaling_config=train_run_context.scaling_config,
            backend_config=train_run_context.backend_config,
            datasets={},
            dataset_config=train_run_context.dataset_config,
        )
        self._state_manager.update_train_run_framework_versions(self._session, self._versions)

    @_without_failing
    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        super().after_controller_state_update(previous_state, current_state)
        if isinstance(current_state, RunningState):
            self._show_workers()

    @_without_failing
    def before_worker_group_start(self, worker_group_context: Any) -> None:
        super().before_worker_group_start(worker_group_context)

    @_without_failing
    def after_worker_group_start(self, worker_group: Any) -> None:
        """Without Ray Train's call of a worker for its versions, for which the controller would wait."""
        self._group, self._shown = worker_group, []
        self._show_workers()

    @_without_failing
    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        self._group = None
        super().before_worker_group_shutdown(worker_group)

    @_without_failing
    def before_worker_group_abort(self, worker_group_context: Any) -> None:
        super().before_worker_group_abort(worker_group_context)

    def _show_workers(self) -> None:
        workers = self._group.get_workers() if self._group is not None else []
        ids = [actor_id(worker) for worker in workers]
        if ids and ids != self._shown:
            self._shown = ids
            attempt = self._group.get_worker_group_context().run_attempt_id
            self._state_manager.update_train_run_attempt_running(self._session, attempt, workers)


def report_outcome(session: str, status: str, detail: str | None) -> None:
    """Reports how a session ended, which Ray Train does not know: workers return without an error in any case.

    Args:
        session: the id in the API.
        status: as in `RunFinished`.
        detail: the error, or after which step it left its loop or stopped.
    """
    with suppress(RayError, GetTimeoutError):
        if not is_tracked() or (actor := get_state_actor()) is None:
            return
        known: list[dict[str, Any]] = ray.get(
            [actor.get_train_runs.remote(), actor.get_train_run_attempts.remote()], timeout=ANSWERS_WITHIN_S
        )
        (runs, all_attempts), updates = known, []
        for attempt in all_attempts.get(session, {}).values():
            if not attempt.status.is_terminal():
                attempt.status, attempt.status_detail = RunAttemptStatus[_STATUS[status]], detail
                attempt.end_time_ns = current_time_ns()
                mark_workers_dead(attempt)
                updates.append(actor.create_or_update_train_run_attempt.remote(attempt))
        if session in runs:
            run = runs[session]
            run.status, run.status_detail = RunStatus[_STATUS[status]], detail
            run.end_time_ns = current_time_ns()
            updates.append(actor.create_or_update_train_run.remote(run))
        ray.get(updates, timeout=ANSWERS_WITHIN_S)
