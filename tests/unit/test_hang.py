"""A hang is told from slowness, and the one that others wait for is named."""

from __future__ import annotations

import threading
import time
from typing import get_args

from elastic_ddp.errors import StorageError, TrainFunctionError
from elastic_ddp.rendezvous.hang import Activity, ActivityReport, HangDetector, Place, stacks


def watch_of(*members: str) -> HangDetector:
    watch = HangDetector(timeout_s=10.0)
    watch.begin(members, 0.0)
    return watch


def test_nobody_hangs_who_gets_somewhere_before_the_timeout() -> None:
    watch = watch_of("a", "b")
    assert not watch.is_hung(9.0)
    watch.update("a", ActivityReport(1, "data"), 9.0)
    assert not watch.is_hung(10.0)
    assert not watch.is_hung(18.0), "b is waiting for a, which is slow"
    assert watch.is_hung(19.0)


def test_the_same_word_again_is_no_progress() -> None:
    watch = watch_of("a")
    for now in range(11):
        watch.update("a", ActivityReport(3, "forward"), float(now))
    assert watch.is_hung(10.0)


def test_the_one_that_others_wait_for_is_the_culprit() -> None:
    watch = watch_of("a", "b", "c")
    watch.update("a", ActivityReport(5, "reduction"), 0.0)
    watch.update("b", ActivityReport(4, "forward"), 0.0)
    watch.update("c", ActivityReport(9, "rendezvous"), 0.0)
    assert watch.culprits(is_broken=False) == ["b"]


def test_nobody_is_named_if_all_wait_or_none_does() -> None:
    watch = watch_of("a", "b")
    for member in "ab":
        watch.update(member, ActivityReport(5, "reduction"), 0.0)
    assert watch.culprits(is_broken=False) == []
    for member in "ab":
        watch.update(member, ActivityReport(6, "forward"), 0.0)
    assert watch.culprits(is_broken=False) == []


def test_once_a_generation_is_broken_all_but_those_at_the_rendezvous_are_culprits() -> None:
    watch = watch_of("a", "b", "c")
    watch.update("a", ActivityReport(5, "rendezvous"), 0.0)
    watch.update("b", ActivityReport(4, "hand-over"), 0.0)
    watch.update("c", ActivityReport(9, "reduction"), 0.0)
    assert watch.culprits(is_broken=True) == ["b", "c"]
    assert watch.culprits(is_broken=False) == []


def at(watch: HangDetector, **places: Place) -> HangDetector:
    for member, place in places.items():
        watch.update(member, ActivityReport(5, place), 0.0)
    return watch


def test_a_culprit_is_given_up_and_the_run_goes_on() -> None:
    verdict = at(watch_of("a", "b"), a="reduction", b="data").decide(is_broken=False)
    assert [*verdict.culprits] == ["b"] and verdict.failure is verdict.end is None
    assert verdict.culprits["b"] == "hung in 'data' for 10 s (hang_timeout_s) while others waited for it"


def test_where_some_may_wait_for_others_the_generation_breaks_and_then_all_but_those_who_came_are_culprits() -> None:
    watch = at(watch_of("a", "b"), a="forward", b="data")
    verdict = watch.decide(is_broken=False)
    assert not verdict.culprits and verdict.end is None and "in 'data, forward'" in (verdict.failure or "")
    assert [*at(watch, a="rendezvous").decide(is_broken=True).culprits] == ["b"]


def test_where_nobody_comes_after_the_generation_was_broken_the_run_ends() -> None:
    for place in get_args(Place):
        watch = at(watch_of("a", "b"), a="reduction", b=place)
        verdict = watch.decide(is_broken=True)
        assert (verdict.end is None) == (place == "rendezvous"), place
        assert isinstance(verdict.end, StorageError) == (place == "commit"), place


def test_what_nobody_waits_for_ends_the_run_at_once() -> None:
    verdict = at(watch_of("a", "b"), a="data", b="data").decide(is_broken=False)
    assert isinstance(verdict.end, TrainFunctionError) and not verdict.culprits and verdict.failure is None
    assert "'data'" in str(verdict.end) and "10 s (hang_timeout_s)" in str(verdict.end)
    alone = at(watch_of("a"), a="forward").decide(is_broken=False)
    assert isinstance(alone.end, TrainFunctionError), "there is nobody to wait for"


def test_all_at_the_rendezvous_go_on_waiting() -> None:
    verdict = at(watch_of("a", "b"), a="rendezvous", b="rendezvous").decide(is_broken=True)
    assert verdict.end is None and not verdict.culprits


def test_the_dead_do_not_hang() -> None:
    watch = watch_of("a")
    watch.remove("a")
    assert not watch.is_hung(100.0)


def test_an_activity_comes_back_to_where_it_was() -> None:
    activity = Activity()
    activity.enter("forward")
    with activity.within("collective"):
        assert activity.now == ActivityReport(2, "collective")
    assert activity.now == ActivityReport(3, "forward")


def test_what_is_done_in_a_place_counts() -> None:
    activity, watch, worked_s = Activity(), watch_of("a"), [0.0]
    with activity.within("commit", lambda: worked_s[0]):
        watch.update("a", activity.now, 0.0)
        activity.tick()
        watch.update("a", activity.now, 9.0)
        worked_s[0] += 5.0
        watch.update("a", activity.now, 18.0)
        with activity.within("shares"):
            assert activity.now.worked_s == 0.0, "that is waited for in the other place"
        assert activity.now.worked_s == 5.0
    assert not watch.is_hung(27.0) and watch.is_hung(28.0)


def test_stacks_name_every_thread_and_what_it_is_in() -> None:
    go_on = threading.Event()

    def stuck_in_a_function() -> None:
        go_on.wait()

    thread = threading.Thread(target=stuck_in_a_function, name="TrainingThread(x)")
    thread.start()
    while "stuck_in_a_function" not in stacks():
        time.sleep(0.01)
    assert stacks().startswith("Thread TrainingThread(x):")
    assert "test_stacks_name_every_thread" in stacks()
    go_on.set()
    thread.join()
