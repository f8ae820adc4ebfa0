"""`WorkerMembership`: one worker's place in the run's generations. It joins, prepares for the next, and leaves."""

from __future__ import annotations

import gc
import logging
import math
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from elastic_ddp.distributed.assignment import Assignment
from elastic_ddp.distributed.fsdp_units import device_of_shards
from elastic_ddp.distributed.process_group import is_peer_failure
from elastic_ddp.distributed.torch_store import StoreConnection
from elastic_ddp.errors import WorkersFailedError, format_exception
from elastic_ddp.rendezvous import standby_process
from elastic_ddp.rendezvous.coordinator import PREPARE_S
from elastic_ddp.rendezvous.hang import STORING
from elastic_ddp.rendezvous.members import JoinRequest
from elastic_ddp.rendezvous.messages import PlannedAssignment
from elastic_ddp.rendezvous.user_place import frames_of
from elastic_ddp.telemetry.event import PEER_FAILED, RESUMED, RUN_ENDED, STARTED, STATE_TRANSFERRED
from elastic_ddp.telemetry.events import GenerationEnded, GenerationStarted
from elastic_ddp.tensors.host_memory import free_bytes
from elastic_ddp.worker.agreement import AgreedEvents
from elastic_ddp.worker.clock import WorkerClock
from elastic_ddp.worker.collective_tasks import CollectiveTasks
from elastic_ddp.worker.generation import Generation, feeds_of, micro_batches_of, strategy_of
from elastic_ddp.worker.state_sharing import GenerationInputs
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
MAX_FAILURES_IN_A_ROW = 3
"""After this many failures with the same workers, the step itself is the likely cause, not a connection."""
LONG_STEP_S = 1.0
"""With steps this long, the 0.1 s until the first rows are read do not matter."""


class RestartTraining(BaseException):
    """Ends the training function in a worker whose state the next generation cannot use.

    The worker calls the function again, with the state of a peer or of the newest commit. Not an Exception, so that
    `except Exception` does not catch it.
    """


class ConsecutiveFailures:
    """Counts how often in a row the same workers failed, without getting past the place of the last failure.

    A place is the index of a step. Tasks before step n are at the place n - 0.5.
    """

    def __init__(self) -> None:
        self._count = 0
        self._place = -1.0

    def record(self, place: float, what: str, failure: str) -> None:
        """Counts a failure in `what`. Raises a WorkersFailedError at the limit."""
        if math.ceil(place) < math.ceil(self._place):  # the run went back to a commit, and fails somewhere else
            self.reset()
        self._count += 1
        self._place = max(self._place, place)
        if self._count >= MAX_FAILURES_IN_A_ROW:
            raise WorkersFailedError(
                f"{what} failed {MAX_FAILURES_IN_A_ROW} times in a row on the same workers, and none of them died. The "
                f"last failure: {failure}. If one rank is slower than the others there, raise collective_timeout_s."
            )

    def record_success(self, place: float) -> None:
        """Resets the count, unless the place is repeated on the way to the failed place."""
        if place >= self._place:
            self.reset()

    def reset(self) -> None:
        self._count = 0
        self._place = -1.0


class WorkerMembership:
    """Takes a worker and its state from generation to generation. The loop over steps runs inside generations.

    Attributes:
        generation: the current generation, or None.
        holds_state: whether this worker has been in a generation, so that its state counts.
        tasks: the collective tasks outside of steps.
        failures: failures of steps and of these tasks.
        clock: measures the phases of this worker.
        agreed_events: records events that all ranks know.
    """

    def __init__(
        self, job: Job, client: RendezvousClient, *, state: TrainState, checkpointer: Checkpointer, device: torch.device
    ) -> None:
        self.generation: Generation | None = None
        self.clock = WorkerClock(client.activity, device)
        self.activity = client.activity
        self.holds_state = False
        self.tasks = CollectiveTasks()
        self.failures = ConsecutiveFailures()
        self.agreed_events = AgreedEvents(client.record)
        self._job = job
        self._client = client
        self._state = state
        self._checkpointer = checkpointer
        self._store = StoreConnection()
        self._feeds = feeds_of(job, device)
        self._inputs = GenerationInputs(
            job=job,
            state=state,
            device=device,
            store=self._store,
            feeds=self._feeds,
            clock=self.clock,
            restore=checkpointer.restore,
            record=client.record,
            on_forming=lambda group: client.set_abort(group.abort),
        )
        self._failure: str | None = None  # how a peer failed, until this worker has joined again
        self._preparing_since: float | None = None  # when this worker began to prepare for another generation
        self._was_rank_0 = False
        self._num_on_node = 1  # how many workers of the run each node has, about
        self._has_restarted = False
        self._has_warmed_up = False
        self._kept_assignment: Assignment | None = None  # in the generation that waits while this worker restarts
        self._num_broken = 0  # generations of the same members in a row that failed to form

    def restart(self, state: TrainState) -> None:
        self.holds_state = False
        self.tasks = CollectiveTasks()
        self._state = state
        self._inputs = replace(self._inputs, state=state)
        self._preparing_since = None
        self._has_restarted = True
        self._has_warmed_up = False

    # Joining.

    def join(self, *, task: str | None = None) -> None:
        """Joins generations until one trains. If a peer fails while a generation forms, joins again.

        `task` is the collective task that this worker is in. Raises RestartTraining if the next generation cannot use
        this worker's state.
        """
        if not self.holds_state:
            # Closing a generation collects garbage, which takes 0.2 s unless imported modules are frozen.
            gc.collect()
            gc.freeze()
            self._stand_by()
        while self._num_broken < MAX_FORM_ATTEMPTS:
            if self._state.is_torn:
                step = self._state.position.step
                _log.warning("the state of step %d is discarded: %s. Training restarts.", step, self._failure)
            if self._state.has_lost_shards or self._state.is_torn:
                raise RestartTraining
            assignment = self._request_assignment(task)
            if assignment.source is None and (self._has_warmed_up or self._state.is_sharded):
                # No member has a state, or shards are lost, so the run may start from this worker's state. Its warm-up
                # step may have changed other objects than the model and the optimizer, so the training function
                # restarts. The other members wait.
                self._kept_assignment = assignment
                raise RestartTraining
            self._num_broken = self._num_broken + 1 if assignment.same_members else 0
            try:
                generation = self._open(assignment)
                if assignment.in_collective_task:
                    self._compare_tasks(generation, task)
                if not assignment.handover_only:
                    self._num_broken = 0
                    if not assignment.same_members:
                        self.failures.reset()
                    return
                if not assignment.ends_after_transfer:
                    self.commit(may_fail=True)  # if the storage fails it, the members keep the state and rejoin
                self.leave(intact=True, reason=STATE_TRANSFERRED)
                self._num_broken = 0 if self._failure is None else self._num_broken
                continue
            except BaseException as error:
                if not is_peer_failure(error):
                    raise
                self._failure = format_exception(error)
            # Outside of the except block: the traceback would keep the process group alive.
            self._client.set_abort(None)
            self.leave(intact=False)
        raise WorkersFailedError(
            f"a generation of the same workers failed to form {MAX_FORM_ATTEMPTS} times in a row, though none of them "
            f"died. The last failure: {self._failure}. Check the network between the nodes."
        )

    def _stand_by(self) -> None:
        """Waits while this worker is a standby. Then reads the first rows of its place, while the others train."""
        if standby_process.has_place():
            return
        self._feeds.shut_down()  # it would have to skip all rows until then, and its tasks may hold CPUs
        standby_process.wait_for_place()
        planned = self._client.plan_join()
        if planned is not None:
            self._read_ahead(planned)
            self._feeds.wait()

    def _request_assignment(self, task: str | None) -> Assignment:
        kept = self._kept_assignment
        if kept is not None:
            self._kept_assignment = None
            return kept
        self.activity.enter("rendezvous")
        failure = self._failure
        self._failure = None
        shards = self._state.shards
        held = self._state.held
        step = self._state.position.step if held is None else held.step
        holds_state = self.holds_state if shards is None else bool(shards.held)
        request = JoinRequest(
            member=self._client.member,
            step=step if holds_state else None,
            updates=len(self._state.updates),
            shards=shards if holds_state else None,
            can_finish=self._state.finish_step is not None,
            fewest_workers=1 if held is None else held.fewest_ranks(self._free_bytes()),
            between_steps=task is None,
            committed=self._checkpointer.durable_step,
            resumable=not (self._state.is_changing or self.tasks.steps_have_ended),
            failure=failure,
            account=self.clock.account.seconds(),
        )
        return self._client.join(request, while_waiting=self._read_ahead)

    def _free_bytes(self) -> int:
        """Returns the free memory of this rank for shards: of its GPU, or its part of the host's."""
        device = device_of_shards(self._job.config, self._inputs.device)
        free = free_bytes(device)
        return free // self._num_on_node if device.type == "cpu" or self._job.config.shares_gpu else free

    def _open(self, assignment: Assignment) -> Generation:
        self.clock.form(self._checkpointer.worked_s)
        generation = self.generation = Generation.open(self._inputs, assignment, self._num_broken)
        self._client.set_abort(generation.abort)
        self.clock.ready(assignment.generation, self._state.position.step, generation.group.num_collectives)
        self._checkpointer.schedule.generation_formed(assignment.num_nodes)
        was_rank_0 = self._was_rank_0
        self._was_rank_0 = assignment.rank == 0
        self.holds_state = True
        self._num_on_node = -(-assignment.world_size // assignment.num_nodes)
        if assignment.rank == 0:
            step = self._state.position.step
            reason = RESUMED if assignment.reason == STARTED and step else assignment.reason
            if not was_rank_0:
                self.agreed_events.report_again()
            number, size = assignment.generation, assignment.world_size
            self._client.record(GenerationStarted(generation=number, world_size=size, first_step=step, reason=reason))
            if not was_rank_0 and assignment.source is not None:
                self._checkpointer.refresh_newest(step)
        return generation

    def _compare_tasks(self, generation: Generation, task: str | None) -> None:
        wanted = self.tasks.next(self._state.position.step, task) if task is not None else None
        with self.activity.within("collective"):
            messages = generation.group.all_gather_bytes(self.tasks.message(wanted))
        self.tasks.compare(wanted, messages)

    # Preparing.

    def warm_up(self) -> WarmupStep | None:
        """Makes slow first uses of libraries and storage. Returns the step to warm up with, if one is useful."""
        self._checkpointer.warm_up(self._state)
        self._store.connect_with_retry(self._client.store_address)
        planned = self._client.plan_join()
        self._read_ahead(planned or self._place_in_group())
        self._feeds.wait()
        batch = self._feeds.peek()
        # With FSDP all ranks restart together, and the model may be too large for one rank.
        # It needs weights, which a model on the meta device may first get from a file or from a peer.
        model = self._state.model
        has_weights = model is not None and not model.first_weights.uninitialized
        is_useful = strategy_of(self._job.config).replicates_state and not self._has_restarted and has_weights
        if planned is None or batch is None or not batch.num_rows or not is_useful:
            return None
        self.activity.enter("warm-up")
        self._has_warmed_up = True
        epoch = self._job.shape.epoch_of(planned.step)
        return WarmupStep(self._state, batch, planned=planned, epoch=epoch, seed=self._job.config.seed)

    def read_ahead(self) -> None:
        """Starts to read while the training function builds: the first pipeline of a process takes seconds."""
        self._read_ahead(self._client.plan_join() or self._place_in_group())

    def _place_in_group(self) -> PlannedAssignment:
        """Returns the place that this worker gets if its group forms the first generation of a new run."""
        rank, size = self._client.member.rank_in_group, self._client.member.group_size
        fits = size <= self._job.config.num_micro_batches
        return PlannedAssignment(rank=rank if fits else 0, world_size=size if fits else 1, step=0)

    def _read_ahead(self, planned: PlannedAssignment) -> bool:
        """Starts to read the rows of a planned place. Returns whether the first rows of the feed are read."""
        if planned.step >= self._job.total_steps:
            return True
        if self._inputs.device.type == "cuda" and not standby_process.has_place():
            return False  # its rows would be on the GPU of another worker
        micro_batches = micro_batches_of(self._job.config, planned.rank, planned.world_size)
        return self._feeds.prepare(micro_batches, planned.step)

    def is_ready_to_change(self, steps_done: int) -> bool:
        """Returns whether this worker is ready for a change of membership after the current step."""
        if not self._client.signals.reconfigure:
            self._preparing_since = None
            return self._client.disconnected  # it cannot receive the request, and must not block it
        if self._preparing_since is None:
            self._preparing_since = time.monotonic()
        planned = self._client.signals.planned
        if planned is None or self.clock.account.step_s >= LONG_STEP_S:
            return True
        is_ready = self._read_ahead(planned._replace(step=steps_done))
        return is_ready or time.monotonic() - self._preparing_since >= PREPARE_S

    # Inside a generation.

    def run_collective(self, name: str, task: Callable[[Generation], Result], what: str | None = None) -> Result:
        """Runs a task that all ranks do together outside of steps. If a peer fails, runs it again with the survivors.

        Errors call the task `what`, by default its name.

        The task returns a JSON value, identical on all ranks. If survivors run other tasks, raises a TasksDifferError.
        """
        while True:
            step = self._state.position.step
            current = self.tasks.next(step, name)
            if self.generation is None:
                self.join(task=name)
                continue
            known = self.tasks.result_of_others(current)
            self.clock.collective()
            try:
                with self.activity.section(f"{what or repr(name)} after {step} steps"):
                    result: Result = task(self.generation) if known is None else known[0]
            except BaseException as error:
                if not is_peer_failure(error):
                    raise
                failure = format_exception(error)
            else:
                self.tasks.done(current, result)
                self.failures.record_success(step - 0.5)
                return result
            self.failures.record(step - 0.5, f"{name!r} after {step} steps", failure)
            self.peer_failed(failure, in_step=False)

    def save(self) -> None:
        """Starts to save the state. Every rank calls it; it returns when this rank's share is copied."""
        assert self.generation is not None
        with self.clock.commit(self._checkpointer.worked_s):
            account = self.clock.account.seconds()
            events = list(self.agreed_events.newest)
            self._checkpointer.save(self._state, self.generation.group, account=account, events=events)

    def commit(self, *, may_fail: bool = False) -> None:
        """Saves the state and waits; see `Checkpointer.wait`. On rank 0 it returns when the commit is complete."""
        assert self.generation is not None
        self.save()
        with self.clock.commit(self._checkpointer.worked_s):
            self._checkpointer.wait(self.generation.group, may_fail=may_fail)

    # Leaving.

    def peer_failed(self, failure: str, *, in_step: bool) -> None:
        """Leaves the generation, in which a peer has failed. The next `join` reports how."""
        self._failure = failure
        self.clock.failed(frames_of(sys._getframe()), in_step=in_step)
        self.leave(intact=False)

    def leave(self, *, intact: bool, reason: str | None = None) -> None:
        """Leaves the generation, if there is one. If all members leave now (`intact`), they meet in a barrier first."""
        reason = reason or (RUN_ENDED if intact else PEER_FAILED)
        if self.generation is not None and intact:
            try:
                with self.activity.within("leaving"):
                    if self._state.is_sharded and self._state.held is None and reason != RUN_ENDED:
                        self._state.hold()
                    self.generation.group.barrier()
            except Exception as error:
                if not is_peer_failure(error):
                    raise
                self._failure = format_exception(error)
                intact = False
                reason = PEER_FAILED
                self.clock.barrier_failed()
        self.clock.leave()
        generation = self.generation
        self.generation = None
        if generation is not None:
            if reason == PEER_FAILED:
                self._keep_shards(generation)
            self._checkpointer.generation_ended(intact=intact)
            self._client.set_abort(None)
            if generation.group.rank == 0:
                step, account = self._state.position.step, self.clock.account.seconds()
                ended = GenerationEnded(generation=generation.number, last_step=step, reason=reason, account=account)
                self._client.record(ended)
            generation.close(intact=intact)

    def _keep_shards(self, generation: Generation) -> None:
        """After a failure, keeps this rank's shards if they are of one step."""
        state = self._state
        if not state.is_sharded or state.held is not None or state.is_torn:
            return
        generation.strategy.reshard()
        if state.finish_step is not None:
            return  # the next generation decides which step the shards are of
        try:
            state.hold()
        except Exception as error:
            if not is_peer_failure(error):
                raise
            # The state_dict() of a registered object gathers shards.

    def shut_down(self, *, save_within_s: float) -> None:
        """Stops reading, and waits up to `save_within_s` for the running save."""
        self._feeds.shut_down()
        with self.activity.within(STORING, self._checkpointer.worked_s):
            self._checkpointer.close(save_within_s)
