"""When a run commits, what a commit says of it, and the one that it begins from."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from elastic_ddp.checkpoint import CheckpointStore
from elastic_ddp.errors import CheckpointError, PeerLostError
from elastic_ddp.job import COMMITS

if TYPE_CHECKING:
    from elastic_ddp.elastic.link import RendezvousLink
    from elastic_ddp.job import Job
    from elastic_ddp.train_state import TrainState


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
        self._request = self._answered = 0
        """The newest request to commit that was voted for, and that was met."""

    def are_due(self, steps_done: int) -> bool:
        """Whether rank 0 votes for one after the step at hand."""
        every, seconds = self._job.config.checkpoint.every_steps, self._job.config.checkpoint.every_seconds
        due = every is not None and steps_done - (self.step or 0) >= every
        overdue = seconds is not None and time.monotonic() - self._at >= seconds
        self._request = self._link.commit_requested
        return due or overdue or self.is_asked_for

    @property
    def is_asked_for(self) -> bool:
        """Whether somebody waits for one."""
        return self._link.commit_requested > self._answered

    def look(self) -> None:
        """What the one before committed is for the storage to say: for a worker that has just become rank 0."""
        newest = self._store.latest()
        self.step, self._at = newest.step if newest is not None else None, time.monotonic()

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
        self._link.say("resumed", step=commit.step)
        return state

    def note(self, step: int) -> None:
        """One is made of a step, by rank 0."""
        self.step, self._at = step, time.monotonic()

    def write(self, state: TrainState, *, generation: int, account: dict[str, float]) -> None:
        """Makes the state durable. Rank 0 calls it."""
        begun = time.monotonic()
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

        self._store.save(state.state_dict(), step=position.step, record=record, fence=fence)
        self.durable_step, self._answered = position.step, self._request
        self._link.say(
            "commit",
            generation=generation,
            step=position.step,
            seconds=time.monotonic() - begun,
            request=self._request or None,
            account=account,
        )
