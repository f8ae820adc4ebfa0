"""Where a run's wall time went, from the events of its ledger: pure functions of plain values.

A session lasts from the call of `fit` (the `at` of `session_started`) until its workers are gone (`session_ended`, or
`finished` or `failed` without one), otherwise to its last event. Each second of it is in one part. What happens in a
generation is told by its *account*: seconds of each phase (see `stopwatch`) since it was formed, until it is left, as
one of its members measured them. The longest one counts; one longer than its generation is scaled down.

useful: as accounted, but for what turns out to be lost. `goodput` is this over the whole.
redone: as accounted; where nobody survived a loss, also the time from the account's end to the loss; and the useful
    time of steps beyond the one that the run went on from.
detection, hand_over, checkpoint: as accounted.
rendezvous: as accounted, and from the account's end until the next generation is formed, but for waiting. That is also
    where training functions begin again, as those of a sharded run do whenever membership changes.
waiting: too few workers. `waited_s` before a generation is formed; where nobody survived, from the loss on. After the
    last generation, if it lost a worker and the run did not finish, or ended for another one.
start_up: until the first generation is formed; all of a session that forms none.
shut_down: after the last generation's account.

Nobody survived a loss if none of the members told that the generation ended, or came to the rendezvous with an account
of it, and either the next one has no state to begin with or the account ends more than a second before the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from elastic_ddp.telemetry.events import (
    MEMBERSHIP_CHANGED,
    RESUMED,
    STARTED,
    STATE_TRANSFERRED,
    Account,
    CommitSucceeded,
    Event,
    FirstStep,
    GenerationAccount,
    GenerationEnded,
    GenerationEvent,
    GenerationFormed,
    GenerationStarted,
    RunFailed,
    RunFinished,
    SessionEnded,
    SessionStarted,
    StepsCompleted,
    WorkerFailed,
)
from elastic_ddp.telemetry.stopwatch import PHASES

PARTS = ("useful", "redone", "detection", "rendezvous", "hand_over", "checkpoint", "waiting", "start_up", "shut_down")
STALLS = ("detection_s", "rendezvous_s", "hand_over_s", "first_step_s")

_LAG_S = 1.0
"""How much earlier than a loss was written down a survivor may have ended its account of it."""
_BEGINS_ANEW = (STARTED, RESUMED)
"""Reasons of generations that nobody brings a state to."""


def goodput(events: Iterable[Event]) -> dict[str, float | None]:
    """Seconds of each part over all sessions, to the millisecond, their `total`, and `goodput`, the useful share of it;
    None where nothing was measured, as in ledgers of versions without accounts.

    Args:
        events: in the order of `read_ledger`.
    """
    events = list(events)
    parts = partition(events)
    total = math.fsum(session.length_s for session in _sessions(events))
    measured = total > 0 and any(getattr(event, "account", None) for event in events)
    return {
        **{part: round(seconds, 3) for part, seconds in parts.items()},
        "total": round(total, 3),
        "goodput": round(parts["useful"] / total, 4) if measured else None,
    }


def partition(events: Iterable[Event]) -> dict[str, float]:
    """Seconds of each part over all sessions."""
    total = dict.fromkeys(PARTS, 0.0)
    work: list[_Work] = []
    for session in _sessions(events):
        total["redone"] += _go_back(work, session.first_step)
        total["start_up"] += session.start_up_s
        for generation, accounted, rest in _intervals(session):
            total["redone"] += _go_back(work, generation.first_step)
            work += _work(generation, accounted.pop("useful", 0.0))
            for part, seconds in [*accounted.items(), *rest.items()]:
                total[part] += seconds
    return {**total, "useful": math.fsum(each.seconds for each in work)}


def stalls(events: Iterable[Event]) -> dict[tuple[str, int], dict[str, float | None]]:
    """What it cost to get to each generation, by its session and number; None where that is not known.

    `detection_s` is of the loss that ended the one before. `rendezvous_s` is from the end of that one's account until
    the process group was formed, without waiting. `hand_over_s` is as accounted, and `first_step_s` from being ready to
    the end of the first step.
    """
    found: dict[tuple[str, int], dict[str, float | None]] = {}
    for session in _sessions(events):
        detection_s, between_s = None, 0.0
        for generation, accounted, rest in _intervals(session):
            row: dict[str, float | None] = dict.fromkeys(STALLS)
            if accounted:
                row["detection_s"] = detection_s
                row["rendezvous_s"] = between_s + accounted.get("rendezvous", 0.0)
                row["hand_over_s"] = accounted.get("hand_over", 0.0)
            row["first_step_s"] = generation.first_step_s
            row = {name: None if seconds is None else round(seconds, 3) for name, seconds in row.items()}
            found[session.name, generation.number] = row
            detection_s = accounted.get("detection", 0.0) if accounted else None
            between_s = rest.get("rendezvous", 0.0)
    return found


@dataclass
class _Generation:
    """What a session's events tell of one of its generations; times are seconds since the session began."""

    number: int
    formed_at: float
    waited_s: float
    first_step: int | None
    """Steps done in the state that it began with."""
    begins_anew: bool
    """None of its members brought a state."""
    account: dict[str, float] = field(default_factory=dict)
    progress: list[tuple[float, int]] = field(default_factory=list)
    """Useful seconds, and steps behind the run by then."""
    lost_at: float | None = None
    ended_by: str | None = None
    """If it told."""
    was_left: bool = False
    """One of its members told of its end, or came from it for the next one."""
    first_step_s: float | None = None

    @property
    def accounted_s(self) -> float:
        return sum(self.account.values())

    def add(self, event: Event, at: float) -> None:
        """Takes an event of this generation."""
        match event:
            case GenerationStarted():  # the rendezvous does not know which state the members load
                self.first_step = event.first_step
            case FirstStep():
                self.first_step_s = event.seconds
            case StepsCompleted() | CommitSucceeded():
                self._add_account(event.account, event.step)
            case GenerationEnded():
                self.ended_by, self.was_left = event.reason, True
                self._add_account(event.account, event.last_step)
            case GenerationAccount():
                self.was_left = True
                self._add_account(event.account, None)
            case WorkerFailed() if self.lost_at is None:
                self.lost_at = at

    def _add_account(self, account: Account | None, step: int | None) -> None:
        account = account or {}
        phases: dict[str, float] = {phase: _positive(account[phase]) for phase in PHASES if phase in account}
        if phases and sum(phases.values()) >= self.accounted_s:
            self.account = phases
        if phases and step is not None:
            self.progress.append((phases.get("useful", 0.0), step))


@dataclass
class _Session:
    name: str
    length_s: float
    finished: bool
    first_step: int | None
    """Steps behind the run when it began, if known."""
    generations: list[_Generation]

    @property
    def start_up_s(self) -> float:
        return self.generations[0].formed_at if self.generations else self.length_s


@dataclass
class _Work:
    """Useful seconds, and the steps done before and after them."""

    first_step: int
    last_step: int
    seconds: float


def _sessions(events: Iterable[Event]) -> list[_Session]:
    by_name: dict[str, list[Event]] = {}
    for event in events:
        by_name.setdefault(event.session, []).append(event)
    return [_session(name, each) for name, each in by_name.items()]


def _session(name: str, events: list[Event]) -> _Session:
    started = next((event for event in events if isinstance(event, SessionStarted)), None)
    over = [event for event in events if isinstance(event, RunFinished | RunFailed | SessionEnded)]
    began_at = _moment(started or events[0])
    length_s = max(0.0, max(_moment(event) for event in over or events) - began_at)
    generations: dict[int, _Generation] = {}
    formed_at = 0.0
    for event in events:
        if not isinstance(event, GenerationEvent):
            continue
        number, at = event.generation, _moment(event) - began_at
        if isinstance(event, GenerationFormed) and number not in generations:
            formed_at = min(max(at, formed_at), length_s)
            generations[number] = _Generation(
                number=number,
                formed_at=formed_at,
                waited_s=_positive(event.waited_s),
                first_step=event.first_step,
                begins_anew=event.first_step is None or event.reason in _BEGINS_ANEW,
            )
        if number in generations:
            generations[number].add(event, at)
    return _Session(
        name=name,
        length_s=length_s,
        finished=any(isinstance(event, RunFinished) and event.status == "finished" for event in over),
        first_step=(started.resumed_from_step or 0) if started is not None else None,
        generations=list(generations.values()),
    )


def _moment(event: Event) -> float:
    """When it happened: not after it was written down, which a worker's clock may say."""
    return event.time if event.at is None else min(event.at, event.time)


def _positive(seconds: Any) -> float:
    return float(seconds) if isinstance(seconds, int | float) and 0 < seconds < math.inf else 0.0


def _intervals(session: _Session) -> Iterator[tuple[_Generation, dict[str, float], dict[str, float]]]:
    """Each generation, with the parts of the time until the next one is formed: its account's, and those of the rest.
    That of the last one lasts to the session's end."""
    for generation, following in zip(session.generations, [*session.generations[1:], None], strict=False):
        until = following.formed_at if following is not None else session.length_s
        length_s = until - generation.formed_at
        scale = min(1.0, length_s / generation.accounted_s) if generation.accounted_s else 1.0
        accounted = {phase: seconds * scale for phase, seconds in generation.account.items()}
        rest_s = max(0.0, length_s - sum(accounted.values()))
        if following is None and session.finished:
            rest = {"shut_down": rest_s}
        else:
            rest = _rest(generation, following, until - rest_s, rest_s)
        yield generation, accounted, rest


def _rest(
    generation: _Generation, following: _Generation | None, accounted_until: float, rest_s: float
) -> dict[str, float]:
    """The parts of the time from the end of a generation's account, unless the run finished in it."""
    if generation.lost_at is not None and not generation.was_left:
        unaccounted_s = max(0.0, generation.lost_at - accounted_until)
        if unaccounted_s > _LAG_S or (following is not None and following.begins_anew):  # nobody survived
            redone_s = min(unaccounted_s, rest_s)
            return {"redone": redone_s, "waiting": rest_s - redone_s}
    if following is not None:
        waiting_s = min(following.waited_s, rest_s)
        return {"waiting": waiting_s, "rendezvous": rest_s - waiting_s}
    is_over = generation.lost_at is None and generation.ended_by not in (MEMBERSHIP_CHANGED, STATE_TRANSFERRED)
    return {"shut_down" if is_over else "waiting": rest_s}


def _work(generation: _Generation, useful_s: float) -> list[_Work]:
    """A generation's useful time, cut where an account told how many steps were behind the run."""
    work, done, booked_s = [], generation.first_step or 0, 0.0
    scale = useful_s / generation.account["useful"] if generation.account.get("useful") else 0.0
    for seconds, step in sorted(generation.progress):
        step = max(step, done)
        until_s = min(seconds * scale, useful_s)
        if until_s > booked_s:
            work.append(_Work(done, step, until_s - booked_s))
            booked_s = until_s
        done = step
    return [*work, _Work(done, done, useful_s - booked_s)]


def _go_back(work: list[_Work], step: int | None) -> float:
    """Takes away the useful time of steps beyond the one that the run goes on from. Returns how much that was."""
    if step is None:
        return 0.0
    lost_s = 0.0
    for each in work:
        if each.last_step > step:
            # Not all of an interval that the step is in: its steps are taken to be of one length.
            kept_s = each.seconds * max(0, step - each.first_step) / (each.last_step - each.first_step or 1)
            lost_s += each.seconds - kept_s
            each.seconds, each.last_step = kept_s, max(step, each.first_step)
    return lost_s
