"""`elastic-ddp doctor` on Ray: on one node, and as a program on a cluster of several."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster
from typer.testing import CliRunner

from elastic_ddp.cli.main import app

COMMAND = ["doctor", "--json", "--data", "data", "--storage", "runs"]


def check(folder: Path, stdout: str, exit_code: int, *, num_nodes: int) -> dict[str, Any]:
    """Returns the findings by check. The machine may fail checks of memory, for example."""
    printed = json.loads(stdout)
    found = {each["check"]: each for each in printed["findings"]}
    nodes = printed["facts"]["nodes"]
    assert len(nodes) == num_nodes
    assert all(node["facts"] and node["clock"] for node in nodes)
    for name in ("nodes", "versions", "clock", "storage", "data", "GPUs", "gloo"):
        assert (found[name]["verdict"], found[name]["node"]) == ("ok", "all"), found[name]
    assert exit_code == any(each["verdict"] == "fail" for each in printed["findings"])
    assert not [*folder.glob("runs/*")], "nothing is left behind"
    return found


@pytest.mark.chaos
@pytest.mark.usefixtures("local_ray")
def test_the_doctor_examines_a_node_and_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(app, COMMAND)
    found = check(folder, done.stdout, done.exit_code, num_nodes=1)
    assert "has the expected value, 1 (nodes: 1)" in found["gloo"]["text"]


@pytest.mark.chaos
def test_the_doctor_examines_every_node_of_a_cluster(cluster: Cluster, folder: Path) -> None:
    cluster.add_node(num_cpus=1, object_store_memory=10**8)
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    line = [sys.executable, "-m", "elastic_ddp.cli.main", *COMMAND]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    found = check(folder, done.stdout, done.returncode, num_nodes=3)
    assert "3 in Ray, 2 for workers" in found["nodes"]["text"]
    assert "has the expected value, 3 (nodes: 2)" in found["gloo"]["text"]
