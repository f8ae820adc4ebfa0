"""What happened in a run over time, from the events of its ledger: pure functions of plain values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from elastic_ddp.report.words import counted, duration
from elastic_ddp.telemetry.event import Event
from elastic_ddp.telemetry.events import (
    CommitFailed,
    CommitSucceeded,
    EvaluationFinished,
    GenerationFormed,
    HangDetected,
    PhasesMeasured,
    RunFailed,
    SessionStarted,
    StepsCompleted,
    WorkerFailed,
    WorkerLeft,
)
from elastic_ddp.telemetry.sessions import Session, moment, read_sessions
from elastic_ddp.telemetry.summary import summarize

_MAX_MEASUREMENTS = 500
Kind = Literal["joined", "lost", "drained", "left", "resumed", "hang", "failed"]


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A change of a run that a reader looks for."""

    kind: Kind
    at: float
    step: int | None
    """Steps done; None before the first generation."""
    world_size: int
    """Number of workers before it; after it if it adds workers."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Point:
    """Values of one step. `session` counts from 0: a line is broken between two sessions."""

    session: int
    at: float
    step: int
    loss: float | None = None
    samples: int | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Save:
    """A commit, or a save that failed."""

    at: float
    step: int
    seconds: float
    num_bytes: int | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What ranks measured about some steps, see `PhasesMeasured`. Facts that are not known are None."""

    session: int
    at: float
    step: int
    phases: Mapping[str, float]
    """Seconds of each phase in one step."""
    slowest_rank: int | None = None
    slowdown: float | None = None
    """Work of the slowest rank for one of its micro-batches, relative to the median of ranks."""
    memory_bytes: int | None = None
    """Of the rank with the most."""
    utilization: float | None = None
    """Mean of the ranks, from 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class History:
    """A run over time. `at` is in seconds since the run began; the time between two sessions does not count."""

    label: str
    """What the report calls the run."""
    summary: dict[str, Any]
    """As `summarize` returns it."""
    config: Mapping[str, Any]
    sizes: list[tuple[float, int]]
    """Number of workers that train, from each time on; 0 while none does."""
    marks: list[Mark]
    points: list[Point]
    evaluations: list[Point]
    """One metric each."""
    saves: list[Save]
    measurements: list[Measurement]

    @property
    def seconds(self) -> float:
        """Duration of all sessions."""
        return float(self.summary["wall_seconds"])


def read_history(events: Iterable[Event]) -> History:
    """Returns the history of a run.

    Args:
        events: in the order of `read_ledger`.
    """
    events = list(events)
    summary = summarize(events)
    clock = _Clock(read_sessions(events))
    started = [event for event in events if isinstance(event, SessionStarted)]
    return History(
        label=str(summary["name"] or "run"),
        summary=summary,
        config=dict(started[-1].config) if started else {},
        sizes=_sizes(events, clock),
        marks=_marks(events, clock),
        points=[_point(event, clock) for event in events if isinstance(event, StepsCompleted)],
        evaluations=[
            Point(session=clock.session(event), at=clock.at(event), step=event.step, metrics={event.name: value})
            for event in events
            if isinstance(event, EvaluationFinished) and (value := finite(event.loss)) is not None
        ],
        saves=[_save(event, clock) for event in events if isinstance(event, CommitSucceeded | CommitFailed)],
        measurements=_merged([_measurement(event, clock) for event in events if isinstance(event, PhasesMeasured)]),
    )


def throughput(points: list[Point], *, buckets: int = 120) -> list[tuple[float, float | None]]:
    """Returns samples per second over time, each over at least one of `buckets` equal parts of the time.

    Stalls between two points lower it. None stands between two sessions.
    """
    if not points:
        return []
    shortest_s = (points[-1].at - points[0].at) / buckets
    rates: list[tuple[float, float | None]] = []
    since = points[0]
    for point in points[1:]:
        before, done = since.samples, point.samples
        if before is None or done is None or point.session != since.session:
            rates += [(point.at, None)] if point.session != since.session else []
            since = point
        elif done < before:  # the session went back to an older commit
            since = point
        elif point.at > since.at and point.at - since.at >= shortest_s:
            rates.append((point.at, (done - before) / (point.at - since.at)))
            since = point
    return rates


def finite(value: Any) -> float | None:
    """Returns a number of a ledger, or None if it is missing, NaN or infinite."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


class _Clock:
    """Converts times of events to seconds since the run began, without the time between sessions."""

    def __init__(self, sessions: list[Session]) -> None:
        self.sessions = sessions
        self._numbers = {session.name: number for number, session in enumerate(sessions)}
        self._offsets = [sum(session.length_s for session in sessions[:number]) for number in range(len(sessions))]

    def session(self, event: Event) -> int:
        return self._numbers[event.session]

    def begin(self, number: int) -> float:
        """When a session began."""
        return self._offsets[number]

    def at(self, event: Event) -> float:
        number = self._numbers[event.session]
        session = self.sessions[number]
        return self._offsets[number] + min(max(0.0, moment(event) - session.began_at), session.length_s)

    def pause_s(self, number: int) -> float:
        """Returns the seconds between a session and the one before it."""
        before, session = self.sessions[number - 1], self.sessions[number]
        return max(0.0, session.began_at - before.began_at - before.length_s)


def _sizes(events: list[Event], clock: _Clock) -> list[tuple[float, int]]:
    sizes: list[tuple[float, int]] = []
    for number, session in enumerate(clock.sessions):
        sizes.append((clock.begin(number), 0))
        for generation in session.generations:
            at = clock.begin(number) + generation.formed_at
            if generation.waited_s and sizes[-1][1]:
                sizes.append((max(sizes[-1][0], at - generation.waited_s), 0))
            sizes.append((at, generation.world_size))
        sizes.append((clock.begin(number) + session.length_s, 0))
    return sizes


def _marks(events: list[Event], clock: _Clock) -> list[Mark]:
    """Returns what changed the run, in order. Workers that join, fail or leave together are one mark."""
    marks = _Marks(clock)
    for event in events:
        marks.take(event)
    return marks.found


class _Marks:
    """Finds the marks of a run, event by event."""

    def __init__(self, clock: _Clock) -> None:
        self.found: list[Mark] = []
        self._clock = clock
        self._step: int | None = None
        self._size = 0
        self._members: set[tuple[Any, Any]] = set()
        """Node and process id of each member of the generation."""
        self._since_formed = 0
        """Number of marks before the generation formed."""
        self._gone: dict[tuple[str, int, Kind], set[str]] = {}
        """Ids of workers that failed or left, by session, generation and mark."""

    def take(self, event: Event) -> None:
        """Takes the next event."""
        match event:
            case SessionStarted():
                self._step = event.resumed_from_step or self._step
                self._size, self._members = 0, set()
                if number := self._clock.session(event):
                    where = "the start" if event.resumed_from_step is None else f"step {event.resumed_from_step:,}"
                    pause = duration(self._clock.pause_s(number))
                    self._add("resumed", event, f"resumed from {where}, {pause} after the session before")
                self._since_formed = len(self.found)
            case GenerationFormed():
                self._form(event)
            case StepsCompleted():
                self._step = event.step
            case WorkerFailed(member=str(member)):
                self._remove("lost", event, member, event.error)
            case WorkerLeft():
                kind: Kind = "drained" if event.kind == "drain" else "left"
                why = "its node or process was to stop" if kind == "drained" else "the run was resized"
                self._remove(kind, event, event.member or str(event.seq), why)
            case HangDetected():
                self._add("hang", event, f"hang: no worker made progress for {duration(event.seconds)}")
            case RunFailed():
                self._add("failed", event, f"the run failed: {_first_line(event.error)}")

    def _form(self, event: GenerationFormed) -> None:
        members = {(member.get("node"), member.get("pid")) for member in event.members}
        joined = len(members - self._members) if self._members else 0
        self._size, self._members = event.world_size, members
        if event.first_step is not None:
            self._step = event.first_step
            # Steps are logged now and then only; the next generation starts at the step where the workers left.
            changed = self.found[self._since_formed :]
            self.found[self._since_formed :] = [replace(mark, step=event.first_step) for mark in changed]
        if joined:
            self._add("joined", event, f"{counted(joined, 'worker')} joined: {self._size:,} train now")
        self._since_formed = len(self.found)

    def _remove(self, kind: Kind, event: WorkerFailed | WorkerLeft, member: str, why: str) -> None:
        gone = self._gone.setdefault((event.session, event.generation, kind), set())
        is_first = not gone
        gone.add(member)
        text = f"{counted(len(gone), 'worker')} {kind}: {_first_line(why)}"
        if is_first:
            self._add(kind, event, text)
        else:
            index = next(at for at in reversed(range(len(self.found))) if self.found[at].kind == kind)
            self.found[index] = replace(self.found[index], text=text)

    def _add(self, kind: Kind, event: Event, text: str) -> None:
        at = self._clock.at(event)
        self.found.append(Mark(kind=kind, at=at, step=self._step, world_size=self._size, text=text))


def _point(event: StepsCompleted, clock: _Clock) -> Point:
    metrics = {str(name): finite(value) for name, value in (event.metrics or {}).items()}
    at, session = clock.at(event), clock.session(event)
    return Point(
        session=session, at=at, step=event.step, loss=finite(event.loss), samples=event.samples, metrics=metrics
    )


def _measurement(event: PhasesMeasured, clock: _Clock) -> Measurement:
    counts = event.micro_batches or [1] * len(event.work_s)
    work_s = [seconds / count for seconds, count in zip(event.work_s, counts, strict=False) if seconds and count]
    work_s = work_s if len(work_s) == len(event.work_s) > 1 else []
    known = [share for share in event.utilization or () if share is not None]
    return Measurement(
        session=clock.session(event),
        at=clock.at(event),
        step=event.step,
        phases=event.phases,
        slowest_rank=max(range(len(work_s)), key=work_s.__getitem__) if work_s else None,
        slowdown=max(work_s) / statistics.median(work_s) if work_s else None,
        memory_bytes=max(event.memory_bytes) if event.memory_bytes else None,
        utilization=statistics.fmean(known) if known else None,
    )


def _merged(measurements: list[Measurement]) -> list[Measurement]:
    """Returns at most `_MAX_MEASUREMENTS`: neighbors become one, with their mean phases and the slowest rank of all."""
    width = -(-len(measurements) // _MAX_MEASUREMENTS)
    if width <= 1:
        return measurements
    merged = []
    for begin in range(0, len(measurements), width):
        part = measurements[begin : begin + width]
        names = dict.fromkeys(name for each in part for name in each.phases)
        worst = max(part, key=lambda each: each.slowdown or 0.0)
        used = [each.utilization for each in part if each.utilization is not None]
        merged.append(
            replace(
                part[-1],
                phases={name: statistics.fmean(each.phases.get(name, 0.0) for each in part) for name in names},
                slowest_rank=worst.slowest_rank,
                slowdown=worst.slowdown,
                memory_bytes=max((each.memory_bytes for each in part if each.memory_bytes), default=None),
                utilization=statistics.fmean(used) if used else None,
            )
        )
    return merged


def _save(event: CommitSucceeded | CommitFailed, clock: _Clock) -> Save:
    if isinstance(event, CommitFailed):
        return Save(at=clock.at(event), step=event.step, seconds=event.seconds, error=_first_line(event.error))
    return Save(at=clock.at(event), step=event.step, seconds=event.seconds, num_bytes=event.num_bytes)


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0][:200]
