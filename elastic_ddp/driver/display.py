"""What a driver prints: a line for each decision in the run, and the progress of training."""

from __future__ import annotations

import sys
from typing import Any

from elastic_ddp.checkpoint import Commit
from elastic_ddp.console import Tolerant
from elastic_ddp.rendezvous.heartbeat import EXITED
from elastic_ddp.rendezvous.messages import DriverUpdate
from elastic_ddp.telemetry import Progress, events
from elastic_ddp.telemetry.event import Event

WORKER_FAILED = "a worker failed"


def print_note(text: str) -> None:
    """Prints a line to standard error."""
    print(text, file=Tolerant(sys.stderr), flush=True)


class RunDisplay(Progress):
    """Shows a run on the terminal, from its events and its progress."""

    def __init__(self, total_steps: int, min_workers: int, resume_from: Commit | None) -> None:
        super().__init__(total_steps)
        self._min_workers = min_workers
        self._newest: dict[str, Any] = {"step": 0, "samples": 0, "world_size": 0, "generation": 0}
        self._phase = "starting"
        if resume_from is not None:
            self._newest |= {"step": resume_from.step, "samples": resume_from.record.get("samples", 0)}
            self._phase = f"resuming from step {resume_from.step}"

    def announce_stop(self, num_workers: int) -> None:
        """Shows that the run was asked to stop, while it has this many workers."""
        self._phase = "stopping"
        where = "after a commit at the next step boundary" if num_workers else "at the newest commit: no worker trains"
        self.note(f"stopping {where} (Ctrl-C again to stop at once)")

    def record(self, event: Event) -> None:
        """Shows an event of the ledger."""
        match event:
            case events.GenerationStarted():
                self._phase = "training"
                self._newest |= {name: getattr(event, name) for name in ("world_size", "generation")}
                self._newest["step"] = event.first_step
            case events.Resumed():  # from an older commit than expected, if newer ones were rejected
                self._newest["step"] = event.step
            case events.WorkerFailed():
                self._phase = WORKER_FAILED
            case events.EvaluationStarted():
                self._phase = f"evaluating ({event.name})"
            case events.EvaluationFinished():
                self._phase = "training"
        if (line := describe_event(event)) is not None:
            self.note(line)

    def show_update(self, update: DriverUpdate) -> None:
        """Shows the newest progress."""
        if update.num_alive < self._min_workers and self._phase == WORKER_FAILED:
            self._phase = f"{WORKER_FAILED}, waiting for its replacement"
        if not update.num_alive and self._phase == "training" and update.outcome is None:
            self._phase = "waiting for workers on nodes that are not drained"
        newest = self._newest | update.progress
        if newest["generation"] < self._newest["generation"]:  # the progress is still that of the generation before
            newest |= {name: self._newest[name] for name in ("step", "world_size")}
        numbers = {name: newest[name] for name in ("samples", "world_size")}
        self.update(newest["step"], loss=newest.get("loss"), state=self._phase, **numbers)


def describe_event(event: Event) -> str | None:
    """Returns the line that the driver prints for an event of the ledger, or None for most events."""
    match event:
        case events.GenerationStarted():
            workers = "1 worker" if event.world_size == 1 else f"{event.world_size} workers"
            return f"[step {event.first_step}] generation {event.generation} ({event.reason}): {workers}"
        case events.GenerationFormed(standing_by=number) if number:
            workers = "1 ready worker stands" if number == 1 else f"{number} ready workers stand"
            return f"{workers} by: even_micro_batches allows {event.world_size}"
        case events.CommitSucceeded():
            return f"[step {event.step}] checkpoint committed in {event.seconds:.2f} s"
        case events.CommitFailed():
            return f"[step {event.step}] commit failed: {event.error.splitlines()[0]}"
        case events.CommitSkipped():
            return f"[step {event.step}] commit skipped: the previous one is still being written"
        case events.CommitRejected():
            return f"commit {event.key} skipped: {event.reason}"
        case events.StepSkipped():
            scale = "" if event.loss_scale is None else f"; the loss scale is now {event.loss_scale:g}"
            return f"[step {event.step}] update skipped: {event.reason}{scale}"
        case events.EvaluationFinished():
            return f"[step {event.step}] {event.name} {event.loss:.4f}"
        case events.HyperparametersDiffer():
            used = (
                "the values in the code are used from here on"
                if event.uses_code
                else "the saved values are used, because a commit of version 0.1.0 does not tell what the code said"
            )
            lines = [f"  {each['name']}: {_short(each['saved'])} -> {_short(each['now'])}" for each in event.changes]
            return "\n".join(
                [f"[step {event.step}] hyperparameters differ between the commit and the code; {used}:", *lines]
            )
        case events.WeightsLoaded():
            differences = {"missing": event.missing, "unexpected": event.unexpected, "converted": event.converted}
            counts = [f"{len(names)} {kind}" for kind, names in differences.items() if names]
            source = event.uri if event.step is None else f"step {event.step} of {event.uri}"
            return f"loaded weights from {', '.join([source, *counts])}"
        case events.Warned():
            return event.text
        case events.WorkerFailed():
            # A worker that reports this has only seen a connection break, perhaps to a worker whose function raised.
            what = "a connection between workers broke" if event.reported_by else WORKER_FAILED
            return f"generation {event.generation}: {what}: {event.error.splitlines()[0]}"
        case events.WorkerLeft():
            why = "it or its node is shutting down" if event.kind == "drain" else "the run was resized"
            return f"a worker left: {why}"
        case events.NewcomerFailed():
            lines = event.error.rstrip().splitlines()
            is_crash = event.error.startswith(EXITED)  # with its stack below; otherwise it can be a traceback
            return f"a worker failed before it trained: {lines[0 if is_crash else -1]}"
        case events.StartFailed():
            return f"workers failed to start, trying again: {event.error.rstrip().splitlines()[-1]}"
        case events.HangDetected():
            return f"hang: no progress on any worker for {event.seconds:g} s; their stacks are in the ledger"
        case events.RendezvousRestarted():
            return "the rendezvous process was restarted; training continued"
    return None


def _short(value: Any) -> Any:
    """Returns a hyperparameter with the first six digits of its numbers."""
    if isinstance(value, list):
        return f"[{', '.join(str(_short(item)) for item in value)}]"
    return f"{value:.6g}" if isinstance(value, float) else value
