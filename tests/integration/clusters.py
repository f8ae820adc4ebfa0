"""Ray clusters of several nodes on this machine, and commands for the runs on them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster


@contextmanager
def cluster_of(num_nodes: int) -> Iterator[Cluster]:
    """A head without CPUs, and nodes with one CPU each."""
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 2 * 10**8}
    cluster = Cluster(True, head_node_args=head)
    try:
        for _ in range(num_nodes):
            cluster.add_node(num_cpus=1, object_store_memory=10**8)
        yield cluster
    finally:
        cluster.shutdown()


def kill(cluster: Cluster, node: Any) -> None:
    """Kills a node with all of its processes, as a power failure does. Workers outlive their raylet for a while."""
    raylet = node.all_processes["raylet"][0].process.pid
    children = [int(stat.parent.name) for stat in Path("/proc").glob("[0-9]*/stat") if parent_of(stat) == raylet]
    cluster.remove_node(node, allow_graceful=False)
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def parent_of(stat: Path) -> int | None:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None  # the process has exited


def status(cluster: Cluster, name: str) -> dict[str, Any]:
    """Returns the status of a run, as `elastic-ddp status --json` prints it. Its `state` is None if it is not live."""
    runs: list[dict[str, Any]] = json.loads(command(cluster, "status", "--json"))
    return next((run for run in runs if run["name"] == name), {"state": None, "step": None, "world_size": 0})


def command(cluster: Cluster, *arguments: str) -> str:
    """Returns what an `elastic-ddp` command for a cluster prints."""
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "COLUMNS": "200"}
    line = [sys.executable, "-m", "elastic_ddp.cli.main", *arguments]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def until(condition: Callable[[], bool], driver: subprocess.Popen[str], timeout_s: float = 120) -> None:
    """Waits for a condition while the driver lives."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert driver.poll() is None, driver.communicate()
        assert time.monotonic() < end, f"the condition is still false after {timeout_s:g} s"
        time.sleep(0.2)
