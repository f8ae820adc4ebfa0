"""The summary of a run, from the events of its ledger: pure functions of plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from elastic_ddp.errors import WorkersFailedError
from elastic_ddp.telemetry.bottleneck import find_bottleneck
from elastic_ddp.telemetry.event import PEER_FAILED, WORKER_FAILED, Event, last_of
from elastic_ddp.telemetry.events import (
    CommitSucceeded,
    CorruptionFound,
    EvaluationFinished,
    GenerationEnded,
    GenerationFormed,
    GenerationStarted,
    PhasesMeasured,
    Resumed,
    RunFailed,
    RunFinished,
    SessionStarted,
    StepsCompleted,
    StepSkipped,
    StepVerified,
    WorkerFailed,
    WorkerLeft,
)
from elastic_ddp.telemetry.goodput import STALLS, goodput, stalls
from elastic_ddp.telemetry.phases import mean_phases, newest, nodes_of
from elastic_ddp.telemetry.world_sizes import scaling


def summarize(events: Iterable[Event], *, name: str | None = None, storage: str | None = None) -> dict[str, Any]:
    """Returns the contents of `summary.json`: figures of the whole run, over all its sessions.

    Steps and samples count from the start of the run. Facts that no event holds are None.

    Args:
        events: in the order of `read_ledger`.
        name, storage: by default from the configuration in the newest `session_started`.

    Returns:
        name, status ("finished", "left", "stopped", "failed", see `RunFinished`; "unfinished" for a run that is running
        or whose driver died), error, steps, total_steps (that the configuration asks for), epochs, samples,
        wall_seconds (of all sessions, from the call of `fit` to the end), samples_per_second (of that time),
        goodput (seconds of each part of that time, see `goodput`), sessions and commits (their numbers),
        phases (seconds of each phase of a step, averaged over the run), bottleneck (of the newest steps, see
        `RunHandle.status`, and the number of those steps), memory_bytes (peak of GPU memory of any rank),
        commit_interval_s (the newest automatic choice), restarts (generations that formed after a failure),
        skipped_steps (steps that did not change the weights, see `on_nonfinite`),
        verified_step (steps done in the newest verified state), corruptions (how often ranks computed different bits),
        workers_lost (workers that failed in a generation), workers_drained (workers that left because their node or
        process was to stop), generations (each with its `stalls` and the number of its session, from 1),
        scaling (throughput at each world size, see `scaling`),
        weights_sha256, samples_sha256, loss (first and last logged value, and the steps done at the last),
        metrics (last values), evaluated_at (steps done at each metric's evaluation), storage, versions.
    """
    events = list(events)
    started = last_of(events, SessionStarted)
    generations = _generations(events)
    commits = [event for event in events if isinstance(event, CommitSucceeded)]
    return {
        "name": started.config.get("name") if name is None and started else name,
        **_outcome(events),
        "sessions": len({event.session for event in events}),
        "restarts": sum(row["reason"] == WORKER_FAILED for row in generations),
        "workers_lost": len({event.member for event in events if isinstance(event, WorkerFailed)} - {None}),
        "workers_drained": sum(isinstance(event, WorkerLeft) and event.kind == "drain" for event in events),
        "skipped_steps": len({event.step for event in events if isinstance(event, StepSkipped)}),
        "verified_step": max((event.step for event in events if isinstance(event, StepVerified)), default=None),
        "corruptions": sum(isinstance(event, CorruptionFound) for event in events),
        "commits": len({commit.step for commit in commits}),
        "commit_interval_s": commits[-1].interval_s if commits else None,
        "generations": generations,
        "scaling": scaling(events),
        **_phases(events),
        **_measurements(events),
        "storage": started.config.get("storage") if storage is None and started else storage,
        "versions": dict(started.versions) if started else {},
    }


def _phases(events: list[Event]) -> dict[str, Any]:
    """Returns the phases of a step, the peak of GPU memory, and what bounded the newest steps."""
    measured = [event for event in events if isinstance(event, PhasesMeasured)]
    last = newest(measured)
    bottleneck = None if last is None else find_bottleneck(last, nodes_of(events, last))
    memory = [max(event.memory_bytes) for event in measured if event.memory_bytes]
    return {
        "phases": mean_phases(measured) if measured else None,
        "bottleneck": {**bottleneck.to_json(), "num_steps": last.num_steps} if last and bottleneck else None,
        "memory_bytes": max(memory, default=None),
    }


def _outcome(events: list[Event]) -> dict[str, Any]:
    """Returns how the run ended, how far it came and how long it took."""
    started = last_of(events, SessionStarted)
    newest = events[events.index(started) :] if started else events  # a run that was resumed has not ended
    failed = last_of(newest, RunFailed)
    finished = last_of(newest, RunFinished) or RunFinished(status="failed" if failed else "unfinished")
    counts = (event.samples for event in reversed(events) if isinstance(event, StepsCompleted | RunFinished))
    samples = next((count for count in counts if count is not None), None)
    seconds = goodput(events)
    wall_seconds = seconds["total"] or 0.0
    return {
        "status": finished.status,
        "error": failed.error if failed else finished.error,
        "steps": _last_step(events) if finished.steps is None else finished.steps,
        "total_steps": finished.total_steps,
        "epochs": finished.epochs,
        "samples": samples,
        "wall_seconds": round(wall_seconds, 3),
        "samples_per_second": round(samples / wall_seconds, 3) if samples and wall_seconds else None,
        "goodput": seconds,
        "weights_sha256": finished.weights_sha256,
        "samples_sha256": finished.samples_sha256,
    }


def _measurements(events: list[Event]) -> dict[str, Any]:
    """Returns the training loss, the last values of metrics, and the steps at which evaluations measured theirs."""
    metrics: dict[str, Any] = {}
    evaluated_at: dict[str, int] = {}
    losses: list[StepsCompleted] = []
    for event in events:
        match event:
            case SessionStarted(resumed_from_step=None):  # without a commit, nothing of earlier sessions counts
                metrics, evaluated_at, losses = {}, {}, []
            case EvaluationFinished():
                metrics[event.name], evaluated_at[event.name] = event.loss, event.step
            case StepsCompleted() | RunFinished():
                metrics |= event.metrics or {}
        if isinstance(event, StepsCompleted) and event.loss is not None:
            losses.append(event)
    first, last, step = (losses[0].loss, losses[-1].loss, losses[-1].step) if losses else (None, None, None)
    return {"loss": {"first": first, "last": last, "step": step}, "metrics": metrics, "evaluated_at": evaluated_at}


def _last_step(events: list[Event]) -> int | None:
    """Returns the steps done after these events. The last value counts, as a session may resume from an older step."""
    step = None
    for event in events:
        if (value := _step_of(event)) is not None:
            step = max(value, step or 0) if isinstance(event, CommitSucceeded) else value
    return step


def _step_of(event: Event) -> int | None:
    """Returns the steps done at an event, or None if it does not hold them."""
    match event:
        case Resumed(step=step) | StepsCompleted(step=step) | CommitSucceeded(step=step):
            return step
        case GenerationStarted(first_step=step) | GenerationEnded(last_step=step):
            return step
        case SessionStarted(resumed_from_step=step) | RunFinished(steps=step):
            return step
    return None


def _generations(events: list[Event]) -> list[dict[str, Any]]:
    """Returns one row for each generation of each session.

    A generation that failed ends at the last step reported in it, or where the next one started if that is later.
    """
    rows: list[dict[str, Any]] = []
    costs = stalls(events)
    sessions = list(dict.fromkeys(event.session for event in events))
    current: dict[str, Any] | None = None
    committed = 0
    for event in events:
        if isinstance(event, CommitSucceeded):
            committed = event.step
        if isinstance(event, GenerationFormed | GenerationStarted):
            # The rendezvous reports a generation first. Its rank 0 does when it starts, if it lives that long.
            if current is None or not _is_about(event, current):
                cost = costs.get((event.session, event.generation), dict.fromkeys(STALLS))
                first = committed if event.first_step is None else event.first_step
                current = {"last_step": first, "first_step": first, "ended_by": None, **cost}
                rows.append(current)
            current |= {key: getattr(event, key) for key in ("generation", "world_size", "reason", "session")}
            current["session_number"] = sessions.index(event.session) + 1
            if isinstance(event, GenerationStarted):
                current["first_step"] = current["last_step"] = event.first_step
        elif current is None or isinstance(event, SessionStarted):
            current = None  # events before a session's first generation belong to none
        elif event.session == current["session"]:
            # A worker may report the end of a generation after the rendezvous has formed the next one.
            _update(next((row for row in rows[-2:] if _is_about(event, row)), current), current, event)
    for previous, following in pairwise(rows):
        if previous["ended_by"] is None:  # no worker reported it
            previous["last_step"] = max(previous["last_step"], following["first_step"])
            same_session = previous["session"] == following["session"]
            previous["ended_by"] = PEER_FAILED if same_session else "the driver failed"
    return rows


def _update(row: dict[str, Any], current: dict[str, Any], event: Event) -> None:
    """Adds an event to the row of its generation, or how the run ended to the current one."""
    if (step := _step_of(event)) is not None:
        row["last_step"] = max(step, row["last_step"])  # a commit is reported some steps later
    match event:
        case GenerationEnded():
            row["ended_by"] = event.reason
        case RunFinished(status="stopped"):
            current["ended_by"] = "the run was stopped"  # workers only know that their loop ended
        case RunFailed() if event.kind not in (None, WorkersFailedError.__name__):
            current["ended_by"] = "an error"  # peers may have reported a broken connection
        case RunFailed() if current["ended_by"] is None:
            current["ended_by"] = "failed"
        case RunFinished() if current["ended_by"] is None:
            current["ended_by"] = event.status


def _is_about(event: Event, row: Mapping[str, Any]) -> bool:
    return (event.session, getattr(event, "generation", None)) == (row["session"], row["generation"])
