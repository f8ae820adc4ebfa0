"""`cluster_has_gpus`, on clusters whose nodes pretend to have GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from ray.cluster_utils import Cluster

pytestmark = pytest.mark.slow

NODE = {"include_dashboard": False, "object_store_memory": 10**8}
PROGRAM = "import elastic_ddp as ed; print('has GPUs:', ed.cluster_has_gpus())"


@pytest.fixture
def head() -> Iterator[Cluster]:
    """A cluster whose head runs no worker, as after `ray up`."""
    cluster = Cluster(True, head_node_args={**NODE, "num_cpus": 0, "num_gpus": 0})
    yield cluster
    cluster.shutdown()


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_a_driver_waits_for_the_first_worker_node_to_learn_whether_there_are_gpus(head: Cluster, num_gpus: int) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "RAY_ADDRESS": head.address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert driver.stdout is not None
    try:
        printed = ""
        while "waiting for a node with CPUs or GPUs" not in printed:
            line = driver.stdout.readline()
            assert line, printed
            printed += line
        head.add_node(**NODE, num_cpus=1, num_gpus=num_gpus)
        printed += driver.communicate(timeout=120)[0]
    finally:
        driver.kill()
        driver.wait()
    assert printed.endswith(f"has GPUs: {bool(num_gpus)}\n")
