"""One session of a run, from the start of its workers to their end, in one driver process."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping
from typing import Any

import ray

from elastic_ddp.checkpoint import Commit, CommitCatalog
from elastic_ddp.data.user_code import import_failure
from elastic_ddp.distributed.step_agreement import EMPTY_SAMPLES_DIGEST
from elastic_ddp.driver.cluster_watch import GcsWatch, WaitWatch
from elastic_ddp.driver.display import RunDisplay
from elastic_ddp.driver.metrics import RunMetrics
from elastic_ddp.driver.ray_train import run_workers
from elastic_ddp.errors import ConfigError, WorkersFailedError
from elastic_ddp.loggers.delivery import LoggedSession
from elastic_ddp.loggers.logger import Logger
from elastic_ddp.loggers.run_loggers import RunLoggers
from elastic_ddp.ray_internals import has_ray_ended
from elastic_ddp.rendezvous.actor import RendezvousHandle
from elastic_ddp.rendezvous.messages import DriverUpdate
from elastic_ddp.signals import StopRequests
from elastic_ddp.storage.lease import DriverLease
from elastic_ddp.telemetry import Ledger, read_ledger
from elastic_ddp.telemetry.event import Event
from elastic_ddp.telemetry.events import RunFailed, RunFinished, SessionEnded, SessionStarted
from elastic_ddp.telemetry.step_values import lost_steps
from elastic_ddp.telemetry.versions import versions
from elastic_ddp.worker.job import COMMITS, Job

EXIT_TIMEOUT_S = 5.0
"""How long workers may take to exit after the run is over, while no save is in progress. Then they are killed."""
RAY_CHECK_S = 3.0
"""How long to wait for an answer before the next check that Ray's processes are alive."""
MAX_CHECKS = 4
"""Checks without an answer, after a request to stop, until any process of Ray that has exited ends the session."""
RETRY_S = 0.5
"""Seconds between two calls of the rendezvous, if it fails or while workers exit."""


class RayEndedError(Exception):
    """Ray's processes on this machine, or its GCS on the head node, have ended."""


class Session:
    """Runs the workers in a background thread; the main thread writes the ledger and shows progress.

    Call `run` once, then `end_workers` and `close_ledger`, whatever `run` raised. The lease must be held. Start-up
    began at `started_at`, a Unix time.
    """

    def __init__(
        self,
        job: Job,
        rendezvous: RendezvousHandle,
        resume_from: Commit | None,
        lease: DriverLease,
        started_at: float,
        gcs: GcsWatch,
        loggers: Mapping[str, Logger] | None = None,
    ) -> None:
        self._job = job
        self._lease = lease
        self._rendezvous = rendezvous
        self._ledger = Ledger(job.storage, lease.session)
        self._display = RunDisplay(job.total_steps, job.config.min_workers, resume_from)
        self._metrics = RunMetrics(job.config.name, resume_from)
        self._wait_watch = WaitWatch(job.config)
        self._gcs = gcs
        config = job.config.recorded()
        logged = LoggedSession(job.storage, lease.session, config, self._display.note, lease.replaced.is_set)
        self.loggers = RunLoggers(loggers or {}, logged)
        """Must be finished after `close_ledger`, and left at the end of the session."""
        self.stop_requests = StopRequests()
        """Must be entered before `run`, and left at the end of the session."""
        self._num_events = 0
        """Events received from the rendezvous."""
        self._error: BaseException | None = None
        self._controllers: list[Any] = []
        self._thread = threading.Thread(target=self._run_workers, name="ray-train", daemon=True)
        earlier = read_ledger(job.storage) if resume_from else []
        self._append(
            SessionStarted(
                at=started_at,
                resumed_from_step=resume_from.step if resume_from else None,
                total_steps=job.total_steps,
                config=config,
                versions=versions(),
            )
        )
        for event in lost_steps(earlier, resume_from.record, resume_from.step) if resume_from else ():
            self._append(event)
        self._ledger.flush()

    def run(self) -> dict[str, Any]:
        """Trains, and returns the outcome: `status`, and the facts or the error that a worker reported last.

        Raises DriverReplacedError if another driver takes over the run.
        """
        self._thread.start()
        self.loggers.start()
        with self._display:
            try:
                outcome = self._follow()
            except RayEndedError:
                outcome = self._outcome_without_ray()
        if outcome["status"] == "failed":
            self._append(RunFailed(error=outcome["error"], kind=outcome.get("kind")))
        self._append(RunFinished(**outcome))
        self._flush()
        return outcome

    def _run_workers(self) -> None:
        try:
            run_workers(self._job, self._rendezvous, self._controllers.append)
        except BaseException as error:
            self._error = error

    def _follow(self) -> dict[str, Any]:
        """Records and shows events until the run is over, and returns its outcome."""
        stopping = False
        while True:
            self._check_ownership()
            self._check_ray()
            if (self.stop_requests.requested or self._gcs.is_lost) and not stopping:
                self._call(self._rendezvous.stop)
            running = self._thread.is_alive()  # before the update, or its last events could be missed
            update = self._receive_update()
            if update.stopping and not stopping:
                stopping = True
                self._display.announce_stop(update.num_alive)
            self._display.show_update(update)
            if self._gcs.is_lost and (update.outcome or not update.num_alive or self._gcs.is_over):
                raise RayEndedError
            if running and not stopping and update.outcome is None and not self._gcs.is_away:
                self._show_wait(update)
            if not running:
                return update.outcome or (self._outcome_of_newest_commit() if stopping else self._failure())
            if update.outcome is not None:
                self._wait_for_workers()
                return update.outcome
            if stopping and not update.num_alive:
                return self._outcome_of_newest_commit()  # Ray Train may wait forever for capacity

    def _show_wait(self, update: DriverUpdate) -> None:
        """Prints what the run waits for, and passes it to the rendezvous for `elastic-ddp status`."""
        before = self._wait_watch.reason
        line = self._wait_watch.update(update.num_alive, update.draining)
        if line is not None:
            self._display.note(line)
        if self._wait_watch.reason != before:
            self._call(self._rendezvous.set_waiting_for, self._wait_watch.reason)

    def _receive_update(self) -> DriverUpdate:
        """Receives new events from the rendezvous, and writes them to the ledger."""
        update: DriverUpdate = self._call(self._rendezvous.wait_for_update, self._num_events)
        for event in update.events:
            self._append(event)
            self._display.record(event)
        self._num_events += len(update.events)
        if update.events:
            self._flush()
        self._metrics.refresh()
        return update

    def _append(self, event: Event) -> None:
        """Adds an event to the ledger, and to the metrics even while the storage fails."""
        self._ledger.append(event)
        self._metrics.record(event)

    def _flush(self) -> None:
        """Stores the events, and lets the loggers read them."""
        self._ledger.flush()
        self.loggers.notify()

    def _call(self, method: Any, *arguments: Any) -> Any:
        """Calls the rendezvous, and retries while it fails: its snapshot file may be on a disk that is full."""
        is_reported = False
        while True:
            try:
                return self._get(method.remote(*arguments))
            except (ray.exceptions.RayActorError, ray.exceptions.RuntimeEnvSetupError) as error:
                missing = import_failure(error)
                if missing is None:
                    raise
                raise missing from None  # Ray's text is long
            except ray.exceptions.RayTaskError as error:
                if not is_reported:
                    self._display.note(f"the rendezvous fails, retrying every {RETRY_S:g} s: {error.cause}")
                is_reported = True
            self._check_ownership()
            time.sleep(RETRY_S)

    def _get(self, answer: Any) -> Any:
        """Waits for an answer. Ray itself would wait for a minute after its own end, and then end the process."""
        for number in itertools.count(1):
            try:
                return ray.get(answer, timeout=RAY_CHECK_S)
            except ray.exceptions.GetTimeoutError:
                if has_ray_ended(is_ending=self.stop_requests.requested and number >= MAX_CHECKS):
                    raise RayEndedError from None

    def _check_ray(self) -> None:
        """Prints whether the GCS has gone away or come back. Once it is lost, the run has to commit and end."""
        if not self.stop_requests.requested and has_ray_ended(is_ending=False):
            self._gcs.is_lost = True  # no process restarts it
        line = self._gcs.check()
        if line is not None:
            self._display.note(line)

    def _check_ownership(self) -> None:
        self._lease.check()
        if self.stop_requests.at_once:
            raise KeyboardInterrupt

    def _wait_for_workers(self) -> None:
        """Records events while workers exit. Waits for a save in progress, but not for a worker that hangs."""
        save_deadline = exit_deadline = time.monotonic() + EXIT_TIMEOUT_S
        save_deadline += self._job.config.drain_deadline_s
        while True:
            running = self._thread.is_alive()
            update = self._receive_update()
            now = time.monotonic()
            if update.is_saving:
                exit_deadline = min(now + EXIT_TIMEOUT_S, save_deadline)
            if not running or now >= exit_deadline or self.stop_requests.at_once:
                return
            self._thread.join(RETRY_S)

    def end_workers(self) -> None:
        """Kills workers that are left, and ends the thread: a process that exits with a thread in Ray crashes."""
        self._metrics.end()
        if self._gcs.is_lost:
            ray.shutdown()  # at the exit of this process, Ray would wait for the GCS and then print a line of its own
            return
        self._thread.join(EXIT_TIMEOUT_S)
        for controller in self._controllers:
            ray.kill(controller)
        self._thread.join(EXIT_TIMEOUT_S)

    def close_ledger(self) -> None:
        """Writes the last event of the session. Raises StorageError if events cannot be stored."""
        self._ledger.append(SessionEnded())
        self._ledger.close()

    def _outcome_of_newest_commit(self) -> dict[str, Any]:
        """The outcome of a run that was stopped while no worker trained."""
        newest = CommitCatalog(self._job.storage.at(COMMITS)).latest()
        record = newest.record if newest else {}
        return {
            "status": "stopped",
            "steps": newest.step if newest else 0,
            "samples": record.get("samples", 0),
            "samples_sha256": record.get("samples_sha256", EMPTY_SAMPLES_DIGEST),
            "epochs": newest.step / self._job.shape.steps_per_epoch if newest else 0.0,
        }

    def _outcome_without_ray(self) -> dict[str, Any]:
        """The outcome if Ray's processes have ended before the run."""
        if self.stop_requests.requested:
            self._display.note(
                "Ray has ended before the run could commit, because the signal has reached its processes, too. Signal "
                "the driver alone, and let fit start Ray or use RAY_ADDRESS."
            )
            return self._outcome_of_newest_commit()
        what = "Ray's processes on this machine have ended."
        if self._gcs.is_away:
            what = (
                f"Ray's GCS at {self._gcs.address} has not responded for {self._gcs.patience_s:g} s. Restart the "
                "cluster with ray up, or with ray start --head on its head node."
            )
        return _failed(f"{what} The same command resumes the run from its newest commit.")

    def _failure(self) -> dict[str, Any]:
        """The outcome if the workers have exited and none reported one."""
        missing = import_failure(self._error)
        if missing is not None:
            return _failed(str(missing), ConfigError)
        reason = str(self._error or "all workers exited without reporting a result")
        limit = self._job.config.max_restarts
        return _failed(f"more workers failed than max_restarts={limit} allows, or none could start: {reason}")


def _failed(error: str, kind: type[Exception] = WorkersFailedError) -> dict[str, Any]:
    return {"status": "failed", "kind": kind.__name__, "error": error}
