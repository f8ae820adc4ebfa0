"""The sessions of a run and their generations, from the events of its ledger: what goodput and scaling start from."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from elastic_ddp.telemetry.account import PHASES
from elastic_ddp.telemetry.event import RESUMED, STARTED, Account, Event, GenerationEvent
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

_WITHOUT_STATE = (STARTED, RESUMED)
"""Reasons of generations to which no member brings a state."""


@dataclass
class Generation:
    """One generation, from the events of its session. Times are seconds since the session began."""

    number: int
    world_size: int
    formed_at: float
    waited_s: float
    first_step: int | None
    """Steps done in the state that it started from."""
    starts_without_state: bool
    account: dict[str, float] = field(default_factory=dict)
    progress: list[tuple[float, int]] = field(default_factory=list)
    """Useful seconds and steps done, for each account with a step."""
    failed_at: float | None = None
    ended_by: str | None = None
    """Why it ended, if a member reported that."""
    has_survivor: bool = False
    """Whether a member reported its end, or came from it to the rendezvous."""
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
                self.ended_by, self.has_survivor = event.reason, True
                self._add_account(event.account, event.last_step)
            case GenerationAccount():
                self.has_survivor = True
                self._add_account(event.account, None)
            case WorkerFailed() if self.failed_at is None:
                self.failed_at = at

    def _add_account(self, account: Account | None, step: int | None) -> None:
        phases: dict[str, float] = {phase: positive(account[phase]) for phase in PHASES if account and phase in account}
        if phases and sum(phases.values()) >= self.accounted_s:
            self.account = phases
        if phases and step is not None:
            self.progress.append((phases.get("useful", 0.0), step))


@dataclass
class Session:
    """One session, from the call of `fit` until its workers have exited."""

    name: str
    began_at: float
    """Unix time in seconds."""
    length_s: float
    finished: bool
    first_step: int | None
    """Steps done when it began, if known."""
    generations: list[Generation]


def read_sessions(events: Iterable[Event]) -> list[Session]:
    """Returns the sessions in the order of their first events.

    Args:
        events: in the order of `read_ledger`.
    """
    by_name: dict[str, list[Event]] = {}
    for event in events:
        by_name.setdefault(event.session, []).append(event)
    return [_session(session_events) for session_events in by_name.values()]


def _session(events: list[Event]) -> Session:
    started = next((event for event in events if isinstance(event, SessionStarted)), None)
    ends = [event for event in events if isinstance(event, RunFinished | RunFailed | SessionEnded)]
    began_at = (started or events[0]).moment
    length_s = max(0.0, max(event.moment for event in ends or events) - began_at)
    generations: dict[int, Generation] = {}
    formed_at = 0.0
    for event in events:
        if not isinstance(event, GenerationEvent):
            continue
        number, at = event.generation, event.moment - began_at
        if isinstance(event, GenerationFormed) and number not in generations:
            formed_at = min(max(at, formed_at), length_s)
            generations[number] = Generation(
                number=number,
                world_size=event.world_size,
                formed_at=formed_at,
                waited_s=positive(event.waited_s),
                first_step=event.first_step,
                starts_without_state=event.first_step is None or event.reason in _WITHOUT_STATE,
            )
        if number in generations:
            generations[number].add(event, at)
    return Session(
        name=events[0].session,
        began_at=began_at,
        length_s=length_s,
        finished=any(isinstance(event, RunFinished) and event.status in ("finished", "left") for event in ends),
        first_step=(started.resumed_from_step or 0) if started is not None else None,
        generations=list(generations.values()),
    )


def positive(seconds: Any) -> float:
    """Returns a duration from a ledger; 0 if it is not a positive, finite number."""
    return float(seconds) if isinstance(seconds, int | float) and 0 < seconds < math.inf else 0.0
