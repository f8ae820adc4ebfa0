"""A live run in a real Prometheus. Needs `ray[default]`, and Debian's prometheus."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

import elastic_ddp as ed
from elastic_ddp.driver.metrics import RunMetrics
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry import events
from elastic_ddp.telemetry.event import last_of
from elastic_ddp.telemetry.ledger import read_ledger
from tests.inside_run import rendezvous_client_of
from tests.integration import jobs
from tests.unit.cluster.test_kubernetes_files import assert_contains
from tests.unit.ledger_events import ledger_event

pytest.importorskip("ray.dashboard.optional_deps", reason="needs ray[default]", exc_type=ImportError)
if (PROMETHEUS := shutil.which("prometheus")) is None:
    pytest.skip("needs prometheus, Debian's package", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(500)]

DASHBOARD = json.loads((Path(__file__).parents[2] / "cluster/grafana/elastic_ddp.json").read_text())
NAME, MEASURED = "seen", "measured"
SCRAPE_S = 1


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A head with a dashboard, whose processes export their metrics every second."""
    system = {"metrics_report_interval_ms": 1000 * SCRAPE_S}
    arguments = {"num_cpus": 3, "include_dashboard": True, "object_store_memory": 2 * 10**8, "_system_config": system}
    cluster = Cluster(True, head_node_args=arguments)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


class Prometheus:
    """The API of a Prometheus server on this machine."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Returns the series of an instant query, each with `metric` (its labels) and `value`."""
        arguments = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self._url}/api/v1/query?{arguments}", timeout=10) as answer:
            series: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return series

    def value(self, metric: str, **labels: str) -> float | None:
        """Returns the only value of a metric of the run; None if it has none, or several."""
        selected = ",".join(f'{name}="{value}"' for name, value in {"run": NAME, **labels}.items())
        series = self.query(f"ray_elastic_ddp_{metric}{{{selected}}}")
        return float(series[0]["value"][1]) if len(series) == 1 else None


@pytest.fixture
def prometheus(head: Cluster, tmp_path: Path) -> Iterator[Prometheus]:
    """A Prometheus with the configuration that Ray writes, and a shorter interval."""
    written = Path(head.head_node.get_session_dir_path(), "metrics/prometheus/prometheus.yml")
    config = tmp_path / "prometheus.yml"
    config.write_text(re.sub(r"(scrape_interval): \w+", rf"\1: {SCRAPE_S}s", written.read_text()))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    line = [str(PROMETHEUS), f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'tsdb'}"]
    with subprocess.Popen([*line, f"--web.listen-address=127.0.0.1:{port}"], stderr=subprocess.DEVNULL) as process:
        try:
            yield Prometheus(port)
        finally:
            process.kill()


@contextmanager
def driver(folder: Path, pause: Path, steps: int) -> Iterator[subprocess.Popen[str]]:
    """Runs `main` in another process."""
    line = [sys.executable, "-m", "tests.chaos.test_prometheus", str(folder / "data"), str(folder / "runs"), str(pause)]
    with (folder / "driver.log").open("a") as log:
        process = subprocess.Popen([*line, str(steps)], stdout=log, stderr=log, text=True)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def until(condition: Callable[[], Any], log: Path, timeout_s: float = 120) -> None:
    """Waits for a condition; fails with what the driver has printed."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            if condition():
                return
        except urllib.error.URLError:
            pass  # the server is starting
        if time.monotonic() > end:
            pytest.fail(log.read_text()[-4000:])
        time.sleep(0.3)


def test_a_live_run_is_in_prometheus_and_in_the_dashboard(
    head: Cluster, prometheus: Prometheus, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "data").symlink_to(folder / "data")
    pause, log, value = tmp_path / "pause", tmp_path / "driver.log", prometheus.value
    storage = Storage(tmp_path / "runs" / NAME)

    def members() -> list[int]:
        formed = last_of(read_ledger(storage), events.GenerationFormed)
        return sorted(member["pid"] for member in formed.members)

    def agrees() -> bool:
        """Whether the values are those of the newest events. The run is paused, so they will be."""
        ledger = read_ledger(storage)
        steps, commit = last_of(ledger, events.StepsCompleted), last_of(ledger, events.CommitSucceeded)
        expected = {
            "step": steps.step,
            "loss": steps.loss,
            "steps_total": steps.step,
            "samples_total": steps.samples,
            "world_size": steps.world_size,
            "commits_total": sum(isinstance(event, events.CommitSucceeded) for event in ledger),
            "last_commit_timestamp_seconds": commit.at,
        }
        phases = last_of(ledger, events.PhasesMeasured).phases
        return expected == {name: value(name) for name in expected} and phases == {
            phase: value("phase_seconds", phase=phase) for phase in phases
        }

    with driver(tmp_path, pause, 10**5) as process:
        until(lambda: (value("step") or 0) >= 12 and value("world_size") == 2, log)
        pause.touch()
        until(agrees, log)
        assert 0 < (value("goodput_ratio") or 0) < 1 and value("failures_total", kind="worker") == 0

        os.kill(members()[0], signal.SIGKILL)
        pause.unlink()
        until(lambda: value("failures_total", kind="worker") == 1 and value("world_size") == 1, log)
        until(lambda: value("world_size") == 2, log)
        check_dashboard(head, prometheus)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    stopped_at = last_of(read_ledger(storage), events.RunFinished).steps

    pause.touch()
    with driver(tmp_path, pause, stopped_at + 20) as process:
        committed_at = last_of(read_ledger(storage), events.CommitSucceeded).at
        # The start of this driver. A gauge has one value once that of the other driver has ended.
        until(lambda: (value("last_commit_timestamp_seconds") or 0) > committed_at, log)
        until(lambda: value("step") == stopped_at, log)
        pause.unlink()
        assert process.wait(60) == 0, log.read_text()
    until(lambda: not prometheus.query(f'ray_elastic_ddp_step{{run="{NAME}"}}'), log)
    [all_steps] = prometheus.query(f'sum by (run) (ray_elastic_ddp_steps_total{{run="{NAME}"}})')
    assert float(all_steps["value"][1]) == stopped_at + 20, "the counters of both drivers stay"


def check_dashboard(head: Cluster, prometheus: Prometheus) -> None:
    """Each query of the dashboard has data. Those of GPUs have it for a session that this process plays."""
    ray.init(head.address, logging_level="ERROR")
    metrics = RunMetrics(MEASURED, None)
    metrics.record(ledger_event("session_started"))
    phases = {"phases": {"data": 0.1}, "work_s": [0.1], "memory_bytes": [10**9], "utilization": [0.9]}
    metrics.record(ledger_event("phases_measured", **phases))
    empty = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    assert len(empty) >= len(DASHBOARD["panels"])

    def all_have_data() -> bool:
        empty[:] = [expression for expression in empty if not prometheus.query(filled_in(expression))]
        return not empty

    end = time.monotonic() + 30
    while not all_have_data():
        assert time.monotonic() < end, empty
        time.sleep(SCRAPE_S)


def filled_in(expression: str) -> str:
    """Replaces Grafana's variables."""
    values = {"$run": MEASURED if "_gpu_" in expression else NAME, "$__rate_interval": "10s", "$__range": "10m"}
    for name, value in values.items():
        expression = expression.replace(name, value)
    return expression


def test_grafanas_model_of_a_dashboard_keeps_all_of_this_one() -> None:
    """Grafana ignores what its model lacks. Needs grafana-foundation-sdk."""
    model = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    pytest.importorskip("grafana_foundation_sdk.cog.plugins").register_default_plugins()
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder").JSONEncoder()
    assert_contains(json.loads(encoder.encode(model.Dashboard.from_json(DASHBOARD))), DASHBOARD, "dashboard")


def main() -> None:
    """Trains until it is stopped, at most STEPS steps; each waits while PAUSE exists: DATA STORAGE PAUSE STEPS."""
    data, storage, pause, steps = sys.argv[1:]

    def slow(run: ed.Run, at: int) -> None:
        time.sleep(0.05)
        client = rendezvous_client_of(run)
        while Path(pause).exists() and not client.signals.stop and not client.signals.failed_generation:
            time.sleep(0.05)

    ray.init(logging_level="WARNING")
    config = jobs.settings(storage, NAME, 2, steps=int(steps), min_workers=1, resize_interval_s=1.0)
    print(ed.ElasticTrainer(jobs.make_train(slow), data, config, transform=jobs.jitter).fit())


if __name__ == "__main__":
    main()
