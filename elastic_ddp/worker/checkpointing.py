"""When a run commits, what a commit says of it, and the one that it begins from."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from elastic_ddp.checkpoint import CheckpointStore, Commit, CommitCatalog, Retention, Save, Saver
from elastic_ddp.checkpoint.interval import MeasuredInterval
from elastic_ddp.checkpoint.metrics import METRICS, Metrics
from elastic_ddp.checkpoint.saver import RankFailedError, is_of_storage
from elastic_ddp.checkpoint.store import SupersededError
from elastic_ddp.distributed.store import StoreConnection, StoreMailbox
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
from elastic_ddp.storage.retry import RetryingStorage
from elastic_ddp.storage.watchdog import STALL_TIMEOUT_S
from elastic_ddp.telemetry.events import (
    CommitFailed,
    CommitRejected,
    CommitSkipped,
    CommitStarted,
    CommitSucceeded,
    Resumed,
)
from elastic_ddp.telemetry.summary import WORKER_FAILED
from elastic_ddp.telemetry.versions import versions
from elastic_ddp.worker.job import COMMITS
from elastic_ddp.worker.restore import restore

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_ddp.config.run_config import CheckpointConfig
    from elastic_ddp.distributed.process_group import ProcessGroup
    from elastic_ddp.rendezvous.client import RendezvousClient
    from elastic_ddp.tensors.state_tree import Layout
    from elastic_ddp.worker.job import Job
    from elastic_ddp.worker.train_state import TrainState

_log = logging.getLogger(__name__)

OF_RANK_0 = frozenset({"user"})
"""Components of the state that may differ between ranks, for all that is known: the first one's count."""
REST_S, LONGEST_REST_S = 5.0, 60.0
"""After a save that failed, before another that no interval asks for: twice as long after each in a row."""
LOOK_S = 0.05
"""How often whoever waits for a save looks whether its generation broke."""


_NOT_OF_THE_SAVE = (PeerFailedError, DriverReplacedError, ReplicasDifferError)
"""What a save may find out beside whether it succeeds: this worker, or the run, may not go on."""


class Checkpointer:
    """The commits of a run, as one worker sees them. All ranks write them, behind training; rank 0 makes them complete,
    and its clock and its ear say when.

    Args:
        before: those of this process before the user's function began again. It has one saver, and so one save at a
            time and one copy of the state, however often that happens, and what was measured stays known.

    Attributes:
        step: steps done when the interval to the next one began to count, as far as this worker knows.
        durable_step: the same, of the newest that this worker made complete itself.
    """

    def __init__(self, job: Job, client: RendezvousClient, before: Checkpointer | None = None) -> None:
        self._job, self._client = job, client
        settings = job.config.checkpoint
        self.step: int | None = None
        self.durable_step: int | None = None
        self._known_step: int | None = None
        """Steps done in the newest one that is there, which the storage said or this worker made."""
        self._at = time.monotonic()
        self._answered = 0
        """The newest request to commit that was met."""
        self._meeting = 0
        """The newest that a save meets which this worker began as rank 0, unless that fails."""
        self._metrics = Metrics()
        """As far as this worker knows. One that has just come knows those of the newest commit, once it is rank 0."""
        self._failed = 0
        """How many in a row, where this worker was rank 0 in them."""
        self._rests_until = -math.inf
        self._has_counted = False
        """Whether losses were counted in this process, as they came."""
        if before is None:
            self._storage = RetryingStorage(job.storage.at(COMMITS))
            store = CheckpointStore(self._storage, keep=retention_of(settings))
            self._saver = Saver(self._storage, store, of_rank_0=OF_RANK_0)
            self._connection = StoreConnection()
            is_measured = settings.is_measured
            self._interval = MeasuredInterval(settings.interval, settings.max_overhead) if is_measured else None
        else:
            before._hear_of_newest()
            self._storage, self._saver, self._connection = before._storage, before._saver, before._connection
            self._interval, self._has_counted = before._interval, before._has_counted
            self.step, self._known_step, self._at = before.step, before._known_step, before._at
            self._answered, self._metrics = before._answered, before._metrics
            self._failed, self._rests_until = before._failed, before._rests_until
        self._store = CommitCatalog(self._storage)
        """To restore from. What it has passed over is news."""
        self._look: threading.Thread | None = None
        self._begun = (0, 0)
        """A generation, and how many were begun in it."""
        self._current: int | None = None
        """The generation that the newest one was begun in, while that goes on."""
        self._num_unmeasured, self._was_measured = 0, False
        self._mailbox: tuple[int, StoreMailbox] | None = None
        """That of the newest generation with a save."""
        self._outcome: Commit | Exception | None = None
        """Of the save before, where this worker was rank 0 in it."""

    def should_commit(self, steps_done: int) -> bool:
        """Whether rank 0 votes for one after the step at hand. Where commits stay by what is measured, none is due
        after the last step unless somebody asks for it: the one that comes when the user's function has returned knows
        what is evaluated until then."""
        settings = self._job.config.checkpoint
        if steps_done == self._job.total_steps and settings.best_metric is not None:
            return self.is_asked_for
        every, seconds = settings.every_steps, settings.every_seconds
        seconds = self._interval.seconds if self._interval is not None else seconds
        due = every is not None and steps_done - (self.step or 0) >= every
        overdue = seconds is not None and time.monotonic() - self._at >= seconds
        return due or overdue or self.is_asked_for

    @property
    def is_asked_for(self) -> bool:
        """Whether somebody waits for one that is not under way, and it is not too soon after one that failed."""
        return self._client.commit_requested > max(self._answered, self._meeting) and not self.in_backoff

    @property
    def in_backoff(self) -> bool:
        """Whether one has just failed: the storage gets some time to recover, unless the next is due."""
        return time.monotonic() < self._rests_until

    def rest(self, group: ProcessGroup) -> None:
        """Waits until that is over, or the generation breaks."""
        while self.in_backoff and not group.aborted:
            self._client.activity.tick()
            time.sleep(LOOK_S)

    @property
    def is_saving(self) -> bool:
        """Whether one is under way, for all that this rank has to do with it. There is one at a time."""
        return self._saver.is_busy

    def worked_s(self) -> float:
        """For how long the storage has been at work for this worker, as in `RetryingStorage.worked_s`."""
        return self._storage.worked_s()

    def skip(self, steps_done: int) -> None:
        """One is due while another is under way: the next comes when its time has come again, unless it is to make up
        for one that did not come to be. Rank 0 calls it."""
        if not self.is_asked_for and self._at > -math.inf:
            self._note(steps_done)
            self._client.record(CommitSkipped(step=steps_done))

    def check(self) -> None:
        """What the last save found out, if this worker may not go on. Rank 0 calls it.

        Raises:
            PeerFailedError: this worker was presumed dead.
            DriverReplacedError: nothing is committed any more.
            ReplicasDifferError: ranks do not hold the same.
        """
        if isinstance(self._outcome, _NOT_OF_THE_SAVE):
            outcome, self._outcome = self._outcome, None
            raise outcome

    def refresh_newest(self, steps_done: int) -> None:
        """What the one before committed is for the storage to say: for a worker that has just become rank 0, and has a
        state of so many steps. It is asked in the background, by a store of its own: all the others would wait for the
        answer."""
        self._look = threading.Thread(
            target=self._ask_storage, args=[self.step, self._begun, steps_done], name="newest-commit", daemon=True
        )
        self._look.start()

    def _ask_storage(self, noted: int | None, begun: tuple[int, int], steps_done: int) -> None:
        try:
            newest = _newest(CommitCatalog(self._storage, self._say_rejected), steps_done)
        except StorageError as error:
            _log.warning("what was committed last cannot be read: %s", error)
            return
        if newest is not None:
            self._metrics.merge(newest.record)
            if self._interval is not None:
                self._interval.go_on_from(newest.record)
        found = newest.step if newest is not None else None
        if (self.step, self._begun) == (noted, begun):  # else one was begun meanwhile, perhaps at the same step
            self._known_step = found
            if noted != found:  # the one that was noted did not come to be, so far
                self.step, self._at = found, -math.inf if noted is not None else self._at

    def is_committed(self, step: int, group: ProcessGroup) -> bool:
        """Whether the state after so many steps is durable. Rank 0 calls it; it waits for the save at hand, and on a
        worker that has just become rank 0 for the storage to say so.

        Raises:
            PeerFailedError: the generation broke meanwhile.
        """
        self._hear_of_newest()
        self._wait_in(group)
        return self._known_step == step

    def _hear_of_newest(self) -> None:
        """Waits for what the storage says of it, if it was asked."""
        if self._look is not None:
            self._look.join(STALL_TIMEOUT_S)
            self._look = None

    def restore(self, group: ProcessGroup, spread: Callable[[], Layout | None]) -> dict[str, Any] | None:
        """The state of the newest commit that can be used, on the CPU, or this rank's part of it; None if there has
        been none. Every rank calls it; `spread` is as for `restoring.restore`.

        Raises:
            CheckpointError: on rank 0: there are commits, or were until they were set aside, and none can be used.
            ConfigError: some rank has not the memory for it.
            StorageError: the storage could not be read.
        """
        newest = restore(
            self._store,
            self._storage,
            group,
            spread,
            check_ours=self._check_ours,
            fence=partial(self._check_may_commit, group.assignment.generation),
            tick=self._client.activity.tick,
        )
        for key, reason in self._store.rejected:
            self._say_rejected(key, reason)
        if newest is None:
            if self._store.rejected:
                reasons = "; ".join(f"{key}: {reason}" for key, reason in self._store.rejected)
                folders = ["commits", *(["set-aside"] if self._storage.list("set-aside") else [])]
                all_of_them = " and ".join(f"{self._storage.uri}/{each}" for each in folders)
                raise CheckpointError(
                    f"no commit of run {self._job.config.name!r} can be used: {reasons}. Repair them, make them "
                    f"readable, or delete {all_of_them} to begin again, or use another name; the run does not silently "
                    "start over"
                )
            if group.rank == 0 and (aside := self._storage.list("set-aside")):
                raise CheckpointError(
                    f"run {self._job.config.name!r} has no commit but those set aside because they did not verify: "
                    f"{aside}. Repair one and move it back, as commits/20.json for step 20, or delete set-aside/, or "
                    "use another name; the run does not silently start over"
                )
            # What this worker knows is of steps that are made once more.
            self.step, self._known_step, self._at = None, None, time.monotonic()
            self._metrics.restore({})
            return None
        commit, state = newest
        self._note(commit.step)
        self._known_step = commit.step
        self._metrics.restore(commit.record)
        if self._interval is not None:
            self._interval.go_on_from(commit.record)
            if group.assignment.reason == WORKER_FAILED and not self._has_counted:  # those who could tell are lost
                self._interval.record_failure()
        if group.rank == 0:
            self._client.record(Resumed(step=commit.step))
        return state

    def _check_ours(self, commit: Commit) -> None:
        """Raises a CheckpointError for a commit of another run, which somebody has put here."""
        if (difference := self._job.difference_to(commit.record)) is not None:
            raise CheckpointError(
                f"{commit.key} is of another run, where {difference}. To begin with its weights, use run.load_weights"
            )

    def _say_rejected(self, key: str, reason: str) -> None:
        self._client.record(CommitRejected(key=key, reason=reason))

    def warm_up(self, state: TrainState) -> None:
        """What the first save of a process would have training wait for.

        Raises:
            CheckpointError: the state holds something that cannot be kept.
        """
        self._saver.warm_up(state.state_dict())
        # Not while a process group forms: where addresses are translated, what connects meanwhile is taken for its own.
        self._connection.connect_with_retry(self._client.store_address)

    def measured(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records metrics, by name, measured after `step` steps. They count for the next commit that is begun."""
        self._metrics.update(step, metrics)

    def save(self, state: TrainState, group: ProcessGroup, *, account: dict[str, float]) -> None:
        """Begins to make the state durable, once the save before has ended. Every rank calls it, and may change the
        state when it returns.

        Raises:
            CheckpointError: the state holds something that cannot be kept.
            PeerFailedError: the generation broke before the save before had ended.
            ReplicasDifferError: on rank 0: ranks do not hold the same, as the save before has shown.
        """
        generation, step, begun_at = group.assignment.generation, state.position.step, time.monotonic()
        number = self._begun[1] + 1 if self._begun[0] == generation else 1
        self._begun, self._current = (generation, number), generation
        request = self._client.commit_requested

        def end(outcome: Commit | Exception) -> None:
            seconds, self._outcome = time.monotonic() - begun_at, outcome
            if isinstance(outcome, Commit):
                self.durable_step = self._known_step = step
                self._failed, self._rests_until = 0, -math.inf
                self._answered = max(self._answered, request)
                if self._interval is not None:
                    self._interval.saved(seconds)
                self._client.record(
                    CommitSucceeded(
                        generation=generation,
                        step=step,
                        seconds=seconds,
                        num_bytes=outcome.num_bytes,
                        request=request or None,
                        account=account,
                        interval_s=round(self._interval.seconds, 3) if self._interval is not None else None,
                    )
                )
                return
            self._meeting = 0
            for_want_of_a_rank = isinstance(outcome, RankFailedError) and self._current != generation
            goes_without = for_want_of_a_rank or isinstance(outcome, SupersededError)
            if goes_without:  # the others, or those of the next generation, can do it, at once
                self.step, self._at = self._known_step, -math.inf
            counts = not (goes_without or isinstance(outcome, _NOT_OF_THE_SAVE))
            if counts:
                self._failed += 1
                doublings = min(self._failed - 1, 30)
                self._rests_until = time.monotonic() + min(REST_S * 2**doublings, LONGEST_REST_S)
            self._client.record(
                CommitFailed(
                    generation=generation,
                    step=step,
                    seconds=seconds,
                    error=format_exception(outcome),
                    counts=counts,
                    of_storage=is_of_storage(outcome),
                )
            )

        attempt = hashlib.sha256(f"{self._job.session}/{generation}/{step}/{number}".encode()).hexdigest()[:32]
        save = Save(
            step=step,
            attempt=attempt,
            world_size=group.world_size,
            rank=group.rank,
            mailbox=self._mailbox_in(group) if group.world_size > 1 else None,
            record=self._record(state, generation),
            fence=partial(self._check_may_commit, generation),
            on_end=end,
            on_reject=self._say_rejected,
            is_current=lambda: self._current == generation,
        )
        if group.rank == 0:
            self._warn_unmeasured(save.record)
        self._wait_in(group)
        if isinstance(self._outcome, ReplicasDifferError):  # the next sample might not show it
            raise self._outcome
        self._outcome = None
        copied_at = time.monotonic()
        with self._client.activity.within("collective"):  # registered state may put its shards together
            values = state.state_dict()
        if group.rank == 0:
            self._client.record(CommitStarted(generation=generation, step=step))
            self._meeting = request
        self._saver.begin(values, save)
        if self._interval is not None:
            self._interval.stalled(time.monotonic() - copied_at)
        self._note(step)

    def _mailbox_in(self, group: ProcessGroup) -> StoreMailbox:
        """One for all saves of a generation: where the store has moved meanwhile it is found once."""
        assignment = group.assignment
        if self._mailbox is None or self._mailbox[0] != assignment.generation:
            address, name = (assignment.store_host, assignment.store_port), f"saves{assignment.generation}"
            mailbox = StoreMailbox(self._connection, address, self._client.store_address, name)
            self._mailbox = (assignment.generation, mailbox)
        return self._mailbox[1]

    def _check_may_commit(self, generation: int) -> None:
        """Raises if what this worker does in the storage in a generation is not what the run does any more.

        Raises:
            PeerFailedError: this worker was presumed dead, or others have begun from a commit since.
            DriverReplacedError: its driver is not the run's.
        """
        if (reason := self._client.why_not_commit(generation)) is not None:
            raise PeerFailedError(reason)
        with self._storage.operation_in_progress():
            driver = find_holder(RetryingStorage(self._job.storage))
        if driver is not None and driver.session != self._job.session:
            raise DriverReplacedError(
                f"run {self._job.config.name!r} was taken over by another driver: {driver}. Nothing of this one is "
                "committed any more"
            )

    def _warn_unmeasured(self, record: Mapping[str, Any]) -> None:
        metric = self._job.config.checkpoint.best_metric
        self._was_measured = self._was_measured or metric in record[METRICS]
        if metric is None or self._was_measured:
            return
        self._num_unmeasured += 1
        if self._num_unmeasured == 2:  # the first may be of a state that is evaluated right after it was committed
            known = ", ".join(record[METRICS]) or "none"
            _log.warning(
                "checkpoint.best_metric=%r has no value so far, and no commit can be the best by it; "
                "give it to step.log or as the name of run.evaluate. Metrics that have one: %s",
                metric,
                known,
            )

    def _note(self, step: int) -> None:
        """From here on it is counted when the next one is due."""
        self.step, self._at = step, time.monotonic()

    def wait(self, group: ProcessGroup) -> None:
        """Until the save that was begun last has ended, for this rank.

        Raises:
            PeerFailedError: the generation broke meanwhile.
            Exception: on rank 0, what it failed of.
        """
        self._wait_in(group)
        if isinstance(self._outcome, RankFailedError):
            raise PeerFailedError(str(self._outcome))
        if isinstance(self._outcome, Exception):
            raise self._outcome

    def _wait_in(self, group: ProcessGroup) -> None:
        """Where a save hangs, whoever waits for another's share is not to blame."""
        while not self._has_ended_soon():
            if group.aborted:
                raise PeerFailedError("a peer was lost while the state was made durable")

    def _has_ended_soon(self) -> bool:
        """Whether the save at hand has ended, after a moment if it has not."""
        if self._saver.wait(within_s=LOOK_S):
            return True
        activity = self._client.activity
        place: Place = "shares" if self._saver.awaits_others else STORING
        if place != activity.now.place:
            activity.enter(place, self.worked_s)
        return False

    def generation_ended(self, *, intact: bool) -> None:
        """This worker's generation is over; `intact` if no rank of it was lost."""
        self._current = None
        if not intact:
            self._saver.generation_broke()
            self._has_counted = True
            if self._interval is not None:
                self._interval.record_failure()

    def close(self, within_s: float = math.inf) -> None:
        """Waits for the save at hand, if there is one. Every save ends: what hangs in it is given up, and so is a rank
        that has fallen silent."""
        end = time.monotonic() + within_s
        while not self._has_ended_soon() and time.monotonic() < end:
            pass

    def _record(self, state: TrainState, generation: int) -> dict[str, Any]:
        position = state.position
        return {
            "time": time.time(),
            "samples": position.samples,
            "samples_sha256": position.samples_sha256,
            "epoch": self._job.shape.epoch_of(position.step),
            "generation": generation,
            "data": self._job.index.fingerprint,
            "identity": self._job.config.identity(),
            "versions": versions(),
            **self._metrics.to_record(),
            **(self._interval.record() if self._interval is not None else {}),
        }


def _newest(store: CommitCatalog, steps_done: int) -> Commit | None:
    """The newest commit on the way to a state of so many steps. Later ones were passed over when the run resumed, and
    may not have been set aside. The one of this very state is read: nobody commits it again if it is there.

    Raises:
        StorageError: the storage could not be read.
    """
    for commit in store.candidates():
        if commit.step < steps_done:
            return commit
        if commit.step == steps_done:
            try:
                store.verify(commit)
            except FileNotFoundError:
                continue
            except CheckpointError as error:
                store.reject(commit.key, commit.attempt, error)
            else:
                return commit
    return None


def retention_of(settings: CheckpointConfig) -> Retention:
    """Which commits stay, as the configuration says it."""
    return Retention(
        last=settings.keep,
        every_steps=settings.keep_every_steps,
        best=settings.keep_best or 0,
        metric=settings.best_metric,
        mode=settings.best_mode,
    )
