"""A run that grows with its cluster: Ray Train starts the group again, and the bits stay."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from elastic_ddp.storage import Storage
from elastic_ddp.telemetry import read_ledger
from tests.integration import jobs

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head without workers, and one node with room for one."""
    cluster = Cluster(
        True, head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": 2 * 10**8}
    )
    cluster.add_node(num_cpus=1, object_store_memory=10**8)
    yield cluster
    cluster.shutdown()


def test_a_run_that_gets_a_node_goes_on_with_more_workers_and_ends_with_the_same_bits(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    jobs.write_rows(str(tmp_path / "data"))
    data, storage = str(tmp_path / "data"), str(tmp_path / "runs")
    calm = jobs.drive(data, storage, "calm", "1", RAY_ADDRESS=cluster.address)
    assert calm.returncode == 0, calm.stderr

    grown = tmp_path / "grown"
    wait = ("wait", str(grown), "25")
    with jobs.driver(data, storage, "grows", "1:3", *wait, RAY_ADDRESS=cluster.address) as run:
        until(lambda: "generation" in events_of(storage, "grows"), run)
        cluster.add_node(num_cpus=2, object_store_memory=10**8)
        # The second generation starts from the newest commit, and waits in the same step.
        until(lambda: events_of(storage, "grows").count("generation") == 2, run)
        grown.touch()
        _, errors = run.communicate(timeout=120)
        assert run.returncode == 0, errors

    summaries = [json.loads(Path(storage, name, "summary.json").read_text()) for name in ("calm", "grows")]
    for key in ("weights_sha256", "samples_sha256", "samples"):
        assert summaries[0][key] == summaries[1][key]
    generations = summaries[1]["generations"]
    assert [(g["world_size"], g["reason"]) for g in generations] == [(1, "start"), (3, "resize")]
    assert generations[1]["first_step"] == 20


def events_of(storage: str, name: str) -> list[str]:
    return [event["event"] for event in read_ledger(Storage(f"{storage}/{name}"))]


def until(condition: Callable[[], bool], driver: subprocess.Popen[str], timeout_s: float = 120) -> None:
    """Waits for a condition for as long as the driver lives."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert driver.poll() is None, driver.communicate()
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.2)
