"""Nodes that fail or drain, at each place of their worker's loop."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.chaos.runs import Trial
from tests.chaos.test_faults import PLACES, TOUR_STEPS, tour
from tests.integration.clusters import cluster_of

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without CPUs."""
    with cluster_of(0) as cluster:
        ray.init(cluster.address, logging_level="ERROR", log_to_driver=False)
        yield cluster
        ray.shutdown()


class Nodes:
    """Nodes with one CPU each."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._nodes: list[Any] = []

    def add_up_to(self, number: int, *, draining: Collection[str] = ()) -> None:
        """Adds nodes until `number` live ones do not drain, as an autoscaler does."""
        while sum(node.node_id not in draining and not node.dead_processes() for node in self._nodes) < number:
            self._nodes.append(self._cluster.add_node(num_cpus=1, object_store_memory=10**8))

    def remove(self) -> None:
        while self._nodes:
            self._cluster.remove_node(self._nodes.pop(), allow_graceful=False)


@pytest.fixture
def nodes(cluster: Cluster) -> Iterator[Nodes]:
    nodes = Nodes(cluster)
    yield nodes
    nodes.remove()


@pytest.fixture(scope="module")
def calm(cluster: Cluster, folder: Path) -> Mapping[str, Any]:
    nodes = Nodes(cluster)
    nodes.add_up_to(1)
    summary = Trial(folder, "calm-on-a-node", settings={"max_workers": 1, "steps": TOUR_STEPS}).fit().summary
    nodes.remove()
    return summary


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["node", "drain"])
def test_failed_and_drained_nodes_make_no_difference_at_any_place(
    nodes: Nodes, folder: Path, calm: Mapping[str, Any], how: str, rank: int
) -> None:
    run = tour(folder, how, rank)
    nodes.add_up_to(3)
    with run.live() as (_, result):
        while not result.done():
            nodes.add_up_to(3, draining={event.node_id for event in run.events("drain_noticed")})
            time.sleep(0.2)
    run.check(result.result().summary, calm)
    if how == "drain":
        assert [event.by for event in run.events("drain_noticed")] == ["Ray"] * len(PLACES)
