"""What commits tell of metrics, and which commit a value is of: plain values."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from elastic_ddp.checkpoint.metrics import Measurement, Metrics, best_first, measurements, measurements_of


def test_a_record_may_have_no_metrics() -> None:
    assert measurements({}) == {} == measurements({"metrics": {}})
    assert measurements_of("loss", {}) == () == measurements_of(None, {"metrics": {"loss": {"value": 1, "step": 7}}})


def test_a_record_has_a_value_and_the_step_that_it_is_of() -> None:
    assert measurements({"metrics": {"loss": {"value": 1, "step": 7}}}) == {"loss": Measurement(1.0, 7)}


def test_a_measurement_is_of_the_first_commit_at_or_after_it() -> None:
    logged, evaluated = Measurement(0.5, 91), Measurement(0.3, 200)
    told = {100: [logged], 200: [logged], 300: [logged, evaluated]}
    assert best_first(told, "min") == [200, 100], "300 knows how good 200 is"


def test_of_several_measurements_on_the_way_to_a_commit_the_nearest_counts() -> None:
    told = {100: [Measurement(0.1, 60), Measurement(0.9, 95)], 200: [Measurement(0.5, 200)]}
    assert best_first(told, "min") == [200, 100]
    assert best_first(told, "max") == [100, 200]


def test_a_value_from_before_the_newest_commit_pushes_out_no_good_one() -> None:
    """It is measured itself right after that, perhaps, and is worse."""
    told = {100: [Measurement(0.1, 100)], 200: [Measurement(0.05, 150)]}
    assert best_first(told, "min") == [100]
    assert best_first({**told, 300: [Measurement(0.8, 200)]}, "min") == [100, 200]
    assert best_first({**told, 300: []}, "min") == [200, 100], "it was not measured itself"


def test_a_value_of_a_state_beyond_all_commits_is_of_none() -> None:
    assert best_first({100: [Measurement(0.1, 150)]}, "min") == []


def evaluated_late(values: dict[int, float], *, keep: int, mode: Any = "min") -> tuple[set[int], Metrics]:
    """A run that commits, and evaluates the same state right after that. The commits that stay, the newest last."""
    metrics, there = Metrics("loss", keep, mode), dict[int, dict[str, Any]]()
    for step, value in values.items():
        there[step] = metrics.record()
        metrics.take(step, {"loss": value, "other": 0.0}, is_late=True)
        told = {each: measurements_of("loss", record) for each, record in there.items()}
        staying = {step, *best_first(told, mode)[:keep]}
        there = {each: record for each, record in there.items() if each in staying}
    return set(there), metrics


def test_the_commit_whose_state_was_measured_best_stays_where_it_is_measured_later() -> None:
    values = {100: 0.43, 200: 0.2565, 300: 1.389, 400: 1.41, 500: 1.425}
    assert evaluated_late(values, keep=1)[0] == {200, 500}


@given(
    st.lists(st.floats(-9, 9), min_size=2, max_size=40, unique=True), st.integers(1, 4), st.sampled_from(["min", "max"])
)
def test_the_best_that_were_measured_later_stay_however_long_ago_that_was(
    values: list[float], keep: int, mode: Any
) -> None:
    by_step = {10 * place: value for place, value in enumerate(values, start=1)}
    *measured, newest = by_step  # how good the newest is no commit tells yet
    best = sorted(measured, key=lambda step: by_step[step], reverse=mode == "max")[:keep]
    assert evaluated_late(by_step, keep=keep, mode=mode)[0] == {*best, newest}


def test_what_is_remembered_for_later_commits_does_not_grow_with_the_run() -> None:
    metrics = evaluated_late({step: 1.0 / step for step in range(1, 1000)}, keep=2)[1]
    late = metrics.record()["measured_later"]["loss"]
    assert len(late) == 10 and late[0] == {"value": 1.0 / 999, "step": 999}


def test_who_goes_on_knows_what_the_record_tells_and_who_learns_from_it_keeps_what_is_newer() -> None:
    before = Metrics("loss", 1)
    before.take(10, {"loss": 0.5, "accuracy": 0.1}, is_late=True)
    before.take(20, {"loss": 0.7}, is_late=True)
    record = before.record()
    after = Metrics("loss", 1)
    after.take(5, {"loss": 0.1, "stale": 1.0}, is_late=True)
    after.go_on_from(record)
    assert after.record() == record
    newcomer = Metrics("loss", 1)
    newcomer.take(30, {"loss": 0.6}, is_late=True)
    newcomer.learn(record)
    told = newcomer.record()
    assert told["metrics"] == {**record["metrics"], "loss": {"value": 0.6, "step": 30}}
    assert [each["step"] for each in told["measured_later"]["loss"]] == [10, 30, 20]


def test_what_is_no_number_is_in_no_record() -> None:
    metrics = Metrics("loss", 1)
    metrics.take(10, {"loss": math.nan}, is_late=True)
    assert metrics.record() == {"metrics": {}}
