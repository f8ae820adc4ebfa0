"""A run on nodes that Ray's autoscaler starts for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray

from elastic_ddp.driver.run_handle import RunHandle
from tests.chaos.autoscaling import autoscaling, connect, draining, nodes_of, num_nodes
from tests.chaos.faults import Fault
from tests.chaos.runs import Trial, until
from tests.integration import jobs

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(600)]


@pytest.fixture
def cluster() -> Iterator[None]:
    with autoscaling() as address:
        connect(address)
        yield
        ray.shutdown()


def worker_nodes(run: RunHandle) -> set[str]:
    """Returns Ray's ids of the nodes of a run's workers."""
    return {member["node_id"] for member in run.status()["members"]}


def test_the_autoscaler_starts_nodes_for_a_run_and_replaces_failed_ones(
    folder: Path, calm: Mapping[str, Any], cluster: None
) -> None:
    go = folder / "nodes-have-gone"
    # Each fault waits for all workers, so also for the replacement of the previous node.
    faults = [
        Fault(1, 10, "forward", "node"),
        Fault(0, 20, "reduction", "node"),
        Fault(1, 25, "forward", "SIGKILL"),
        Fault(1, 32, "forward", "drain"),
    ]
    run = Trial(
        folder,
        "autoscaled",
        faults,
        {"max_workers": 2},
        hold=jobs.hold_until_asked(str(go), step=40),
        wait_for_cpus=False,
    )
    assert num_nodes() == 0
    with run.live() as (handle, result):
        until(lambda: len(run.happened()) == len(faults), result, timeout_s=240)
        until(lambda: len(worker_nodes(handle) - draining()) == 2, result)
        assert len(ray.nodes()) > 5, "the head, two nodes, and a replacement for each failed or drained one"
        handle.resize(1)
        until(lambda: num_nodes() == 1, result)
        assert nodes_of("_StatsActor") <= {ray.get_runtime_context().get_node_id()}, "the actor would keep a node alive"
        go.touch()
    summary = result.result().summary
    assert jobs.same_bits(summary, calm) and summary["workers_failed"] == 3
    run.check_steps(summary["generations"])
