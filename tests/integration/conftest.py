"""Clusters and data that several test modules use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.integration import jobs
from tests.integration.clusters import cluster_of


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head node without CPUs, and one node with one CPU."""
    with cluster_of(1) as cluster:
        yield cluster


@pytest.fixture
def local_ray() -> Iterator[None]:
    """A Ray cluster of one node, owned by this process."""
    ray.init("local", num_cpus=3, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the data set in `data`."""
    (tmp_path / "data").mkdir()
    jobs.write_rows(str(tmp_path / "data"))
    return tmp_path
