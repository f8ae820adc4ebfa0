"""`WorkerMembership`: one worker's place in the run's generations. It joins, prepares for the next, and leaves."""

from __future__ import annotations

import gc
import logging
import time
from typing import TYPE_CHECKING, TypeVar

from elastic_ddp.distributed.process_group import Assignment, is_peer_failure
from elastic_ddp.distributed.store import StoreConnection
from elastic_ddp.errors import PeerFailedError, StorageError, WorkersFailedError, format_exception
from elastic_ddp.rendezvous.coordinator import PREPARE_S
from elastic_ddp.rendezvous.hang import STORING
from elastic_ddp.rendezvous.messages import PlannedAssignment
from elastic_ddp.telemetry.account import Account
from elastic_ddp.telemetry.event import PEER_FAILED, RESUMED, RUN_ENDED, STARTED, STATE_TRANSFERRED
from elastic_ddp.telemetry.events import GenerationEnded, GenerationStarted
from elastic_ddp.worker.collective_tasks import CollectiveTasks
from elastic_ddp.worker.generation import Generation, GenerationInputs, feeds_of, micro_batches_of, strategy_of
from elastic_ddp.worker.retry_limit import ConsecutiveFailures
from elastic_ddp.worker.warmup_step import WarmupStep

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from elastic_ddp.rendezvous.client import RendezvousClient
    from elastic_ddp.worker.checkpointing import Checkpointer
    from elastic_ddp.worker.job import Job
    from elastic_ddp.worker.train_state import TrainState

Result = TypeVar("Result")

_log = logging.getLogger(__name__)

MAX_FORM_ATTEMPTS = 10
"""A generation of the same members that fails to form this often has another cause than dying workers."""
LONG_STEP_S = 1.0
"""With steps this long, the 0.1 s until the first rows are read do not matter."""


class RestartTraining(BaseException):
    """Ends the training function in a worker whose state the next generation cannot use.

    The worker calls the function again, with the state of a peer or of the newest commit. Not an Exception, so that
    `except Exception` does not catch it.
    """


class WorkerMembership:
    """Takes a worker and its state from generation to generation. The loop over steps runs inside them.

    Attributes:
        generation: the current generation, or None.
        account: how this worker spends its time in the generation.
        activity: what this worker is doing, for the detection of hangs.
        holds_state: whether this worker has been in a generation, so that its state counts.
        tasks: the collective tasks outside of steps.
    """

    def __init__(
        self, job: Job, client: RendezvousClient, *, state: TrainState, checkpointer: Checkpointer, device: torch.device
    ) -> None:
        self.generation: Generation | None = None
        self.account = Account(idle_s=lambda: client.activity.idle_s)
        self.activity = client.activity
        self.holds_state = False
        self.tasks = CollectiveTasks()
        self._job, self._client, self._state, self._checkpointer = job, client, state, checkpointer
        self._store, self._feeds = StoreConnection(), feeds_of(job, device)
        self._inputs = GenerationInputs(
            job=job,
            state=state,
            device=device,
            store=self._store,
            feeds=self._feeds,
            activity=client.activity,
            restore=checkpointer.restore,
            on_forming=lambda group: client.on_failure(group.abort),
            on_formed=lambda: self.account.formed(),
        )
        self._failure: str | None = None  # how a peer failed, if the training function has restarted since
        self._preparing_since: float | None = None  # when this worker began to prepare for another generation
        self._was_rank_0 = False
        self._has_restarted = False  # whether the training function has run in this process before
        self._num_broken = 0  # generations of the same members in a row that failed to form
        self._failures = ConsecutiveFailures()  # in collective tasks

    def carry_over_from(self, previous: WorkerMembership) -> None:
        """Continues the membership of this worker before a restart of the training function."""
        self.account, self._failure, self._was_rank_0 = previous.account, previous._failure, previous._was_rank_0
        self._num_broken, self._failures = previous._num_broken, previous._failures
        self._has_restarted = True

    # Joining.

    def join(self, failure: str | None = None, *, task: str | None = None) -> Generation:
        """Joins the next generation that makes steps. If a peer fails while it forms, joins again.

        Args:
            failure: how a peer of the last generation failed, if one did.
            task: the collective task that this worker is in, outside of steps.

        Raises:
            RestartTraining: the next generation cannot use this worker's state.
            WorkersFailedError: the generation failed to form too often, though no worker died.
        """
        account = self.account.seconds()
        failure, self._failure = failure or self._failure, None
        if not self.holds_state:
            # Closing a generation collects garbage, which takes 0.2 s unless imported modules are frozen.
            gc.collect()
            gc.freeze()
        while self._num_broken < MAX_FORM_ATTEMPTS:
            self._check_state_usable(failure)
            assignment = self._request_assignment(failure, account, is_in_task=task is not None)
            failure = None
            self._num_broken = self._num_broken + 1 if assignment.same_members else 0
            try:
                generation = self.generation = self._open(assignment)
                if assignment.in_collective_task:
                    self._compare_tasks(generation, task)
                if not assignment.handover_only:
                    self._num_broken = 0
                    self._failures.reset_for(generation)
                    return generation
                self._hand_over_and_leave(generation)
                self._num_broken = 0
            except BaseException as error:
                if not is_peer_failure(error):
                    raise
                failure = format_exception(error)
            # Outside of the except block: the traceback would keep the process group alive.
            self._client.on_failure(None)
            self.leave(intact=False)
            account = self.account.seconds()
        raise WorkersFailedError(
            f"a generation of the same workers failed to form {MAX_FORM_ATTEMPTS} times in a row, though none of them "
            f"died. The last failure: {failure}. Check the network between the nodes."
        )

    def _check_state_usable(self, failure: str | None) -> None:
        """Raises RestartTraining if this worker's state is of no use to another generation."""
        if self._state.is_torn:
            _log.warning(
                "a worker failed while step %d changed the state (%s); the training function restarts",
                self._state.position.step,
                failure,
            )
        if self._state.is_sharded or self._state.is_torn:
            self._failure = failure
            raise RestartTraining

    def _request_assignment(self, failure: str | None, account: dict[str, float], *, is_in_task: bool) -> Assignment:
        self.activity.enter("rendezvous")
        return self._client.join(
            step=self._state.position.step if self.holds_state else None,
            between_steps=not is_in_task,
            failure=failure,
            committed=self._checkpointer.durable_step,
            account=account,
            resumable=not (self._state.is_changing or self.tasks.steps_have_ended),
            while_waiting=self._read_ahead,
        )

    def _open(self, assignment: Assignment) -> Generation:
        self.account.begin()
        self.activity.enter("hand-over", self._checkpointer.worked_s)
        generation = Generation.open(self._inputs, assignment, self._num_broken)
        self._client.on_failure(generation.abort)
        self.account.ready()
        self.activity.enter("between steps")
        was_rank_0, self._was_rank_0 = self._was_rank_0, assignment.rank == 0
        self.holds_state = True
        if assignment.rank == 0:
            step = self._state.position.step
            self._client.record(
                GenerationStarted(
                    generation=assignment.generation,
                    world_size=assignment.world_size,
                    first_step=step,
                    reason=RESUMED if assignment.reason == STARTED and step else assignment.reason,
                )
            )
            if not was_rank_0 and assignment.source is not None:
                self._checkpointer.refresh_newest(step)
        return generation

    def _compare_tasks(self, generation: Generation, task: str | None) -> None:
        wanted = self.tasks.next(self._state.position.step, task) if task is not None else None
        with self.activity.within("collective"):
            messages = generation.group.all_gather_bytes(self.tasks.message(wanted))
        self.tasks.compare(wanted, messages)

    def _hand_over_and_leave(self, generation: Generation) -> None:
        """Ends a generation that makes no step. If it had no receiver for the state, commits the state.

        If the storage fails the commit, the members keep the state in memory and rejoin.
        """
        if not generation.group.assignment.receivers:
            self.commit(may_fail=True)
        failure = self.leave(intact=True, reason=STATE_TRANSFERRED)
        if failure is not None:
            raise PeerFailedError(failure)

    # Preparing.

    def warm_up(self) -> WarmupStep | None:
        """Does what is slow the first time in a process, so that no rank waits for it.

        Returns:
            The step to warm up with, or None if no other worker trains or a warm-up is of no use.
        """
        self._checkpointer.warm_up(self._state)
        self._store.connect_with_retry(self._client.store_address)
        planned = self._client.plan_join()
        self._read_ahead(planned or PlannedAssignment(rank=0, world_size=1, step=0))
        self._feeds.wait()  # the first pipeline of a process takes seconds
        batch = self._feeds.peek()
        # With FSDP all ranks restart together, and the model may be too large for one rank.
        is_useful = strategy_of(self._job.config).replicates_state and not self._has_restarted
        if planned is None or batch is None or not batch.num_rows or not is_useful:
            return None
        self.activity.enter("warm-up")
        epoch = self._job.shape.epoch_of(planned.step)
        return WarmupStep(self._state, batch, planned=planned, epoch=epoch, seed=self._job.config.seed)

    def _read_ahead(self, planned: PlannedAssignment) -> bool:
        """Starts to read the rows of a planned place. Returns whether the first of them are read."""
        if planned.step >= self._job.total_steps:
            return True
        micro_batches = micro_batches_of(
            planned.rank, num_micro_batches=self._job.config.num_micro_batches, world_size=planned.world_size
        )
        return self._feeds.prepare(micro_batches, planned.step)

    def is_ready_to_change(self, steps_done: int) -> bool:
        """Returns whether membership may change after the current step, as far as this worker is concerned."""
        if not self._client.reconfigure_requested:
            self._preparing_since = None
            return self._client.disconnected  # it cannot receive the request, and must not block it
        if self._preparing_since is None:
            self._preparing_since = time.monotonic()
        planned = self._client.planned
        if planned is None or self.account.step_s >= LONG_STEP_S:
            return True
        is_ready = self._read_ahead(planned._replace(step=steps_done))
        return is_ready or time.monotonic() - self._preparing_since >= PREPARE_S

    # Inside a generation.

    def run_collective(self, name: str, task: Callable[[Generation], Result], *, failure: str | None = None) -> Result:
        """Runs a task that all ranks do together outside of steps. If a peer fails, runs it again with the survivors.

        No worker can join meanwhile.

        Args:
            name: the task's name.
            task: receives the generation. Its result is a JSON value, identical on all ranks.
            failure: how a peer failed before the task, if one did.

        Raises:
            TasksDifferError: a peer failed, and not all survivors do this task.
            WorkersFailedError: it failed too often in a row, though no worker died.
        """
        self.tasks.next(self._state.position.step, name)  # raises before this worker leaves the generation
        while True:
            if failure is not None:
                self.account.record_failure(in_step=False)
                self.leave(intact=False)
                self.join(failure, task=name)
            assert self.generation is not None
            self.account.mark()
            step = self._state.position.step
            current = self.tasks.next(step, name)
            known = self.tasks.result_of_others(current)
            try:
                result: Result = task(self.generation) if known is None else known[0]
            except BaseException as error:
                if not is_peer_failure(error):
                    raise
                failure = format_exception(error)
                self._failures.record(step)
                self._failures.check(f"{name!r} after {step} steps", failure)
            else:
                self.tasks.done(current, result)
                self._failures.record_success(step)
                return result

    def save(self) -> None:
        """Starts to save the state. Every rank calls it; it returns when this rank's share is copied."""
        assert self.generation is not None
        with self.account.checkpoint(), self.activity.within(STORING, self._checkpointer.worked_s):
            self._checkpointer.save(self._state, self.generation.group, account=self.account.seconds())

    def commit(self, *, may_fail: bool = False) -> None:
        """Saves the state and waits. Every rank calls it; on rank 0 it returns when the commit is complete.

        Args:
            may_fail: whether to log a failure of the storage, and to wait for the backoff, instead of raising.
        """
        assert self.generation is not None
        self.save()
        with self.account.checkpoint(), self.activity.within(STORING, self._checkpointer.worked_s):
            try:
                self._checkpointer.wait(self.generation.group)
            except StorageError as error:
                if not may_fail:
                    raise
                _log.warning("the state is not committed yet: %s", format_exception(error))
                self._checkpointer.wait_for_backoff(self.generation.group)

    # Leaving.

    def leave(self, *, intact: bool, reason: str | None = None) -> str | None:
        """Leaves the generation, if there is one.

        Args:
            intact: whether all members leave it now. They meet in a barrier first.
            reason: why, for the ledger.

        Returns:
            How a member failed before the barrier, or None. The generation was then left as broken.
        """
        failure, reason = None, reason or (RUN_ENDED if intact else PEER_FAILED)
        if self.generation is not None and intact:
            try:
                with self.activity.within("leaving"):
                    self.generation.group.barrier()
            except Exception as error:
                if not is_peer_failure(error):
                    raise
                failure = format_exception(error)
                self.account.record_detection()
        self.account.end()
        generation, self.generation = self.generation, None
        if generation is not None:
            intact = intact and failure is None
            self._checkpointer.generation_ended(intact=intact)
            self._client.on_failure(None)
            if generation.group.rank == 0:
                self._client.record(
                    GenerationEnded(
                        generation=generation.number,
                        last_step=self._state.position.step,
                        reason=reason if failure is None else PEER_FAILED,
                        account=self.account.seconds(),
                    )
                )
            generation.close(intact=intact)
        return failure

    def shut_down(self, *, save_within_s: float) -> None:
        """Stops reading, and waits up to `save_within_s` for the running save."""
        self._feeds.shut_down()
        with self.activity.within(STORING, self._checkpointer.worked_s):
            self._checkpointer.close(save_within_s)
