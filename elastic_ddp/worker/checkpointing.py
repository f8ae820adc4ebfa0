"""`Checkpointer`: how a run commits and restores, as one worker sees it. `commit_schedule` decides when."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from elastic_ddp.checkpoint import CheckpointStore, Commit, CommitCatalog, Retention, Save, Saver
from elastic_ddp.checkpoint.record import METRICS, Metrics, describe_unmeasured
from elastic_ddp.checkpoint.saver import RankFailedError, is_of_storage
from elastic_ddp.checkpoint.store import SupersededError
from elastic_ddp.distributed.torch_store import StoreConnection, StoreMailbox
from elastic_ddp.errors import (
    CheckpointError,
    DriverReplacedError,
    PeerFailedError,
    ReplicasDifferError,
    StorageError,
    format_exception,
)
from elastic_ddp.rendezvous.hang import STORING, Place
from elastic_ddp.storage.lease import find_holder
from elastic_ddp.storage.watchdog import STALL_TIMEOUT_S, WatchedStorage
from elastic_ddp.telemetry.event import WORKER_FAILED, Event
from elastic_ddp.telemetry.events import (
    CommitFailed,
    CommitRejected,
    CommitSkipped,
    CommitStarted,
    CommitSucceeded,
    Resumed,
    Warned,
)
from elastic_ddp.telemetry.step_values import steps_record
from elastic_ddp.telemetry.versions import versions
from elastic_ddp.worker.commit_schedule import CommitSchedule
from elastic_ddp.worker.job import COMMITS
from elastic_ddp.worker.nonfinite import weights_error
from elastic_ddp.worker.restore import check_no_commits, newest_before, restore

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_ddp.distributed.process_group import ProcessGroup
    from elastic_ddp.rendezvous.client import RendezvousClient
    from elastic_ddp.tensors.state_tree import Layout
    from elastic_ddp.worker.job import Job
    from elastic_ddp.worker.train_state import TrainState

_log = logging.getLogger(__name__)

OF_RANK_0 = frozenset({"user"})
"""Components of the state that may differ between ranks; rank 0's are saved."""
METRICS_OF_EVERY_RUN = frozenset({"loss", "grad_norm", "loss_scale"})
"""The metrics of every run."""
SAVE_POLL_S = 0.05
"""How often a rank that waits for a save checks whether its generation broke."""
_STOPS_WORKER = (PeerFailedError, DriverReplacedError, ReplicasDifferError)
"""Errors that end this worker or the run. They do not count as failed saves."""


class Checkpointer:
    """Saves and restores the state of a run, one save at a time. All ranks write in the background; rank 0 commits.

    Attributes:
        metrics: the newest values, for the next commit that is begun.
        worked_s: returns for how many seconds the storage has worked for this worker.
        verified_step: steps done in the newest state that all ranks were found to hold alike; None if there is none.
        roll_back_to: steps done in the newest state that the next restore may use; None for any.
        durable_step: steps done in the newest commit that this worker completed since the training function started.
    """

    def __init__(self, job: Job, client: RendezvousClient) -> None:
        self._job = job
        self._client = client
        settings = job.config.checkpoint
        self.schedule = CommitSchedule(
            settings, job.total_steps, lambda: client.signals.commit, steps_per_epoch=job.shape.steps_per_epoch
        )
        self.metrics = Metrics()
        self.verified_step: int | None = None
        self.roll_back_to: int | None = None
        self.durable_step: int | None = None
        self._storage = WatchedStorage((job.debugged or job.storage).at(COMMITS))
        self.worked_s = self._storage.worked_s
        keep = Retention(
            last=settings.keep,
            every_steps=settings.keep_every_steps,
            best=settings.keep_best or 0,
            metric=settings.best_metric,
            mode=settings.best_mode,
        )
        self._saver = Saver(self._storage, CheckpointStore(self._storage, keep=keep), of_rank_0=OF_RANK_0)
        self._connection = StoreConnection()
        self._refresh: threading.Thread | None = None
        self._num_saves = (0, 0)  # a generation, and the number of saves that this rank began in it
        self._current: int | None = None  # the generation of the newest save, until that generation ends
        self._outcome: Commit | Exception | None = None  # on rank 0: of the newest save that has ended
        self._num_unmeasured = 0  # commits without a value of `best_metric`, until 2 of them are reported

    def restart(self) -> None:
        """Prepares for another call of the training function in this process. The running save must have ended."""
        self._join_refresh()
        self.durable_step = self._outcome = None

    def warm_up(self, state: TrainState) -> None:
        """Prepares the first save, so that training does not wait for it. Raises a CheckpointError as `save` does."""
        if not any(tensor.is_meta for tensor in (*state.module.parameters(), *state.module.buffers())):
            self._saver.warm_up(state.state_dict())  # otherwise FSDP makes them, and looks at the state then
        # Not while a process group forms: with address translation, its connections could be confused with this one.
        self._connection.connect_with_retry(self._client.store_address)

    # Saving.

    @property
    def is_saving(self) -> bool:
        """Whether this rank still takes part in a save. One save runs at a time."""
        return self._saver.is_busy

    def save(
        self, state: TrainState, group: ProcessGroup, *, account: dict[str, float], events: Sequence[Event]
    ) -> None:
        """Waits for the previous save, copies the state, and starts to write the copy in the background.

        Every rank calls it, and may change the state when it returns. On rank 0 it raises as `check` does. The newest
        `events` are saved with the state.

        Raises:
            CheckpointError: the state holds something that cannot be saved.
            NonFiniteError: a weight is NaN or infinite.
            PeerFailedError: the generation ended before the previous save.
        """
        assignment = group.assignment
        step = state.position.step
        request = self._client.signals.commit
        generation = assignment.generation
        address = (assignment.store_host, assignment.store_port)
        number = self._num_saves[1] + 1 if self._num_saves[0] == generation else 1
        self._num_saves = (generation, number)
        self._current = generation
        mailbox = StoreMailbox(self._connection, address, self._client.store_address, f"saves{generation}")
        save = Save(
            step=step,
            attempt=hashlib.sha256(f"{self._job.session}/{generation}/{step}/{number}".encode()).hexdigest()[:32],
            world_size=group.world_size,
            rank=group.rank,
            mailbox=mailbox if group.world_size > 1 else None,
            record=self._record(state, generation) | steps_record(events),
            fence=partial(self._check_may_commit, generation),
            on_end=partial(self._save_ended, generation, step, request, time.monotonic(), account),
            on_reject=self._record_rejected,
            is_current=lambda: self._current == generation,
        )
        self._wait_in(group)
        self.check()  # a later save might not show that ranks hold different values
        self._outcome = None
        copy_began_at = time.monotonic()
        with self._client.activity.within("collective"):  # registered state may gather its shards
            values = state.state_dict()
        if self._job.config.on_nonfinite != "ignore":
            nonfinite = state.nonfinite_parameters()
            if nonfinite:
                raise weights_error(step, nonfinite)
        if self._job.debugged is not None:
            self.schedule.reset_timer(step)
            return
        if group.rank == 0:
            self._warn_if_unmeasured(save.record[METRICS])
            self._client.record(CommitStarted(generation=generation, step=step))
            self.schedule.save_started(request)
        self._saver.begin(values, save)
        self.schedule.interval.stalled(time.monotonic() - copy_began_at)
        self.schedule.reset_timer(step)

    def _save_ended(
        self,
        generation: int,
        step: int,
        request: int,
        began_at: float,
        account: dict[str, float],
        outcome: Commit | Exception,
    ) -> None:
        """Records the outcome of a save, in the saving thread of rank 0."""
        seconds = time.monotonic() - began_at
        self._outcome = outcome
        facts: dict[str, Any] = {"generation": generation, "step": step, "seconds": seconds}
        if isinstance(outcome, Commit):
            self.durable_step = step
            self.schedule.save_succeeded(step, request, seconds)
            facts |= {"request": request or None, "account": account, "interval_s": self.schedule.interval_s}
            self._client.record(CommitSucceeded(**facts, num_bytes=outcome.num_bytes))
            return
        # After a failed rank, the next generation can commit at once.
        is_over = isinstance(outcome, SupersededError) or (
            isinstance(outcome, RankFailedError) and self._current != generation
        )
        counts = not is_over and not isinstance(outcome, _STOPS_WORKER)
        self.schedule.save_failed(counts=counts, retry_at_once=is_over)
        error = format_exception(outcome)
        of_storage = is_of_storage(outcome)
        self._client.record(CommitFailed(**facts, error=error, counts=counts, of_storage=of_storage))

    def _record(self, state: TrainState, generation: int) -> dict[str, Any]:
        position = state.position
        return {
            "time": time.time(),
            "samples": position.samples,
            "samples_sha256": position.samples_sha256,
            "epoch": self._job.shape.epoch_of(position.step),
            "generation": generation,
            "versions": versions(),
            **self._job.to_record(),
            **({} if self.verified_step is None else {"verified_step": self.verified_step}),
            **self.metrics.to_record(),
            **self.schedule.to_record(),
        }

    def _warn_if_unmeasured(self, measured: Mapping[str, Any]) -> None:
        metric = self._job.config.checkpoint.best_metric
        if metric is None or metric in measured or self._num_unmeasured >= 2:
            return
        # Without metrics of the user, the first commit may come before the first evaluation.
        self._num_unmeasured = 2 if measured.keys() - METRICS_OF_EVERY_RUN else self._num_unmeasured + 1
        if self._num_unmeasured == 2:
            self._client.record(Warned(text=describe_unmeasured(metric, measured)))

    def skip(self, steps_done: int) -> None:
        """Skips a commit that is due while a save is running. Rank 0 calls it."""
        if self.schedule.skip(steps_done):
            self._client.record(CommitSkipped(step=steps_done))

    def check(self) -> None:
        """Raises an error of the newest save that stops this worker. Rank 0 calls it."""
        if isinstance(self._outcome, _STOPS_WORKER):
            outcome = self._outcome
            self._outcome = None
            raise outcome

    @property
    def replicas_differ(self) -> bool:
        """Whether the newest save found that ranks hold different state. On rank 0, until `forget_outcome`."""
        return isinstance(self._outcome, ReplicasDifferError)

    def forget_outcome(self) -> None:
        """Forgets the outcome of the newest save, because a verified step has found the rank at fault since."""
        self._outcome = None

    def _check_may_commit(self, generation: int) -> None:
        """Raises if this worker was presumed dead, if the run has resumed since, or if the driver was replaced."""
        reason = self._client.why_not_commit(generation)
        if reason is not None:
            raise PeerFailedError(reason)
        with self._storage.operation_in_progress():
            driver = find_holder(self._job.storage)
        if driver is not None and driver.session != self._job.session:
            raise DriverReplacedError(
                f"another driver has taken over run {self._job.config.name!r}: {driver}. This driver's workers no "
                "longer commit."
            )

    # Waiting.

    def wait(self, group: ProcessGroup, *, may_fail: bool = False) -> None:
        """Waits until this rank's part in the newest save has ended.

        Raises a PeerFailedError if the generation broke meanwhile, and on rank 0 the error of the save. With
        `may_fail`, it waits for the backoff after a failure of the storage instead.
        """
        self._wait_in(group)
        if isinstance(self._outcome, RankFailedError):
            raise PeerFailedError(str(self._outcome))
        if may_fail and isinstance(self._outcome, StorageError):
            while self.schedule.in_backoff and not group.aborted:
                self._client.activity.tick()
                time.sleep(SAVE_POLL_S)
        elif isinstance(self._outcome, Exception):
            raise self._outcome

    def _wait_in(self, group: ProcessGroup) -> None:
        while not self._poll_save():
            if group.aborted:
                raise PeerFailedError("a worker failed while this one waited for a save")

    def _poll_save(self) -> bool:
        """Returns whether the running save has ended; if not, returns after `SAVE_POLL_S`."""
        if self._saver.wait(within_s=SAVE_POLL_S):
            return True
        activity = self._client.activity
        place: Place = "shares" if self._saver.awaits_others else STORING
        if place != activity.now.place:
            activity.enter(place, self.worked_s)
        return False

    def generation_ended(self, *, intact: bool) -> None:
        self._current = None
        if not intact:
            self._saver.generation_broke()
            self.schedule.worker_failed()

    def close(self, within_s: float = math.inf) -> None:
        """Waits for the running save. Every save ends: storage calls and silent ranks time out."""
        end = time.monotonic() + within_s
        while not self._poll_save() and time.monotonic() < end:
            pass

    # The newest commit.

    def refresh_newest(self, steps_done: int) -> None:
        """Reads in the background which commit is the newest. A new rank 0 calls it: the former may have failed."""
        arguments = [steps_done, (self.schedule.step, self._num_saves)]
        self._refresh = threading.Thread(target=self._read_newest, args=arguments, name="newest-commit", daemon=True)
        self._refresh.start()

    def _read_newest(self, steps_done: int, unchanged: tuple[int | None, tuple[int, int]]) -> None:
        try:
            newest = newest_before(self._storage, steps_done, self._record_rejected)
        except StorageError as error:
            _log.warning("cannot read the newest commit: %s", error)
            return
        record = newest.record if newest is not None else {}
        self.metrics.merge(record)
        self.schedule.interval.merge(record)
        if (self.schedule.step, self._num_saves) == unchanged:  # otherwise a save has begun meanwhile
            self.schedule.set_newest(newest.step if newest is not None else None)

    def _join_refresh(self) -> None:
        if self._refresh is not None:
            self._refresh.join(STALL_TIMEOUT_S)
            self._refresh = None

    def is_committed(self, step: int, group: ProcessGroup) -> bool:
        """Returns on rank 0 whether the state after `step` steps is committed, once the running save has ended."""
        self._join_refresh()
        self._wait_in(group)
        return self.schedule.committed_step == step or self._job.debugged is not None

    # Restoring.

    def restore(self, group: ProcessGroup, make_layout: Callable[[], Layout | None]) -> dict[str, Any] | None:
        """Returns this rank's state from the newest usable commit, on the CPU; None if there are no commits.

        Every rank calls it. Raises as `restore.restore` does, and a CheckpointError if no commit is usable.
        """
        rolled_back = self._job.config.verify.action == "rollback" and self._roll_back(group)
        catalog = CommitCatalog(self._storage, self._record_rejected)
        restored = restore(
            catalog,
            self._storage,
            group,
            make_layout,
            check_same_run=self._job.check_same_run,
            fence=partial(self._check_may_commit, group.assignment.generation) if self._job.debugged is None else None,
            tick=self._client.activity.tick,
        )
        if restored is None:
            if group.rank == 0 and not rolled_back:
                check_no_commits(self._job.config.name, self._storage, catalog.rejected)
            self.schedule.start_over()
            self.metrics.restore({})
            return None
        commit, state = restored
        self.metrics.restore(commit.record)
        self.verified_step = commit.record.get("verified_step")
        self.schedule.resume(commit.step, commit.record, after_failure=group.assignment.reason == WORKER_FAILED)
        if group.rank == 0:
            self._client.record(Resumed(step=commit.step))
        return state

    def _roll_back(self, group: ProcessGroup) -> bool:
        """Sets aside the commits of states after the lowest `roll_back_to` of the ranks. Collective.

        Returns whether any rank has one: the run begins anew if no commit is left. From here on, no save of an earlier
        generation can commit; see `why_not_commit`.
        """
        known = [json.loads(each) for each in group.all_gather_bytes(json.dumps(self.roll_back_to).encode())]
        limits = [limit for limit in known if limit is not None]
        self.roll_back_to = None
        if not limits or group.rank != 0:
            return bool(limits)
        catalog = CommitCatalog(self._storage, self._record_rejected)
        for commit in catalog.manifests():
            if commit.step <= min(limits):
                break
            reason = f"a worker computed wrong values, and the newest verified state is of step {min(limits)}"
            catalog.reject(commit.key, commit.attempt, CheckpointError(reason))
        catalog.set_aside_rejected(partial(self._check_may_commit, group.assignment.generation))
        return True

    def _record_rejected(self, key: str, reason: str) -> None:
        self._client.record(CommitRejected(key=key, reason=reason))
