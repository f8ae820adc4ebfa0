"""Sends the steps to an MLflow tracking server."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from elastic_ddp.config.environment import hide_credentials
from elastic_ddp.config.settings import flatten
from elastic_ddp.errors import ConfigError, format_exception
from elastic_ddp.loggers.logger import LoggedRun

EXPERIMENT = "elastic_ddp"
"""Experiment without MLFLOW_EXPERIMENT_NAME."""
TAG = "elastic_ddp.run_id"
"""The tag by which a later session finds its MLflow run."""
STEP = "step"
"""A metric of every step whose value is the step. Its newest value is the newest step."""
_STATUS = {"finished": "FINISHED", "left": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_MAX_PARAM = 500
_MAX_NAME = 250
_PARAMS_PER_CALL = 100


class MlflowLogger:
    """Continues the same MLflow run in all sessions.

    Raises:
        ConfigError: MLFLOW_TRACKING_URI cannot be used.
    """

    def __init__(self) -> None:
        # By default MLflow retries for four minutes before it raises.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        from mlflow import MlflowClient

        try:
            self._client: Any = MlflowClient()
        except Exception as error:  # of the store that belongs to the URI
            reason = hide_credentials(format_exception(error)).rstrip(".")
            raise ConfigError(
                f"loggers='mlflow': {reason}. Set MLFLOW_TRACKING_URI to the address of a "
                "tracking server, such as http://mlflow:5000"
            ) from error
        self._run_id = self._experiment_id = ""
        self._is_first = True

    @property
    def destination(self) -> str:
        """The page of the MLflow run, or its name and the store if that has no pages."""
        uri = self._client.tracking_uri.partition("?")[0].rstrip("/")
        if uri.startswith(("http://", "https://")):
            return f"{uri}/#/experiments/{self._experiment_id}/runs/{self._run_id}"
        return f"MLflow run {self._run_id} at {uri}"

    def start(self, run: LoggedRun) -> int | None:
        self._experiment_id = self._open_experiment()
        found = self._client.search_runs([self._experiment_id], f"tags.`{TAG}` = '{run.id}'", max_results=1)
        self._is_first = True
        if found:
            self._run_id = found[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            if not found[0].data.params:  # the call after `create_run` failed
                self._log_config(run.config)
            newest = found[0].data.metrics.get(STEP)
            return None if newest is None else int(newest)
        tags = {TAG: run.id, "storage": run.uri}
        created = self._client.create_run(self._experiment_id, run_name=run.name, tags=tags)
        self._run_id = created.info.run_id
        self._log_config(run.config)
        return None

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        from mlflow.entities import Metric

        metrics = {valid_name(name): value for name, value in values.items()}
        if self._is_first:  # a store that is not transactional can have a part of this step
            metrics = {name: value for name, value in metrics.items() if not self._has(name, step)}
        batch = [Metric(name, value, int(time * 1000), step) for name, value in {**metrics, STEP: step}.items()]
        self._client.log_batch(self._run_id, batch, synchronous=True)
        self._is_first = False

    def finish(self, status: str) -> None:
        self._client.set_terminated(self._run_id, _STATUS.get(status, "FAILED"))

    def _open_experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if experiment_id:
            return experiment_id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # another process has just created it
                experiment = self._client.get_experiment_by_name(name)
        return str(experiment.experiment_id)

    def _has(self, name: str, step: int) -> bool:
        return any(metric.step == step for metric in self._client.get_metric_history(self._run_id, name))

    def _log_config(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(name, str(value)[:_MAX_PARAM]) for name, value in flatten(config).items()]
        for start in range(0, len(params), _PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=params[start : start + _PARAMS_PER_CALL], synchronous=True)


def valid_name(name: str) -> str:
    """Returns the name that MLflow accepts for a metric: a normal path of at most 250 characters."""
    cut = re.sub(r"[^\w\-. :/]", "_", name)[:_MAX_NAME]
    return "/".join("_" if part in (".", "..") else part for part in cut.split("/") if part) or "_"
