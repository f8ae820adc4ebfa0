"""How often a run commits, from what was measured."""

from __future__ import annotations

import math

import pytest

from elastic_ddp.checkpoint.interval import (
    FIRST_INTERVAL_S,
    MeasuredInterval,
    interval_s,
    mean_time_between_failures,
)


def test_the_interval_of_young_is_the_one_that_loses_the_least() -> None:
    stall_s, mtbf_s = 0.4, 5000.0
    young = interval_s(stall_s=stall_s, save_s=0.0, mtbf_s=mtbf_s, max_overhead=None)

    def lost_share(seconds: float) -> float:
        """Of the time: the stalls, and half an interval for each failure."""
        return stall_s / seconds + seconds / 2 / mtbf_s

    assert young == pytest.approx(63.2456, abs=1e-4)
    assert lost_share(young) < min(lost_share(young * 0.9), lost_share(young * 1.1))


def test_no_commit_costs_more_than_the_share_that_is_allowed() -> None:
    assert interval_s(stall_s=0.5, save_s=1.0, mtbf_s=None, max_overhead=0.02) == 25.0
    assert interval_s(stall_s=0.5, save_s=1.0, mtbf_s=2.0, max_overhead=0.02) == 25.0, "Young's would be shorter"
    assert interval_s(stall_s=0.5, save_s=1.0, mtbf_s=10_000.0, max_overhead=0.02) == 100.0, "Young's is longer"


@pytest.mark.parametrize(("mtbf_s", "max_overhead"), [(100.0, None), (None, 0.5), (100.0, 0.5)])
def test_there_is_one_save_at_a_time(mtbf_s: float | None, max_overhead: float | None) -> None:
    assert interval_s(stall_s=0.1, save_s=90.0, mtbf_s=mtbf_s, max_overhead=max_overhead) == 90.0


def test_failures_are_counted_beside_one_in_an_hour() -> None:
    assert mean_time_between_failures(0, 0.0) == 3600.0
    assert mean_time_between_failures(0, 36_000.0) == 39_600.0
    assert mean_time_between_failures(10, 36_000.0) == 3600.0
    assert mean_time_between_failures(999, 996_400.0) == 1000.0, "what was seen outweighs it in the end"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_before_a_save_was_measured_the_interval_is_a_minute() -> None:
    measured = MeasuredInterval("auto", None)
    assert measured.seconds == FIRST_INTERVAL_S == 60.0
    measured.stalled(0.02)
    assert measured.seconds < 60.0


def test_the_interval_follows_the_median_of_the_last_stalls() -> None:
    measured = MeasuredInterval(None, 0.01)
    for stall_s in (5.0, 0.1, 0.1, 0.1, 0.1, 0.1):  # the first gets its memory
        measured.stalled(stall_s)
    assert measured.seconds == pytest.approx(10.0)
    for _ in range(3):
        measured.stalled(0.3)
    assert measured.seconds == pytest.approx(30.0)
    for _ in range(3):
        measured.saved(45.0)
    assert measured.seconds == 45.0


def test_losses_shorten_the_interval_and_quiet_time_lengthens_it() -> None:
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


def test_what_a_commit_keeps_of_it_counts_in_the_next_life() -> None:
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
    for _ in range(3):  # it is gone back to again and again
        after.merge(record)
    assert after.record() == {"losses": 2, "watched_s": 7300.0}, "it was seen"


def test_a_commit_that_keeps_nothing_of_it_changes_nothing() -> None:
    measured = MeasuredInterval("auto", None, Clock())
    measured.merge({})
    assert measured.record() == {"losses": 0, "watched_s": 0.0}
