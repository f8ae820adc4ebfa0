"""`elastic-ddp doctor` on a cluster of several nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster


@pytest.mark.chaos
def test_the_doctor_examines_every_node_of_a_cluster(cluster: Cluster, folder: Path) -> None:
    cluster.add_node(num_cpus=1, object_store_memory=10**8)
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    line = [sys.executable, "-m", "elastic_ddp.cli.main", "doctor", "--json", "--data", "data", "--storage", "runs"]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    printed = json.loads(done.stdout)
    found = {each["check"]: each for each in printed["findings"]}
    nodes = printed["facts"]["nodes"]
    assert len(nodes) == 3 and all(node["facts"] and node["clock"] for node in nodes)
    for name in ("nodes", "versions", "clock", "storage", "data", "GPUs", "gloo"):
        assert (found[name]["verdict"], found[name]["node"]) == ("ok", "all"), found[name]
    # The machine may fail checks of memory, for example.
    assert done.returncode == any(each["verdict"] == "fail" for each in printed["findings"])
    assert not [*folder.glob("runs/*")], "nothing is left behind"
    assert "3 in Ray, 2 for workers" in found["nodes"]["text"]
    assert "has the expected value, 3 (nodes: 2)" in found["gloo"]["text"]
