"""The commit interval from measured costs and failures."""

from __future__ import annotations

import math

import pytest

from elastic_ddp.checkpoint.interval import (
    FIRST_INTERVAL_S,
    MeasuredInterval,
    interval_s,
    mean_time_between_failures,
)


def test_young_interval_loses_the_least_time() -> None:
    stall_s, mtbf_s = 0.4, 5000.0
    young = interval_s(stall_s=stall_s, save_s=0.0, mtbf_s=mtbf_s, max_overhead=None)

    def lost_share(seconds: float) -> float:
        """Returns the fraction of time lost: stalls, and half an interval for each failure."""
        return stall_s / seconds + seconds / 2 / mtbf_s

    assert young == pytest.approx(63.2456, abs=1e-4)
    assert lost_share(young) < min(lost_share(young * 0.9), lost_share(young * 1.1))


def test_stalls_take_at_most_max_overhead() -> None:
    assert interval_s(stall_s=0.5, save_s=1.0, mtbf_s=None, max_overhead=0.02) == 25.0
    assert interval_s(stall_s=0.5, save_s=1.0, mtbf_s=2.0, max_overhead=0.02) == 25.0, "Young's would be shorter"
    assert interval_s(stall_s=0.5, save_s=1.0, mtbf_s=10_000.0, max_overhead=0.02) == 100.0, "Young's is longer"


@pytest.mark.parametrize(("mtbf_s", "max_overhead"), [(100.0, None), (None, 0.5), (100.0, 0.5)])
def test_the_interval_is_at_least_the_duration_of_a_save(mtbf_s: float | None, max_overhead: float | None) -> None:
    assert interval_s(stall_s=0.1, save_s=90.0, mtbf_s=mtbf_s, max_overhead=max_overhead) == 90.0


def test_the_failure_rate_has_a_prior_of_one_per_hour() -> None:
    assert mean_time_between_failures(0, 0.0) == 3600.0
    assert mean_time_between_failures(0, 36_000.0) == 39_600.0
    assert mean_time_between_failures(10, 36_000.0) == 3600.0
    assert mean_time_between_failures(999, 996_400.0) == 1000.0, "observations outweigh the prior"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_interval_is_a_minute_until_a_save_is_measured() -> None:
    measured = MeasuredInterval("auto", None)
    assert measured.seconds == FIRST_INTERVAL_S == 60.0
    measured.stalled(0.02)
    assert measured.seconds < 60.0


def test_the_interval_follows_the_median_of_the_newest_stalls() -> None:
    measured = MeasuredInterval(None, 0.01)
    for stall_s in (5.0, 0.1, 0.1, 0.1, 0.1, 0.1):  # the first save allocates its memory
        measured.stalled(stall_s)
    assert measured.seconds == pytest.approx(10.0)
    for _ in range(3):
        measured.stalled(0.3)
    assert measured.seconds == pytest.approx(30.0)
    for _ in range(3):
        measured.saved(45.0)
    assert measured.seconds == 45.0


def test_failures_shorten_the_interval_and_time_without_them_lengthens_it() -> None:
    clock = Clock()
    measured = MeasuredInterval("auto", None, clock)
    measured.stalled(0.5)
    at_first = measured.seconds
    assert at_first == pytest.approx(math.sqrt(3600.0))
    for _ in range(3):
        measured.record_failure()
    assert measured.seconds == pytest.approx(at_first / 2)
    clock.now += 3 * 3600.0
    assert measured.seconds == pytest.approx(at_first)


def test_counts_in_a_commit_continue_in_the_next_session() -> None:
    clock = Clock()
    before = MeasuredInterval("auto", None, clock)
    clock.now += 7200.0
    before.record_failure()
    record = before.record()
    assert record == {"losses": 1, "watched_s": 7200.0}
    after = MeasuredInterval("auto", None, clock)
    after.merge(record)
    after.record_failure()
    clock.now += 100.0
    assert after.record() == {"losses": 2, "watched_s": 7300.0}
    for _ in range(3):  # the commit is restored several times
        after.merge(record)
    assert after.record() == {"losses": 2, "watched_s": 7300.0}, "failures count once"


def test_a_record_without_counts_changes_nothing() -> None:
    measured = MeasuredInterval("auto", None, Clock())
    measured.merge({})
    assert measured.record() == {"losses": 0, "watched_s": 0.0}
