"""The sessions of a run and their generations, from one pass over the events of its ledger.

Summary, goodput, scaling and the report use these sessions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic_ddp.telemetry.event import Event, GenerationEvent, PhaseSeconds, last_of
from elastic_ddp.telemetry.events import (
    CommitSucceeded,
    FirstStep,
    GenerationAccount,
    GenerationEnded,
    GenerationFormed,
    GenerationStarted,
    RunFailed,
    RunFinished,
    SessionEnded,
    SessionStarted,
    StepsCompleted,
    WorkerFailed,
)


@dataclass
class Generation:
    """One generation, from the events of its session. Times are seconds since the session began."""

    number: int
    world_size: int
    reason: str
    """Why it was formed."""
    formed_at: float
    waited_s: float
    starts_without_state: bool
    first_step: int
    """Steps done in the starting state. Until a member reports this number, the newest commit's step."""
    last_step: int
    """Steps done at its end, from the newest report of its members."""
    account: PhaseSeconds = field(default_factory=dict)
    progress: list[tuple[float, int]] = field(default_factory=list)
    """Useful seconds and steps done, after the first step and for each account with a step."""
    failed_at: float | None = None
    ended_by: str | None = None
    """Why it ended, if a member reported that."""
    has_survivor: bool = False
    """Whether a member of the generation reported its end, or joined again with an account of it."""
    first_step_s: float | None = None

    @property
    def accounted_s(self) -> float:
        return sum(self.account.values())

    def add(self, event: Event, at: float) -> None:
        """Takes an event of this generation."""
        match event:
            case GenerationStarted():  # the rendezvous does not know which state the members load
                self.reason = event.reason
                self.first_step = self.last_step = event.first_step
            case FirstStep():
                self.first_step_s = event.seconds
                self.progress.append((event.seconds, self.first_step + 1))
            case StepsCompleted() | CommitSucceeded():
                self._add_account(event.account, event.step)
            case GenerationEnded():
                self.ended_by = event.reason
                self.has_survivor = True
                self._add_account(event.account, event.last_step)
            case GenerationAccount():
                self.has_survivor = True
                self._add_account(event.account, None)
            case WorkerFailed() if self.failed_at is None:
                self.failed_at = at

    def _add_account(self, account: PhaseSeconds | None, step: int | None) -> None:
        if step is not None:
            self.last_step = max(step, self.last_step)  # a commit is reported some steps later
        if account is not None and step is not None:
            self.progress.append((account.get("useful", 0.0), step))
        if account is not None and sum(account.values()) >= self.accounted_s:
            self.account = account


@dataclass
class Session:
    """One session, from the call of `fit` until its workers have exited."""

    name: str
    events: list[Event]
    began_at: float
    """Unix time in seconds."""
    length_s: float
    offset_s: float
    """Seconds of all sessions before it."""
    first_step: int | None
    """Steps done when it began, if known."""
    failed: RunFailed | None
    finished: RunFinished | None
    generations: list[Generation]

    def at(self, event: Event) -> float:
        """Returns when an event of the session happened, in seconds of all sessions."""
        return self.offset_s + min(max(0.0, event.moment - self.began_at), self.length_s)


def read_sessions(events: Iterable[Event]) -> list[Session]:
    """Returns the sessions in the order of their first events.

    Args:
        events: in the order of `read_ledger`.
    """
    by_name: dict[str, list[Event]] = {}
    for event in events:
        by_name.setdefault(event.session, []).append(event)
    sessions: list[Session] = []
    offset_s = 0.0
    for session_events in by_name.values():
        sessions.append(_session(session_events, offset_s))
        offset_s += sessions[-1].length_s
    return sessions


def _session(events: list[Event], offset_s: float) -> Session:
    started = next((event for event in events if isinstance(event, SessionStarted)), None)
    ends = [event for event in events if isinstance(event, RunFinished | RunFailed | SessionEnded)]
    began_at = (started or events[0]).moment
    length_s = max(0.0, max(event.moment for event in ends or events) - began_at)
    first_step = None if started is None else started.resumed_from_step or 0
    return Session(
        name=events[0].session,
        events=events,
        began_at=began_at,
        length_s=length_s,
        offset_s=offset_s,
        first_step=first_step,
        failed=last_of(events, RunFailed),
        finished=last_of(events, RunFinished),
        generations=_generations(events, began_at, length_s, first_step or 0),
    )


def _generations(events: list[Event], began_at: float, length_s: float, committed: int) -> list[Generation]:
    found: dict[int, Generation] = {}
    formed_at = 0.0
    for event in events:
        if not isinstance(event, GenerationEvent):
            continue
        number = event.generation
        at = event.moment - began_at
        # A run in the driver's process has no rendezvous, which forms generations.
        if isinstance(event, GenerationFormed | GenerationStarted) and number not in found:
            formed_at = min(max(at, formed_at), length_s)
            first_step = committed if event.first_step is None else event.first_step
            found[number] = Generation(
                number=number,
                world_size=event.world_size,
                reason=event.reason,
                formed_at=formed_at,
                waited_s=event.waited_s if isinstance(event, GenerationFormed) else 0.0,
                starts_without_state=event.first_step is None,
                first_step=first_step,
                last_step=first_step,
            )
        if number in found:
            found[number].add(event, at)
        if isinstance(event, CommitSucceeded):
            committed = event.step
    return list(found.values())
