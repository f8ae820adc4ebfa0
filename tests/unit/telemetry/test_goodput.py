from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ddp.telemetry import goodput as module
from elastic_ddp.telemetry.event import MEMBERSHIP_CHANGED, RUN_ENDED, Event
from elastic_ddp.telemetry.events import GenerationEnded, WorkerFailed
from elastic_ddp.telemetry.goodput import PARTS, goodput, scaling, stalls
from elastic_ddp.telemetry.sessions import read_sessions
from tests.unit.ledger_events import accounted, event, finished, formed, started


def partition(events: list[Event]) -> dict[str, float]:
    return module.partition(read_sessions(events))


def parts(**seconds: float) -> dict[str, float]:
    """All parts; those that are not given are zero."""
    return {**dict.fromkeys(PARTS, 0.0), **seconds}


FAILURE = [
    started(100.0),
    formed(1, 103.0, None),
    event("generation_started", 104.0, generation=1, first_step=0),
    event("first_step", 104.5, generation=1, seconds=0.4),
    accounted("steps_completed", 1, 109.0, step=10, rendezvous=0.25, hand_over=0.75, useful=5.0),
    event("worker_failed", 113.0, generation=1, error="silent"),
    accounted("generation_account", 1, 113.25, rendezvous=0.25, hand_over=0.75, useful=6.25, redone=0.5, detection=2.5),
    formed(2, 115.0, 12, waited_s=1.25),
    event("first_step", 116.0, generation=2, seconds=0.3),
    accounted("commit_succeeded", 2, 124.0, step=20, rendezvous=0.125, hand_over=0.375, useful=7.5, checkpoint=1.0),
    accounted("generation_ended", 2, 125.0, last_step=20, rendezvous=0.125, hand_over=0.375, useful=8.5,
              checkpoint=1.0),
    finished(126.5),
]  # fmt: skip
"""Two workers; one stops sending heartbeats, and the other continues with a third."""


def test_a_failure_with_a_survivor() -> None:
    assert partition(FAILURE) == parts(
        start_up=3.0,
        useful=6.25 + 8.5,
        redone=0.5,
        detection=2.5,
        hand_over=0.75 + 0.375,
        checkpoint=1.0,
        waiting=1.25,
        rendezvous=0.25 + (115.0 - 113.25 - 1.25) + 0.125,
        shut_down=1.5,
    )
    seconds = goodput(read_sessions(FAILURE))
    assert (seconds["total"], seconds["goodput"]) == (26.5, round(14.75 / 26.5, 4))
    assert {*seconds} == {*PARTS, "total", "goodput"}


def test_the_stall_before_each_generation_is_known_from_its_accounts() -> None:
    first = {"detection_s": None, "rendezvous_s": 0.25, "hand_over_s": 0.75, "first_step_s": 0.4}
    second = {"detection_s": 2.5, "rendezvous_s": 0.625, "hand_over_s": 0.375, "first_step_s": 0.3}
    assert stalls(*read_sessions(FAILURE)) == [first, second]
    assert stalls(*read_sessions(FAILURE[:8])) == [first, dict.fromkeys(second)]
    lost_account = [*FAILURE[:4], *FAILURE[7:]]
    assert [row["detection_s"] for row in stalls(*read_sessions(lost_account))] == [None, None]


def test_the_longest_account_counts_in_any_order() -> None:
    moved = [*FAILURE[:4], FAILURE[6], FAILURE[7], FAILURE[4], FAILURE[5], *FAILURE[8:]]
    assert partition(moved) == partition(FAILURE)


def test_work_after_the_commit_is_redone_when_all_workers_fail() -> None:
    events = [
        started(0.0),
        formed(1, 2.0, None),
        event("generation_started", 2.0, generation=1, first_step=0),
        accounted("commit_succeeded", 1, 10.0, step=10, hand_over=1.0, useful=6.0, checkpoint=1.0),
        accounted("steps_completed", 1, 15.0, step=20, hand_over=1.0, useful=11.0, checkpoint=1.0),
        event("worker_failed", 18.0, generation=1, error="killed"),
        event("worker_failed", 19.0, generation=1, error="killed"),
        formed(2, 30.0, None, reason="worker failed", waited_s=1.0),
        event("generation_started", 30.5, generation=2, first_step=10),
        accounted("generation_ended", 2, 40.0, last_step=30, hand_over=0.5, useful=9.5),
        finished(40.0),
    ]
    lost_after_the_account, lost_after_the_commit = 18.0 - 15.0, 5.0
    expected = parts(
        start_up=2.0,
        hand_over=1.5,
        checkpoint=1.0,
        useful=6.0 + 9.5,
        redone=lost_after_the_account + lost_after_the_commit,
        waiting=30.0 - 18.0,
    )
    assert partition(events) == expected
    half = [replace(entry, first_step=15) if getattr(entry, "first_step", 0) == 10 else entry for entry in events]
    assert partition(half)["redone"] == 3.0 + 2.5, "half of the steps between two accounts"


def test_a_session_that_resumes_from_an_older_step_redoes_work() -> None:
    first = [
        started(0.0),
        formed(1, 1.0, None),
        event("generation_started", 1.0, generation=1, first_step=0),
        accounted("commit_succeeded", 1, 5.0, step=4, useful=4.0),
        accounted("steps_completed", 1, 8.0, step=7, useful=7.0),
        formed(2, 8.0, 7, reason="workers joined"),
        accounted("steps_completed", 2, 11.0, step=9, useful=3.0),
    ]
    assert partition(first)["useful"] == 10.0, "no work is known to be discarded"
    assert partition([*first, started(1000.0, "s2", step=9)])["redone"] == 0.0
    second = [started(1000.0, "s2", step=4), finished(1002.0, "s2", "stopped")]
    assert partition(first + second) == parts(start_up=1.0 + 2.0, useful=4.0, redone=6.0)
    assert partition([*first, started(1000.0, "s2")])["redone"] == 10.0, "there was no commit to resume from"


@pytest.mark.parametrize(
    ("last", "resumed", "expected"),
    [
        pytest.param({"useful": 8.0}, 6, {"useful": 6.0, "redone": 2.0}, id="only the end is known"),
        pytest.param({"useful": 7.0, "redone": 1.0}, 4, {"useful": 4.0, "redone": 4.0}, id="some was redone before"),
    ],
)
def test_redone_seconds_are_counted_once(last: dict[str, float], resumed: int, expected: dict[str, float]) -> None:
    events = [
        started(0.0),
        formed(1, 1.0, None),
        accounted("commit_succeeded", 1, 5.0, step=4, useful=4.0),
        accounted("generation_ended", 1, 9.0, last_step=8, **last),
    ]
    assert partition([*events, started(100.0, "s2", step=resumed)]) == parts(start_up=1.0, **expected)


def test_waiting_is_at_most_the_time_between_generations() -> None:
    events = [
        started(0.0),
        formed(1, 1.0, None),
        accounted("generation_ended", 1, 5.0, last_step=4, useful=4.0),
        formed(2, 7.0, 4, waited_s=30.0),
        finished(7.0),
    ]
    assert partition(events) == parts(start_up=1.0, useful=4.0, waiting=2.0)


def test_a_generation_without_a_state_means_that_all_workers_failed() -> None:
    events = [
        started(0.0),
        formed(1, 1.0, None),
        accounted("steps_completed", 1, 5.0, step=4, useful=4.0),
        event("worker_failed", 5.5, generation=1),
        formed(2, 9.0, None, reason="worker failed", waited_s=0.5),
        event("generation_started", 9.0, generation=2, first_step=4),
        accounted("generation_ended", 2, 10.0, last_step=5, useful=1.0),
    ]
    assert partition(events)["redone"] == 0.5 and partition(events)["waiting"] == 3.5


def test_an_account_that_ends_shortly_before_the_failure_is_a_survivors() -> None:
    events = [
        started(0.0),
        formed(1, 1.0, None),
        accounted("steps_completed", 1, 5.0, step=4, useful=4.0),
        event("worker_failed", 5.75, generation=1),
        formed(2, 9.0, 4, waited_s=0.5),
        finished(9.0),
    ]
    assert partition(events) == parts(start_up=1.0, useful=4.0, waiting=0.5, rendezvous=3.5)
    late = [replace(entry, at=6.5, time=6.5) if isinstance(entry, WorkerFailed) else entry for entry in events]
    assert partition(late) == parts(start_up=1.0, useful=4.0, redone=1.5, waiting=2.5)


def test_a_worker_that_fails_while_it_waits_redoes_no_work() -> None:
    events = [
        started(0.0),
        formed(1, 1.0, None),
        accounted("generation_ended", 1, 5.0, last_step=4, useful=4.0),
        event("worker_failed", 15.0, generation=1),
        formed(2, 20.0, 4, waited_s=14.0),
        accounted("generation_ended", 2, 22.0, last_step=5, useful=2.0),
        finished(22.0),
    ]
    assert partition(events) == parts(start_up=1.0, useful=6.0, waiting=14.0, rendezvous=1.0)


def test_survivors_of_a_sharded_run_do_not_wait_for_workers() -> None:
    """In a sharded run all survivors restart together from the commit of step 10."""
    events = [
        started(0.0),
        formed(1, 1.0, None),
        accounted("generation_ended", 1, 13.0, last_step=12, useful=12.0),
        event("worker_failed", 13.25, generation=1),
        formed(2, 16.0, None, waited_s=0.5),
        event("generation_started", 16.5, generation=2, first_step=10),
        accounted("generation_ended", 2, 18.0, last_step=12, useful=2.0),
        finished(18.0),
    ]
    assert partition(events) == parts(start_up=1.0, useful=12.0, redone=2.0, waiting=0.5, rendezvous=2.5)


@pytest.mark.parametrize("teller", ["generation_ended", "generation_account"])
def test_restarts_of_training_functions_count_as_rendezvous(teller: str) -> None:
    """In a sharded run with a failure. Rank 0 may have failed before it could report."""
    events = [
        started(0.0),
        formed(1, 1.0, None),
        accounted("commit_succeeded", 1, 9.0, step=8, useful=8.0),
        event("worker_failed", 11.0, generation=1),
        accounted(teller, 1, 11.0, useful=8.0, redone=2.0),
        formed(2, 31.0, None, reason="worker failed"),
        event("generation_started", 31.0, generation=2, first_step=8),
        accounted("generation_ended", 2, 41.0, last_step=18, useful=10.0),
        finished(41.0),
    ]
    assert partition(events) == parts(start_up=1.0, useful=18.0, redone=2.0, rendezvous=20.0)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("stopped", {"redone": 2.0, "waiting": 20.0}),
        ("failed", {"redone": 2.0, "waiting": 20.0}),
        ("finished", {"shut_down": 22.0}),
    ],
)
def test_time_without_replacements_is_waiting(status: str, expected: Mapping[str, float]) -> None:
    events = [
        started(0.0),
        formed(1, 1.0, None),
        accounted("steps_completed", 1, 5.0, step=4, useful=4.0),
        event("worker_failed", 7.0, generation=1),
        finished(27.0, status=status),
    ]
    assert partition(events) == parts(start_up=1.0, useful=4.0, **expected)
    survived = [*events[:4], accounted("generation_ended", 1, 7.0, last_step=4, useful=4.0, detection=2.0), events[4]]
    rest = "shut_down" if status == "finished" else "waiting"
    assert partition(survived) == parts(start_up=1.0, useful=4.0, detection=2.0) | {rest: 20.0}


def test_a_run_whose_workers_are_all_drained_waits() -> None:
    events = [
        started(0.0),
        formed(1, 1.0, None),
        accounted("generation_ended", 1, 5.0, last_step=4, useful=4.0, reason=MEMBERSHIP_CHANGED),
        event("worker_left", 5.5, kind="drain"),
        finished(55.0, status="stopped"),
    ]
    assert partition(events) == parts(start_up=1.0, useful=4.0, waiting=50.0)
    ended = [replace(entry, reason=RUN_ENDED) if isinstance(entry, GenerationEnded) else entry for entry in events]
    assert partition(ended) == parts(start_up=1.0, useful=4.0, shut_down=50.0)


def test_a_session_without_a_generation_is_all_start_up() -> None:
    killed = [started(10.0), event("newcomer_failed", 13.0, late=1.0, generation=0)]
    assert partition(killed) == parts(start_up=3.0)
    assert partition([*killed, finished(16.0)]) == parts(start_up=6.0)
    assert partition([*killed, started(100.0, "s2"), finished(101.0, "s2")]) == parts(start_up=4.0)
    assert goodput([]) == {**parts(), "total": 0.0, "goodput": None}


def test_a_run_in_the_process_of_its_driver_has_a_goodput_without_a_rendezvous() -> None:
    begun = event("generation_started", 2.0, generation=1, world_size=1, first_step=0, reason="start")
    ended = accounted("generation_ended", 1, 10.0, last_step=8, useful=8.0)
    assert partition([started(0.0), begun, ended, finished(10.0)]) == parts(start_up=2.0, useful=8.0)


def test_clocks_that_are_ahead_are_corrected() -> None:
    ahead = accounted("steps_completed", 1, 900.0, late=-890.0, step=3, useful=8.0)
    assert partition([started(0.0), formed(1, 2.0, None), ahead]) == parts(start_up=2.0, useful=8.0)


def test_an_account_longer_than_its_generation_is_scaled_down() -> None:
    steps = accounted("steps_completed", 1, 5.0, step=4, useful=6.0, checkpoint=2.0)
    assert partition([started(0.0), formed(1, 1.0, None), steps, finished(5.0)]) == parts(
        start_up=1.0, useful=3.0, checkpoint=1.0
    )


SAMPLES = 10
"""Samples of a step."""


def generation(number: int, world_size: int, at: float, first_step: int, session: str = "s1") -> list[Event]:
    """A generation forms, and its first step takes 2 s."""
    fields: dict[str, Any] = {"generation": number, "world_size": world_size, "first_step": first_step}
    return [
        formed(number, at, first_step, session, world_size=world_size),
        event("generation_started", at, session, reason="start", **fields),
        event("first_step", at + 2.0, session, generation=number, seconds=2.0),
    ]


def steps(number: int, at: float, step: int, useful: float, session: str = "s1") -> Event:
    return accounted("steps_completed", number, at, session, step=step, samples=SAMPLES * step, useful=useful)


GROWN = [
    started(0.0),
    *generation(1, 1, 10.0, 0),
    steps(1, 21.0, 10, 11.0),  # 9 steps in 9 s after the first
    steps(1, 31.0, 20, 21.0),
    *generation(2, 2, 32.0, 20),
    steps(2, 40.0, 31, 8.0),  # 10 steps in 6 s after the first
    finished(41.0),
]


def rates(events: list[Event]) -> dict[int, float]:
    return {row["world_size"]: row["samples_per_s"] for row in scaling(read_sessions(events))}


def test_each_world_size_has_its_throughput_without_the_first_step() -> None:
    one, two = scaling(read_sessions(GROWN))
    assert one == {
        "world_size": 1, "steps": 19, "samples": 190, "seconds": 19.0,
        "samples_per_s": 10.0, "samples_per_s_per_worker": 10.0, "efficiency": 1.0,
    }  # fmt: skip
    assert (two["world_size"], two["steps"], two["seconds"]) == (2, 10, 6.0)
    assert two["samples_per_s"] == pytest.approx(100 / 6, abs=1e-3)
    assert two["efficiency"] == pytest.approx(10 / 12, abs=1e-4), "of the rate per worker with one worker"


def test_steps_that_were_repeated_count_once() -> None:
    """The session before stopped at step 31 and its last commit is step 25, halfway between two accounts."""
    resumed = [*GROWN[:-1], started(100.0, "s2", step=26), *generation(1, 2, 105.0, 26, "s2")]
    resumed += [steps(1, 112.0, 32, 7.0, "s2"), finished(113.0, "s2")]
    _, two = scaling(read_sessions(resumed))
    assert two["steps"] == (26 - 21) + (32 - 27)
    assert two["seconds"] == pytest.approx(3.0 + 5.0)
    from_the_start = [
        *GROWN[:-1],
        started(100.0, "s2"),
        *generation(1, 3, 105.0, 0, "s2"),
        steps(1, 112.0, 6, 7.0, "s2"),
    ]
    assert set(rates(from_the_start)) == {3}, "no earlier work survived"


def test_steps_that_a_later_generation_of_the_session_repeats_count_once() -> None:
    """All workers failed after step 20, and the newest commit was step 15."""
    again = [*generation(2, 2, 40.0, 15), steps(2, 50.0, 30, 10.0), finished(51.0)]
    one, two = scaling(read_sessions([*GROWN[:6], *again]))
    assert (one["steps"], one["seconds"]) == (15 - 1, 14.0)
    assert two["steps"] == 30 - 16


def test_steps_of_unlogged_generations_count_by_their_last_account() -> None:
    ended = accounted("generation_ended", 2, 40.0, last_step=26, useful=5.0)
    third = [*generation(3, 1, 41.0, 26), steps(3, 50.0, 40, 9.0)]
    assert rates([*GROWN[:-2], ended, *third])[2] == pytest.approx(50 / 3.0, abs=1e-3)


def test_a_run_without_measured_steps_has_no_scaling() -> None:
    assert rates([]) == rates(GROWN[:4]) == rates([started(0.0), finished(1.0)]) == {}


seconds = st.floats(0, 100).map(lambda value: round(value, 3))


@given(st.data())
def test_the_parts_of_a_generated_run_are_found(data: st.DataObject) -> None:
    """Generates a run phase by phase. Each second is in one part, also if events are missing."""
    truth = dict.fromkeys(PARTS, 0.0)
    now, events = 1e6, []

    def spend(part: str, at_least: float = 0.0) -> float:
        nonlocal now
        took = at_least + data.draw(seconds)
        truth[part] += took
        now += took
        return took

    for session in ("s1", "s2"):
        step = 0  # nothing is committed, so all work is redone
        truth["redone"], truth["useful"] = truth["redone"] + truth["useful"], 0.0
        events.append(started(now, session, step=None))
        spend("start_up")
        waited, gap, anew = 0.0, 0.0, True
        for number in range(1, 1 + data.draw(st.integers(0, 4))):
            reason = "start" if anew else "worker failed"
            events.append(
                formed(number, now, None if anew else step, session, reason=reason, waited_s=waited, late=0.0)
            )
            if anew:
                step = 0
                truth["redone"], truth["useful"] = truth["redone"] + truth["useful"], 0.0
                events.append(event("generation_started", now, session, generation=number, first_step=0, late=0.0))
            account = {"rendezvous": spend("rendezvous"), "hand_over": spend("hand_over"), "useful": 0.0}
            for _ in range(data.draw(st.integers(0, 3))):
                account["useful"] += spend("useful")
                account["checkpoint"] = account.get("checkpoint", 0.0) + spend("checkpoint")
                step += 1
                events.append(accounted("steps_completed", number, now, session, step=step, late=0.0, **account))
            if data.draw(st.booleans()):  # a worker survives
                account |= {"redone": spend("redone"), "detection": spend("detection")}
                events.append(event("worker_failed", now, session, generation=number, late=0.0))
                events.append(accounted("generation_account", number, now, session, late=0.0, **account))
                gap, waited, anew = spend("rendezvous"), spend("waiting"), False
            else:
                if not account["useful"]:
                    events.append(accounted("steps_completed", number, now, session, step=step, late=0.0, **account))
                spend("redone", at_least=1.5)
                events.append(event("worker_failed", now, session, generation=number, late=0.0))
                spend("waiting")
                gap, waited, anew = 0.0, 0.0, True
        truth["rendezvous"] -= gap  # no generation follows, so this was waiting
        truth["waiting"] += gap
        events.append(finished(now, session, "stopped"))
    assert partition(events) == pytest.approx(truth, abs=1e-6)
    readable = [entry for entry in events if data.draw(st.booleans())]  # other lines of the ledger are damaged
    total_s = sum(session.length_s for session in read_sessions(readable))
    found = partition(readable)
    assert min(found.values()) >= 0 and sum(found.values()) == pytest.approx(total_s, abs=1e-6)
