"""What a driver prints while Ray's GCS is away or its run waits for workers, and when it gives up."""

from __future__ import annotations

import errno
from collections.abc import Collection

import pytest
import ray

from elastic_ddp import RunConfig
from elastic_ddp.config.capacity import ClusterUse
from elastic_ddp.driver.cluster_watch import LATE_S, READ_S, REPEAT_S, TIMEOUT_VARIABLE, GcsWatch, WaitWatch

CONFIG = RunConfig(
    name="lm", storage="runs", steps=1, global_batch_size=8, micro_batch_size=1, min_workers=2, max_workers=4
)


class Gcs:
    """Fails with `error`, if there is one. Its clock shows `now`."""

    def __init__(self) -> None:
        self.error: OSError | None = None
        self.now, self.num_contacts = 0.0, 0
        self.watch = GcsWatch("10.0.0.1:6379", self.contact, lambda: self.now)

    def contact(self, address: str, timeout_s: float) -> None:
        self.num_contacts += 1
        if self.error is not None:
            raise self.error

    def check_until(self, end: float) -> list[str]:
        """Checks once a second, and returns what is printed."""
        lines = []
        while self.now < end:
            self.now += 1.0
            lines.append(self.watch.check())
        return [line for line in lines if line is not None]


def test_one_line_is_printed_when_the_gcs_goes_away_and_one_when_it_returns() -> None:
    gcs = Gcs()
    assert gcs.check_until(10) == [] and gcs.num_contacts == 3
    gcs.error = ConnectionRefusedError()
    (line,) = gcs.check_until(40)
    assert "10.0.0.1:6379 does not respond" in line and "within 42 s" in line
    gcs.error = None
    (line,) = gcs.check_until(44)
    assert "responds again" in line and not gcs.watch.is_lost


@pytest.mark.parametrize("ray_waits_s", [None, 600])
def test_a_gcs_that_does_not_return_is_lost_before_ray_ends_its_processes(
    monkeypatch: pytest.MonkeyPatch, ray_waits_s: int | None
) -> None:
    if ray_waits_s is not None:
        monkeypatch.setenv(TIMEOUT_VARIABLE, str(ray_waits_s))
    unit = (ray_waits_s or 60) / 60
    gcs = Gcs()
    gcs.error = ConnectionRefusedError()
    gcs.check_until(41 * unit)
    assert gcs.watch.is_away and not gcs.watch.is_lost
    gcs.check_until(46 * unit)
    assert gcs.watch.is_lost and not gcs.watch.is_over, "there is time for a commit"
    gcs.check_until(55 * unit)
    assert gcs.watch.is_over


def test_a_driver_with_too_many_open_files_does_not_count_as_a_lost_gcs() -> None:
    gcs = Gcs()
    gcs.error = OSError(errno.EMFILE, "Too many open files")
    assert gcs.check_until(100) == []
    assert not gcs.watch.is_away and not gcs.watch.is_lost


class Cluster:
    """A node with two CPUs, and the time."""

    def __init__(self) -> None:
        self.now, self.free, self.reads = 0.0, 2.0, 0
        self.held = {"other": {"CPU": 2.0}}
        self.fails = False
        self.watch = WaitWatch(CONFIG, self.read, lambda: self.now)

    def read(self, run: str, avoid: Collection[str]) -> ClusterUse:
        assert (run, avoid) == ("lm", ["n"])
        self.reads += 1
        if self.fails:
            raise ray.exceptions.RaySystemError("no answer")
        return ClusterUse([{"CPU": 2.0}], [{"CPU": self.free}], self.held, num_own=0)


def test_a_run_with_enough_workers_reads_nothing_of_the_cluster() -> None:
    cluster = Cluster()
    assert cluster.watch.update(2, ["n"]) is None and cluster.watch.reason is None and cluster.reads == 0


def test_a_reason_is_printed_when_it_changes_and_then_rarely() -> None:
    cluster = Cluster()
    watch = cluster.watch
    cluster.free = 0.0
    line = watch.update(0, ["n"])
    assert line is not None and "run 'other' (CPU=2)" in line and watch.reason == line
    assert watch.update(0, ["n"]) is None and cluster.reads == 1
    cluster.now, cluster.held = READ_S, {}
    changed = watch.update(1, ["n"])
    assert changed is not None and "other Ray jobs (CPU=2)" in changed
    cluster.now, cluster.fails = REPEAT_S, True
    assert watch.update(1, ["n"]) is None and watch.reason == changed
    cluster.now += READ_S
    assert watch.update(1, ["n"]) == changed, "the cluster does not answer, and the reason is the last one known"
    assert watch.update(2, ["n"]) is None and watch.reason is None
    cluster.now, cluster.fails = cluster.now + READ_S, False
    assert watch.update(1, ["n"]) == changed, "a new wait is a new line"


def test_free_resources_are_a_reason_only_after_a_while() -> None:
    cluster = Cluster()
    assert cluster.watch.update(0, ["n"]) is None and cluster.watch.reason is None
    cluster.now = LATE_S
    assert "Ray has not started them" in (cluster.watch.update(0, ["n"]) or "")
