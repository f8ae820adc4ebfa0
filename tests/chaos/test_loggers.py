"""Kills of workers and of the driver do not show in TensorBoard, W&B, MLflow, or a user's logger."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from elastic_ddp.loggers.wandb import read_records
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry import read_ledger
from tests.chaos.logged import EVALUATE_EVERY, JsonLines
from tests.integration import jobs

for package in ("wandb", "tensorboard", "mlflow", "sqlalchemy"):
    pytest.importorskip(package, reason="needs the packages wandb, tensorboard and mlflow, with MLflow's server")

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(600)]

Values = dict[str, list[tuple[int, float]]]


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an MLflow server with a database."""
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    database = f"sqlite:///{folder}/mlflow.db"
    line = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    process = subprocess.Popen(
        [*line, "--backend-store-uri", database, "--artifacts-destination", str(folder)],
        env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        start_new_session=True,
    )
    address, end = f"http://127.0.0.1:{port}", time.monotonic() + 120
    try:
        while not is_up(address):
            assert process.poll() is None and time.monotonic() < end, "MLflow's server does not start"
            time.sleep(0.2)
        yield address
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def is_up(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5):
            return True
    except OSError:
        return False


def of_tensorboard(run: Path) -> Values:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def of_wandb(run: Path) -> Values:
    from wandb.proto.wandb_internal_pb2 import Record

    values: Values = {}
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        for record in map(Record.FromString, read_records(file.read_bytes())):
            for item in record.history.item:
                name = "/".join(item.nested_key) or item.key
                values.setdefault(name, []).append((record.history.step.num, json.loads(item.value_json)))
    return values


def of_mlflow(address: str) -> Values:
    from mlflow import MlflowClient

    client = MlflowClient(address)
    experiment = client.get_experiment_by_name("elastic_ddp")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["global_batch_size"] == "48"
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {name: [(metric.step, metric.value) for metric in metrics] for name, metrics in histories.items()}


def of_user(logger: JsonLines) -> Values:
    values: Values = {}
    for step, record in logger.read():
        for name, value in record.items():
            values.setdefault(name, []).append((step, value))
    return values


def test_a_run_with_two_lost_workers_and_a_killed_driver_logs_each_step_once(folder: Path, mlflow_server: str) -> None:
    (folder / "held-out").mkdir()
    jobs.write_rows(str(folder / "held-out"), rows=131, seed=1)
    line = [sys.executable, "-m", "tests.chaos.logged", str(folder), "logged"]
    environment = {**os.environ, "MLFLOW_TRACKING_URI": mlflow_server, "WANDB_MODE": "offline"}
    for expected in (-9, 0):
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == expected, done.stdout + done.stderr
        assert "logger " not in done.stderr, done.stderr

    run = folder / "runs" / "logged"
    events = read_ledger(Storage(run))
    repeated = [event.step for event in events if event.event == "steps_completed"]
    assert sum(event.event == "session_started" for event in events) == 2
    assert len({event.member for event in events if event.event == "worker_failed"} - {None}) == 2
    assert any(later <= earlier for earlier, later in pairwise(repeated)), "the second session repeated steps"
    losses = {event.step: event.loss for event in events if event.event == "steps_completed"}
    evaluations = {event.step: event.value for event in events if event.event == "evaluation_finished"}
    assert set(losses) == set(range(1, jobs.STEPS + 1)), "also the step before which rank 0 was killed"
    assert sorted(evaluations) == list(range(EVALUATE_EVERY, jobs.STEPS, EVALUATE_EVERY))
    user = of_user(JsonLines(folder / "logged.jsonl"))
    for found in (user, of_tensorboard(run), of_wandb(run), of_mlflow(mlflow_server)):
        assert found["loss"] == [(step, pytest.approx(loss)) for step, loss in sorted(losses.items())]
        assert [step for step, _ in found["twice"]] == sorted(losses)
        assert found["validation_loss"] == [(step, pytest.approx(loss)) for step, loss in sorted(evaluations.items())]
        assert found["commit/seconds"] == [(step, pytest.approx(value)) for step, value in user["commit/seconds"]]
    assert (folder / "logged.status").read_text() == "finished"
