"""What a driver prints while Ray's GCS is away, and when it gives up."""

from __future__ import annotations

import errno
import itertools

import pytest

from elastic_ddp.driver import gcs_watch
from elastic_ddp.driver.gcs_watch import GcsWatch


class Gcs:
    """Refuses connections while `is_down`. Its clock shows `now`."""

    def __init__(self) -> None:
        self.is_down, self.now, self.num_contacts = False, 0.0, 0
        self.watch = GcsWatch("10.0.0.1:6379", self.contact, lambda: self.now)

    def contact(self, address: str, timeout_s: float) -> None:
        self.num_contacts += 1
        if self.is_down:
            raise ConnectionRefusedError

    def check_until(self, end: float) -> list[str]:
        """Checks once a second, and returns what is printed."""
        lines = []
        while self.now < end:
            self.now += 1.0
            lines.append(self.watch.check())
        return [line for line in lines if line is not None]


def test_one_line_is_printed_when_the_gcs_goes_away_and_one_when_it_returns() -> None:
    gcs = Gcs()
    assert gcs.check_until(10) == []
    gcs.is_down = True
    (line,) = gcs.check_until(40)
    assert "10.0.0.1:6379 does not respond" in line and "within 42 s" in line
    gcs.is_down = False
    (line,) = gcs.check_until(44)
    assert "responds again" in line and not gcs.watch.is_lost


def test_a_gcs_that_does_not_return_is_lost_before_ray_ends_its_processes() -> None:
    gcs = Gcs()
    gcs.is_down = True
    gcs.check_until(41)
    assert gcs.watch.is_away and not gcs.watch.is_lost
    gcs.check_until(46)
    assert gcs.watch.is_lost and not gcs.watch.is_over, "there is time for a commit"
    gcs.check_until(55)
    assert gcs.watch.is_over


def test_a_driver_with_too_many_open_files_does_not_count_as_a_lost_gcs() -> None:
    def fail(address: str, timeout_s: float) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    now = itertools.count(step=10.0)
    watch = GcsWatch("10.0.0.1:6379", fail, lambda: next(now))
    assert [watch.check() for _ in range(10)] == [None] * 10
    assert not watch.is_away and not watch.is_lost


def test_a_longer_timeout_of_ray_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gcs_watch.RECONNECT_TIMEOUT, "600")
    gcs = Gcs()
    gcs.is_down = True
    gcs.check_until(410)
    assert not gcs.watch.is_lost


def test_the_gcs_is_contacted_every_three_seconds() -> None:
    gcs = Gcs()
    gcs.check_until(30)
    assert gcs.num_contacts == 10
