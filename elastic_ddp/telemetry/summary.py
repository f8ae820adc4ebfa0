"""The summary of a run, from the events of its ledger: pure functions of plain values."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from elastic_ddp.errors import WorkersFailedError
from elastic_ddp.telemetry.bottleneck import find_bottleneck
from elastic_ddp.telemetry.event import PEER_FAILED, WORKER_FAILED, Event, last_of
from elastic_ddp.telemetry.events import (
    CommitSucceeded,
    CorruptionFound,
    EvaluationFinished,
    PhasesMeasured,
    RunFinished,
    SessionStarted,
    StepsCompleted,
    StepSkipped,
    StepVerified,
    WorkerFailed,
    WorkerLeft,
)
from elastic_ddp.telemetry.goodput import goodput, scaling, stalls
from elastic_ddp.telemetry.phases import mean_phases, newest, nodes_of
from elastic_ddp.telemetry.sessions import Session, read_sessions


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
        commit_interval_s (the newest automatic choice), recoveries (generations that formed after a failure),
        skipped_steps (steps that did not change the weights, see `on_nonfinite`),
        verified_step (steps done in the newest verified state), corruptions (how often ranks computed different bits),
        workers_failed (workers that failed in a generation), workers_drained (workers that left because their node or
        process was to stop), generations (each with its `stalls` and the number of its session, from 1),
        scaling (throughput at each world size, see `scaling`),
        weights_sha256, samples_sha256, loss (first and last logged value, and the steps done at the last),
        metrics (last values), evaluated_at (steps done at each metric's evaluation), storage, versions.
    """
    events = list(events)
    sessions = read_sessions(events)
    started = last_of(events, SessionStarted)
    generations = _generations(sessions)
    commits = [event for event in events if isinstance(event, CommitSucceeded)]
    return {
        "name": started.config.get("name") if name is None and started else name,
        **_outcome(events, sessions, started),
        "sessions": len(sessions),
        "recoveries": sum(row["reason"] == WORKER_FAILED for row in generations),
        "workers_failed": len({event.member for event in events if isinstance(event, WorkerFailed)} - {None}),
        "workers_drained": sum(isinstance(event, WorkerLeft) and event.kind == "drain" for event in events),
        "skipped_steps": len({event.step for event in events if isinstance(event, StepSkipped)}),
        "verified_step": max((event.step for event in events if isinstance(event, StepVerified)), default=None),
        "corruptions": sum(isinstance(event, CorruptionFound) for event in events),
        "commits": len({commit.step for commit in commits}),
        "commit_interval_s": commits[-1].interval_s if commits else None,
        "generations": generations,
        "scaling": scaling(sessions),
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
        "bottleneck": {**vars(bottleneck), "num_steps": last.num_steps} if last and bottleneck else None,
        "memory_bytes": max(memory, default=None),
    }


def _outcome(events: list[Event], sessions: list[Session], started: SessionStarted | None) -> dict[str, Any]:
    """Returns how the run ended, how far it came and how long it took."""
    failed = sessions[-1].failed if sessions else None  # a run that was resumed has not ended
    finished = sessions[-1].finished if sessions else None
    finished = finished or RunFinished(status="failed" if failed else "unfinished")
    counts = (event.samples for event in reversed(events) if isinstance(event, StepsCompleted | RunFinished))
    samples = next((count for count in counts if count is not None), None)
    seconds = goodput(sessions)
    wall_seconds = seconds["total"] or 0.0
    return {
        "status": finished.status,
        "error": failed.error if failed else finished.error,
        "steps": _steps(sessions) if finished.steps is None else finished.steps,
        "total_steps": started.total_steps if started else None,
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
                metrics = {}
                evaluated_at = {}
                losses = []
            case EvaluationFinished():
                metrics[event.name] = event.value
                evaluated_at[event.name] = event.step
            case StepsCompleted():
                metrics |= event.metrics
                losses.append(event)
            case RunFinished():
                metrics |= event.metrics or {}
    loss: dict[str, Any] = {"first": None, "last": None, "step": None}
    if losses:
        loss = {"first": losses[0].loss, "last": losses[-1].loss, "step": losses[-1].step}
    return {"loss": loss, "metrics": metrics, "evaluated_at": evaluated_at}


def _steps(sessions: list[Session]) -> int | None:
    """Returns the steps done that the newest session has reported."""
    if not sessions:
        return None
    newest = sessions[-1]
    return newest.generations[-1].last_step if newest.generations else newest.first_step


def _generations(sessions: list[Session]) -> list[dict[str, Any]]:
    """Returns one row for each generation of each session.

    A generation that failed ends at the last step reported in it, or where the next one started if that is later.
    """
    rows: list[dict[str, Any]] = []
    for number, session in enumerate(sessions, start=1):
        for generation, costs in zip(session.generations, stalls(session), strict=True):
            rows.append(
                {
                    "last_step": generation.last_step,
                    "first_step": generation.first_step,
                    "ended_by": generation.ended_by,
                    **costs,
                    "generation": generation.number,
                    "world_size": generation.world_size,
                    "reason": generation.reason,
                    "session": session.name,
                    "session_number": number,
                }
            )
        if session.generations:
            rows[-1]["ended_by"] = _end_of(session)
            if session.finished is not None:
                rows[-1]["last_step"] = max(rows[-1]["last_step"], session.finished.steps or 0)
    for previous, following in pairwise(rows):
        if previous["ended_by"] is None:  # no worker reported it
            previous["last_step"] = max(previous["last_step"], following["first_step"])
            is_same_session = previous["session"] == following["session"]
            previous["ended_by"] = PEER_FAILED if is_same_session else "its driver died"
    return rows


def _end_of(session: Session) -> str | None:
    """Returns why the last generation of a session ended."""
    failed = session.failed
    finished = session.finished
    if finished is not None and finished.status == "stopped":
        return "the run was stopped"  # workers only know that their loop ended
    if failed is not None and failed.kind not in (None, WorkersFailedError.__name__):
        return "an error"  # peers may have reported a broken connection
    reported = session.generations[-1].ended_by
    if reported is None and failed is not None:
        return "failed"
    return finished.status if reported is None and finished is not None else reported
