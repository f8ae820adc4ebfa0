"""Who stays in a group of workers and who goes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_ddp.ray_internals.turnover import Turnover, classify_workers
from elastic_ddp.rendezvous.messages import WorkerDirectives

ERROR = RuntimeError("it died")
NOBODY = WorkerDirectives(failed={}, newcomers=[], dismissed=[], leaving=[], avoid=[], limit=3, is_over=False)


def sorted_out(
    orders: WorkerDirectives, done: set[int] | None = None, failed: set[int] | None = None, overdue: bool = False
) -> Turnover:
    """Of workers a, b and c."""
    failed = failed or set()
    return classify_workers(
        "abc",
        orders,
        done=(done or set()) | failed,
        errors=dict.fromkeys(failed, ERROR),
        is_overdue=lambda _: overdue,
    )


def test_who_trains_stays() -> None:
    turnover = sorted_out(NOBODY)
    assert not (turnover.failed or turnover.through or turnover.dismissed or turnover.left)
    assert not (turnover.is_over or turnover.nobody_trains or turnover.all_have_left)


def test_a_dead_worker_and_one_presumed_so_are_lost() -> None:
    turnover = sorted_out(NOBODY._replace(failed={"c": "it is silent"}), failed={0})
    assert turnover.failed.keys() == {0, 2}
    assert turnover.failed[0] is ERROR and str(turnover.failed[2]) == "it is silent"
    assert not turnover.nobody_trains, "b goes on"
    assert sorted_out(NOBODY._replace(failed={"c": "it is silent"}), failed={0, 1}).nobody_trains


def test_who_was_let_go_and_dies_is_not_lost() -> None:
    turnover = sorted_out(NOBODY._replace(dismissed=["a"]), failed={0})
    assert not turnover.failed and turnover.left == {0}


def test_who_was_let_go_has_left_when_its_function_has_ended_or_time_is_up() -> None:
    orders = NOBODY._replace(dismissed=["a", "b", "c"])
    assert sorted_out(orders, done={0}).left == {0}
    assert not sorted_out(orders, done={0}).all_have_left
    assert sorted_out(orders, done={0}).nobody_trains
    assert sorted_out(orders, done={0}, overdue=True).all_have_left


def test_who_returns_amid_a_run_was_let_go_and_at_its_end_is_through() -> None:
    assert sorted_out(NOBODY, done={1}).left == {1}
    at_the_end = sorted_out(NOBODY._replace(is_over=True), done={1})
    assert at_the_end.through == {1} and not at_the_end.is_over, "the others have not returned"


def test_a_run_is_over_when_all_are_through_whom_nobody_let_go() -> None:
    over = NOBODY._replace(is_over=True, dismissed=["c"])
    assert sorted_out(over, done={0, 1}).is_over
    assert not sorted_out(over, done={0}).is_over
    assert not sorted_out(over, done={0}, failed={1}).is_over, "who failed last makes it a failed run"
    assert not sorted_out(NOBODY._replace(dismissed=["a", "b", "c"]), done={0, 1, 2}).is_over, "all were drained"


RANKS = st.sets(st.integers(0, 2))
NAMES = st.sets(st.sampled_from("abc"))


@given(RANKS, RANKS, NAMES, NAMES, st.booleans(), st.booleans())
def test_every_worker_is_sorted_once_and_who_gave_no_reason_stays(
    done: set[int], failed: set[int], lost: set[str], dismissed: set[str], over: bool, overdue: bool
) -> None:
    orders = NOBODY._replace(failed=dict.fromkeys(lost, "silent"), dismissed=sorted(dismissed), is_over=over)
    turnover = sorted_out(orders, done, failed, overdue)
    assert turnover.left <= turnover.dismissed
    assert not turnover.through & (turnover.dismissed | turnover.failed.keys())
    unmoved = {rank for rank, name in enumerate("abc") if rank not in done | failed and name not in lost | dismissed}
    stay = turnover.everyone - turnover.through - turnover.dismissed - turnover.failed.keys()
    assert stay == unmoved, "a function that has ended, and a word of the rendezvous, are all the reasons there are"
    assert turnover.nobody_trains == (not stay)
