"""What several test modules start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ray.cluster_utils import Cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head without workers, and one node with room for one."""
    cluster = Cluster(
        True, head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": 2 * 10**8}
    )
    cluster.add_node(num_cpus=1, object_store_memory=10**8)
    yield cluster
    cluster.shutdown()
