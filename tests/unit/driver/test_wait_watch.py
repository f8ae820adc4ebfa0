"""When a driver reads and prints what its run waits for."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import ray

from elastic_ddp import RunConfig
from elastic_ddp.config.capacity import ClusterUse
from elastic_ddp.driver.wait_watch import CHECK_S, LATE_S, REPEAT_S, WaitWatch

CONFIG = RunConfig(
    name="lm", storage="runs", steps=1, global_batch_size=8, micro_batch_size=1, min_workers=2, max_workers=4
)


class Cluster:
    """A node with two CPUs, and the time."""

    def __init__(self) -> None:
        self.now, self.free, self.reads = 0.0, 2.0, 0
        self.held = {"other": {"CPU": 2.0}}
        self.fails = False

    def read(self, run: str, avoid: Collection[str]) -> ClusterUse:
        assert (run, avoid) == ("lm", ["n"])
        self.reads += 1
        if self.fails:
            raise ray.exceptions.RaySystemError("no answer")
        return ClusterUse([{"CPU": 2.0}], [{"CPU": self.free}], self.held, num_own=0)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def watch(cluster: Cluster) -> WaitWatch:
    return WaitWatch(CONFIG, cluster.read, lambda: cluster.now)


def test_a_run_with_enough_workers_reads_nothing_of_the_cluster(cluster: Cluster, watch: WaitWatch) -> None:
    assert watch.update(2, ["n"]) is None and watch.reason is None and cluster.reads == 0


def test_a_reason_is_printed_when_it_changes_and_then_rarely(cluster: Cluster, watch: WaitWatch) -> None:
    cluster.free = 0.0
    line = watch.update(0, ["n"])
    assert line is not None and "run 'other' (CPU=2)" in line and watch.reason == line
    assert watch.update(0, ["n"]) is None and cluster.reads == 1
    cluster.now, cluster.held = CHECK_S, {}
    changed = watch.update(1, ["n"])
    assert changed is not None and "other Ray jobs (CPU=2)" in changed
    cluster.now, cluster.fails = REPEAT_S, True
    assert watch.update(1, ["n"]) is None and watch.reason == changed
    cluster.now += CHECK_S
    assert watch.update(1, ["n"]) == changed, "the cluster does not answer, and the reason is the last one known"
    assert watch.update(2, ["n"]) is None and watch.reason is None
    cluster.now, cluster.fails = cluster.now + CHECK_S, False
    assert watch.update(1, ["n"]) == changed, "a new wait is a new line"


def test_free_resources_are_a_reason_only_after_a_while(cluster: Cluster, watch: WaitWatch) -> None:
    assert watch.update(0, ["n"]) is None and watch.reason is None
    cluster.now = LATE_S
    assert "Ray has not started them" in (watch.update(0, ["n"]) or "")
