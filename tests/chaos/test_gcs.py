"""Ray's GCS dies while a run is live: for good, or until it is restarted with its state in Redis."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from elastic_ddp.driver.cluster_watch import TIMEOUT_VARIABLE
from tests.chaos.runs import Trial
from tests.integration import jobs
from tests.integration.clusters import cluster_of

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

RAY_WAITS_S = 40
"""How long Ray's processes wait for the GCS, instead of 60 s. A driver has 15 % of this time to end; it takes 4 s."""


@pytest.fixture
def short_wait(calm: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Requested after `calm`, whose Ray is another one."""
    monkeypatch.setenv(TIMEOUT_VARIABLE, str(RAY_WAITS_S))


@pytest.fixture
def redis(short_wait: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Redis server on loopback, in which Ray's heads keep their state."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", "/tmp"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    monkeypatch.setenv("RAY_REDIS_ADDRESS", f"127.0.0.1:{port}")
    yield
    server.kill()
    server.wait()


class HeldRun:
    """A run that waits in step 20 until it is released. What its driver prints is in `printed`."""

    def __init__(self, cluster: Cluster, folder: Path, name: str) -> None:
        self.trial = Trial(folder, name)
        self._log, self._go = folder / f"{name}.log", folder / f"{name}.go"
        arguments = [str(folder / "data"), str(folder / "runs"), name, "1:2", "ask", str(self._go), "20"]
        with self._log.open("a") as log:
            self.driver = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.jobs", *arguments],
                stdout=log,
                stderr=log,
                cwd=Path(__file__).parents[2],
                env={**os.environ, "RAY_ADDRESS": cluster.address},
                start_new_session=True,
            )

    @property
    def printed(self) -> str:
        return self._log.read_text()

    @property
    def is_held(self) -> bool:
        """Whether two workers wait in step 20."""
        if not Path(self.trial.config["storage"], self.trial.name).exists():
            return False
        sizes = [event.world_size for event in self.trial.events("generation_started")]
        steps = [event.step for event in self.trial.events("steps_completed")]
        return sizes[-1:] == [2] and max(steps, default=0) >= 20

    def until(self, condition: Callable[[], bool], timeout_s: float = 120) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            assert self.driver.poll() is None and time.monotonic() < end, self.printed
            time.sleep(0.1)

    def end(self) -> int:
        """Lets the run finish, and returns the exit status of its driver."""
        self._go.touch()
        return self.driver.wait(120)


def test_a_driver_whose_gcs_is_gone_commits_and_prints_what_to_do(
    folder: Path, calm: Mapping[str, Any], short_wait: None
) -> None:
    with cluster_of(2) as cluster:
        run = HeldRun(cluster, folder, "gcs-gone")
        run.until(lambda: run.is_held)
        address, killed_at = cluster.address, time.monotonic()
        cluster.head_node.kill_gcs_server()
        assert run.driver.wait(2 * RAY_WAITS_S) == 1, run.printed
        took_s = time.monotonic() - killed_at
    last = run.printed.strip().splitlines()[-1]
    assert f"WorkersFailedError: Ray's GCS at {address} has not responded" in last
    assert "The same command resumes the run from its newest commit" in last
    assert took_s < RAY_WAITS_S, "Ray itself ends processes then"
    (commit,) = [event.step for event in run.trial.events("commit_succeeded")][-1:]
    with cluster_of(1) as cluster:
        again = HeldRun(cluster, folder, "gcs-gone")
        assert again.end() == 0, again.printed
    facts = jobs.summary(folder, "gcs-gone")
    again.trial.check_results(facts, calm)
    assert facts["generations"][0]["last_step"] == commit, "no step is lost"
    again.trial.check_steps(facts["generations"])


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs Debian's redis-server")
def test_a_gcs_that_is_restarted_with_redis_loses_no_step_and_no_worker(
    folder: Path, calm: Mapping[str, Any], redis: None
) -> None:
    with cluster_of(2) as cluster:
        run = HeldRun(cluster, folder, "redis")
        run.until(lambda: run.is_held)
        cluster.head_node.kill_gcs_server()
        run.until(lambda: "does not respond" in run.printed)
        cluster.head_node.start_gcs_server()
        run.until(lambda: "responds again" in run.printed)
        assert run.end() == 0, run.printed
    facts = jobs.summary(folder, "redis")
    run.trial.check(facts, calm)
    assert [generation["world_size"] for generation in facts["generations"]] == [2]
