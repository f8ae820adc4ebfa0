"""Hang detection: a hang is not slow progress, and the member that others wait for is the culprit."""

from __future__ import annotations

import threading
import time
from typing import get_args

from elastic_ddp.errors import ElasticDDPError, StorageError, TrainFunctionError
from elastic_ddp.rendezvous.hang import Activity, ActivityReport, Consequence, HangDetector, Place, stacks


def detector_of(*members: str) -> HangDetector:
    detector = HangDetector(timeout_s=10.0)
    detector.begin(members, 0.0)
    return detector


def culprits(consequence: Consequence) -> list[str]:
    assert isinstance(consequence, dict)
    return [*consequence]


def test_progress_of_one_member_is_no_hang() -> None:
    detector = detector_of("a", "b")
    assert not detector.is_hung(9.0)
    detector.update("a", ActivityReport(1, "data"), 9.0)
    assert not detector.is_hung(10.0)
    assert not detector.is_hung(18.0), "b waits for a, which is slow"
    assert detector.is_hung(19.0)


def test_a_repeated_report_is_no_progress() -> None:
    detector = detector_of("a")
    for now in range(11):
        detector.update("a", ActivityReport(3, "forward"), float(now))
    assert detector.is_hung(10.0)


def at(detector: HangDetector, **places: Place) -> HangDetector:
    for member, place in places.items():
        detector.update(member, ActivityReport(5, place), 0.0)
    return detector


def test_a_culprit_fails_and_the_run_continues() -> None:
    consequence = at(detector_of("a", "b"), a="reduction", b="data").decide(is_broken=False)
    assert consequence == {"b": "hung in 'data' for 10 s (hang_timeout_s) while others waited for it"}
    detector = at(detector_of("a", "b"), a="reduction")
    detector.update("b", ActivityReport(5, "data", is_idle=True, where="train.py:9 in load"), 0.0)
    consequence = detector.decide(is_broken=False)
    assert isinstance(consequence, dict)
    assert consequence["b"].startswith("hung in 'data', at train.py:9 in load, for 10 s")


def test_a_generation_that_may_wait_is_aborted_to_find_the_culprits() -> None:
    detector = at(detector_of("a", "b"), a="forward", b="data")
    consequence = detector.decide(is_broken=False)
    assert isinstance(consequence, str) and "in 'data, forward'" in consequence
    assert culprits(at(detector, a="rendezvous").decide(is_broken=True)) == ["b"]


def test_after_an_abort_members_outside_the_rendezvous_are_culprits() -> None:
    detector = at(detector_of("a", "b", "c"), a="rendezvous", b="hand-over", c="reduction")
    assert culprits(detector.decide(is_broken=True)) == ["b", "c"]
    assert not isinstance(detector.decide(is_broken=False), dict)


def test_the_run_ends_if_no_member_comes_after_an_abort() -> None:
    for place in get_args(Place):
        detector = at(detector_of("a", "b"), a="reduction", b=place)
        consequence = detector.decide(is_broken=True)
        assert isinstance(consequence, ElasticDDPError) == (place != "rendezvous"), place
        assert isinstance(consequence, StorageError) == (place == "commit"), place


def test_a_hang_that_no_member_waits_for_ends_the_run() -> None:
    consequence = at(detector_of("a", "b"), a="data", b="data").decide(is_broken=False)
    assert isinstance(consequence, TrainFunctionError)
    assert "'data'" in str(consequence) and "10 s (hang_timeout_s)" in str(consequence)
    detector = detector_of("a", "b")
    for member in "ab":
        detector.update(member, ActivityReport(5, "data", is_idle=True, where=f"{member}.py:1 in train"), 0.0)
    assert "rank 0 at a.py:1 in train; rank 1 at b.py:1 in train. `" in str(detector.decide(is_broken=False))
    alone = at(detector_of("a"), a="forward").decide(is_broken=False)
    assert isinstance(alone, TrainFunctionError), "no other member to wait for"


def test_members_at_the_rendezvous_keep_waiting() -> None:
    assert isinstance(at(detector_of("a", "b"), a="rendezvous", b="rendezvous").decide(is_broken=True), str)


def test_an_activity_returns_to_the_previous_place() -> None:
    activity = Activity()
    activity.enter("forward")
    with activity.within("collective"):
        assert activity.now == ActivityReport(2, "collective")
    assert activity.now == ActivityReport(3, "forward")


def test_ticks_and_background_work_count_as_progress() -> None:
    activity, detector, worked_s = Activity(), detector_of("a"), [0.0]
    with activity.within("commit", lambda: worked_s[0]):
        detector.update("a", activity.now, 0.0)
        activity.tick()
        detector.update("a", activity.now, 9.0)
        worked_s[0] += 5.0
        detector.update("a", activity.now, 18.0)
        with activity.within("shares"):
            assert activity.now.worked_s == 0.0, "the background work belongs to the other place"
        assert activity.now.worked_s == 5.0
    assert not detector.is_hung(27.0) and detector.is_hung(28.0)


def test_stacks_name_each_thread_and_its_function() -> None:
    resume = threading.Event()

    def stuck_in_a_function() -> None:
        resume.wait()

    thread = threading.Thread(target=stuck_in_a_function, name="TrainingThread(x)")
    thread.start()
    while "stuck_in_a_function" not in stacks():
        time.sleep(0.01)
    assert stacks().startswith("Thread TrainingThread(x):")
    assert "test_stacks_name_every_thread" in stacks()
    resume.set()
    thread.join()
