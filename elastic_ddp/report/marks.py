"""The marks of a run: its changes of workers and sessions, its failures and hangs, from the events of its ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from elastic_ddp.formatting import duration, first_line, plural
from elastic_ddp.telemetry.description import describe_status
from elastic_ddp.telemetry.event import Event
from elastic_ddp.telemetry.events import (
    CorruptionFound,
    GenerationFormed,
    HangDetected,
    RunFailed,
    RunFinished,
    StepsCompleted,
    WorkerFailed,
    WorkerLeft,
)
from elastic_ddp.telemetry.sessions import Session


class Look(NamedTuple):
    """How the report and the terminal show one kind of mark."""

    symbol: str
    """The symbol's name in Plotly."""
    glyph: str
    """The symbol as a character."""
    color: str


FAILED_COLOR = "#d62728"
LOOKS = {
    "failed": Look("x", "✕", FAILED_COLOR),
    "hang": Look("star", "★", FAILED_COLOR),
    "corruption": Look("pentagon", "⬟", FAILED_COLOR),
    "run failed": Look("hexagon", "⬢", FAILED_COLOR),
    "driver died": Look("cross", "✚", FAILED_COLOR),
    "stopped": Look("square", "■", "#7a7a7a"),
    "drained": Look("triangle-down", "▼", "#e08214"),
    "left": Look("triangle-down-open", "▽", "#7a7a7a"),
    "resumed": Look("diamond", "◆", "#a05cc4"),
    "joined": Look("triangle-up", "▲", "#2a9d6e"),
    "commit": Look("line-ns-open", "|", "#7a8a2b"),
}
"""The most important kind is first: of two marks in one column, a terminal shows the first."""
DRIVER_DIED = "the driver died: no event tells how its session ended"
_MAX_NAMED = 3
"""For more workers, a mark has only their number."""


@dataclass(kw_only=True)
class Mark:
    """A change of a run, or a failure."""

    kind: str
    """A key of `LOOKS`."""
    at: float
    time: float
    """Unix time."""
    step: int | None
    """Steps done; None before the first generation."""
    world_size: int
    """Number of workers before it; after it if it adds workers."""
    text: str


def find_marks(sessions: Sequence[Session]) -> list[Mark]:
    """Returns what changed the run, in order. Workers that join, fail or leave together are one mark."""
    marks: list[Mark] = []
    for number, session in enumerate(sessions):
        found = _SessionMarks(session, sessions[number - 1] if number else None)
        for event in session.events:
            found.take(event)
        if session.finished is None and number < len(sessions) - 1:
            found.add("driver died", session.events[-1], DRIVER_DIED)
        marks += found.marks
    return marks


class _SessionMarks:
    """Finds the marks of a session, event by event."""

    def __init__(self, session: Session, before: Session | None) -> None:
        self.marks: list[Mark] = []
        self._session = session
        self._step = session.first_step or (None if before is None else 0)
        self._size = 0
        self._members: set[tuple[Any, Any]] = set()
        """Node and process id of each member of the generation."""
        self._names: dict[str, str] = {}
        """Rank, node and process id of each worker, by its id, in the newest generation that it was in."""
        self._since_formed = 0
        """Number of marks before the generation formed."""
        self._gone: dict[tuple[int, str], tuple[Mark, dict[str, str | None]]] = {}
        """The mark for workers that failed or left in a generation, and their names by id."""
        self._resumed = None if before is None else _describe_resume(session, before)
        """The text for the mark of a resumed session; None after its first generation has formed."""

    def take(self, event: Event) -> None:
        """Takes the next event."""
        match event:
            case GenerationFormed():
                self._form(event)
            case StepsCompleted():
                self._step = event.step
            case WorkerFailed(member=str(member)):
                self._remove("failed", event, member, event.error)
            case WorkerLeft(member=str(member), kind="drain"):
                self._remove("drained", event, member, "its node or process was to stop")
            case WorkerLeft(member=str(member)):
                self._remove("left", event, member, "the run was resized")
            case HangDetected():
                self.add("hang", event, f"hang: no worker made progress for {duration(event.seconds)}")
            case CorruptionFound():
                self._step = event.step
                self.add("corruption", event, f"corruption: {first_line(event.text)}")
            case RunFailed():
                self.add("run failed", event, f"the run failed: {first_line(event.error)}")
            case RunFinished(status="stopped" | "left"):
                self._step = self._step if event.steps is None else event.steps
                text = "was stopped" if event.status == "stopped" else describe_status(vars(event))
                self.add("stopped", event, f"the run {text}")

    def add(self, kind: str, event: Event, text: str) -> Mark:
        """Adds the mark of an event."""
        mark = Mark(
            kind=kind,
            at=self._session.at(event),
            time=event.moment,
            step=self._step,
            world_size=self._size,
            text=text,
        )
        self.marks.append(mark)
        return mark

    def _form(self, event: GenerationFormed) -> None:
        names = {(member["node"], member["pid"]): _name(member) for member in event.members}
        self._names |= {member["id"]: _name(member) for member in event.members}
        joined = [name for place, name in names.items() if place not in self._members] if self._members else []
        self._size = event.world_size
        self._members = set(names)
        if event.first_step is not None:
            self._step = event.first_step
            # Steps are logged now and then only; the next generation starts at the step where the workers left.
            for mark in self.marks[self._since_formed :]:
                mark.step = event.first_step
        if self._resumed is not None:
            self.add("resumed", event, self._resumed)
            self._resumed = None
        if joined:
            after = "" if event.recovered_s is None else f", {duration(event.recovered_s)} after the failure"
            self.add("joined", event, f"{_named(joined)} joined: {self._size:,} train now{after}")
        self._since_formed = len(self.marks)

    def _remove(self, kind: str, event: WorkerFailed | WorkerLeft, member: str, why: str) -> None:
        key = event.generation, kind
        if key not in self._gone:
            self._gone[key] = self.add(kind, event, ""), {}
        mark, gone = self._gone[key]
        gone[member] = self._names.get(member)
        mark.text = f"{_named(list(gone.values()))} {kind}: {first_line(why)}"


def _describe_resume(session: Session, before: Session) -> str:
    """Returns the text for the mark of a session that is not the first."""
    where = f"step {session.first_step:,}" if session.first_step else "the start"
    pause_s = session.began_at - before.began_at - before.length_s
    # Below 0 if the clocks of their machines differ.
    pause = f": the driver started {duration(pause_s)} after the session before" if pause_s >= 0 else ""
    return f"resumed from {where}{pause}"


def _name(member: dict[str, Any]) -> str:
    standby = ", a standby" if member.get("standby") else ""
    return f"rank {member.get('rank')} ({member.get('node')}, pid {member.get('pid')}{standby})"


def _named(names: Sequence[str | None]) -> str:
    """Returns "rank 1 (10.0.0.5, pid 123)" for few workers, and the number of many."""
    known = [name for name in names if name is not None]
    if len(known) < len(names) or len(names) > _MAX_NAMED:
        return plural(len(names), "worker")
    return " and ".join(filter(None, [", ".join(known[:-1]), known[-1]]))
