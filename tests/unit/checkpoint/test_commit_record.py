"""The metrics in commit records, and the order of commits by a metric."""

from __future__ import annotations

import math

import pytest

from elastic_ddp.checkpoint.record import Measurement, Metrics, Mode, best_first, measurements


def test_a_record_holds_values_and_the_steps_at_which_they_were_measured() -> None:
    assert measurements({}) == {} == measurements({"metrics": {}})
    assert measurements({"metrics": {"loss": {"value": 1, "step": 7}}}) == {"loss": Measurement(1.0, 7)}


def test_a_measurement_counts_for_the_first_commit_that_has_it() -> None:
    logged, evaluated = Measurement(0.5, 91), Measurement(0.3, 200)
    assert best_first({100: logged, 200: logged, 300: evaluated, 400: evaluated}, "min") == [300, 100]


@pytest.mark.parametrize(("mode", "expected"), [("min", [20, 10, 30]), ("max", [30, 10, 20])])
def test_commits_without_a_value_are_left_out_and_ties_go_to_the_earlier(mode: Mode, expected: list[int]) -> None:
    values = {10: Measurement(0.5, 10), 20: Measurement(0.1, 20), 30: Measurement(0.9, 30), 40: None}
    assert best_first(values, mode) == expected
    assert best_first({20: Measurement(0.5, 20), 10: Measurement(0.5, 10)}, mode) == [10, 20]


def test_restoring_replaces_all_values_and_merging_keeps_the_newer_ones() -> None:
    before = Metrics()
    before.update(10, {"loss": 0.5, "accuracy": 0.1})
    before.update(20, {"loss": 0.7})
    record = before.to_record()
    after = Metrics()
    after.update(5, {"loss": 0.1, "stale": 1.0})
    after.restore(record)
    assert after.to_record() == record
    newcomer = Metrics()
    newcomer.update(30, {"loss": 0.6})
    newcomer.merge(record)
    assert newcomer.to_record()["metrics"] == {**record["metrics"], "loss": {"value": 0.6, "step": 30}}


def test_a_value_that_json_cannot_hold_is_in_no_record() -> None:
    metrics = Metrics()
    for value in (math.nan, math.inf, -math.inf):
        metrics.update(10, {"loss": value})
    assert metrics.to_record() == {"metrics": {}}
