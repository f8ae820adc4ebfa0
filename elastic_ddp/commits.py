"""When a run commits, what a commit says of it, and the one that it begins from."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from elastic_ddp.checkpoint import CheckpointStore
from elastic_ddp.errors import CheckpointError, DriverReplacedError, PeerLostError, StorageError
from elastic_ddp.job import COMMITS
from elastic_ddp.lease import holder

if TYPE_CHECKING:
    from elastic_ddp.elastic.link import RendezvousLink
    from elastic_ddp.job import Job
    from elastic_ddp.train_state import TrainState

_log = logging.getLogger(__name__)


class Commits:
    """The commits of a run, as one worker sees them. Rank 0 writes them, and its clock and its ear say when; all ranks
    know when one was made.

    Attributes:
        step: steps done in the newest commit, as far as this worker knows.
        durable_step: the same, of the newest that this worker wrote itself.
    """

    def __init__(self, job: Job, link: RendezvousLink) -> None:
        self._job, self._link = job, link
        self._store = CheckpointStore(job.storage.at(COMMITS), keep=job.config.checkpoint.keep)
        self.step: int | None = None
        self.durable_step: int | None = None
        self._at = time.monotonic()
        self._answered = 0
        """The newest request to commit that was met."""
        self._look: threading.Thread | None = None
        self._is_sure = True
        """Whether the storage said so, or this worker's own eyes."""

    def are_due(self, steps_done: int) -> bool:
        """Whether rank 0 votes for one after the step at hand."""
        every, seconds = self._job.config.checkpoint.every_steps, self._job.config.checkpoint.every_seconds
        due = every is not None and steps_done - (self.step or 0) >= every
        overdue = seconds is not None and time.monotonic() - self._at >= seconds
        return due or overdue or self.is_asked_for

    @property
    def is_asked_for(self) -> bool:
        """Whether somebody waits for one."""
        return self._link.commit_requested > self._answered

    def look(self) -> None:
        """What the one before committed is for the storage to say: for a worker that has just become rank 0. It is
        asked in the background, by a store of its own: all the others would wait for the answer."""
        self._look = threading.Thread(target=self._ask_storage, args=[self.step], name="newest-commit", daemon=True)
        self._look.start()

    def _ask_storage(self, noted: int | None) -> None:
        try:
            newest = CheckpointStore(self._job.storage.at(COMMITS), keep=self._job.config.checkpoint.keep).latest()
        except StorageError as error:
            _log.warning("what was committed last cannot be read: %s", error)
            self._is_sure = False
            return
        found = newest.step if newest is not None else None
        if self.step == noted != found:  # the one that was noted did not come to be
            self.step, self._at = found, float("-inf") if noted is not None else self._at

    def have(self, step: int) -> bool:
        """Whether the state after so many steps is durable. On a worker that has just become rank 0 it waits for the
        storage to say so."""
        if self._look is not None:
            self._look.join()
            self._look = None
        return self._is_sure and self.step == step

    def load_newest(self) -> dict[str, Any] | None:
        """The state of the newest commit that can be used; None if there has been none."""
        newest = self._store.load_latest()
        for key, reason in self._store.rejected:
            self._link.say("commit_rejected", key=key, reason=reason)
        if newest is None:
            if self._store.rejected:
                raise CheckpointError(
                    f"no commit of run {self._job.config.name!r} can be used: {dict(self._store.rejected)}. Repair or "
                    "delete them, or use another name; the run does not silently start over"
                )
            return None
        commit, state = newest
        self.step = commit.step
        self._link.say("resumed", step=commit.step)
        return state

    def note(self, step: int) -> None:
        """One is made of a step, by rank 0."""
        self.step, self._at, self._is_sure = step, time.monotonic(), True

    def write(self, state: TrainState, *, generation: int, account: dict[str, float]) -> None:
        """Makes the state durable. Rank 0 calls it."""
        begun, request = time.monotonic(), self._link.commit_requested
        position = state.position
        record = {
            "samples": position.samples,
            "samples_sha256": position.samples_sha256,
            "epoch": self._job.shape.epoch_of(position.step),
            "generation": generation,
            "data": self._job.index.fingerprint,
            "identity": self._job.config.identity(),
        }

        def fence() -> None:
            if not self._link.is_member_of(generation):
                raise PeerLostError(f"generation {generation} is over, and this worker was presumed dead")
            driver = holder(self._job.storage)
            if driver is not None and driver.session != self._job.session:
                raise DriverReplacedError(
                    f"run {self._job.config.name!r} was taken over by another driver: {driver}. Nothing of this one is "
                    "committed any more"
                )

        self._store.save(state.state_dict(), step=position.step, record=record, fence=fence)
        self.durable_step, self._answered = position.step, request
        self._link.say(
            "commit",
            generation=generation,
            step=position.step,
            seconds=time.monotonic() - begun,
            request=request or None,
            account=account,
        )
