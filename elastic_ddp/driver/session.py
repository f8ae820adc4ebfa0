"""One life of a run's driver: the workers in a thread of their own, the record and the display in the main one."""

from __future__ import annotations

import threading
import time
from typing import Any

import ray

from elastic_ddp.checkpoint import Commit, CommitCatalog
from elastic_ddp.distributed.step_agreement import EMPTY_CHAIN
from elastic_ddp.driver.ray_train import run_workers
from elastic_ddp.errors import WorkersFailedError
from elastic_ddp.rendezvous.actor import RendezvousHandle
from elastic_ddp.rendezvous.messages import DriverUpdate
from elastic_ddp.signals import StopRequests
from elastic_ddp.storage.lease import DriverLease
from elastic_ddp.telemetry import Ledger, Progress
from elastic_ddp.telemetry.events import (
    CommitFailed,
    CommitRejected,
    CommitSkipped,
    CommitSucceeded,
    EvaluationFinished,
    EvaluationStarted,
    Event,
    GenerationStarted,
    HangDetected,
    NewcomerFailed,
    RendezvousRestarted,
    Resumed,
    RunFailed,
    RunFinished,
    SessionEnded,
    SessionStarted,
    StartFailed,
    WeightsLoaded,
    WorkerFailed,
    WorkerLeft,
)
from elastic_ddp.telemetry.versions import versions
from elastic_ddp.worker.job import COMMITS, Job
from elastic_ddp.worker.main import work

WORKERS_LEAVE_S = 5.0
"""How long workers may take to leave when the run is over and nothing is saved any more, before they are ended."""
LOOK_S = 0.5
"""How often it is looked meanwhile what they say."""
A_WORKER_WAS_LOST = "a worker was lost"


class Session:
    """See the module. `run` it once, then `end_workers`, whatever became of it. What went before, since `began_at`, is
    start-up as well."""

    def __init__(
        self, job: Job, rendezvous: RendezvousHandle, resumed: Commit | None, lease: DriverLease, began_at: float
    ) -> None:
        self._job = job
        self._lease = lease
        resumed_from_step = resumed.step if resumed else None
        self._newest = {
            "step": resumed_from_step or 0,
            "samples": resumed.record.get("samples", 0) if resumed else 0,
            "world_size": 0,
            "generation": 0,
        }
        self._rendezvous = rendezvous
        self._ledger = Ledger(job.storage, lease.session)
        self._progress = Progress(job.total_steps)
        self._stop_requests = StopRequests()
        self._error: BaseException | None = None
        self._controllers: list[Any] = []
        self._thread = threading.Thread(target=self._run_workers, name="ray-train", daemon=True)
        self._ledger.append(
            SessionStarted(
                at=began_at,
                resumed_from_step=resumed_from_step,
                config=job.config.model_dump(),
                versions=versions(),
            )
        )
        self._ledger.flush()
        self._state = "starting" if resumed_from_step is None else f"resuming from step {resumed_from_step}"

    def run(self) -> dict[str, Any]:
        """The outcome: what the workers said last, or what became of them."""
        self._thread.start()
        with self._progress, self._stop_requests:
            outcome = self._follow()
        if outcome["status"] == "failed":
            self._ledger.append(RunFailed(error=outcome["error"], kind=outcome.get("kind")))
        self._ledger.append(RunFinished(**outcome))
        self._ledger.flush()
        return outcome

    def _run_workers(self) -> None:
        try:
            run_workers(
                work,
                self._job,
                self._rendezvous,
                config=self._job.config,
                storage=self._job.storage,
                on_controller=self._controllers.append,
            )
        except BaseException as error:
            self._error = error

    def _follow(self) -> dict[str, Any]:
        """Writes down and shows what happens until the workers are done."""
        seen, stopping = 0, False
        while True:
            self._lease.check()
            if self._stop_requests.count > 1:
                raise KeyboardInterrupt
            if self._stop_requests.count and not stopping:
                self._ask(self._rendezvous.stop)
            running = self._thread.is_alive()
            news: DriverUpdate = self._ask(self._rendezvous.wait_for_update, seen)
            if news.stopping and not stopping:
                stopping, self._state = True, "stopping"
                how = (
                    "committing at the next step boundary"
                    if news.num_alive
                    else "at the newest commit, as nobody trains"
                )
                self._progress.note(f"stopping: {how} (Ctrl-C again to stop at once)")
            for event in news.events:
                self._record(event)
                seen += 1
            self._show(news)
            if news.events:
                self._ledger.flush()
            if not running:
                return news.outcome or self._workers_gone(stopping)
            if news.outcome is not None:
                self._see_off(seen)
                return news.outcome
            if stopping and not news.num_alive:
                return self._stopped()  # Ray Train may wait for room for workers for ever

    def _ask(self, method: Any, *arguments: Any) -> Any:
        """What the rendezvous answers, once it can: the disk of this node, where it keeps its memory, may be full for a
        while. The run does not wait for it.

        Raises:
            KeyboardInterrupt: the second Ctrl-C came first.
        """
        is_said = False
        while True:
            try:
                return ray.get(method.remote(*arguments))
            except ray.exceptions.RayTaskError as error:
                if not is_said:
                    self._progress.note(f"the rendezvous is asked again and again, as it cannot answer: {error.cause}")
                is_said = True
            self._lease.check()
            if self._stop_requests.count > 1:
                raise KeyboardInterrupt
            time.sleep(LOOK_S)

    def _see_off(self, seen: int) -> None:
        """Writes down what workers say on leaving. One that is stuck in a user's code is not waited for; a save that is
        under way is, for as long as a worker waits for it."""
        save_by = leave_by = time.monotonic() + WORKERS_LEAVE_S
        save_by += self._job.config.drain_deadline_s
        while True:
            running = self._thread.is_alive()
            news: DriverUpdate = self._ask(self._rendezvous.wait_for_update, seen)
            for event in news.events:
                self._record(event)
                seen += 1
            now = time.monotonic()
            leave_by = min(now + WORKERS_LEAVE_S, save_by) if news.is_saving else leave_by
            if not running or now >= leave_by or self._stop_requests.count > 1:
                return
            self._thread.join(LOOK_S)

    def end_workers(self) -> None:
        """Ends what is left of them, and does not leave a thread in Ray behind: a process that exits then crashes."""
        self._thread.join(WORKERS_LEAVE_S)
        for controller in self._controllers:
            ray.kill(controller)
        self._thread.join(WORKERS_LEAVE_S)

    def close_ledger(self) -> None:
        """Puts the session's end on record, once all is over.

        Raises:
            StorageError: events are lost, as the storage still refuses them.
        """
        self._ledger.append(SessionEnded())
        self._ledger.close()

    def _stopped(self) -> dict[str, Any]:
        """Stopped with no worker in a generation: the run stands where its newest commit does."""
        newest = CommitCatalog(self._job.storage.at(COMMITS)).latest()
        record = newest.record if newest else {}
        return {
            "status": "stopped",
            "steps": newest.step if newest else 0,
            "samples": record.get("samples", 0),
            "samples_sha256": record.get("samples_sha256", EMPTY_CHAIN),
            "epochs": newest.step / self._job.shape.steps_per_epoch if newest else 0.0,
        }

    def _workers_gone(self, stopping: bool) -> dict[str, Any]:
        """The workers are done and none said how it ended."""
        if stopping:
            return self._stopped()
        reason = str(self._error or "all workers returned without a word")
        return {
            "status": "failed",
            "kind": WorkersFailedError.__name__,
            "error": f"workers were lost more often than max_restarts={self._job.config.max_restarts} allows, or could "
            f"not be started: {reason}",
        }

    def _record(self, event: Event) -> None:
        self._ledger.append(event)
        note = self._progress.note
        match event:
            case GenerationStarted():
                self._state = "training"
                self._newest |= {
                    "step": event.first_step,
                    "world_size": event.world_size,
                    "generation": event.generation,
                }
                workers = "1 worker" if event.world_size == 1 else f"{event.world_size} workers"
                note(f"generation {event.generation} ({event.reason}): {workers} from step {event.first_step}")
            case Resumed():  # it has looked into the commit, and may have passed over newer ones
                self._newest |= {"step": event.step}
            case CommitRejected():
                note(f"{event.key} is passed over: {event.reason}")
            case WeightsLoaded():
                differences = {
                    "missing": event.missing,
                    "unexpected": event.unexpected,
                    "converted": event.converted,
                }
                counts = [f"{len(names)} {what}" for what, names in differences.items() if names]
                source = f"step {event.step} in {event.uri}"
                note(f"began with the weights of {', '.join([source, *counts])}")
            case CommitSucceeded():
                note(f"committed step {event.step} in {event.seconds:.2f} s")
            case CommitFailed():
                note(f"step {event.step} could not be committed: {event.error.splitlines()[0]}")
            case CommitSkipped():
                note(f"step {event.step} is not committed: the commit before is still being written")
            case WorkerFailed():
                self._state = A_WORKER_WAS_LOST
                # Who reports it has seen that a connection broke, as that to a worker whose training function fails
                # does.
                what = "a connection between workers broke" if event.reported_by else "a worker was lost"
                note(f"{what} in generation {event.generation}: {event.error.splitlines()[0]}")
            case WorkerLeft():
                why = "it, or its node, was to go" if event.kind == "drain" else "the run was resized"
                note(f"a worker left: {why}")
            case HangDetected():
                note(f"nobody got anywhere for {event.seconds:g} s; the ledger has everybody's stacks")
            case RendezvousRestarted():
                note("the rendezvous was restarted; training went on meanwhile")
            case StartFailed():
                note(f"workers are started again: {event.error.rstrip().splitlines()[-1]}")
            case NewcomerFailed():
                note(f"a worker was lost before it trained: {event.error.rstrip().splitlines()[-1]}")
            case EvaluationStarted():
                self._state = f"evaluating ({event.name})"
            case EvaluationFinished():
                self._state = "training"
                note(f"{event.name} {event.loss:.4f} at step {event.step}")

    def _show(self, news: DriverUpdate) -> None:
        if news.num_alive < self._job.config.min_workers and self._state == A_WORKER_WAS_LOST:
            self._state = f"{A_WORKER_WAS_LOST}, waiting for its replacement"
        if not news.num_alive and self._state == "training" and news.outcome is None:
            self._state = "waiting for workers, which need a node that is not drained"
        newest = self._newest | news.progress
        if newest["generation"] < self._newest["generation"]:  # nobody has made a step in the newest one
            newest |= {name: self._newest[name] for name in ("step", "world_size")}
        self._progress.update(
            newest["step"],
            metrics={"loss": newest["loss"]} if newest.get("loss") is not None else None,
            samples=newest["samples"],
            world_size=newest["world_size"],
            state=self._state,
        )
