"""A run over time, from the events of its ledger: pure functions of plain values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Generic

import numpy as np

from elastic_ddp.report.marks import DRIVER_DIED, Mark, find_marks
from elastic_ddp.telemetry.event import E, Event, last_of
from elastic_ddp.telemetry.events import (
    CommitFailed,
    CommitSucceeded,
    EvaluationFinished,
    GenerationFormed,
    PhasesMeasured,
    SessionStarted,
    StepsCompleted,
)
from elastic_ddp.telemetry.sessions import Session, read_sessions
from elastic_ddp.telemetry.summary import summarize

_MAX_MEASUREMENTS = 500
_MAX_POINTS = 2000
"""Points of a line; more are thinned out."""
_UNITS = ((3 * 86_400, 86_400, "d"), (3 * 3_600, 3_600, "h"), (300, 60, "min"), (0, 1, "s"))
"""From how many seconds on, the seconds in a unit, and its name."""


@dataclass(frozen=True)
class Point(Generic[E]):
    """An event in the time of its run."""

    session: int
    """Number of its session, from 0: a line is broken between two sessions."""
    at: float
    event: E


@dataclass(frozen=True, kw_only=True)
class History:
    """A run over time. `at` is in seconds since the run began; the time between two sessions does not count."""

    label: str
    """What the report calls the run."""
    summary: dict[str, Any]
    """As `summarize` returns it."""
    config: Mapping[str, Any]
    began: float
    """Unix time of the first session's start."""
    ended: float
    """Unix time of the last session's end, or of the last event."""
    nodes: list[str]
    """Addresses of the nodes that trained."""
    sizes: list[tuple[float, int]]
    """Number of workers that train, from each time on; 0 while none does."""
    start_ups: list[tuple[float, float]]
    """Begin of each session, and when its first generation formed."""
    marks: list[Mark]
    points: list[Point[StepsCompleted]]
    evaluations: list[Point[EvaluationFinished]]
    commits: list[Point[CommitSucceeded]]
    failed_commits: list[Point[CommitFailed]]
    measurements: list[Point[PhasesMeasured]]

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
    sessions = read_sessions(events)

    def points(kind: type[E]) -> list[Point[E]]:
        return [
            Point(number, session.at(event), event)
            for number, session in enumerate(sessions)
            for event in session.events
            if isinstance(event, kind)
        ]

    started = last_of(events, SessionStarted)
    formed = [event for event in events if isinstance(event, GenerationFormed)]
    return History(
        label=str(summary["name"] or "run"),
        summary=summary,
        config=started.config if started else {},
        began=sessions[0].began_at if sessions else 0.0,
        ended=sessions[-1].began_at + sessions[-1].length_s if sessions else 0.0,
        nodes=sorted({member["node"] for event in formed for member in event.members}),
        sizes=_sizes(sessions),
        start_ups=[_start_up(session) for session in sessions],
        marks=find_marks(sessions),
        points=points(StepsCompleted),
        evaluations=points(EvaluationFinished),
        commits=points(CommitSucceeded),
        failed_commits=points(CommitFailed),
        measurements=_merged(points(PhasesMeasured)),
    )


def with_dead_driver(history: History) -> History:
    """Returns the history of a run whose newest session has no end, after its driver has died."""
    size = history.sizes[-2][1] if len(history.sizes) > 1 else 0
    common = {"at": history.seconds, "time": history.ended, "step": history.summary["steps"], "world_size": size}
    died = Mark(kind="driver died", text=DRIVER_DIED, **common)
    return replace(history, marks=[*history.marks, died])


def value_of(point: Point[StepsCompleted] | Point[EvaluationFinished], name: str) -> float | None:
    """Returns the `loss` of a step or a metric; None if the point has no finite value of this name."""
    event = point.event
    if isinstance(event, EvaluationFinished):
        return finite(event.value) if event.name == name else None
    return finite(event.loss if name == "loss" else event.metrics.get(name))


def slowdown(event: PhasesMeasured) -> float | None:
    """Returns the work of the slowest rank for one of its micro-batches, relative to the median; None for one rank."""
    work_s = event.micro_batch_s
    return max(work_s) / statistics.median(work_s) if len(work_s) > 1 else None


def throughput(points: Sequence[Point[StepsCompleted]], length_s: float, count: int) -> list[float]:
    """Returns the mean samples per second in each of `count` equal intervals of a run's time.

    NaN stands for an interval that is not between two points of a session. A stall lowers the throughput. Steps that
    were redone count again.
    """
    known = [(each.session, each.at, each.event.samples) for each in points]
    at = [0.0]
    done = [0.0]
    measured_s = [0.0]
    for (session, begin, before), (same, end, after) in pairwise([*known[:1], *known]):
        at.append(end)
        done.append(done[-1] + (max(0, after - before) if same == session else 0))
        measured_s.append(measured_s[-1] + (max(0.0, end - begin) if same == session else 0.0))
    edges = np.linspace(0.0, length_s, count + 1)
    samples, seconds = (np.diff(np.interp(edges, at, counted)).tolist() for counted in (done, measured_s))
    return [used / spent_s if spent_s > 1e-6 else math.nan for used, spent_s in zip(samples, seconds, strict=True)]


def thin(points: Sequence[Point[Any]], name: str) -> Sequence[Point[Any]]:
    """Returns the points of the smallest and of the largest value in each of equally many neighbors."""
    width = -(-2 * len(points) // _MAX_POINTS)
    if width <= 2:
        return points
    kept = []
    for begin in range(0, len(points), width):
        part = range(begin, min(begin + width, len(points)))
        ends = sorted(part, key=lambda index: value_of(points[index], name) or 0.0)
        kept += [points[index] for index in sorted({ends[0], ends[-1]})]
    return kept


def time_unit(histories: Sequence[History]) -> tuple[float, str]:
    """The seconds in the unit of the time axis, and its name: the same for all runs."""
    longest_s = max((history.seconds for history in histories), default=0.0)
    return next((size, unit) for at_least, size, unit in _UNITS if longest_s >= at_least)


def finite(value: Any) -> float | None:
    """Returns a number of a ledger, or None if it is missing, NaN or infinite."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _sizes(sessions: Sequence[Session]) -> list[tuple[float, int]]:
    sizes: list[tuple[float, int]] = []
    for session in sessions:
        sizes.append((session.offset_s, 0))
        for generation in session.generations:
            at = session.offset_s + generation.formed_at
            if generation.waited_s and sizes[-1][1]:
                sizes.append((max(sizes[-1][0], at - generation.waited_s), 0))
            sizes.append((at, generation.world_size))
        sizes.append((session.offset_s + session.length_s, 0))
    return sizes


def _start_up(session: Session) -> tuple[float, float]:
    trains_at = session.generations[0].formed_at if session.generations else session.length_s
    return session.offset_s, session.offset_s + trains_at


def _merged(measurements: list[Point[PhasesMeasured]]) -> list[Point[PhasesMeasured]]:
    """Returns at most `_MAX_MEASUREMENTS`: of neighbors the one with the slowest rank, with the mean phases of all."""
    width = -(-len(measurements) // _MAX_MEASUREMENTS) or 1
    merged = []
    for begin in range(0, len(measurements), width):
        part = measurements[begin : begin + width]
        worst = max(part, key=lambda each: slowdown(each.event) or 0.0)
        names = dict.fromkeys(name for each in part for name in each.event.phases)
        event = replace(
            worst.event,
            phases={name: statistics.fmean(each.event.phases.get(name, 0.0) for each in part) for name in names},
            memory_bytes=[used for each in part for used in each.event.memory_bytes or ()],
            utilization=[share for each in part for share in each.event.utilization or ()],
        )
        merged.append(replace(worst, event=event))
    return merged
