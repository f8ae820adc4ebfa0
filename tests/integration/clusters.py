"""Clusters of several nodes on this machine, and what the command line says of the runs on them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster


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
    return command(cluster, "status")


def command(cluster: Cluster, *arguments: str) -> str:
    """What `elastic-ddp` prints, asked for something on a cluster."""
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "COLUMNS": "200"}
    line = [sys.executable, "-m", "elastic_ddp.cli.main", *arguments]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def until(condition: Callable[[], bool], driver: subprocess.Popen[str], timeout_s: float = 120) -> None:
    """Waits for a condition for as long as the driver lives."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert driver.poll() is None, driver.communicate()
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.2)
