from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ddp.telemetry.events import (
    MEMBERSHIP_CHANGED,
    RUN_ENDED,
    Event,
    GenerationEnded,
    RunFailed,
    RunFinished,
    SessionStarted,
    WorkerFailed,
    parse,
)
from elastic_ddp.telemetry.goodput import PARTS, goodput, partition, stalls
from elastic_ddp.telemetry.stopwatch import PHASES
from tests.unit.ledger_events import ledger_event


def event(name: str, at: float, session: str = "s1", *, late: float = 0.25, **fields: Any) -> Event:
    """As the driver writes it down, a little after it happened."""
    return ledger_event(name, at=at, time=at + late, session=session, **fields)


def started(at: float, session: str = "s1", step: int | None = None) -> Event:
    return ledger_event("session_started", time=at, session=session, resumed_from_step=step)


def finished(at: float, session: str = "s1", status: str = "finished") -> Event:
    return ledger_event("finished", time=at, session=session, status=status)


def formed(number: int, at: float, step: int | None, session: str = "s1", **fields: Any) -> Event:
    reason = fields.pop("reason", "start" if step is None else "worker failed")
    return event("rendezvous", at, session, generation=number, world_size=2, first_step=step, reason=reason, **fields)


def told(name: str, number: int, at: float, session: str = "s1", **fields: Any) -> Event:
    account = {phase: fields.pop(phase) for phase in PHASES if phase in fields}
    return event(name, at, session, generation=number, account=account, **fields)


def without_account(event: Event) -> Event:
    return replace(event, account=None) if hasattr(event, "account") else event


def parts(**seconds: float) -> dict[str, float]:
    """All the parts, of which those not named are zero."""
    return {**dict.fromkeys(PARTS, 0.0), **seconds}


LOSS = [
    started(100.0),
    formed(1, 103.0, None),
    event("generation", 104.0, generation=1, first_step=0),
    event("first_step", 104.5, generation=1, seconds=0.4),
    told("steps", 1, 109.0, step=10, rendezvous=0.25, hand_over=0.75, useful=5.0),
    event("worker_lost", 113.0, generation=1, error="silent"),
    told("generation_account", 1, 113.25, rendezvous=0.25, hand_over=0.75, useful=6.25, redone=0.5, detection=2.5),
    formed(2, 115.0, 12, waited_s=1.25),
    event("first_step", 116.0, generation=2, seconds=0.3),
    told("commit", 2, 124.0, step=20, rendezvous=0.125, hand_over=0.375, useful=7.5, checkpoint=1.0),
    told("generation_ended", 2, 125.0, last_step=20, rendezvous=0.125, hand_over=0.375, useful=8.5, checkpoint=1.0),
    finished(126.5),
]  # fmt: skip
"""Two workers; one falls silent, and the other goes on with a third."""


def test_a_loss_that_was_survived() -> None:
    assert partition(LOSS) == parts(
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
    seconds = goodput(LOSS)
    assert (seconds["total"], seconds["goodput"]) == (26.5, round(14.75 / 26.5, 4))
    assert {*seconds} == {*PARTS, "total", "goodput"}


def test_what_it_took_to_get_to_each_generation() -> None:
    assert stalls(LOSS) == {
        ("s1", 1): {"detection_s": None, "rendezvous_s": 0.25, "hand_over_s": 0.75, "first_step_s": 0.4},
        ("s1", 2): {"detection_s": 2.5, "rendezvous_s": 0.625, "hand_over_s": 0.375, "first_step_s": 0.3},
    }


def test_stalls_that_no_account_tells_of_are_not_known() -> None:
    unknown = {"detection_s": None, "rendezvous_s": None, "hand_over_s": None, "first_step_s": None}
    assert stalls([without_account(each) for each in LOSS])["s1", 2] == {**unknown, "first_step_s": 0.3}
    assert stalls(LOSS[:8])["s1", 2] == unknown
    first_is_silent = [each for each in LOSS if getattr(each, "generation", 0) != 1 or not hasattr(each, "account")]
    assert stalls(first_is_silent)["s1", 2]["detection_s"] is None


def test_the_longest_account_counts_whoever_it_comes_from_and_whenever() -> None:
    moved = [*LOSS[:4], LOSS[6], LOSS[7], LOSS[4], LOSS[5], *LOSS[8:]]
    assert partition(moved) == partition(LOSS)


def test_what_a_commit_holds_is_not_lost_when_everybody_dies_but_what_came_after_it_is() -> None:
    events = [
        started(0.0),
        formed(1, 2.0, None),
        event("generation", 2.0, generation=1, first_step=0),
        told("commit", 1, 10.0, step=10, hand_over=1.0, useful=6.0, checkpoint=1.0),
        told("steps", 1, 15.0, step=20, hand_over=1.0, useful=11.0, checkpoint=1.0),
        event("worker_lost", 18.0, generation=1, error="killed"),
        event("worker_lost", 19.0, generation=1, error="killed"),
        formed(2, 30.0, None, reason="worker failed", waited_s=1.0),
        event("generation", 30.5, generation=2, first_step=10),
        told("generation_ended", 2, 40.0, last_step=30, hand_over=0.5, useful=9.5),
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
    half = [replace(each, first_step=15) if getattr(each, "first_step", 0) == 10 else each for each in events]
    assert partition(half)["redone"] == 3.0 + 2.5, "half of the steps between two accounts"


def test_a_session_that_is_resumed_further_back_has_lost_what_it_did_since() -> None:
    first = [
        started(0.0),
        formed(1, 1.0, None),
        event("generation", 1.0, generation=1, first_step=0),
        told("commit", 1, 5.0, step=4, useful=4.0),
        told("steps", 1, 8.0, step=7, useful=7.0),
        formed(2, 8.0, 7, reason="workers joined"),
        told("steps", 2, 11.0, step=9, useful=3.0),
    ]
    assert partition(first)["useful"] == 10.0, "nothing is known to be lost yet"
    assert partition([*first, started(1000.0, "s2", step=9)])["redone"] == 0.0
    second = [started(1000.0, "s2", step=4), finished(1002.0, "s2", "stopped")]
    assert partition(first + second) == parts(start_up=1.0 + 2.0, useful=4.0, redone=6.0)
    assert partition([*first, started(1000.0, "s2")])["redone"] == 10.0, "there was no commit to go on from"


def test_the_end_of_a_generation_tells_how_many_steps_its_last_seconds_were_for() -> None:
    events = [
        started(0.0),
        formed(1, 1.0, None),
        told("commit", 1, 5.0, step=4, useful=4.0),
        told("generation_ended", 1, 9.0, last_step=8, useful=8.0),
    ]
    assert partition([*events, started(100.0, "s2", step=6)]) == parts(start_up=1.0, useful=6.0, redone=2.0)


def test_seconds_that_an_account_takes_back_are_not_lost_twice() -> None:
    events = [
        started(0.0),
        formed(1, 1.0, None),
        told("steps", 1, 6.0, step=10, useful=5.0),
        event("worker_lost", 6.0, generation=1),
        told("generation_account", 1, 6.0, useful=4.0, redone=1.0),
    ]
    assert partition([*events, started(100.0, "s2", step=5)]) == parts(start_up=1.0, useful=2.0, redone=3.0)


def test_nobody_waits_longer_than_there_was_time_for() -> None:
    events = [
        started(0.0),
        formed(1, 1.0, None),
        told("generation_ended", 1, 5.0, last_step=4, useful=4.0),
        formed(2, 7.0, 4, waited_s=30.0),
        finished(7.0),
    ]
    assert partition(events) == parts(start_up=1.0, useful=4.0, waiting=2.0)


@pytest.mark.parametrize("reason", ["start", "resume"])
def test_a_generation_that_begins_anew_says_that_nobody_survived(reason: str) -> None:
    events = [
        started(0.0),
        formed(1, 1.0, None),
        told("steps", 1, 5.0, step=4, useful=4.0),
        event("worker_lost", 5.5, generation=1),
        formed(2, 9.0, 4, reason=reason, waited_s=0.5),
        told("generation_ended", 2, 10.0, last_step=5, useful=1.0),
    ]
    assert partition(events)["redone"] == 0.5 and partition(events)["waiting"] == 3.5


def test_an_account_that_ends_shortly_before_the_loss_is_a_survivors() -> None:
    events = [
        started(0.0),
        formed(1, 1.0, None),
        told("steps", 1, 5.0, step=4, useful=4.0),
        event("worker_lost", 5.75, generation=1),
        formed(2, 9.0, 4, waited_s=0.5),
        finished(9.0),
    ]
    assert partition(events) == parts(start_up=1.0, useful=4.0, waiting=0.5, rendezvous=3.5)
    late = [replace(each, at=6.5, time=6.5) if isinstance(each, WorkerFailed) else each for each in events]
    assert partition(late) == parts(start_up=1.0, useful=4.0, redone=1.5, waiting=2.5)


def test_who_dies_while_it_waits_for_others_loses_no_work() -> None:
    events = [
        started(0.0),
        formed(1, 1.0, None),
        told("generation_ended", 1, 5.0, last_step=4, useful=4.0),
        event("worker_lost", 15.0, generation=1),
        formed(2, 20.0, 4, waited_s=14.0),
        told("generation_ended", 2, 22.0, last_step=5, useful=2.0),
        finished(22.0),
    ]
    assert partition(events) == parts(start_up=1.0, useful=6.0, waiting=14.0, rendezvous=1.0)
    nobody = [replace(each, first_step=None) if hasattr(each, "first_step") else each for each in events]
    assert partition(nobody) == partition(events)


def test_who_survives_a_loss_but_not_with_its_state_does_not_wait_for_workers() -> None:
    """A sharded run: all that are left begin again, together, from the commit of step 10."""
    events = [
        started(0.0),
        formed(1, 1.0, None),
        told("generation_ended", 1, 13.0, last_step=12, useful=12.0),
        event("worker_lost", 13.25, generation=1),
        formed(2, 16.0, None, waited_s=0.5),
        event("generation", 16.5, generation=2, first_step=10),
        told("generation_ended", 2, 18.0, last_step=12, useful=2.0),
        finished(18.0),
    ]
    assert partition(events) == parts(start_up=1.0, useful=12.0, redone=2.0, waiting=0.5, rendezvous=2.5)


@pytest.mark.parametrize("teller", ["generation_ended", "generation_account"])
def test_training_functions_that_begin_again_are_no_useful_time_and_wait_for_nobody(teller: str) -> None:
    """A sharded run that loses a worker, of which the first to tell may have died."""
    events = [
        started(0.0),
        formed(1, 1.0, None),
        told("commit", 1, 9.0, step=8, useful=8.0),
        event("worker_lost", 11.0, generation=1),
        told(teller, 1, 11.0, useful=8.0, redone=2.0),
        formed(2, 31.0, None, reason="worker failed"),
        event("generation", 31.0, generation=2, first_step=8),
        told("generation_ended", 2, 41.0, last_step=18, useful=10.0),
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
def test_workers_that_never_come_back_are_waited_for(status: str, expected: Mapping[str, float]) -> None:
    events = [
        started(0.0),
        formed(1, 1.0, None),
        told("steps", 1, 5.0, step=4, useful=4.0),
        event("worker_lost", 7.0, generation=1),
        finished(27.0, status=status),
    ]
    assert partition(events) == parts(start_up=1.0, useful=4.0, **expected)
    survived = [*events[:4], told("generation_ended", 1, 7.0, last_step=4, useful=4.0, detection=2.0), events[4]]
    rest = "shut_down" if status == "finished" else "waiting"
    assert partition(survived) == parts(start_up=1.0, useful=4.0, detection=2.0) | {rest: 20.0}


def test_a_run_whose_workers_were_all_drained_waits_until_it_is_stopped() -> None:
    events = [
        started(0.0),
        formed(1, 1.0, None),
        told("generation_ended", 1, 5.0, last_step=4, useful=4.0, reason=MEMBERSHIP_CHANGED),
        event("worker_left", 5.5, kind="drain"),
        finished(55.0, status="stopped"),
    ]
    assert partition(events) == parts(start_up=1.0, useful=4.0, waiting=50.0)
    ended = [replace(each, reason=RUN_ENDED) if isinstance(each, GenerationEnded) else each for each in events]
    assert partition(ended) == parts(start_up=1.0, useful=4.0, shut_down=50.0)


def test_a_session_without_a_generation_is_all_start_up_and_one_without_an_end_lasts_to_its_last_event() -> None:
    killed = [started(10.0), event("newcomer_lost", 13.0, late=1.0, generation=0)]
    assert partition(killed) == parts(start_up=3.0)
    assert partition([*killed, finished(16.0)]) == parts(start_up=6.0)
    assert partition([*killed, started(100.0, "s2"), finished(101.0, "s2")]) == parts(start_up=4.0)
    assert goodput([]) == {**parts(), "total": 0.0, "goodput": None}


def test_events_that_happened_after_they_were_written_down_come_from_a_clock_that_is_ahead() -> None:
    ahead = told("steps", 1, 900.0, late=-890.0, step=3, useful=8.0)
    assert partition([started(0.0), formed(1, 2.0, None), ahead]) == parts(start_up=2.0, useful=8.0)


def test_a_ledger_without_accounts_has_no_goodput() -> None:
    old = [without_account(each) for each in LOSS]
    assert goodput(old)["goodput"] is None
    assert goodput(old)["total"] == 26.5


def test_an_account_longer_than_its_generation_is_scaled_down() -> None:
    events = [started(0.0), formed(1, 1.0, None), told("steps", 1, 5.0, step=4, useful=6.0, checkpoint=2.0)]
    assert partition([*events, finished(5.0)]) == parts(start_up=1.0, useful=3.0, checkpoint=1.0)


seconds = st.floats(0, 100).map(lambda value: round(value, 3))


@given(st.data())
def test_parts_are_what_they_were(data: st.DataObject) -> None:
    """A run is made up phase by phase and told as events; the record has to find every part again."""
    truth = dict.fromkeys(PARTS, 0.0)
    now, events = 1e6, []

    def spend(part: str, at_least: float = 0.0) -> float:
        nonlocal now
        took = at_least + data.draw(seconds)
        truth[part] += took
        now += took
        return took

    for session in ("s1", "s2"):
        step = 0  # nothing is committed, and everything is lost with the last survivor
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
                events.append(event("generation", now, session, generation=number, first_step=0, late=0.0))
            account = {"rendezvous": spend("rendezvous"), "hand_over": spend("hand_over"), "useful": 0.0}
            for _ in range(data.draw(st.integers(0, 3))):
                account["useful"] += spend("useful")
                account["checkpoint"] = account.get("checkpoint", 0.0) + spend("checkpoint")
                step += 1
                events.append(told("steps", number, now, session, step=step, late=0.0, **account))
            if data.draw(st.booleans()):  # somebody survives
                account |= {"redone": spend("redone"), "detection": spend("detection")}
                events.append(event("worker_lost", now, session, generation=number, late=0.0))
                events.append(told("generation_account", number, now, session, late=0.0, **account))
                gap, waited, anew = spend("rendezvous"), spend("waiting"), False
            else:
                if not account["useful"]:
                    events.append(told("steps", number, now, session, step=step, late=0.0, **account))
                spend("redone", at_least=1.5)
                events.append(event("worker_lost", now, session, generation=number, late=0.0))
                spend("waiting")
                gap, waited, anew = 0.0, 0.0, True
        truth["rendezvous"] -= gap  # with no generation to come of it, it was waiting too
        truth["waiting"] += gap
        events.append(finished(now, session, "stopped"))
    found = partition(events)
    assert found == pytest.approx(truth, abs=1e-6)


times = st.floats(0, 1000)
accounts = st.dictionaries(st.sampled_from([*PHASES, "unheard of"]), st.one_of(st.floats(-10, 300), st.just("NaN")))
anything = st.fixed_dictionaries(
    {
        "event": st.sampled_from(
            [
                "session_started", "rendezvous", "generation", "steps", "commit", "generation_ended",
                "generation_account", "first_step", "worker_lost", "worker_left", "finished", "failed",
            ]
        ),
        "time": times,
        "session": st.sampled_from(["s1", "s2"]),
    },
    optional={
        "at": times,
        "generation": st.integers(1, 4),
        "account": st.one_of(st.none(), accounts),
        "waited_s": st.floats(-5, 500),
        "first_step": st.one_of(st.none(), st.integers(0, 30)),
        "step": st.integers(0, 30),
        "last_step": st.integers(0, 30),
        "seconds": st.floats(0, 10),
        "resumed_from_step": st.one_of(st.none(), st.integers(0, 30)),
        "reason": st.sampled_from(["start", "worker failed", "workers joined"]),
        "status": st.sampled_from(["finished", "stopped", "failed"]),
    },
)  # fmt: skip


def length(events: list[Event]) -> float:
    """Of one session."""

    def moment(each: Event) -> float:
        return each.time if each.at is None else min(each.at, each.time)

    begins = [each for each in events if isinstance(each, SessionStarted)] or events
    ends = [each for each in events if isinstance(each, RunFinished | RunFailed)] or events
    return max(0.0, max(map(moment, ends)) - moment(begins[0]))


@given(st.lists(anything.map(parse), max_size=40))
def test_every_second_is_in_exactly_one_part_whatever_the_events(events: list[Event]) -> None:
    sessions = [[each for each in events if each.session == name] for name in ("s1", "s2")]
    whole = sum(length(session) for session in sessions if session)
    found = partition(events)
    assert {*found} == {*PARTS}
    assert min(found.values()) >= 0
    assert sum(found.values()) == pytest.approx(whole, abs=1e-6)
    shown = goodput(events)
    assert shown["total"] == pytest.approx(whole, abs=1e-3)
    assert sum(shown[part] or 0.0 for part in PARTS) == pytest.approx(whole, abs=1e-3 * len(PARTS))
    assert shown["goodput"] is None or 0 <= shown["goodput"] <= 1
    for row in stalls(events).values():
        assert all(value is None or value >= 0 for value in row.values())
