"""Fixtures: the data set of the chaos tests, and their undisturbed run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.integration import jobs


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chaos")
    (folder / "data").mkdir()
    jobs.write_rows(str(folder / "data"))
    return folder


@pytest.fixture(scope="module")
def one_node(undisturbed: Mapping[str, Any]) -> Iterator[None]:
    """A local Ray with CPUs for one more worker than the runs have."""
    ray.init("local", num_cpus=4, include_dashboard=False, logging_level="WARNING")
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def calm(undisturbed: Mapping[str, Any]) -> Mapping[str, Any]:
    """The summary of a run on one worker without faults."""
    return undisturbed
