"""The steps of a run in one worker, what the ranks do between two of them, and the end."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from elastic_ddp.distributed.process_group import is_peer_failure
from elastic_ddp.errors import CheckpointError, ConfigError, ReplicasDifferError, format_exception
from elastic_ddp.rendezvous.client import RendezvousClient, RunStopped
from elastic_ddp.rendezvous.hang import STORING
from elastic_ddp.telemetry.account import CHANGED, UNMADE
from elastic_ddp.telemetry.events import EvaluationFinished, EvaluationStarted, FirstStep, StepsCompleted
from elastic_ddp.worker.checkpointing import Checkpointer
from elastic_ddp.worker.collective_tasks import NotTogetherError
from elastic_ddp.worker.generation import Generation
from elastic_ddp.worker.job import Job
from elastic_ddp.worker.membership import RestartTraining, WorkerMembership
from elastic_ddp.worker.retry_limit import ConsecutiveFailures
from elastic_ddp.worker.seeding import seed_all
from elastic_ddp.worker.step import Step
from elastic_ddp.worker.train_state import Position, TrainState
from elastic_ddp.worker.warmup_step import WarmupStep

if TYPE_CHECKING:
    import numpy as np
    import torch

    from elastic_ddp.distributed.process_group import ProcessGroup


class Loop:
    """What goes on behind the user's loop over steps, from the worker's begin to its end: `Run` is its face.

    Attributes:
        job: what the run was started with.
        link: to the rendezvous.
        device: where this worker trains.
        state: all that training changes.
        checkpointer: of that state.
        membership: in the run's generations.
    """

    def __init__(
        self, job: Job, client: RendezvousClient, device: torch.device, checkpointer: Checkpointer | None = None
    ) -> None:
        self.job, self.client, self.device = job, client, device
        self.state = TrainState()
        self.checkpointer = checkpointer or Checkpointer(job, client)
        self.membership = WorkerMembership(job, client, state=self.state, checkpointer=self.checkpointer, device=device)
        self._step: Step | None = None
        self._rehearsal: WarmupStep | None = None
        self._failures = ConsecutiveFailures()

    @property
    def has_begun(self) -> bool:
        """Whether this worker has come to its first step, or to the one that it rehearses."""
        return self.membership.holds_state or self._rehearsal is not None

    @property
    def rank(self) -> int:
        """In the current generation, before its first the one that this worker is likely to get, or 0."""
        generation = self.membership.generation
        return generation.group.rank if generation else self._rehearsal.place.rank if self._rehearsal else 0

    @property
    def world_size(self) -> int:
        """Of the current generation; before the first as for `rank`."""
        generation = self.membership.generation
        return generation.group.world_size if generation else self._rehearsal.place.world_size if self._rehearsal else 0

    @property
    def position(self) -> Position:
        return self.state.position

    def restart(self) -> Loop:
        """That for the user's function to begin again with, once `RestartTraining` has ended it, and the save at hand
        has ended: nobody restores an older commit meanwhile, as all wait for this worker."""
        self.client.activity.enter("start")
        self.membership.shut_down(save_within_s=math.inf)
        self.checkpointer.restart()
        loop = Loop(self.job, self.client, self.device, self.checkpointer)
        loop.membership.carry_over_from(self.membership)
        loop._failures = self._failures
        return loop

    # Steps.

    def steps(self) -> Iterator[Step]:
        """See `Run.steps`."""
        part = self.membership
        failure: str | None = None
        while True:
            generation = part.generation
            if generation is None:
                if not part.holds_state:
                    self._rehearsal = part.warm_up()
                    if self._rehearsal is not None:
                        yield self._rehearsal
                        self._rehearsal = None
                generation = part.join(failure)
                self._failures.forget_unless_again(generation)
            if self.position.step >= self.job.total_steps:
                return
            self._step = self._next_step(generation)
            yield self._step
            step, self._step = self._step, None
            if step.agreed is None and step.failure is None:
                raise ConfigError(f"step {step.index} was skipped; every step has to run, in `with step`")
            failure = step.failure if step.failure is not None else self._end_step(step)
            if failure is None:
                self._failures.made(step.index)
                continue
            self._failures.count(step.index)
            if part.generation is generation or self.state.is_torn:
                part.account.record_failure(in_step=True)
                part.leave(intact=False)
            elif part.generation is not None:  # an evaluation after the step has got into another
                self._failures.forget_unless_again(part.generation)
            self._failures.check(f"step {step.index}", failure)

    def _next_step(self, generation: Generation) -> Step:
        step, shape = self.position.step, self.job.shape
        self.membership.tasks.begin_step(step)
        seed_all(self.job.config.seed, step, "begin")
        return Step(generation, shape.rows(step), shape.epoch_of(step), lambda: self._votes(step + 1))

    def _votes(self, steps_done: int) -> dict[str, bool]:
        """What this rank wants to happen after the step at hand. Rank 0's clock counts, and its ear; membership
        changes when all are ready for that."""
        reconfigure = self.membership.is_ready_to_change(steps_done)
        if self.state.is_sharded and self.checkpointer.schedule.in_backoff:
            reconfigure = False  # it begins with a commit, and the last one has just failed
        if self.rank != 0:
            return {"reconfigure": reconfigure, "saving": self.checkpointer.is_saving}
        return {
            "commit": self.checkpointer.schedule.should_commit(steps_done),
            "saving": self.checkpointer.is_saving,
            "stop": self.client.stop_requested,
            "reconfigure": reconfigure,
        }

    def _end_step(self, step: Step, *, goes_on: bool = True) -> str | None:
        """Does what the ranks agreed on at the end of a step, when the user's loop is through with it. Returns how a
        peer was lost meanwhile; the step itself is done.

        Args:
            step: it.
            goes_on: whether steps may follow it, for which membership could change.
        """
        assert step.agreed is not None
        part = self.membership
        # An evaluation after the step may have found a peer lost, and a new generation: then there is nobody to end
        # this step with, and what was voted for is voted for again.
        if part.generation is not step.generation:
            return None
        try:
            self._apply_agreement(step)
            goes_on = goes_on and self.position.step < self.job.total_steps
            if goes_on and step.agreed.votes["reconfigure"] == self.world_size:
                if self.state.is_sharded and not self._made_durable(step.generation):
                    return None  # the next one begins from the newest commit, and that is an older one
                return part.leave(intact=True, reason=CHANGED)
        except Exception as error:
            if not is_peer_failure(error):
                raise
            return format_exception(error)
        return None

    def _apply_agreement(self, step: Step) -> None:
        """What the ranks agreed on in a step, but for a change of membership."""
        assert step.agreed is not None
        part, generation = self.membership, step.generation
        first_step_s = part.account.step_done()
        metrics: dict[str, float] = {}
        if self.rank == 0:
            self.client.progress(generation=generation.number, **self._newest(step))
            if first_step_s is not None:
                self.client.record(FirstStep(generation=generation.number, seconds=first_step_s))
        if step.index % self.job.config.log_every_steps == 0 or self.position.step == self.job.total_steps:
            with part.activity.within("collective"):
                metrics = gather_metrics(generation.group, step, self.job.shape.rows(step.index))
            if self.rank == 0:
                newest, account = self._newest(step), part.account.seconds()
                self.client.record(
                    StepsCompleted(generation=generation.number, **newest, metrics=metrics, account=account)
                )
        self.checkpointer.record_metrics(self.position.step, metrics | {"loss": step.loss})
        if self.rank == 0:
            self.checkpointer.check()
        if step.agreed.votes["stop"]:
            self._commit_the_end(generation)
            raise RunStopped("stop was requested")
        if step.agreed.votes["commit"] and not step.agreed.votes["saving"]:
            part.save()
        elif step.agreed.votes["commit"] and self.rank == 0 and self.position.step < self.job.total_steps:
            self.checkpointer.skip(self.position.step)

    def _newest(self, step: Step) -> dict[str, Any]:
        return {
            "step": self.position.step,
            "epoch": step.epoch,
            "loss": step.loss,
            "samples": self.position.samples,
            "world_size": self.world_size,
        }

    def measure(self, name: str, figure: Callable[[Generation], float]) -> float:
        """A figure that all ranks make together, in a step or after one; see `Run.evaluate`."""
        part, step = self.membership, self._step
        if self._rehearsal is not None or self.state.is_torn:
            return math.nan
        if part.generation is None:
            raise ConfigError("run.evaluate was called before run.steps(); call it inside the loop or after it")
        if self.rank == 0:
            self.client.record(EvaluationStarted(generation=part.generation.number, name=name))
        if step is not None and step.in_progress:  # a part of it: where a peer is lost here, it comes again
            with step.capture_first_error():
                value = figure(part.generation)
        else:
            try:
                failure = step.failure if step is not None and step.generation is part.generation else None
                value = part.run_collective(name, figure, failure=failure)
            except NotTogetherError:
                return math.nan
        self.checkpointer.record_metrics(self.position.step, {name: value})
        if self.rank == 0:
            self.client.record(
                EvaluationFinished(generation=part.generation.number, step=self.position.step, name=name, loss=value)
            )
        return value

    # The end.

    def finish(self) -> dict[str, Any]:
        """After the user's function: the last commit, and what the summary says of the run. Every rank calls it.

        Raises:
            RestartTraining: the loop ended with a step that lost a peer or with a warm-up step.
        """
        part = self.membership
        if self._rehearsal is not None:  # of a step with which the loop ends
            raise RestartTraining
        if part.generation is None:
            raise ConfigError("the training function returned without looping over run.steps(); nothing was trained")
        failure = unmade = None
        step, self._step = self._step, None  # a loop that ended early left it open
        if step is not None and step.failure is not None:
            unmade = step.index
            # Else an evaluation after it has got into another generation.
            if step.generation is part.generation or self.state.is_torn:
                failure = step.failure
                self._failures.count(step.index)
                self._failures.check(f"step {step.index}", failure)
        elif step is not None and step.agreed is not None and step.generation is part.generation:
            failure = self._end_step(step, goes_on=False)
        part.tasks.end_steps()
        everyone = part.run_collective("weights", self._gather_weights_sha256, failure=failure)
        if failure is not None and part.generation is not None:
            self._failures.forget_unless_again(part.generation)
        if len(set(everyone)) > 1:
            raise ReplicasDifferError(
                f"ranks ended with different weights: {dict(enumerate(everyone))}; something in the training function "
                "depends on the rank, the host or the time, or uses a nondeterministic operation"
            )
        part.run_collective("the last commit", self._commit_the_end)
        if self.position.step == unmade:
            part.leave(intact=True, reason=UNMADE)
            raise RestartTraining
        return {"weights_sha256": everyone[0], **self.progress()}

    def _gather_weights_sha256(self, generation: Generation) -> list[str]:
        generation.strategy.reshard()
        weights = self.state.weights_sha256()
        with generation.activity.within("collective"):
            return [digest.decode() for digest in generation.group.all_gather_bytes(weights.encode())]

    def _commit_the_end(self, generation: Generation) -> None:
        """Makes the state durable, and every rank sure of that: none of them leaves with it before. What the storage
        fails of is tried again, as often as saves may fail."""
        for tries_left in range(self.job.config.checkpoint.max_failed_saves, -1, -1):
            if self._is_durable(generation):
                break
            self.membership.commit(may_fail=tries_left > 0)
        else:
            if not self._is_durable(generation):  # a save that does not say how it ended is a mistake of ours
                raise CheckpointError(
                    f"the save of step {self.position.step} has ended, and there is no commit of it; the same command "
                    "goes on from the newest one"
                )
        with generation.activity.within("collective"):
            generation.group.barrier()

    def _made_durable(self, generation: Generation) -> bool:
        """Makes the state durable, if the storage lets it. Returns on every rank whether it did."""
        if self._is_durable(generation):
            return True
        self.membership.save()
        return self._is_durable(generation)

    def _is_durable(self, generation: Generation) -> bool:
        """Whether there is a commit of the state as it is, once the save at hand has ended."""
        group, word = generation.group, None
        if group.rank == 0:
            with generation.activity.within(STORING, self.checkpointer.worked_s):
                word = b"there" if self.checkpointer.is_committed(self.position.step, group) else b""
        # Rank 0 waits for the shares of the others, which are still being written.
        with generation.activity.within("collective", self.checkpointer.worked_s):
            return bool(group.broadcast_bytes(word))

    def progress(self) -> dict[str, Any]:
        """How far the run is, as the summary says it."""
        return {
            "steps": self.position.step,
            "total_steps": self.job.total_steps,
            "epochs": self.position.step / self.job.shape.steps_per_epoch,
            "samples": self.position.samples,
            "samples_sha256": self.position.samples_sha256,
        }

    def close(self, *, intact: bool, reason: str | None = None) -> None:
        """Leaves the generation, if there is one; `intact` when all its members do, none of which is missed then."""
        self.membership.leave(intact=intact, reason=reason)

    def shut_down(self) -> None:
        """Nothing is read any more. For the end of the run in this worker, after `close`."""
        self.membership.shut_down(save_within_s=self.job.config.drain_deadline_s)


def gather_metrics(group: ProcessGroup, step: Step, rows: np.ndarray) -> dict[str, float]:
    """Returns what was logged in a step, averaged over the rows of its global batch. Every rank calls it."""
    everyone = [json.loads(part) for part in group.all_gather_bytes(json.dumps(step.metrics()).encode())]
    merged: dict[str, dict[str, float]] = {}
    for metrics in reversed(everyone):  # values logged outside micro-batches are rank 0's
        for name, places in metrics.items():
            merged.setdefault(name, {}).update(places)
    means = {}
    for name, places in merged.items():
        if "None" in places:
            means[name] = places["None"]
            continue
        weights = {m: int(rows[int(m)]) for m in sorted(places, key=int)}
        means[name] = sum(places[m] * weights[m] for m in weights) / max(1, sum(weights.values()))
    return means
