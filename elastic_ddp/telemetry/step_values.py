"""The values of each step, for loggers: a pure function of the ledger's events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile
from typing import Any

from elastic_ddp.telemetry.event import Event, parse
from elastic_ddp.telemetry.events import (
    CommitSucceeded,
    EvaluationFinished,
    PhasesMeasured,
    RunFinished,
    SessionStarted,
    StepsCompleted,
)
from elastic_ddp.telemetry.ledger import plain

_STEPS = "logged_steps"
"""The entry of a commit's record."""
_NONFINITE = ("NaN", "Infinity", "-Infinity")


def beginning(events: Iterable[Event]) -> str | None:
    """Returns the newest session that began without a commit: the steps that count begin with it."""
    begun = [event.session for event in events if isinstance(event, SessionStarted) and event.resumed_from_step is None]
    return begun[-1] if begun else None


def steps_record(events: Iterable[Event]) -> dict[str, Any]:
    """Returns the entry of a commit's record for its newest steps. The ledger lacks them if the driver dies first."""
    return {_STEPS: [plain(event.to_json()) for event in events if isinstance(event, StepsCompleted)]}


def lost_steps(events: Sequence[Event], record: Mapping[str, Any], step: int) -> list[StepsCompleted]:
    """Returns the steps up to `step` that workers made after a driver's death: a commit has them, and no ledger.

    Args:
        events: of the ledger before the session that resumes.
        record: of the commit from which it resumes.
        step: the commit's step.
    """
    begun = beginning(events)
    own = dropwhile(lambda event: event.session != begun, events)
    newest = max((event.step for event in own if isinstance(event, StepsCompleted)), default=0)
    saved = (parse(entry) for entry in record.get(_STEPS, ()))
    return [
        replace(event, at=None, account=None)  # by the clock of a worker, and of a generation that the ledger lacks
        for event in saved
        if isinstance(event, StepsCompleted) and newest < event.step <= step
    ]


@dataclass(frozen=True)
class LoggedStep:
    """All values of one step."""

    step: int
    """Steps done since the start of the run."""
    time: float
    """Unix time in seconds at which the step was reported."""
    values: dict[str, float]
    """The values by name, see `loggers.Logger.log`."""


class StepValues:
    """Joins the events of a run into one record for each logged step, in strictly increasing order.

    Pass it all events of the ledger, in the order of `read_ledger`; the same events give the same records. A record is
    complete once an event of a later step follows, or the end of the run: an evaluation comes after its step, and some
    loggers cannot add to an earlier step.

    A session that resumes from an older commit repeats steps, with the same bits unless the code or a setting was
    changed. Their repetitions are left out. Pass no session before `beginning`. Values that are reported after their
    step, for example a commit's, belong to the newest step at that time.
    """

    def __init__(self) -> None:
        self._held: LoggedStep | None = None
        """The newest step, whose values are not complete yet."""
        self._newest = -1
        """Step of the newest complete record."""
        self._late: dict[str, float] = {}
        """Values for the next record: no step is held that could have them."""
        self._evaluated: dict[str, int] = {}
        """Step of the newest evaluation, by name."""
        self._measured = -1
        """Step of the newest measurement of phases."""
        self._counted: tuple[float, int] | None = None
        """Time and samples of the last event with samples in this session."""

    def add(self, event: Event) -> LoggedStep | None:
        """Adds an event. Returns the record that it completes, if it does."""
        complete = None
        step = getattr(event, "step", None)
        if self._held is not None and (isinstance(event, RunFinished) or (step is not None and step > self._held.step)):
            complete = self._held
            self._newest = complete.step
            self._held = None
        match event:
            case SessionStarted():
                self._counted = None
            case StepsCompleted():
                own = {name: getattr(event, name) for name in ("loss", "epoch", "samples", "world_size")}
                values = {**event.metrics, **own, **self._rate(event)}
                self._add(event, values)
            case EvaluationFinished() if event.step > self._evaluated.get(event.name, -1):
                self._evaluated[event.name] = event.step
                self._add(event, {event.name: event.value}, may_be_late=True)
            case PhasesMeasured() if event.step > self._measured:
                self._measured = event.step
                self._add_late(dict(_phase_values(event)))
            case CommitSucceeded():
                self._add_late({"commit/seconds": event.seconds, "commit/bytes": event.num_bytes})
        return complete

    def _add(
        self, event: StepsCompleted | EvaluationFinished, values: Mapping[str, Any], *, may_be_late: bool = False
    ) -> None:
        """Adds values to the record of a step. If it is complete, they are repeated, or belong to the next record."""
        if self._held is None and event.step > self._newest:
            self._held = LoggedStep(event.step, event.moment, self._late)
            self._late = {}
        if self._held is not None and event.step == self._held.step:
            for name, value in _numbers(values):
                self._held.values.setdefault(name, value)
        elif may_be_late:
            self._add_late(values)

    def _add_late(self, values: Mapping[str, Any]) -> None:
        (self._late if self._held is None else self._held.values).update(_numbers(values))

    def _rate(self, event: StepsCompleted) -> dict[str, float]:
        """Returns the samples per second since the last such event of the session."""
        before = self._counted
        self._counted = event.moment, event.samples
        if before is None or event.samples < before[1] or event.moment <= before[0]:
            return {}
        return {"samples_per_s": (event.samples - before[1]) / (event.moment - before[0])}


def _phase_values(event: PhasesMeasured) -> Iterator[tuple[str, Any]]:
    for phase, seconds in event.phases.items():
        yield f"phases/{phase}_s", seconds
    if event.work_s:
        yield "phases/slowest_rank_s", max(event.work_s)
    if event.memory_bytes:
        yield "gpu/memory_bytes", max(event.memory_bytes)
    known = [share for share in event.utilization or [] if share is not None]
    if known:
        yield "gpu/utilization", sum(known) / len(known)


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields the values that are numbers. The ledger has text for those that JSON cannot express."""
    for name, value in values.items():
        if value in _NONFINITE:
            yield name, float(value)
        elif isinstance(value, int | float):
            yield name, value
