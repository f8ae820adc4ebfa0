"""Groups of workers that could not be started, because one of them died meanwhile."""

from __future__ import annotations

from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.controller.state import ReschedulingState, TrainControllerState
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2._internal.execution.failure_handling.default import DefaultFailurePolicy
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError, WorkerGroupError


def why_not_started(error: TrainingFailedError) -> str | None:
    """What became of a group that a worker's death kept from starting; None of any other error."""
    if isinstance(error, ControllerError) and isinstance(error.controller_failure, WorkerGroupStartupFailedError):
        return str(error.controller_failure)
    return None


def why_not_started_before(state: TrainControllerState) -> str | None:
    """The same of the group before the one that is about to be started in this state."""
    return why_not_started(state.training_failed_error) if isinstance(state, ReschedulingState) else None


class CountingFailurePolicy(DefaultFailurePolicy):
    """Counts a group that could not be started as one whose workers were lost. Ray Train would try again for ever, also
    where the training function's modules crash every worker that imports them."""

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        error = training_failed_error
        if (why := why_not_started(error)) is not None:
            error = WorkerGroupError(error_message=why, worker_failures={})
        return super().make_decision(training_failed_error=error)
