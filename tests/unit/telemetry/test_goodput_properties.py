from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ddp.telemetry.account import PHASES
from elastic_ddp.telemetry.event import Event, parse
from elastic_ddp.telemetry.events import RunFailed, RunFinished, SessionStarted
from elastic_ddp.telemetry.goodput import PARTS, goodput, partition, stalls
from tests.unit.goodput_events import accounted, event, finished, formed, started

seconds = st.floats(0, 100).map(lambda value: round(value, 3))


@given(st.data())
def test_the_parts_of_a_generated_run_are_found(data: st.DataObject) -> None:
    """Generates a run phase by phase, and checks that the events give the same parts."""
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


times = st.floats(0, 1000)
accounts = st.dictionaries(st.sampled_from([*PHASES, "unknown"]), st.one_of(st.floats(-10, 300), st.just("NaN")))
anything = st.fixed_dictionaries(
    {
        "event": st.sampled_from(
            [
                "session_started", "generation_formed", "generation_started", "steps_completed", "commit_succeeded",
                "generation_ended", "generation_account", "first_step", "worker_failed", "worker_left", "run_finished",
                "run_failed",
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
    """The length of one session in seconds."""

    def moment(entry: Event) -> float:
        return entry.time if entry.at is None else min(entry.at, entry.time)

    begins = [entry for entry in events if isinstance(entry, SessionStarted)] or events
    ends = [entry for entry in events if isinstance(entry, RunFinished | RunFailed)] or events
    return max(0.0, max(map(moment, ends)) - moment(begins[0]))


@given(st.lists(anything.map(parse), max_size=40))
def test_each_second_is_in_exactly_one_part(events: list[Event]) -> None:
    sessions = [[entry for entry in events if entry.session == name] for name in ("s1", "s2")]
    total_s = sum(length(session) for session in sessions if session)
    seconds_of = partition(events)
    assert {*seconds_of} == {*PARTS}
    assert min(seconds_of.values()) >= 0
    assert sum(seconds_of.values()) == pytest.approx(total_s, abs=1e-6)
    figures = goodput(events)
    assert figures["total"] == pytest.approx(total_s, abs=1e-3)
    assert sum(figures[part] or 0.0 for part in PARTS) == pytest.approx(total_s, abs=1e-3 * len(PARTS))
    assert figures["goodput"] is None or 0 <= figures["goodput"] <= 1
    for row in stalls(events).values():
        assert all(value is None or value >= 0 for value in row.values())
