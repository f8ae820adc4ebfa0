"""`Loop`: the loop over steps in one worker, what ranks do between two steps, and the end of the run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from elastic_ddp.distributed.process_group import is_peer_failure
from elastic_ddp.errors import CheckpointError, ConfigError, ReplicasDifferError, format_exception
from elastic_ddp.rendezvous.client import RendezvousClient, RunStopped
from elastic_ddp.rendezvous.hang import STORING
from elastic_ddp.telemetry.event import MEMBERSHIP_CHANGED, STEP_REPEATS
from elastic_ddp.telemetry.events import EvaluationFinished, EvaluationStarted, FirstStep, StepsCompleted
from elastic_ddp.worker.checkpointing import Checkpointer
from elastic_ddp.worker.collective_tasks import TasksDifferError
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
    """The part of a worker behind `Run`, for one call of the training function.

    Attributes:
        job: the run.
        client: the connection to the rendezvous.
        device: the device that this worker trains on.
        state: everything that training changes.
        checkpointer: saves and restores the state.
        membership: this worker's place in the run's generations.
    """

    def __init__(
        self, job: Job, client: RendezvousClient, device: torch.device, checkpointer: Checkpointer | None = None
    ) -> None:
        self.job, self.client, self.device = job, client, device
        self.state = TrainState()
        self.checkpointer = checkpointer or Checkpointer(job, client)
        self.membership = WorkerMembership(job, client, state=self.state, checkpointer=self.checkpointer, device=device)
        self._step: Step | None = None
        self._warmup: WarmupStep | None = None
        self._failures = ConsecutiveFailures()

    @property
    def has_begun(self) -> bool:
        """Whether this worker has reached its first step or its warm-up step."""
        return self.membership.holds_state or self._warmup is not None

    @property
    def rank(self) -> int:
        """The rank in the current generation. Before the first one, the expected rank, or 0."""
        generation = self.membership.generation
        return generation.group.rank if generation else self._warmup.planned.rank if self._warmup else 0

    @property
    def world_size(self) -> int:
        """The size of the current generation. Before the first one, the expected size, or 0."""
        generation = self.membership.generation
        return generation.group.world_size if generation else self._warmup.planned.world_size if self._warmup else 0

    @property
    def position(self) -> Position:
        """The steps done and the samples consumed."""
        return self.state.position

    def restart(self) -> Loop:
        """Returns the loop for another call of the training function, after `RestartTraining`.

        Waits for the running save first. No rank restores an older commit meanwhile, because all wait for this worker.
        """
        self.client.activity.enter("start")
        self.membership.shut_down(save_within_s=math.inf)
        self.checkpointer.restart()
        loop = Loop(self.job, self.client, self.device, self.checkpointer)
        loop.membership.carry_over_from(self.membership)
        loop._failures = self._failures
        return loop

    # Steps.

    def steps(self) -> Iterator[Step]:
        """Yields the remaining steps; see `Run.steps`."""
        membership, failure = self.membership, None
        while True:
            generation = membership.generation
            if generation is None:
                if not membership.holds_state:
                    yield from self._warm_up()
                generation = membership.join(failure)
                self._failures.reset_for(generation)
            if self.position.step >= self.job.total_steps:
                return
            self._step = self._next_step(generation)
            yield self._step
            step, self._step = self._step, None
            if step.agreed is None and step.failure is None:
                raise ConfigError(f"step {step.index} was skipped. Run every step, in `with step`.")
            failure = step.failure if step.failure is not None else self._end_step(step)
            if failure is None:
                self._failures.record_success(step.index)
                continue
            self._failures.record(step.index)
            if membership.generation is generation or self.state.is_torn:
                membership.account.record_failure(in_step=True)
                membership.leave(intact=False)
            elif membership.generation is not None:  # an evaluation after the step has joined another one
                self._failures.reset_for(membership.generation)
            self._failures.check(f"step {step.index}", failure)

    def _warm_up(self) -> Iterator[Step]:
        self._warmup = self.membership.warm_up()
        if self._warmup is not None:
            yield self._warmup
            self._warmup = None

    def _next_step(self, generation: Generation) -> Step:
        step, shape = self.position.step, self.job.shape
        self.membership.tasks.begin_step(step)
        seed_all(self.job.config.seed, step, "begin")
        return Step(generation, shape.rows(step), shape.epoch_of(step), lambda: self._votes(step + 1))

    def _votes(self, steps_done: int) -> dict[str, bool]:
        """Returns this rank's votes for what to do after the current step.

        A commit or a stop is rank 0's decision. Membership changes when all ranks vote for it.
        """
        reconfigure = self.membership.is_ready_to_change(steps_done)
        if self.state.is_sharded and self.checkpointer.schedule.in_backoff:
            reconfigure = False  # sharded ranks commit before a change, and the last save has just failed
        votes = {"reconfigure": reconfigure, "saving": self.checkpointer.is_saving}
        if self.rank == 0:
            votes["commit"] = self.checkpointer.schedule.should_commit(steps_done)
            votes["stop"] = self.client.stop_requested
        return votes

    def _end_step(self, step: Step, *, more_steps: bool = True) -> str | None:
        """Does what the ranks agreed on in a step, once the training function is through with the step.

        Args:
            step: the step, which is done.
            more_steps: whether another step may follow. Otherwise membership does not change.

        Returns:
            How a worker failed meanwhile, or None.
        """
        assert step.agreed is not None
        membership = self.membership
        # After a failure in an evaluation, this worker is in another generation, whose ranks vote again.
        if membership.generation is not step.generation:
            return None
        try:
            self._apply_agreement(step)
            more_steps = more_steps and self.position.step < self.job.total_steps
            if more_steps and step.agreed.votes["reconfigure"] == self.world_size:
                if self.state.is_sharded and not self._make_durable(step.generation):
                    return None  # the next generation would start from an older commit
                return membership.leave(intact=True, reason=MEMBERSHIP_CHANGED)
        except Exception as error:
            if not is_peer_failure(error):
                raise
            return format_exception(error)
        return None

    def _apply_agreement(self, step: Step) -> None:
        """Reports the step, and commits or stops if the ranks agreed on that."""
        assert step.agreed is not None
        votes, generation, is_rank_0 = step.agreed.votes, step.generation, self.rank == 0
        metrics = self._report(step)
        self.checkpointer.record_metrics(self.position.step, metrics | {"loss": step.loss})
        if is_rank_0:
            self.checkpointer.check()
        if votes["stop"]:
            self._commit_final_state(generation)
            raise RunStopped("stop was requested")
        if votes["commit"] and not votes["saving"]:
            self.membership.save()
        elif votes["commit"] and is_rank_0 and self.position.step < self.job.total_steps:
            self.checkpointer.skip(self.position.step)

    def _report(self, step: Step) -> dict[str, float]:
        """Rank 0 reports the step to the rendezvous and the ledger. Returns the logged metrics, if they are due."""
        account, generation, is_rank_0 = self.membership.account, step.generation, self.rank == 0
        first_step_s = account.step_done()
        progress = {
            "step": self.position.step,
            "epoch": step.epoch,
            "loss": step.loss,
            "samples": self.position.samples,
            "world_size": self.world_size,
        }
        if is_rank_0:
            self.client.progress(generation=generation.number, **progress)
            if first_step_s is not None:
                self.client.record(FirstStep(generation=generation.number, seconds=first_step_s))
        if step.index % self.job.config.log_every_steps and self.position.step < self.job.total_steps:
            return {}
        with generation.activity.within("collective"):
            metrics = gather_metrics(generation.group, step, self.job.shape.rows(step.index))
        if is_rank_0:
            event = StepsCompleted(
                generation=generation.number,
                **progress,  # type: ignore[arg-type]
                metrics=metrics,
                account=account.seconds(),
            )
            self.client.record(event)
        return metrics

    def measure(self, name: str, figure: Callable[[Generation], float]) -> float:
        """Returns a figure that all ranks compute together, in a step or after one; see `Run.evaluate`."""
        membership, step = self.membership, self._step
        if self._warmup is not None or self.state.is_torn:
            return math.nan
        if membership.generation is None:
            raise ConfigError("run.evaluate was called before run.steps(). Call it inside the loop or after it.")
        if self.rank == 0:
            self.client.record(EvaluationStarted(generation=membership.generation.number, name=name))
        if step is not None and step.in_progress:  # after a failure, it is repeated with the step
            with step.capture_first_error():
                value = figure(membership.generation)
        else:
            try:
                failure = step.failure if step is not None and step.generation is membership.generation else None
                value = membership.run_collective(name, figure, failure=failure)
            except TasksDifferError:
                return math.nan
        self.checkpointer.record_metrics(self.position.step, {name: value})
        if self.rank == 0:
            number = membership.generation.number
            self.client.record(EvaluationFinished(generation=number, step=self.position.step, name=name, loss=value))
        return value

    # The end.

    def finish(self) -> dict[str, Any]:
        """Compares the weights of all ranks, makes the last commit, and returns the outcome for the summary.

        Every rank calls it when the training function has returned.

        Raises:
            RestartTraining: the loop ended with a warm-up step, or with a step that is to be repeated.
            ReplicasDifferError: ranks hold different weights.
        """
        membership = self.membership
        if self._warmup is not None:
            raise RestartTraining
        if membership.generation is None:
            raise ConfigError("the training function returned without a loop over run.steps(): nothing was trained.")
        failure, repeated = self._end_last_step()
        membership.tasks.end_steps()
        digests = membership.run_collective("weights", self._gather_weights_sha256, failure=failure)
        if failure is not None and membership.generation is not None:
            self._failures.reset_for(membership.generation)
        if len(set(digests)) > 1:
            raise ReplicasDifferError(
                f"ranks ended with different weights: {dict(enumerate(digests))}. Something in the training function "
                "depends on the rank, the host, or the time, or uses a nondeterministic operation."
            )
        membership.run_collective("the last commit", self._commit_final_state)
        if self.position.step == repeated:
            membership.leave(intact=True, reason=STEP_REPEATS)
            raise RestartTraining
        return {"weights_sha256": digests[0], **self.progress()}

    def _end_last_step(self) -> tuple[str | None, int | None]:
        """Ends a step that is still open, because the training function left the loop early.

        Returns:
            How a worker failed, or None; and the index of a step that failed, which another generation may still do.
        """
        step, self._step = self._step, None
        if step is None:
            return None, None
        is_current = step.generation is self.membership.generation  # otherwise an evaluation joined another one
        if step.failure is not None:
            if not is_current and not self.state.is_torn:
                return None, step.index
            self._failures.record(step.index)
            self._failures.check(f"step {step.index}", step.failure)
            return step.failure, step.index
        if step.agreed is not None and is_current:
            return self._end_step(step, more_steps=False), None
        return None, None

    def _gather_weights_sha256(self, generation: Generation) -> list[str]:
        generation.strategy.reshard()
        weights = self.state.weights_sha256()
        with generation.activity.within("collective"):
            return [digest.decode() for digest in generation.group.all_gather_bytes(weights.encode())]

    def _commit_final_state(self, generation: Generation) -> None:
        """Commits the state, unless it is committed. No rank leaves before all know that it is. Collective.

        A save that the storage fails is retried as often as `max_failed_saves` allows.
        """
        for retries_left in range(self.job.config.checkpoint.max_failed_saves, -1, -1):
            if self._is_durable(generation):
                break
            self.membership.commit(may_fail=retries_left > 0)
        else:
            if not self._is_durable(generation):
                raise CheckpointError(
                    f"the save of step {self.position.step} ended without an error and without a commit. Run the same "
                    "command again to resume from the newest commit."
                )
        with generation.activity.within("collective"):
            generation.group.barrier()

    def _make_durable(self, generation: Generation) -> bool:
        """Commits the state, unless it is committed. Returns, on every rank, whether that succeeded. Collective."""
        if self._is_durable(generation):
            return True
        self.membership.save()
        return self._is_durable(generation)

    def _is_durable(self, generation: Generation) -> bool:
        """Returns whether the current state is committed, once the running save has ended. Collective."""
        group, answer = generation.group, None
        if group.rank == 0:
            with generation.activity.within(STORING, self.checkpointer.worked_s):
                answer = b"yes" if self.checkpointer.is_committed(self.position.step, group) else b""
        # The other ranks may still write their shares, for which rank 0 waits.
        with generation.activity.within("collective", self.checkpointer.worked_s):
            return bool(group.broadcast_bytes(answer))

    def progress(self) -> dict[str, Any]:
        """Returns the position of the run, for the summary."""
        return {
            "steps": self.position.step,
            "total_steps": self.job.total_steps,
            "epochs": self.position.step / self.job.shape.steps_per_epoch,
            "samples": self.position.samples,
            "samples_sha256": self.position.samples_sha256,
        }

    def close(self, *, intact: bool, reason: str | None = None) -> None:
        """Leaves the generation, if there is one; `intact` if all its members leave now."""
        self.membership.leave(intact=intact, reason=reason)

    def shut_down(self) -> None:
        """Stops reading and saving at the end of the run, after `close`."""
        self.membership.shut_down(save_within_s=self.job.config.drain_deadline_s)


def gather_metrics(group: ProcessGroup, step: Step, rows: np.ndarray) -> dict[str, float]:
    """Returns what was logged in a step, averaged over the rows of its global batch. Collective."""
    gathered = [json.loads(part) for part in group.all_gather_bytes(json.dumps(step.metrics()).encode())]
    merged: dict[str, dict[str, float]] = {}
    for metrics in reversed(gathered):  # outside of micro-batches, rank 0's values count
        for name, values in metrics.items():
            merged.setdefault(name, {}).update(values)
    means = {}
    for name, values in merged.items():
        if "None" in values:
            means[name] = values["None"]
            continue
        weights = {m: int(rows[int(m)]) for m in sorted(values, key=int)}
        means[name] = sum(values[m] * weights[m] for m in weights) / max(1, sum(weights.values()))
    return means
