"""The run's metrics for Prometheus, which Ray's agent on the driver's node exports with the prefix `ray_`.

Metrics are exported if that node has `ray[default]`; elsewhere Ray drops them. Gauges end 20 s after the driver.
Counters start at zero in each driver.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ray.util.metrics import Counter, Gauge

from elastic_ddp.checkpoint import Commit
from elastic_ddp.ray_internals import start_at_zero
from elastic_ddp.telemetry import events
from elastic_ddp.telemetry.event import Event
from elastic_ddp.telemetry.goodput import goodput
from elastic_ddp.telemetry.sessions import read_sessions

_log = logging.getLogger(__name__)

GOODPUT_S = 10.0
"""How often the goodput is computed."""

PREFIX = "elastic_ddp_"
GAUGES = {
    "step": ("Steps done since the start of the run.", ()),
    "loss": ("Mean training loss of the newest logged step.", ()),
    "world_size": ("Workers in the generation that trains, 0 while none does.", ()),
    "goodput_ratio": ("Share of this driver's time that went into steps that count.", ()),
    "last_commit_timestamp_seconds": ("Unix time of this driver's newest commit; of its start before that.", ()),
    "phase_seconds": ("Seconds of each phase in one step, averaged over steps and ranks.", ("phase",)),
    "micro_batch_work_seconds": ("Seconds of the rank's own work for one micro-batch.", ("rank",)),
    "gpu_memory_bytes": ("Peak of the GPU memory that torch allocated on the rank.", ("rank",)),
    "gpu_utilization_ratio": ("Share of the time in which the rank's GPU was busy.", ("rank",)),
}
"""Help and labels of each gauge, without the label `run`."""
COUNTERS = {
    "steps_total": ("Steps done, repeated ones included.", ()),
    "samples_total": ("Samples used, repeated ones included except those before the first logged step.", ()),
    "commits_total": ("Commits that succeeded.", ()),
    "failures_total": ("Failures by kind.", ("kind",)),
}
"""Help and labels of each counter, without the label `run`."""
FAILURES = ("worker", "connection", "start", "hang", "commit", "rendezvous", "corruption", "run")
"""Kinds of failures. A worker that hangs counts as one `hang` and one `worker`."""
_FAILURES: dict[type[Event], str] = {
    events.NewcomerFailed: "start",
    events.StartFailed: "start",
    events.HangDetected: "hang",
    events.CommitFailed: "commit",
    events.RendezvousRestarted: "rendezvous",
    events.CorruptionFound: "corruption",
    events.RunFailed: "run",
}
"""Events that are a failure, and its kind. A failed worker is counted once."""


class RunMetrics:
    """Records the metrics of one session from its events. It never raises, and costs microseconds without an exporter.

    `run` is the value of the label `run`. The session resumes from the commit `resume_from`.
    """

    def __init__(self, run: str, resume_from: Commit | None, clock: Callable[[], float] = time.time) -> None:
        self._run = run
        self._clock = clock
        self._gauges = {name: Gauge(PREFIX + name, text, ("run", *labels)) for name, (text, labels) in GAUGES.items()}
        self._counters = {
            name: Counter(PREFIX + name, text, ("run", *labels)) for name, (text, labels) in COUNTERS.items()
        }
        self._newest: dict[tuple[str, int | None], Event] = {}
        """The source of the goodput: few events for each generation, however long the run is."""
        self._computed_at = float("-inf")
        self._world_size = 0
        self._by_rank: set[tuple[str, int]] = set()
        """Gauges and ranks that have a value."""
        self._failed: set[str] = set()
        record = {} if resume_from is None else resume_from.record
        self._step = 0 if resume_from is None else resume_from.step
        self._samples: int | None = record.get("samples", 0)
        self._has_failed = False

    def record(self, event: Event) -> None:
        """Takes an event of the ledger."""
        self._safely(lambda: self._record(replace(event, time=self._clock())))

    def refresh(self) -> None:
        """Lowers the goodput while no worker trains. Call it often."""
        now = self._clock()
        if not self._world_size and now - self._computed_at >= GOODPUT_S:
            self._safely(lambda: self._compute_goodput(events.SessionEnded(at=now, time=now)))

    def end(self) -> None:
        """Silences the alerts about a session that is over, in a program that continues. Call it whatever happened."""
        for name in ("world_size", "last_commit_timestamp_seconds"):
            self._safely(partial(self._set, name, math.nan))  # compares as false; Ray has no way to remove it

    def _safely(self, update: Callable[[], None]) -> None:
        """Calls a function. Metrics must not end a run, whatever Ray does in another version or state."""
        try:
            update()
        except Exception:
            if not self._has_failed:
                _log.warning("a metric could not be recorded, and later errors are not logged", exc_info=True)
            self._has_failed = True

    def _record(self, event: Event) -> None:
        match event:
            case events.SessionStarted():
                self._start()
            case events.GenerationStarted():
                self._move_to(event.first_step)
                self._set_world_size(event.world_size)
            case events.Resumed():
                self._move_to(event.step)
            case events.StepsCompleted():
                self._count("steps_total", event.step - self._step)
                self._step = event.step
                if event.samples is not None:
                    self._count("samples_total", 0 if self._samples is None else event.samples - self._samples)
                    self._samples = event.samples
                self._set("step", event.step)
                self._set("loss", event.loss)
            case events.PhasesMeasured():
                self._record_phases(event)
            case events.CommitSucceeded():
                self._count("commits_total")
                self._set("last_commit_timestamp_seconds", event.moment)
            case events.GenerationEnded() | events.RunFinished():
                self._set_world_size(0)
            case events.WorkerFailed():
                self._record_failure(event)
        kind = _FAILURES.get(type(event))
        if kind is not None:
            self._count("failures_total", kind=kind)
        self._keep(event)

    def _start(self) -> None:
        self._set("step", self._step)
        self._set("world_size", 0)
        self._set("last_commit_timestamp_seconds", self._clock())
        for name in ("steps_total", "samples_total", "commits_total"):
            start_at_zero(self._counters[name], {"run": self._run})
        for kind in FAILURES:
            start_at_zero(self._counters["failures_total"], {"run": self._run, "kind": kind})

    def _move_to(self, step: int) -> None:
        """Training continues from `step`, an earlier step if all workers failed."""
        self._count("steps_total", step - self._step)
        if step < self._step:
            self._samples = None  # known again after the next logged step
        self._step = step
        self._set("step", step)

    def _record_phases(self, event: events.PhasesMeasured) -> None:
        for phase, seconds in event.phases.items():
            self._set("phase_seconds", seconds, phase=phase)
        by_rank: dict[str, Sequence[float | None]] = {
            "micro_batch_work_seconds": event.micro_batch_s,
            "gpu_memory_bytes": event.memory_bytes or [],
            "gpu_utilization_ratio": event.utilization or [],
        }
        for name, values in by_rank.items():
            for rank, value in enumerate(values):
                self._set(name, value, rank=str(rank))
                self._by_rank.add((name, rank))

    def _record_failure(self, event: events.WorkerFailed) -> None:
        self._set_world_size(0)
        if event.member is None:
            self._count("failures_total", kind="connection")
        elif event.member not in self._failed:
            self._failed.add(event.member)
            self._count("failures_total", kind="worker")

    def _set_world_size(self, world_size: int) -> None:
        self._world_size = world_size
        self._set("world_size", world_size)
        if world_size:
            for name, rank in [key for key in self._by_rank if key[1] >= world_size]:
                self._by_rank.discard((name, rank))
                self._set(name, 0, rank=str(rank))  # Ray has no way to remove it

    def _keep(self, event: Event) -> None:
        """Keeps the newest event of each kind in each generation: accounts are totals of their generation."""
        key = (event.event, getattr(event, "generation", None))
        if key not in self._newest or not isinstance(event, events.WorkerFailed):  # its first failure ends it
            self._newest[key] = event
        if event.time - self._computed_at >= GOODPUT_S or isinstance(event, events.RunFinished):
            self._compute_goodput()

    def _compute_goodput(self, *more: Event) -> None:
        share = goodput(read_sessions([*self._newest.values(), *more]))["goodput"]
        if share is not None:
            self._computed_at = self._clock()
            self._set("goodput_ratio", share)

    def _set(self, name: str, value: float | None, **labels: str) -> None:
        if value is not None:
            self._gauges[name].set(float(value), {"run": self._run, **labels})

    def _count(self, name: str, number: float = 1, **labels: str) -> None:
        if number > 0:
            self._counters[name].inc(number, {"run": self._run, **labels})
