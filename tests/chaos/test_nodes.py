"""Nodes that die, and nodes that Ray takes away after a notice, wherever their worker is in its loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.chaos.runs import Trial
from tests.chaos.test_faults import faults_at, name_of, table

pytestmark = [pytest.mark.slow, pytest.mark.chaos]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """A head without workers."""
    cluster = Cluster(
        True, head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": 2 * 10**8}
    )
    ray.init(cluster.address, logging_level="ERROR", log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def three_nodes(nodes: Cluster) -> Iterator[Cluster]:
    """With room for one worker on each, fresh ones where the last test left fewer."""
    there = [nodes.add_node(num_cpus=1, object_store_memory=10**8) for _ in range(3)]
    yield nodes
    for node in there:
        nodes.remove_node(node, allow_graceful=False)


@pytest.fixture(scope="module")
def calm(nodes: Cluster, folder: Path) -> Mapping[str, Any]:
    node = nodes.add_node(num_cpus=1, object_store_memory=10**8)
    summary = Trial(folder, "calm-on-a-node", settings={"max_workers": 1}).fit().summary
    nodes.remove_node(node, allow_graceful=False)
    return summary


@pytest.mark.parametrize(("how", "place", "rank"), table("node", "drain"))
def test_a_node_that_goes_makes_no_difference(
    three_nodes: Cluster, folder: Path, calm: Mapping[str, Any], how: str, place: str, rank: int
) -> None:
    run = Trial(folder, name_of(how, place, rank), faults_at(place, rank, how))
    summary = run.fit().summary
    run.check(summary, calm)
    if how == "drain":
        assert [each["by"] for each in run.events("notice")] == ["Ray"]
