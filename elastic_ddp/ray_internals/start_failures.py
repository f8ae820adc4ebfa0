"""Failures of worker groups that could not be started because a worker died during the start."""

from __future__ import annotations

from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2._internal.execution.failure_handling.default import DefaultFailurePolicy
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError, WorkerGroupError


def start_failure(error: TrainingFailedError) -> str | None:
    """Returns why a group did not start, or None if this is another error."""
    if isinstance(error, ControllerError) and isinstance(error.controller_failure, WorkerGroupStartupFailedError):
        return str(error.controller_failure)
    return None


class CountingFailurePolicy(DefaultFailurePolicy):
    """Counts a failed start against the limit of failures. Ray Train would retry it forever.

    A training function whose modules crash every worker on import would never end otherwise.
    """

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        if (reason := start_failure(training_failed_error)) is not None:
            training_failed_error = WorkerGroupError(error_message=reason, worker_failures={})
        return super().make_decision(training_failed_error)
