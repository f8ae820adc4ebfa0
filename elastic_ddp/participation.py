"""One worker's part in the run's generations: how it gets into one, gets ready for the next, and leaves."""

from __future__ import annotations

import gc
import logging
import time
from typing import TYPE_CHECKING, TypeVar

from elastic_ddp.elastic.assembly import PREPARE_S
from elastic_ddp.elastic.hang import STORING
from elastic_ddp.elastic.messages import Prospect
from elastic_ddp.errors import PeerLostError, StorageError, WorkersLostError, described
from elastic_ddp.generation import Generation, feeds_of, micro_batches_of, strategy_of
from elastic_ddp.losses import Losses
from elastic_ddp.parallel.process_group import Assignment, is_lost_peer
from elastic_ddp.parallel.store import StoreConnection
from elastic_ddp.rehearsal import Rehearsal
from elastic_ddp.telemetry.account import HANDED_ON, PEER_LOST, RUN_ENDED, Account
from elastic_ddp.together import Tasks

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from elastic_ddp.commits import Commits
    from elastic_ddp.elastic.link import RendezvousLink
    from elastic_ddp.job import Job
    from elastic_ddp.train_state import TrainState

Result = TypeVar("Result")

_log = logging.getLogger(__name__)

FORMED_AGAIN = 10
"""Times that a generation may break while it forms, before something else than a death is taken for the cause."""
LONG_STEP_S = 1.0
"""Steps beside which the tenth of a second is nothing that the first rows take to come."""


class TrainAgain(BaseException):
    """Ends the user's function in a worker whose state is of no use to the next generation: it is to begin again, with
    that of a peer, or from the newest commit. Not an Exception: `except Exception` lets it pass."""


class Participation:
    """A worker goes from generation to generation with its state, and the loop over steps runs within them.

    Attributes:
        generation: the one that this worker is in, if it is in one.
        account: of its time in that.
        activity: where it is, for whoever looks for a hang.
        holds_state: whether it has been in one, and so has a state that counts.
        tasks: what it does with all others outside of steps.
    """

    def __init__(
        self, job: Job, link: RendezvousLink, *, state: TrainState, commits: Commits, device: torch.device
    ) -> None:
        self.generation: Generation | None = None
        self.account = Account(still_s=lambda: link.activity.still_s)
        self.activity = link.activity
        self.holds_state = False
        self.tasks = Tasks()
        self._job, self._link, self._state, self._commits, self._device = job, link, state, commits, device
        self._feeds = feeds_of(job, device)
        self._store = StoreConnection()
        self._lost: str | None = None
        """How a peer of this process's last generation was lost, if the user's function has begun again since."""
        self._preparing_since: float | None = None
        """Since when this worker gets ready for another generation."""
        self._was_first = False
        self._begins_again = False
        """Whether this process has been through the user's function before: what is slow the first time was."""
        self._broken = 0
        """Times that a generation of the same workers has broken while it formed."""
        self._losses = Losses()
        """Of what all workers do together outside of steps."""

    def join(self, lost: str | None = None, *, amid: str | None = None) -> Generation:
        """Gets into the next generation in which steps are made, formed again if a peer is lost while it forms.

        Args:
            lost: how a peer of the last one was lost, if one was.
            amid: what this worker does together with the others, who have begun it with it, outside of steps.

        Raises:
            TrainAgain: it is of no use there as it is.
        """
        account = self.account.seconds()
        lost, self._lost = lost or self._lost, None
        if not self.holds_state:
            # A generation's end looks for garbage that holds on to its process group, which takes 0.2 s among all that
            # has been imported and built, and next to nothing among what is new since now.
            gc.collect()
            gc.freeze()
        while self._broken < FORMED_AGAIN:
            if self._state.is_half_changed:
                text = "a peer was lost while step %d changed the state (%s): the training function begins again"
                _log.warning(text, self._state.position.step, lost)
            if self._state.is_spread or self._state.is_half_changed:
                self._lost = lost
                raise TrainAgain
            self.activity.enter("rendezvous")
            step = self._state.position.step if self.holds_state else None
            assignment = self._link.join(
                step=step,
                between_steps=amid is None,
                lost=lost,
                committed=self._commits.durable_step,
                account=account,
                resumable=not (self._state.is_changing or self.tasks.steps_have_ended),
                while_waiting=self._read_ahead,
            )
            lost = None
            self._broken = self._broken + 1 if assignment.again else 0
            try:
                self.generation = generation = self._open(assignment, self._broken)
                if assignment.amid:
                    self._compare_tasks(generation, amid)
                if not assignment.brief:
                    self._broken = 0
                    self._losses.forget_unless_again(generation)
                    return generation
                self._hand_on(generation)
                self._broken = 0
            except BaseException as error:
                if not is_lost_peer(error):
                    raise
                lost = described(error)
            # Here the traceback is gone, and with it what held the process group.
            self._link.cut_when_broken(None)
            self.leave(intact=False)
            account = self.account.seconds()
        raise WorkersLostError(
            f"a generation of the same workers broke {FORMED_AGAIN} times while it formed, though none of them died. "
            f"The last time: {lost}. Look at the network between the nodes"
        )

    def follow(self, before: Participation) -> None:
        """This one begins where that of the same worker before it ended."""
        self.account, self._lost, self._was_first = before.account, before._lost, before._was_first
        self._broken, self._losses = before._broken, before._losses
        self._begins_again = True

    def warm_up(self) -> Rehearsal | None:
        """What nobody is to wait for when this worker joins for the first time: all that is slow the first time in a
        process. Returns the step that it should rehearse, if others train meanwhile."""
        self._commits.warm_up(self._state)
        self._store.find(self._link.store_address)
        place = self._link.ask_for_prospect()
        self._read_ahead(place or Prospect(rank=0, world_size=1, step=0))
        self._feeds.wait()  # the first pipeline takes seconds
        batch = self._feeds.peek()
        if place is None or batch is None or not batch.num_rows or not strategy_of(self._job.config).keeps_state:
            return None  # or all begin again together, and the whole model may be too large for one
        if self._begins_again:
            return None  # others wait for it
        self.activity.enter("warm-up")
        epoch = self._job.shape.epoch_of(place.step)
        return Rehearsal(self._state, batch, place=place, epoch=epoch, seed=self._job.config.seed)

    def _read_ahead(self, prospect: Prospect) -> bool:
        """Has the rows of a place that this worker may get read. Returns whether the first of them are there."""
        if prospect.step >= self._job.total_steps:
            return True
        micro_batches = micro_batches_of(
            prospect.rank, num_micro_batches=self._job.config.num_micro_batches, world_size=prospect.world_size
        )
        return self._feeds.prepare(micro_batches, prospect.step)

    def is_ready_to_change(self, steps_done: int) -> bool:
        """Whether membership may change after the step at hand, for all that this worker knows."""
        if not self._link.reconfigure_requested:
            self._preparing_since = None
            return self._link.is_deaf  # it will not hear, and is in nobody's way
        if self._preparing_since is None:
            self._preparing_since = time.monotonic()
        prospect = self._link.prospect
        if prospect is None or self.account.step_s >= LONG_STEP_S:
            return True
        is_ready = self._read_ahead(prospect._replace(step=steps_done))
        return is_ready or time.monotonic() - self._preparing_since >= PREPARE_S

    def _open(self, assignment: Assignment, attempt: int = 0) -> Generation:
        """Takes this worker's place in a generation."""
        self.account.begin()
        self.activity.enter("hand-over", self._commits.worked_s)
        generation = Generation.open(
            assignment,
            job=self._job,
            state=self._state,
            device=self._device,
            store=self._store,
            feeds=self._feeds,
            restore=self._commits.restore,
            on_forming=lambda group: self._link.cut_when_broken(group.cut),
            on_formed=self.account.formed,
            activity=self.activity,
            attempt=attempt,
        )
        self._link.cut_when_broken(generation.cut)
        self.account.ready()
        self.activity.enter("between steps")
        was_first, self._was_first = self._was_first, assignment.rank == 0
        self.holds_state = True
        if assignment.rank == 0:
            self._link.say(
                "generation",
                generation=assignment.generation,
                world_size=assignment.world_size,
                first_step=self._state.position.step,
                reason="resume" if assignment.reason == "start" and self._state.position.step else assignment.reason,
            )
            if not was_first and assignment.source is not None:
                self._commits.look(self._state.position.step)
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
        lost = self.leave(intact=True, reason=HANDED_ON)
        if lost is not None:
            raise PeerLostError(lost)

    def together(self, name: str, what: Callable[[Generation], Result], *, lost: str | None = None) -> Result:
        """Something that all ranks do together outside of steps, done again in a new generation if a peer is lost in
        it. Nobody can join meanwhile.

        Args:
            name: of it.
            what: it, told of the generation in which it is done. What it returns is the same on every rank, and is
                something that JSON has.
            lost: how a peer was lost before it, if one was.

        Raises:
            NotTogetherError: a peer was lost, and not all of the others do it.
            WorkersLostError: so it was again and again, though none of them died.
        """
        self.tasks.next(self._state.position.step, name)  # if it cannot be done, nobody is kept from steps by it
        while True:
            if lost is not None:
                self.account.lost(in_step=False)
                self.leave(intact=False)
                self.join(lost, amid=name)
            assert self.generation is not None
            self.account.mark()
            step = self._state.position.step
            task = self.tasks.next(step, name)
            known = self.tasks.result_of_others(task)
            try:
                result: Result = what(self.generation) if known is None else known[0]
            except BaseException as error:
                if not is_lost_peer(error):
                    raise
                lost = described(error)
                self._losses.count(step)
                self._losses.check(f"{name!r} after {step} steps", lost)
            else:
                self.tasks.done(task, result)
                self._losses.made(step)
                return result

    def save(self) -> None:
        """Begins to make the state durable. Every rank calls it, and goes on when its share is copied."""
        assert self.generation is not None
        with self.account.checkpoint(), self.activity.within(STORING, self._commits.worked_s):
            self._commits.save(self._state, self.generation.group, account=self.account.seconds())

    def commit(self, *, may_fail: bool = False) -> None:
        """Makes the state durable. Every rank calls it; rank 0 returns when that is so.

        Args:
            may_fail: the storage may; then rank 0 returns once it has had time to recover.
        """
        assert self.generation is not None
        self.save()
        with self.account.checkpoint(), self.activity.within(STORING, self._commits.worked_s):
            try:
                self._commits.wait(self.generation.group)
            except StorageError as error:
                if not may_fail:
                    raise
                _log.warning("the state is not durable yet: %s", described(error))
                self._commits.rest(self.generation.group)

    def shut_down(self, *, save_within_s: float) -> None:
        """Nothing is read or saved any more, once the save at hand has ended, or so many seconds are over."""
        self._feeds.shut_down()
        with self.activity.within(STORING, self._commits.worked_s):
            self._commits.close(save_within_s)

    def leave(self, *, intact: bool, reason: str | None = None) -> str | None:
        """Leaves the generation, if there is one; `intact` when all its members do. Returns how one of them was lost
        before all were through: then it was left as if it had broken."""
        lost, reason = None, reason or (RUN_ENDED if intact else PEER_LOST)
        if self.generation is not None and intact:
            try:
                with self.activity.within("leaving"):
                    self.generation.group.meet()
            except Exception as error:
                if not is_lost_peer(error):
                    raise
                lost = described(error)
                self.account.waited()
        self.account.end()
        generation, self.generation = self.generation, None
        if generation is not None:
            intact = intact and lost is None
            self._commits.generation_ended(intact=intact)
            self._link.cut_when_broken(None)
            if generation.group.rank == 0:
                self._link.say(
                    "generation_ended",
                    generation=generation.number,
                    last_step=self._state.position.step,
                    reason=reason if lost is None else PEER_LOST,
                    account=self.account.seconds(),
                )
            generation.close(intact=intact)
        return lost
