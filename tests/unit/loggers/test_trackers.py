"""W&B and MLflow, with the real packages: W&B offline, MLflow with a database. Skipped where they are not installed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import elastic_ddp as ed
from elastic_ddp.errors import ConfigError
from elastic_ddp.loggers.mlflow import MlflowLogger
from elastic_ddp.loggers.wandb import read_records
from tests.unit.logged_runs import LAST, driver, newest_commit, session_events

ALL = list(range(1, LAST + 1))
LOG_AND_DIE = """
import os, sys
from pathlib import Path
from elastic_ddp.loggers.wandb import WandbLogger
from tests.unit import logged_runs

folder, session, first, last = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
events = logged_runs.session_events(first)
with logged_runs.driver(folder, session, WandbLogger()) as this:
    this.record(*(events if last < 0 else events[:last]))
    if last < 0:
        this.loggers.finish("finished")
    else:
        # W&B writes its file every 15 s: what it got is in memory.
        logged_runs.until(lambda: this.notes and list(folder.glob("wandb/*/*.wandb")))
assert this.notes == [f"logging to {folder}/wandb, offline"], this.notes
os.kill(os.getpid(), 9 if last >= 0 else 0)
"""


def run(*arguments: object, program: str = LOG_AND_DIE, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**known, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def wandb_steps(folder: Path, run_id: str = "s1") -> list[int]:
    """Returns the steps of a W&B run in the files of all offline sessions, in the order of these."""
    from wandb.proto.wandb_internal_pb2 import Record

    records = [
        Record.FromString(data)
        for file in sorted(folder.glob(f"wandb/offline-run-*-{run_id}/*.wandb"))
        for data in read_records(file.read_bytes())
    ]
    return [record.history.step.num for record in records if record.HasField("history")]


@pytest.mark.slow
@pytest.mark.parametrize("number", [3, 17, 30])
def test_wandb_offline_has_each_step_once_after_a_kill_of_the_driver(tmp_path: Path, number: int) -> None:
    pytest.importorskip("wandb")
    events = session_events()
    first = run(tmp_path, "s1", 0, number, WANDB_MODE="offline")
    assert first.returncode == -9, first.stderr
    second = run(tmp_path, "s2", newest_commit(events[:number]), -1, WANDB_MODE="offline")
    assert second.returncode == 0, second.stderr
    run_id = "s1" if newest_commit(events[:number]) else "s2"  # without a commit, the second session begins anew
    assert wandb_steps(tmp_path, run_id) == ALL
    again = run(tmp_path, "s3", 3, -1, WANDB_MODE="offline")
    assert again.returncode == 0, again.stderr
    assert wandb_steps(tmp_path, run_id) == ALL, "a later session finds what the file of the second has"


KILL_THE_SERVICE = """
import os, signal, subprocess, sys
from pathlib import Path
from elastic_ddp.loggers.wandb import WandbLogger
from tests.unit import logged_runs

events = logged_runs.session_events()
with logged_runs.driver(Path(sys.argv[1]), "s1", WandbLogger()) as this:
    this.record(*events[:12])
    (delivery,) = this.loggers._deliveries
    logged_runs.until(lambda: (delivery.newest or 0) >= 2)
    children = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "pid=,comm="], capture_output=True, text=True)
    services = [line.split()[0] for line in children.stdout.splitlines() if "wandb" in line]
    assert services, children.stdout
    for process in services:
        os.kill(int(process), signal.SIGKILL)
    this.record(*events[12:])
    this.loggers.finish("finished")
assert this.notes[-1] == "logger WandbLogger0 works again", this.notes
"""


@pytest.mark.slow
def test_wandb_gets_what_it_lacks_after_its_service_has_died(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    recovered = run(tmp_path, program=KILL_THE_SERVICE, WANDB_MODE="offline")
    assert recovered.returncode == 0, recovered.stderr
    assert wandb_steps(tmp_path) == ALL


def test_wandb_without_a_credential_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    program = "from elastic_ddp.loggers.run_loggers import open_loggers; open_loggers(['wandb'], [])"
    refused = run(program=program, HOME=str(tmp_path))
    assert "ConfigError: loggers='wandb': W&B has no credential" in refused.stderr, refused.stderr
    (tmp_path / ".netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {'a' * 40}\n")
    assert run(program=program, HOME=str(tmp_path)).returncode == 0
    assert run(program=program, HOME=str(tmp_path), WANDB_MODE="offline").returncode == 0


def history(name: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("elastic_ddp")
    (run,) = client.search_runs([experiment.experiment_id])
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("mlflow", "sqlalchemy"):
        pytest.importorskip(package, reason="MLflow has no database without its server")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")


@pytest.mark.slow
def test_mlflow_has_each_step_once_after_a_kill_of_the_driver(tmp_path: Path, database: None) -> None:
    folder, events = tmp_path / "run", session_events()
    for session, before in enumerate((events[:20], session_events(3)[:3], session_events(3)[:9])):
        with driver(folder, f"s{session}", MlflowLogger()) as first:
            first.record(*before)
        for thread in threading.enumerate():
            if thread.name.startswith("logger-"):  # a kill would have ended it
                thread.join(60)
    with driver(folder, "s9", MlflowLogger()) as second:
        second.record(*session_events(3))
        second.loggers.finish("finished")
    (note,) = second.notes
    assert note.startswith("logging to MLflow run ") and note.endswith(f" at sqlite:///{tmp_path}/mlflow.db")
    assert history("loss") == [(step, 1 / step) for step in ALL]
    assert history("accuracy") == [(step, step / 10) for step in ALL if step % 2 == 0]


@pytest.mark.slow
def test_mlflow_gets_the_rest_of_a_step_that_it_has_in_part(tmp_path: Path, database: None) -> None:
    from mlflow import MlflowClient

    run = ed.LoggedRun(
        name="a", uri=str(tmp_path), id="1", config={"a": {"b": "c" * 9000}}, session="1", session_number=1
    )
    logger = MlflowLogger()
    assert logger.start(run) is None
    logger.log(1, {"loss": 0.5, "bad name%": float("nan"), "accuracy": 1.0}, 100.0)
    client = MlflowClient()
    (experiment,) = [found for found in client.search_experiments() if found.name == "elastic_ddp"]
    (found,) = client.search_runs([experiment.experiment_id])
    client.log_metric(found.info.run_id, "loss", 0.25, timestamp=101_001, step=2)
    resumed = MlflowLogger()
    assert resumed.start(run) == 1
    resumed.log(2, {"loss": 0.25, "accuracy": 2.0}, 101.0)
    assert history("loss") == [(1, 0.5), (2, 0.25)] and history("accuracy") == [(1, 1.0), (2, 2.0)]
    assert len(history("bad name_")) == 1 and found.data.params["a.b"] == "c" * 500


@pytest.mark.slow
def test_mlflow_gets_settings_and_names_that_it_would_refuse(tmp_path: Path, database: None) -> None:
    class Fails(MlflowLogger):
        def _log_config(self, config: Mapping[str, Any]) -> None:
            raise ConnectionError

    run = ed.LoggedRun(name="a", uri=str(tmp_path), id="1", config={"a": 7}, session="1", session_number=1)
    with pytest.raises(ConnectionError):
        Fails().start(run)
    logger = MlflowLogger()
    logger.start(run)
    logger.log(1, {"a//b": 1.0, "/abs": 2.0, "../x/.": 3.0, "y" * 300: 4.0, "//": 5.0}, 100.0)
    names = ("a/b", "abs", "_/x/_", "y" * 250, "_")
    assert [history(name) for name in names] == [[(1, float(value))] for value in range(1, 6)]
    (found,) = logger._client.search_runs(["1"])
    assert found.data.params == {"a": "7"}


def test_mlflow_without_a_usable_store_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://here")
    with pytest.raises(ConfigError, match=r"loggers='mlflow': .*nonsense.* Set MLFLOW_TRACKING_URI to the address"):
        MlflowLogger()
