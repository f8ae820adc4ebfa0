"""A driver's console: a line for each decision in the run, and the progress of training."""

from __future__ import annotations

import sys
from typing import Any

from elastic_ddp.checkpoint import Commit
from elastic_ddp.console import Tolerant
from elastic_ddp.rendezvous.messages import DriverUpdate
from elastic_ddp.telemetry import Progress, events
from elastic_ddp.telemetry.description import describe_event
from elastic_ddp.telemetry.event import PEER_FAILED, Event


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
                self._phase = PEER_FAILED
            case events.EvaluationStarted():
                self._phase = f"evaluating ({event.name})"
            case events.EvaluationFinished():
                self._phase = "training"
        line = describe_event(event)
        if line is not None:
            self.note(line)

    def show_update(self, update: DriverUpdate) -> None:
        """Shows the newest progress."""
        if update.num_alive < self._min_workers and self._phase == PEER_FAILED:
            self._phase = f"{PEER_FAILED}, waiting for its replacement"
        if not update.num_alive and self._phase == "training" and update.outcome is None:
            self._phase = "waiting for workers on nodes that are not drained"
        newest = self._newest | update.progress
        if newest["generation"] < self._newest["generation"]:  # the progress is still from the generation before
            newest |= {name: self._newest[name] for name in ("step", "world_size")}
        numbers = {name: newest[name] for name in ("samples", "world_size")}
        self.update(newest["step"], loss=newest.get("loss"), state=self._phase, **numbers)
