"""One worker's part in the run's generations: how it gets into one, gets ready for the next, and leaves."""

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
from elastic_ddp.telemetry.account import HANDED_ON, PEER_FAILED, RUN_ENDED, Account
from elastic_ddp.telemetry.events import GenerationEnded, GenerationStarted
from elastic_ddp.worker.collective_tasks import CollectiveTasks
from elastic_ddp.worker.generation import Generation, feeds_of, micro_batches_of, strategy_of
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

FORMED_AGAIN = 10
"""Times that a generation may break while it forms, before something else than a death is taken for the cause."""
LONG_STEP_S = 1.0
"""Steps beside which the tenth of a second is nothing that the first rows take to come."""


class RestartTraining(BaseException):
    """Ends the user's function in a worker whose state is of no use to the next generation: it is to begin again, with
    that of a peer, or from the newest commit. Not an Exception: `except Exception` lets it pass."""


class WorkerMembership:
    """A worker goes from generation to generation with its state, and the loop over steps runs within them.

    Attributes:
        generation: the one that this worker is in, if it is in one.
        account: of its time in that.
        activity: where it is, for whoever looks for a hang.
        holds_state: whether it has been in one, and so has a state that counts.
        tasks: what it does with all others outside of steps.
    """

    def __init__(
        self, job: Job, client: RendezvousClient, *, state: TrainState, checkpointer: Checkpointer, device: torch.device
    ) -> None:
        self.generation: Generation | None = None
        self.account = Account(still_s=lambda: client.activity.still_s)
        self.activity = client.activity
        self.holds_state = False
        self.tasks = CollectiveTasks()
        self._job, self._client, self._state, self._checkpointer, self._device = (
            job,
            client,
            state,
            checkpointer,
            device,
        )
        self._feeds = feeds_of(job, device)
        self._store = StoreConnection()
        self._failure: str | None = None
        """How a peer of this process's last generation was lost, if the user's function has begun again since."""
        self._preparing_since: float | None = None
        """Since when this worker gets ready for another generation."""
        self._was_first = False
        self._begins_again = False
        """Whether this process has been through the user's function before: what is slow the first time was."""
        self._broken = 0
        """Times that a generation of the same workers has broken while it formed."""
        self._failures = ConsecutiveFailures()
        """Of what all workers do together outside of steps."""

    def join(self, failure: str | None = None, *, amid: str | None = None) -> Generation:
        """Gets into the next generation in which steps are made, formed again if a peer is lost while it forms.

        Args:
            lost: how a peer of the last one was lost, if one was.
            amid: what this worker does together with the others, who have begun it with it, outside of steps.

        Raises:
            RestartTraining: it is of no use there as it is.
        """
        account = self.account.seconds()
        failure, self._failure = failure or self._failure, None
        if not self.holds_state:
            # A generation's end looks for garbage that holds on to its process group, which takes 0.2 s among all that
            # has been imported and built, and next to nothing among what is new since now.
            gc.collect()
            gc.freeze()
        while self._broken < FORMED_AGAIN:
            if self._state.is_torn:
                text = "a peer was lost while step %d changed the state (%s): the training function begins again"
                _log.warning(text, self._state.position.step, failure)
            if self._state.is_sharded or self._state.is_torn:
                self._failure = failure
                raise RestartTraining
            self.activity.enter("rendezvous")
            step = self._state.position.step if self.holds_state else None
            assignment = self._client.join(
                step=step,
                between_steps=amid is None,
                failure=failure,
                committed=self._checkpointer.durable_step,
                account=account,
                resumable=not (self._state.is_changing or self.tasks.steps_have_ended),
                while_waiting=self._read_ahead,
            )
            failure = None
            self._broken = self._broken + 1 if assignment.same_members else 0
            try:
                self.generation = generation = self._open(assignment, self._broken)
                if assignment.in_collective_task:
                    self._compare_tasks(generation, amid)
                if not assignment.handover_only:
                    self._broken = 0
                    self._failures.forget_unless_again(generation)
                    return generation
                self._hand_on(generation)
                self._broken = 0
            except BaseException as error:
                if not is_peer_failure(error):
                    raise
                failure = format_exception(error)
            # Here the traceback is gone, and with it what held the process group.
            self._client.abort_when_broken(None)
            self.leave(intact=False)
            account = self.account.seconds()
        raise WorkersFailedError(
            f"a generation of the same workers broke {FORMED_AGAIN} times while it formed, though none of them died. "
            f"The last time: {failure}. Look at the network between the nodes"
        )

    def carry_over_from(self, before: WorkerMembership) -> None:
        """This one begins where that of the same worker before it ended."""
        self.account, self._failure, self._was_first = before.account, before._failure, before._was_first
        self._broken, self._failures = before._broken, before._failures
        self._begins_again = True

    def warm_up(self) -> WarmupStep | None:
        """What nobody is to wait for when this worker joins for the first time: all that is slow the first time in a
        process. Returns the step that it should rehearse, if others train meanwhile."""
        self._checkpointer.warm_up(self._state)
        self._store.connect_with_retry(self._client.store_address)
        place = self._client.ask_for_prospect()
        self._read_ahead(place or PlannedAssignment(rank=0, world_size=1, step=0))
        self._feeds.wait()  # the first pipeline takes seconds
        batch = self._feeds.peek()
        if place is None or batch is None or not batch.num_rows or not strategy_of(self._job.config).replicates_state:
            return None  # or all begin again together, and the whole model may be too large for one
        if self._begins_again:
            return None  # others wait for it
        self.activity.enter("warm-up")
        epoch = self._job.shape.epoch_of(place.step)
        return WarmupStep(self._state, batch, place=place, epoch=epoch, seed=self._job.config.seed)

    def _read_ahead(self, prospect: PlannedAssignment) -> bool:
        """Has the rows of a place that this worker may get read. Returns whether the first of them are there."""
        if prospect.step >= self._job.total_steps:
            return True
        micro_batches = micro_batches_of(
            prospect.rank, num_micro_batches=self._job.config.num_micro_batches, world_size=prospect.world_size
        )
        return self._feeds.prepare(micro_batches, prospect.step)

    def is_ready_to_change(self, steps_done: int) -> bool:
        """Whether membership may change after the step at hand, for all that this worker knows."""
        if not self._client.reconfigure_requested:
            self._preparing_since = None
            return self._client.disconnected  # it will not hear, and is in nobody's way
        if self._preparing_since is None:
            self._preparing_since = time.monotonic()
        prospect = self._client.prospect
        if prospect is None or self.account.step_s >= LONG_STEP_S:
            return True
        is_ready = self._read_ahead(prospect._replace(step=steps_done))
        return is_ready or time.monotonic() - self._preparing_since >= PREPARE_S

    def _open(self, assignment: Assignment, attempt: int = 0) -> Generation:
        """Takes this worker's place in a generation."""
        self.account.begin()
        self.activity.enter("hand-over", self._checkpointer.worked_s)
        generation = Generation.open(
            assignment,
            job=self._job,
            state=self._state,
            device=self._device,
            store=self._store,
            feeds=self._feeds,
            restore=self._checkpointer.restore,
            on_forming=lambda group: self._client.abort_when_broken(group.abort),
            on_formed=self.account.formed,
            activity=self.activity,
            attempt=attempt,
        )
        self._client.abort_when_broken(generation.abort)
        self.account.ready()
        self.activity.enter("between steps")
        was_first, self._was_first = self._was_first, assignment.rank == 0
        self.holds_state = True
        if assignment.rank == 0:
            resumes = assignment.reason == "start" and self._state.position.step
            self._client.record(
                GenerationStarted(
                    generation=assignment.generation,
                    world_size=assignment.world_size,
                    first_step=self._state.position.step,
                    reason="resume" if resumes else assignment.reason,
                )
            )
            if not was_first and assignment.source is not None:
                self._checkpointer.refresh_newest(self._state.position.step)
        return generation

    def _compare_tasks(self, generation: Generation, amid: str | None) -> None:
        step = self._state.position.step
        wanted = self.tasks.next(step, amid) if amid is not None else None
        with self.activity.within("collective"):
            everyone = generation.group.all_gather_bytes(self.tasks.message(wanted))
        self.tasks.compare(wanted, everyone)

    def _hand_on(self, generation: Generation) -> None:
        """In a brief generation, whoever was to get the state has it now. If that was nobody, it is committed; what
        the storage fails of is counted, and no end of a run that has the state in memory."""
        if not generation.group.assignment.receivers:
            self.commit(may_fail=True)
        failure = self.leave(intact=True, reason=HANDED_ON)
        if failure is not None:
            raise PeerFailedError(failure)

    def run_collective(self, name: str, what: Callable[[Generation], Result], *, failure: str | None = None) -> Result:
        """Something that all ranks do together outside of steps, done again in a new generation if a peer is lost in
        it. Nobody can join meanwhile.

        Args:
            name: of it.
            what: it, told of the generation in which it is done. What it returns is the same on every rank, and is
                something that JSON has.
            lost: how a peer was lost before it, if one was.

        Raises:
            NotTogetherError: a peer was lost, and not all of the others do it.
            WorkersFailedError: so it was again and again, though none of them died.
        """
        self.tasks.next(self._state.position.step, name)  # if it cannot be done, nobody is kept from steps by it
        while True:
            if failure is not None:
                self.account.record_failure(in_step=False)
                self.leave(intact=False)
                self.join(failure, amid=name)
            assert self.generation is not None
            self.account.mark()
            step = self._state.position.step
            task = self.tasks.next(step, name)
            known = self.tasks.result_of_others(task)
            try:
                result: Result = what(self.generation) if known is None else known[0]
            except BaseException as error:
                if not is_peer_failure(error):
                    raise
                failure = format_exception(error)
                self._failures.count(step)
                self._failures.check(f"{name!r} after {step} steps", failure)
            else:
                self.tasks.done(task, result)
                self._failures.made(step)
                return result

    def save(self) -> None:
        """Begins to make the state durable. Every rank calls it, and goes on when its share is copied."""
        assert self.generation is not None
        with self.account.checkpoint(), self.activity.within(STORING, self._checkpointer.worked_s):
            self._checkpointer.save(self._state, self.generation.group, account=self.account.seconds())

    def commit(self, *, may_fail: bool = False) -> None:
        """Makes the state durable. Every rank calls it; rank 0 returns when that is so.

        Args:
            may_fail: the storage may; then rank 0 returns once it has had time to recover.
        """
        assert self.generation is not None
        self.save()
        with self.account.checkpoint(), self.activity.within(STORING, self._checkpointer.worked_s):
            try:
                self._checkpointer.wait(self.generation.group)
            except StorageError as error:
                if not may_fail:
                    raise
                _log.warning("the state is not durable yet: %s", format_exception(error))
                self._checkpointer.wait_for_backoff(self.generation.group)

    def shut_down(self, *, save_within_s: float) -> None:
        """Nothing is read or saved any more, once the save at hand has ended, or so many seconds are over."""
        self._feeds.shut_down()
        with self.activity.within(STORING, self._checkpointer.worked_s):
            self._checkpointer.close(save_within_s)

    def leave(self, *, intact: bool, reason: str | None = None) -> str | None:
        """Leaves the generation, if there is one; `intact` when all its members do. Returns how one of them was lost
        before all were through: then it was left as if it had broken."""
        failure, reason = None, reason or (RUN_ENDED if intact else PEER_FAILED)
        if self.generation is not None and intact:
            try:
                with self.activity.within("leaving"):
                    self.generation.group.barrier()
            except Exception as error:
                if not is_peer_failure(error):
                    raise
                failure = format_exception(error)
                self.account.waited()
        self.account.end()
        generation, self.generation = self.generation, None
        if generation is not None:
            intact = intact and failure is None
            self._checkpointer.generation_ended(intact=intact)
            self._client.abort_when_broken(None)
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
