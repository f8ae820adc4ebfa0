"""Made-up runs for the tests of loggers: the events of their sessions, and a logger that keeps what it gets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import elastic_ddp as ed
from elastic_ddp.loggers.delivery import LoggedSession
from elastic_ddp.loggers.logger import Logger
from elastic_ddp.loggers.run_loggers import RunLoggers
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry.event import Event
from elastic_ddp.telemetry.events import (
    CommitStarted,
    CommitSucceeded,
    EvaluationFinished,
    EvaluationStarted,
    PhasesMeasured,
    RunFinished,
    SessionEnded,
    SessionStarted,
    StepsCompleted,
    WorkerFailed,
)
from elastic_ddp.telemetry.ledger import Ledger

LAST = 6
"""Steps of a made-up run. It evaluates after each even step, and commits after step 3."""


def step_events(step: int) -> Iterator[Event]:
    """The events of one step, the same in each repetition."""
    metrics = {"grad_norm": 1.0 + step}
    yield StepsCompleted(
        generation=1,
        at=100.0 + step,
        time=100.0 + step,
        step=step,
        epoch=0,
        loss=1 / step,
        samples=8 * step,
        world_size=2,
        metrics=metrics,
    )
    yield PhasesMeasured(generation=1, step=step, num_steps=1, phases={"forward": 0.5}, work_s=[0.1, 0.2])
    if step % 2 == 0:
        yield EvaluationStarted(generation=1, name="accuracy")
        yield EvaluationFinished(generation=1, step=step, name="accuracy", value=step / 10)


def session_events(first_step: int = 0) -> list[Event]:
    """The events of a session that resumes after `first_step` steps, to the end of the run."""
    events: list[Event] = [SessionStarted(resumed_from_step=first_step or None)]
    for step in range(first_step + 1, LAST + 1):
        events += step_events(step)
        if step == 3:
            events.append(CommitStarted(generation=1, step=3))
        if step == 4 and first_step < 3:
            events.append(CommitSucceeded(generation=1, step=3, seconds=0.25, num_bytes=1000))
        if step == 5:
            events.append(WorkerFailed(generation=1, error="killed"))
    return [*events, RunFinished(status="finished", steps=LAST), SessionEnded()]


def newest_commit(events: Sequence[Event]) -> int:
    return max((event.step for event in events if isinstance(event, CommitSucceeded)), default=0)


class Keeper:
    """A logger that keeps what it gets, also for another logger object of the next session."""

    def __init__(self, kept: list[tuple[int, Mapping[str, float]]] | None = None) -> None:
        self.kept = [] if kept is None else kept
        self.runs: list[ed.LoggedRun] = []
        self.status: str | None = None

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.kept]

    def start(self, run: ed.LoggedRun) -> int | None:
        if self.runs and self.runs[-1].id != run.id:
            self.kept.clear()
        self.runs.append(run)
        return max(self.steps, default=None)

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        self.kept.append((step, dict(values)))

    def finish(self, status: str) -> None:
        self.status = status


class Driver:
    """The part of a driver's session that writes the ledger and feeds loggers."""

    def __init__(self, folder: Path, session: str, loggers: Mapping[str, Logger]) -> None:
        self.storage = Storage(folder)
        self.ledger = Ledger(self.storage, session)
        self.notes: list[str] = []
        self._is_started = False
        self.replaced = threading.Event()
        config = {"name": folder.name, "steps": LAST}
        logged = LoggedSession(self.storage, session, config, self.notes.append, self.replaced.is_set)
        self.loggers = RunLoggers(loggers, logged)

    def record(self, *events: Event) -> None:
        for event in events:
            self.ledger.append(event)
        self.ledger.flush()
        self.start()
        self.loggers.notify()

    def start(self) -> None:
        """Starts the loggers, if they are not. The ledger has the start of the session, as in a real driver."""
        if not self._is_started:
            self._is_started = True
            self.loggers.start()


@contextmanager
def driver(folder: Path, session: str, *loggers: Logger) -> Iterator[Driver]:
    """Runs a driver, which has died at the end of the block unless it has finished its loggers."""
    this = Driver(folder, session, {f"{type(logger).__name__}{n}": logger for n, logger in enumerate(loggers)})
    with this.loggers:
        yield this


def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "not true in time"
        time.sleep(0.002)
