"""The marks of a run: its changes of workers and sessions, its failures and hangs, from the events of its ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from elastic_ddp.formatting import duration, first_line, plural
from elastic_ddp.telemetry.description import describe_status
from elastic_ddp.telemetry.event import Event
from elastic_ddp.telemetry.events import (
    CorruptionFound,
    GenerationFormed,
    HangDetected,
    RunFailed,
    RunFinished,
    SessionStarted,
    StepsCompleted,
    WorkerFailed,
    WorkerLeft,
)
from elastic_ddp.telemetry.sessions import Session

Kind = Literal[
    "joined", "failed", "drained", "left", "stopped", "run failed", "driver died", "resumed", "hang", "corruption"
]


class Look(NamedTuple):
    """How the report and the terminal show one kind of mark."""

    words: str
    symbol: str
    """The symbol's name in Plotly."""
    glyph: str
    """The symbol as a character."""
    color: str

    @property
    def short_words(self) -> str:
        """The words beside a curve of workers."""
        return self.words.removeprefix("worker ")


LOOKS: dict[Kind, Look] = {
    "failed": Look("worker failed", "x", "✕", "#d62728"),
    "hang": Look("hang", "star", "★", "#d62728"),
    "corruption": Look("corruption", "pentagon", "⬟", "#d62728"),
    "run failed": Look("run failed", "hexagon", "⬢", "#d62728"),
    "driver died": Look("driver died", "cross", "✚", "#d62728"),
    "stopped": Look("stopped", "square", "■", "#7a7a7a"),
    "drained": Look("worker drained", "triangle-down", "▼", "#e08214"),
    "left": Look("worker left (resize)", "triangle-down-open", "▽", "#7a7a7a"),
    "resumed": Look("resumed", "diamond", "◆", "#a05cc4"),
    "joined": Look("worker joined", "triangle-up", "▲", "#2a9d6e"),
}
"""The most important kind is first: of two marks in one column, a terminal shows the first."""
DRIVER_DIED = "the driver died: no event tells how its session ended"
_MAX_NAMED = 3
"""For more workers, a mark has only their number."""


@dataclass(kw_only=True)
class Mark:
    """A change of a run, or a failure."""

    kind: Kind
    at: float
    time: float
    """Unix time."""
    step: int | None
    """Steps done; None before the first generation."""
    world_size: int
    """Number of workers before it; after it if it adds workers."""
    text: str
    num_workers: int = 0
    """How many joined, failed or left."""


class Clock:
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
        return self._offsets[number] + min(max(0.0, event.moment - session.began_at), session.length_s)

    def pause_s(self, number: int) -> float:
        """Returns the seconds between a session and the one before it; below 0 if their clocks differ."""
        before, session = self.sessions[number - 1], self.sessions[number]
        return session.began_at - before.began_at - before.length_s


def find_marks(events: list[Event], clock: Clock) -> list[Mark]:
    """Returns what changed the run, in order. Workers that join, fail or leave together are one mark."""
    marks = _Marks(clock)
    for event in events:
        marks.take(event)
    return marks.found


class _Marks:
    """Finds the marks of a run, event by event."""

    def __init__(self, clock: Clock) -> None:
        self.found: list[Mark] = []
        self._clock = clock
        self._step: int | None = None
        self._size = 0
        self._members: set[tuple[Any, Any]] = set()
        """Node and process id of each member of the generation."""
        self._names: dict[str, str] = {}
        """Rank, node and process id of each worker, by its id, in the newest generation that it was in."""
        self._since_formed = 0
        """Number of marks before the generation formed."""
        self._gone: dict[tuple[str, int, Kind], tuple[Mark, dict[str, str | None]]] = {}
        """The mark for workers that failed or left in a generation of a session, and their names by id."""
        self._last: Event | None = None
        self._has_end = False
        """Whether the session reported its end."""
        self._resumed: str | None = None
        """The text for the mark of a resumed session; None after its first generation has formed."""

    def take(self, event: Event) -> None:
        """Takes the next event."""
        match event:
            case SessionStarted():
                self._begin(event)
            case GenerationFormed():
                self._form(event)
            case StepsCompleted():
                self._step = event.step
            case WorkerFailed(member=str(member)):
                self._remove("failed", event, member, event.error)
            case WorkerLeft():
                kind: Kind = "drained" if event.kind == "drain" else "left"
                why = "its node or process was to stop" if kind == "drained" else "the run was resized"
                self._remove(kind, event, event.member or str(event.seq), why)
            case HangDetected():
                self._add("hang", event, f"hang: no worker made progress for {duration(event.seconds)}")
            case CorruptionFound():
                self._add("corruption", event, f"corruption: {first_line(event.text)}", step=event.step)
            case RunFailed():
                self._add("run failed", event, f"the run failed: {first_line(event.error)}")
            case RunFinished():
                self._has_end = True
                if event.status in ("stopped", "left"):
                    self._step = self._step if event.steps is None else event.steps
                    text = "was stopped" if event.status == "stopped" else describe_status(vars(event))
                    self._add("stopped", event, f"the run {text}")
        self._last = event

    def _begin(self, event: SessionStarted) -> None:
        if self._last is not None and not self._has_end:
            self._add("driver died", self._last, DRIVER_DIED)
        number = self._clock.session(event)
        self._step = event.resumed_from_step or (0 if number else None)
        self._size, self._members, self._has_end, self._resumed = 0, set(), False, None
        if number:
            where = "the start" if event.resumed_from_step is None else f"step {event.resumed_from_step:,}"
            pause_s = self._clock.pause_s(number)
            pause = f": the driver started {duration(pause_s)} after the session before" if pause_s >= 0 else ""
            self._resumed = f"resumed from {where}{pause}"
        self._since_formed = len(self.found)

    def _form(self, event: GenerationFormed) -> None:
        names = {(member.get("node"), member.get("pid")): _name(member) for member in event.members}
        self._names |= {str(member["id"]): _name(member) for member in event.members if "id" in member}
        joined = [name for place, name in names.items() if place not in self._members] if self._members else []
        self._size, self._members = event.world_size, set(names)
        if event.first_step is not None:
            self._step = event.first_step
            # Steps are logged now and then only; the next generation starts at the step where the workers left.
            for mark in self.found[self._since_formed :]:
                mark.step = event.first_step
        if self._resumed is not None:
            self._add("resumed", event, self._resumed)
            self._resumed = None
        if joined:
            after = "" if event.recovered_s is None else f", {duration(event.recovered_s)} after the failure"
            self._add("joined", event, f"{_named(joined)} joined: {self._size:,} train now{after}", len(joined))
        self._since_formed = len(self.found)

    def _remove(self, kind: Kind, event: WorkerFailed | WorkerLeft, member: str, why: str) -> None:
        key = event.session, event.generation, kind
        if key not in self._gone:
            self._gone[key] = self._add(kind, event, ""), {}
        mark, gone = self._gone[key]
        gone[member] = self._names.get(member)
        mark.text, mark.num_workers = f"{_named(list(gone.values()))} {kind}: {first_line(why)}", len(gone)

    def _add(self, kind: Kind, event: Event, text: str, num_workers: int = 0, step: int | None = None) -> Mark:
        mark = Mark(
            kind=kind,
            at=self._clock.at(event),
            time=event.moment,
            step=self._step if step is None else step,
            world_size=self._size,
            text=text,
            num_workers=num_workers,
        )
        self.found.append(mark)
        return mark


def _name(member: dict[str, Any]) -> str:
    standby = ", a standby" if member.get("standby") else ""
    return f"rank {member.get('rank')} ({member.get('node')}, pid {member.get('pid')}{standby})"


def _named(names: Sequence[str | None]) -> str:
    """Returns "rank 1 (10.0.0.5, pid 123)" for few workers, and the number of many."""
    known = [name for name in names if name is not None]
    if len(known) < len(names) or len(names) > _MAX_NAMED:
        return plural(len(names), "worker")
    return " and ".join(filter(None, [", ".join(known[:-1]), known[-1]]))
