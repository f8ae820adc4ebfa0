"""Which workers of a group train, have failed, or are leaving."""

from __future__ import annotations

import itertools

import pytest

from elastic_ddp.ray_internals.worker_states import WorkerStates, classify_workers
from elastic_ddp.rendezvous.messages import WorkerDirectives

ERROR = RuntimeError("it died")
NONE = WorkerDirectives(failed={}, newcomers=[], dismissed=[], leaving=[], avoid=[], limit=3, is_over=False)


def classify(
    directives: WorkerDirectives, ended: set[int] | None = None, failed: set[int] | None = None, overdue: bool = False
) -> WorkerStates:
    """Classifies workers a, b and c."""
    failed = failed or set()
    return classify_workers(
        "abc",
        directives,
        ended=(ended or set()) | failed,
        errors=dict.fromkeys(failed, ERROR),
        is_overdue=lambda _: overdue,
    )


def test_a_training_worker_has_no_other_state() -> None:
    states = classify(NONE)
    assert not (states.failed or states.finished or states.dismissed or states.exited)
    assert not (states.run_is_over or states.none_trains or states.all_exited)


def test_a_dead_worker_and_one_presumed_dead_have_failed() -> None:
    states = classify(NONE._replace(failed={"c": "it is silent"}), failed={0})
    assert states.failed.keys() == {0, 2}
    assert states.failed[0] is ERROR and str(states.failed[2]) == "it is silent"
    assert not states.none_trains, "b trains"
    assert classify(NONE._replace(failed={"c": "it is silent"}), failed={0, 1}).none_trains


def test_a_dismissed_worker_that_dies_has_not_failed() -> None:
    states = classify(NONE._replace(dismissed=["a"]), failed={0})
    assert not states.failed and states.exited == {0}


def test_a_dismissed_worker_has_exited_when_it_has_returned_or_is_overdue() -> None:
    directives = NONE._replace(dismissed=["a", "b", "c"])
    assert classify(directives, ended={0}).exited == {0}
    assert not classify(directives, ended={0}).all_exited
    assert classify(directives, ended={0}).none_trains
    assert classify(directives, ended={0}, overdue=True).all_exited


def test_a_worker_that_returns_was_dismissed_or_has_finished_the_run() -> None:
    assert classify(NONE, ended={1}).exited == {1}
    at_the_end = classify(NONE._replace(is_over=True), ended={1})
    assert at_the_end.finished == {1} and not at_the_end.run_is_over, "the others have not returned"


def test_a_run_is_over_when_all_workers_that_were_not_dismissed_have_finished() -> None:
    over = NONE._replace(is_over=True, dismissed=["c"])
    assert classify(over, ended={0, 1}).run_is_over
    assert not classify(over, ended={0}).run_is_over
    assert not classify(over, ended={0}, failed={1}).run_is_over, "a failure at the end makes it a failed run"
    assert not classify(NONE._replace(dismissed=["a", "b", "c"]), ended={0, 1, 2}).run_is_over, "all were drained"


@pytest.mark.parametrize("is_over", [False, True])
def test_a_worker_trains_unless_its_function_has_ended_or_the_rendezvous_has_removed_it(is_over: bool) -> None:
    for has_ended, has_failed, is_presumed_dead, is_dismissed in itertools.product([False, True], repeat=4):
        states = classify(
            NONE._replace(
                failed={"a": "it is silent"} if is_presumed_dead else {}, dismissed=["a"] * is_dismissed
            )._replace(is_over=is_over),
            ended={0} if has_ended else set(),
            failed={0} if has_failed else set(),
        )
        assert states.exited <= states.dismissed
        assert not states.finished & (states.dismissed | states.failed.keys())
        training = states.all - states.finished - states.dismissed - states.failed.keys()
        assert (0 in training) != (has_ended or has_failed or is_presumed_dead or is_dismissed)
