"""What happened in a run over time, from the events of its ledger: pure functions of plain values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from elastic_ddp.report.marks import DRIVER_DIED, Clock, Mark, find_marks
from elastic_ddp.telemetry.event import Event
from elastic_ddp.telemetry.events import (
    CommitFailed,
    CommitSucceeded,
    EvaluationFinished,
    GenerationFormed,
    PhasesMeasured,
    SessionStarted,
    StepsCompleted,
)
from elastic_ddp.telemetry.sessions import read_sessions
from elastic_ddp.telemetry.summary import summarize

_MAX_MEASUREMENTS = 500
_MAX_POINTS = 2000
"""Points of a line; more are thinned out."""
_UNITS = ((3 * 86_400, 86_400, "d"), (3 * 3_600, 3_600, "h"), (300, 60, "min"), (0, 1, "s"))
"""From how many seconds on, the seconds in a unit, and its name."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Values of one step. `session` counts from 0: a line is broken between two sessions."""

    session: int
    at: float
    step: int
    loss: float | None = None
    samples: int | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)

    def value(self, name: str) -> float | None:
        """Returns a metric, or the `loss`; None if the point has none of this name."""
        return self.loss if name == "loss" else self.metrics.get(name)


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


P = TypeVar("P", Point, Measurement)


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
    points: list[Point]
    evaluations: list[Point]
    """One metric each."""
    commits: list[tuple[float, CommitSucceeded]]
    failed_commits: list[tuple[float, CommitFailed]]
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
    clock = Clock(read_sessions(events))
    started = [event for event in events if isinstance(event, SessionStarted)]
    formed = [event for event in events if isinstance(event, GenerationFormed)]
    nodes = {str(member["node"]) for event in formed for member in event.members if "node" in member}
    return History(
        label=str(summary["name"] or "run"),
        summary=summary,
        config=dict(started[-1].config) if started else {},
        began=clock.sessions[0].began_at if clock.sessions else 0.0,
        ended=clock.sessions[-1].began_at + clock.sessions[-1].length_s if clock.sessions else 0.0,
        nodes=sorted(nodes),
        sizes=_sizes(events, clock),
        start_ups=[_start_up(number, clock) for number in range(len(clock.sessions))],
        marks=find_marks(events, clock),
        points=[_point(event, clock) for event in events if isinstance(event, StepsCompleted)],
        evaluations=[
            Point(session=clock.session(event), at=clock.at(event), step=event.step, metrics={event.name: value})
            for event in events
            if isinstance(event, EvaluationFinished) and (value := finite(event.loss)) is not None
        ],
        commits=[(clock.at(event), event) for event in events if isinstance(event, CommitSucceeded)],
        failed_commits=[(clock.at(event), event) for event in events if isinstance(event, CommitFailed)],
        measurements=_merged([_measurement(event, clock) for event in events if isinstance(event, PhasesMeasured)]),
    )


def with_dead_driver(history: History) -> History:
    """Returns the history of a run whose newest session has no end, after its driver has died."""
    size = history.sizes[-2][1] if len(history.sizes) > 1 else 0
    common = {"at": history.seconds, "time": history.ended, "step": history.summary["steps"], "world_size": size}
    died = Mark(kind="driver died", text=DRIVER_DIED, **common)
    return replace(history, summary={**history.summary, "status": "dead"}, marks=[*history.marks, died])


def throughput(points: Sequence[Point], length_s: float, count: int) -> list[float]:
    """Returns the mean samples per second in each of `count` equal intervals of a run's time.

    NaN stands for an interval that is not between two points of a session. A stall lowers the throughput. Steps that
    were redone count again.
    """
    known = [(point.session, point.at, point.samples) for point in points if point.samples is not None]
    at, done, measured_s = [0.0], [0.0], [0.0]
    for (session, begin, before), (same, end, after) in pairwise([*known[:1], *known]):
        at.append(end)
        done.append(done[-1] + (max(0, after - before) if same == session else 0))
        measured_s.append(measured_s[-1] + (max(0.0, end - begin) if same == session else 0.0))
    edges = np.linspace(0.0, length_s, count + 1)
    samples, seconds = (np.diff(np.interp(edges, at, counted)).tolist() for counted in (done, measured_s))
    return [used / spent_s if spent_s > 1e-6 else math.nan for used, spent_s in zip(samples, seconds, strict=True)]


def thin(points: list[Point], name: str) -> list[Point]:
    """Returns the points of the smallest and of the largest value in each of equally many neighbors."""
    width = -(-2 * len(points) // _MAX_POINTS)
    if width <= 2:
        return points
    kept = []
    for begin in range(0, len(points), width):
        part = range(begin, min(begin + width, len(points)))
        ends = sorted(part, key=lambda index: points[index].value(name) or 0.0)
        kept += [points[index] for index in sorted({ends[0], ends[-1]})]
    return kept


def broken(points: Iterable[P]) -> list[P | None]:
    """Returns the points, with None where a session follows another."""
    result: list[P | None] = []
    session: int | None = None
    for point in points:
        if session not in (None, point.session):
            result.append(None)
        session = point.session
        result.append(point)
    return result


def time_unit(histories: Sequence[History]) -> tuple[float, str]:
    """The seconds in the unit of the time axis, and its name: the same for all runs."""
    longest_s = max((history.seconds for history in histories), default=0.0)
    return next((size, unit) for at_least, size, unit in _UNITS if longest_s >= at_least)


def finite(value: Any) -> float | None:
    """Returns a number of a ledger, or None if it is missing, NaN or infinite."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


def _sizes(events: list[Event], clock: Clock) -> list[tuple[float, int]]:
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


def _start_up(number: int, clock: Clock) -> tuple[float, float]:
    begin, session = clock.begin(number), clock.sessions[number]
    return begin, begin + (session.generations[0].formed_at if session.generations else session.length_s)


def _point(event: StepsCompleted, clock: Clock) -> Point:
    metrics = {str(name): finite(value) for name, value in (event.metrics or {}).items()}
    at, session = clock.at(event), clock.session(event)
    return Point(
        session=session, at=at, step=event.step, loss=finite(event.loss), samples=event.samples, metrics=metrics
    )


def _measurement(event: PhasesMeasured, clock: Clock) -> Measurement:
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
