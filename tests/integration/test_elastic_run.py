"""A run and its cluster: it waits for room, grows and shrinks with it, and tells where it is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from tests.integration import jobs

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head without workers, and one node with room for one."""
    cluster = Cluster(
        True, head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": 2 * 10**8}
    )
    cluster.add_node(num_cpus=1, object_store_memory=10**8)
    yield cluster
    cluster.shutdown()


def test_a_run_that_gets_a_node_goes_on_with_more_workers_and_ends_with_the_same_bits(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    jobs.write_rows(str(tmp_path / "data"))
    data, storage = str(tmp_path / "data"), str(tmp_path / "runs")
    calm = jobs.drive(data, storage, "calm", "1", RAY_ADDRESS=cluster.address)
    assert calm.returncode == 0, calm.stderr

    grown = tmp_path / "grown"
    with jobs.driver(data, storage, "grows", "1:3", "grow", str(grown), "25", RAY_ADDRESS=cluster.address) as run:
        until(grown.exists, run)
        cluster.add_node(num_cpus=2, object_store_memory=10**8)
        _, errors = run.communicate(timeout=120)
        assert run.returncode == 0, errors

    summaries = [json.loads(Path(storage, name, "summary.json").read_text()) for name in ("calm", "grows")]
    for key in ("weights_sha256", "samples_sha256", "samples"):
        assert summaries[0][key] == summaries[1][key]
    generations = summaries[1]["generations"]
    assert [generations[0]["world_size"], generations[-1]["world_size"]] == [1, 3]
    assert {each["reason"] for each in generations[1:]} == {"workers joined"}
    assert generations[1]["first_step"] == generations[0]["last_step"] == 26, "the step at hand is finished"
    assert summaries[1]["restarts"] == 0


@pytest.mark.chaos
def test_a_run_without_room_waits_is_stopped_and_finishes_once_there_is_room(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    jobs.write_rows(str(tmp_path / "data"))
    data, storage = str(tmp_path / "data"), str(tmp_path / "runs")
    with jobs.driver(data, storage, "waits", "2", RAY_ADDRESS=cluster.address) as run:
        until(lambda: row(cluster, "waits")[:1] == ["starting"], run)
        os.killpg(run.pid, signal.SIGINT)
        output, errors = run.communicate(timeout=60)
    assert run.returncode == 0, errors
    assert "room for 1 workers of {'CPU': 1.0}, and min_workers is 2: waiting for nodes" in errors
    assert "status='stopped', steps=0" in output
    assert status(cluster).startswith("no run is live on this cluster")

    cluster.add_node(num_cpus=1, object_store_memory=10**8)
    hold = tmp_path / "hold"
    with jobs.driver(data, storage, "waits", "2", "wait", str(hold), "25", RAY_ADDRESS=cluster.address) as run:
        until(lambda: row(cluster, "waits")[:1] + row(cluster, "waits")[3:5] == ["training", "25", "44"], run)
        hold.touch()
        _, errors = run.communicate(timeout=120)
    assert run.returncode == 0, errors
    summary = json.loads(Path(storage, "waits", "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["sessions"]) == ("finished", 44, 2)


def test_a_node_that_dies_takes_its_workers_but_no_step(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    jobs.write_rows(str(tmp_path / "data"))
    data, storage = str(tmp_path / "data"), str(tmp_path / "runs")
    calm = jobs.drive(data, storage, "calm", "1", RAY_ADDRESS=cluster.address)
    assert calm.returncode == 0, calm.stderr

    doomed = cluster.add_node(num_cpus=2, object_store_memory=10**8)
    hold = tmp_path / "hold"
    with jobs.driver(data, storage, "shrinks", "1:3", "wait", str(hold), "25", "3", RAY_ADDRESS=cluster.address) as run:
        until(lambda: row(cluster, "shrinks")[:3:2] == ["training", "3"], run)
        kill(cluster, doomed)
        hold.touch()
        _, errors = run.communicate(timeout=120)
        assert run.returncode == 0, errors

    summaries = [json.loads(Path(storage, name, "summary.json").read_text()) for name in ("calm", "shrinks")]
    for key in ("weights_sha256", "samples_sha256", "samples"):
        assert summaries[0][key] == summaries[1][key]
    generations = summaries[1]["generations"]
    assert max(each["world_size"] for each in generations) == 3 > generations[-1]["world_size"] == 1
    for before, after in pairwise(generations):
        assert after["first_step"] == before["last_step"], "no step is done again"


@pytest.mark.chaos
def test_a_run_that_has_lost_all_its_workers_can_be_stopped(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    jobs.write_rows(str(tmp_path / "data"))
    data, storage = str(tmp_path / "data"), str(tmp_path / "runs")
    cluster.add_node(num_cpus=2, object_store_memory=10**8)
    with jobs.driver(
        data, storage, "lost", "2", "wait", str(tmp_path / "never"), "25", RAY_ADDRESS=cluster.address
    ) as run:
        until(lambda: row(cluster, "lost")[3:4] == ["25"], run)
        for node in list(cluster.worker_nodes):
            kill(cluster, node)
        until(lambda: row(cluster, "lost")[:1] == ["waiting"], run)
        os.killpg(run.pid, signal.SIGINT)
        output, errors = run.communicate(timeout=120)
    assert run.returncode == 0, errors
    assert "status='stopped', steps=20" in output


def kill(cluster: Cluster, node: Any) -> None:
    """A node goes as when its power is cut. Without their raylet alone, workers would live on for a while."""
    raylet = node.all_processes["raylet"][0].process.pid
    below = [int(stat.parent.name) for stat in Path("/proc").glob("[0-9]*/stat") if parent_of(stat) == raylet]
    cluster.remove_node(node, allow_graceful=False)
    for pid in below:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def parent_of(stat: Path) -> int | None:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None  # it is gone


def row(cluster: Cluster, name: str) -> list[str]:
    """State, generation, workers, step and steps of a run, as `elastic-ddp status` prints them; nothing if it is not
    live."""
    rows = [line.split() for line in status(cluster).splitlines()]
    return next((each[1:6] for each in rows if each[:1] == [name]), [])


def status(cluster: Cluster) -> str:
    """What `elastic-ddp status` prints."""
    command = [sys.executable, "-m", "elastic_ddp.cli", "status"]
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "COLUMNS": "200"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout


def until(condition: Callable[[], bool], driver: subprocess.Popen[str], timeout_s: float = 120) -> None:
    """Waits for a condition for as long as the driver lives."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert driver.poll() is None, driver.communicate()
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.2)
