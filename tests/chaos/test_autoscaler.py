"""A run on nodes that Ray's own autoscaler starts for it."""

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


def where(run: RunHandle) -> set[str]:
    """The nodes of a run's workers."""
    return {each["node_id"] for each in run.status()["members"]}


def test_nodes_are_started_for_a_run_and_lost_ones_are_replaced(
    folder: Path, calm: Mapping[str, Any], cluster: None
) -> None:
    """There is never room for a worker but what is started for it."""
    go = folder / "nodes-have-gone"
    # Every one waits for as many workers as the run may have: for what replaces the node before.
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
        has_room=False,
    )
    assert num_nodes() == 0
    with run.live() as (handle, result):
        until(lambda: len(run.happened()) == len(faults), result, timeout_s=240)
        until(lambda: len(where(handle) - draining()) == 2, result)
        assert len(ray.nodes()) > 5, "the head, two nodes, and one for each that was lost or drained"
        handle.resize(1)
        until(lambda: num_nodes() == 1, result)
        assert nodes_of("_StatsActor") == {ray.get_runtime_context().get_node_id()}, "it would keep a node"
        go.touch()
    summary = result.result().summary
    assert jobs.same_bits(summary, calm) and summary["workers_lost"] == 3
    run.check_steps(summary["generations"])
