"""`Loop`: the loop over steps in one worker, what ranks do between two steps, and the end of the run."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from elastic_ddp.distributed.process_group import is_peer_failure
from elastic_ddp.errors import CheckpointError, ConfigError, ReplicasDifferError, format_exception
from elastic_ddp.rendezvous.client import RendezvousClient, RunStopped
from elastic_ddp.rendezvous.hang import STORING
from elastic_ddp.seeding import seed_all
from elastic_ddp.telemetry.event import MEMBERSHIP_CHANGED, STEP_REPEATS
from elastic_ddp.telemetry.events import (
    EvaluationFinished,
    EvaluationStarted,
    FirstStep,
    StepsCompleted,
    StepSkipped,
    Warned,
)
from elastic_ddp.telemetry.phases import combine
from elastic_ddp.worker.checkpointing import Checkpointer
from elastic_ddp.worker.collective_tasks import TasksDifferError
from elastic_ddp.worker.evaluated_values import Unmeasured
from elastic_ddp.worker.generation import Generation
from elastic_ddp.worker.job import Job
from elastic_ddp.worker.loss_scale import LossScale
from elastic_ddp.worker.profiling import MEMBERSHIP_CHANGES, StepProfiler
from elastic_ddp.worker.state_checks import warn_about_batch_norm, warn_about_mirrors, warn_about_schedulers
from elastic_ddp.worker.step import Step
from elastic_ddp.worker.step_plan import StepPlan
from elastic_ddp.worker.train_state import TrainState
from elastic_ddp.worker.verified_steps import VerifiedSteps
from elastic_ddp.worker.warmup_step import WarmupStep
from elastic_ddp.worker.worker_membership import RestartTraining, WorkerMembership

if TYPE_CHECKING:
    import torch


_OF_DETAIL = (
    "TORCH_DISTRIBUTED_DEBUG=DETAIL acts as INFO: with DETAIL, torch's DDP crashes on gloo, and process groups have no "
    "timeouts. Ranks at different places of the program end a run without it, with an error that names the places."
)


class Loop:
    """The part of a worker behind `Run`. It lives as long as the worker; `restart` gives it a new state."""

    def __init__(self, job: Job, client: RendezvousClient, device: torch.device) -> None:
        self.job = job
        self.client = client
        self.device = device
        self.state = self._new_state()
        self.checkpointer = Checkpointer(job, client)
        self.membership = WorkerMembership(job, client, state=self.state, checkpointer=self.checkpointer, device=device)
        self.profiler = StepProfiler(job.storage, client, device)
        self._step: Step | None = None
        self._warmup: WarmupStep | None = None
        self._mirror_warning: str | None = None
        self._verified = VerifiedSteps(job, client, self.state, self.checkpointer, self.membership)

    @property
    def has_begun(self) -> bool:
        """Whether this worker has reached its first step or its warm-up step."""
        return self.membership.holds_state or self._warmup is not None

    @property
    def rank(self) -> int:
        generation = self.membership.generation
        return generation.group.rank if generation else self._warmup.planned.rank if self._warmup else 0

    @property
    def world_size(self) -> int:
        generation = self.membership.generation
        return generation.group.world_size if generation else self._warmup.planned.world_size if self._warmup else 0

    def restart(self) -> None:
        """Prepares for another call of the training function, after `RestartTraining`.

        Waits for the running save first. No rank restores an older commit meanwhile, because all wait for this worker.
        """
        self.client.activity.enter("start")
        self.profiler.interrupt(MEMBERSHIP_CHANGES)
        self.membership.shut_down(save_within_s=math.inf)
        self.checkpointer.restart()
        self.state = self._new_state()
        self._step = None
        self._warmup = None
        self.membership.restart(self.state)
        self._verified.restart(self.state)

    def _new_state(self) -> TrainState:
        loss_scale = LossScale() if self.job.config.precision == "fp16" else None
        return TrainState(steps_per_epoch=self.job.shape.steps_per_epoch, loss_scale=loss_scale)

    # Steps.

    def steps(self) -> Iterator[Step]:
        """Yields the remaining steps; see `Run.steps`."""
        membership, shape = self.membership, self.job.shape
        if not self.has_begun:
            self.state.record_prepared()
        while True:
            if membership.generation is None:
                self.profiler.interrupt(MEMBERSHIP_CHANGES)
                if not membership.holds_state:
                    self._warmup = membership.warm_up()
                    if self._warmup is not None:
                        yield self._warmup
                        self._warmup = None
                membership.join()
                self._warn()
            generation = membership.generation
            assert generation is not None
            index = self.state.position.step
            if index >= self.job.total_steps:
                return
            config = self.job.config
            if config.even_micro_batches and config.num_micro_batches % self.world_size:
                membership.leave(intact=True, reason=MEMBERSHIP_CHANGED)  # it was formed to finish an evaluation
                continue
            membership.tasks.begin_step(index)
            self.client.activity.begin(f"the code before step {index}", is_users=True)
            seed_all(self.job.config.seed, index, "begin")
            verify = self._verified.begin_step(generation, index)
            plan = StepPlan(generation, shape.rows(index), self._votes, self._is_logged(index), verify)
            self._step = Step(plan, shape.epoch_of(index))
            yield self._step
            step = self._step
            self._step = None
            outcome = step.outcome
            self._verified.end_step(generation, outcome)
            if outcome.dispute is not None:
                membership.leave(intact=True, reason=STEP_REPEATS)
                continue
            if not outcome.is_done and outcome.failure is None:
                raise ConfigError(f"step {step.index} was skipped. Run every step, in `with step`.")
            failure = outcome.failure or self._end_step(step)
            if failure is None:
                membership.failures.record_success(step.index)
                continue
            if step.has_progressed:
                membership.failures.reset()
            membership.failures.record(step.index, f"step {step.index}", failure)
            # An evaluation in this step may have joined the next generation already.
            if membership.generation is generation or self.state.is_torn:
                membership.peer_failed(failure, in_step=True)

    def _warn(self) -> None:
        """Rank 0 reports problems that it expects later in the run, most in the first generation of the session."""
        generation, shape = self.membership.generation, self.job.shape
        assert generation is not None
        if self.rank != 0:
            return
        texts: list[str | None] = []
        warning = warn_about_mirrors(generation.group.assignment) if self.state.mirror is not None else None
        if warning != self._mirror_warning:
            self._mirror_warning = warning
            texts.append(warning)
        if generation.number == 1:
            is_detailed = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"
            texts.append(_OF_DETAIL if is_detailed else None)
            texts.append(warn_about_schedulers(self.state.optimizers, self.state.schedulers, self.state.registered))
            if self.job.total_steps >= shape.steps_per_epoch:
                texts.append(warn_about_batch_norm(self.state.module, shape))
        for text in texts:
            if text is not None:
                self.client.record(Warned(text=text))

    def _votes(self) -> dict[str, int]:
        """Returns this rank's votes. Rank 0 decides on a commit or a stop; membership changes when all ranks agree."""
        steps_done = self.state.position.step + 1
        reconfigure = self.membership.is_ready_to_change(steps_done)
        generation = self.membership.generation
        profile = 0 if generation is None else self.profiler.vote(generation.number, self.rank)
        votes = {"reconfigure": reconfigure, "saving": self.checkpointer.is_saving, "profile": profile}
        if self.rank == 0:
            differ = self._verified.must_find_rank_at_fault
            votes["commit"] = not differ and self.checkpointer.schedule.should_commit(steps_done)
            votes["stop"] = self.client.signals.stop
            votes["verify"] = self._verified.vote()
        return votes

    def _end_step(self, step: Step, *, more_steps: bool = True) -> str | None:
        """Carries out the ranks' agreement of a completed step. Returns how a worker failed meanwhile, or None."""
        assert step.outcome.agreed is not None
        membership = self.membership
        votes = step.outcome.agreed.votes
        self.state.guard.check(self.state.optimizers, self.state.schedulers)
        # After a failure in an evaluation, this worker is in another generation, whose ranks vote again.
        if membership.generation is not step.generation:
            if membership.generation is not None:  # several updates count as a step after the evaluation only
                membership.generation.feed.skip_to(self.state.position.step)
            return None
        self.client.activity.begin(f"the end of step {step.index}")
        self.profiler.step_done(self.state.position.step, step.generation.number, votes["profile"])
        try:
            self._apply_agreement(step, votes)
            more_steps = more_steps and self.state.position.step < self.job.total_steps
            if more_steps and votes["reconfigure"] == self.world_size:
                membership.leave(intact=True, reason=MEMBERSHIP_CHANGED)
        except Exception as error:
            if not is_peer_failure(error):
                raise
            return format_exception(error)
        return None

    def _apply_agreement(self, step: Step, votes: Mapping[str, int]) -> None:
        """Reports the step, and commits or stops if the ranks agreed to do so."""
        is_rank_0, steps_done = self.rank == 0, self.state.position.step
        self.checkpointer.metrics.update(steps_done, self._report(step) | {"loss": step.loss})
        every = self.job.config.verify.every_steps
        is_verified = bool(every and steps_done % every == 0)
        if step.generation.compare_mirrors(is_wanted=bool(votes["commit"]) or is_verified) and is_verified:
            self._verified.record(step.generation, steps_done, num_checks=0)
        if is_rank_0 and not self._verified.must_find_rank_at_fault:
            self.checkpointer.check()
        if votes["stop"]:
            self._commit_final_state(step.generation)
            raise RunStopped("stop was requested")
        if votes["commit"] and not votes["saving"]:
            self.membership.save()
        elif votes["commit"] and is_rank_0 and steps_done < self.job.total_steps:
            self.checkpointer.skip(steps_done)

    def _is_logged(self, step: int) -> bool:
        """Returns whether the values of a step are gathered, for the ledger and for `Step.metrics`."""
        return step % self.job.config.log_every_steps == 0 or step + 1 == self.job.total_steps

    def _report(self, step: Step) -> dict[str, float]:
        """Reports the step to the rendezvous and the ledger. Returns the logged metrics, if they are due."""
        clock = self.membership.clock
        record = partial(self.membership.agreed_events.record, is_rank_0=self.rank == 0)
        generation = step.generation
        position = self.state.position
        first_step_s = clock.step_done(position.step)
        progress: dict[str, Any] = {
            "step": position.step,
            "epoch": step.epoch,
            "loss": step.loss,
            "samples": position.samples,
            "world_size": self.world_size,
        }
        if self.rank == 0:
            self.client.progress(generation=generation.number, **progress)
        if first_step_s is not None:
            record(FirstStep(generation=generation.number, seconds=first_step_s))
        reason = step.outcome.skip_reason
        if reason is not None:
            scale = None if self.state.loss_scale is None else self.state.loss_scale.scale
            record(StepSkipped(generation=generation.number, step=position.step, reason=reason, loss_scale=scale))
        if not self._is_logged(step.index):
            return {}
        metrics = step.metrics
        seconds = clock.account.seconds() if self.rank == 0 else None
        record(StepsCompleted(generation=generation.number, **progress, metrics=metrics, account=seconds))
        counts = [len(owned) for owned in generation.strategy.ranges]
        measured = combine(step.outcome.phases, generation=generation.number, micro_batches=counts)
        if measured is not None:
            record(measured)
        return metrics

    def measure(self, given_name: str | None, figure: Callable[[Generation], Any]) -> Any:
        """Returns figures that all ranks compute together, in a step or after one; see `Run.evaluate`."""
        name = "validation_loss" if given_name is None else given_name
        what = f"run.evaluate(name={name!r})"
        membership = self.membership
        step = self._step
        if self._warmup is not None or self.state.is_torn:
            return Unmeasured(math.nan)
        if membership.generation is None:
            raise ConfigError("run.evaluate was called before run.steps(). Call it inside the loop or after it.")
        if self.rank == 0:
            self.client.record(EvaluationStarted(generation=membership.generation.number, name=name))

        def evaluate(generation: Generation) -> Any:
            with self.client.activity.within("evaluation"):
                return figure(generation)

        if step is not None and step.in_progress:  # after a failure, it is repeated with the step
            with step.capture_first_error(), self.client.activity.section(f"{what} in step {step.index}"):
                value = evaluate(membership.generation)
        else:
            failure = None if step is None else step.outcome.failure
            if step is not None and failure is not None and step.generation is membership.generation:
                membership.peer_failed(failure, in_step=True)
            try:
                value = membership.run_collective(name, evaluate, what)
            except TasksDifferError:
                return Unmeasured(math.nan)
        generation = membership.generation
        assert generation is not None
        steps_done = self.state.position.step
        prefix = "validation" if given_name is None else given_name
        named = {f"{prefix}_{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
        self.checkpointer.metrics.update(steps_done, named)
        for metric, each in named.items():
            finished = EvaluationFinished(generation=generation.number, step=steps_done, name=metric, value=each)
            membership.agreed_events.record(finished, is_rank_0=self.rank == 0)
        return value

    # The end.

    def finish(self) -> dict[str, Any]:
        """Compares the weights of all ranks, makes the last commit, and returns the outcome for the summary.

        Raises RestartTraining if the loop ended with a warm-up step, or with a step that is to be repeated.
        """
        membership = self.membership
        if self._warmup is not None:
            raise RestartTraining
        if membership.generation is None:
            raise ConfigError("the training function returned without a loop over run.steps(): nothing was trained.")
        repeated = self._end_last_step()
        membership.tasks.end_steps()
        what = "the final comparison of weights (the training function has returned)"
        digests = membership.run_collective("weights", self._gather_weights_sha256, what)
        if len(set(digests)) > 1:
            raise ReplicasDifferError(
                f"ranks ended with different weights: {dict(enumerate(digests))}. Something in the training function "
                "depends on the rank, the host, or the time, or uses a nondeterministic operation."
            )
        membership.run_collective("the last commit", self._commit_final_state)
        if self.state.position.step == repeated:
            membership.leave(intact=True, reason=STEP_REPEATS)
            raise RestartTraining
        return {"weights_sha256": digests[0], **self.progress()}

    def _end_last_step(self) -> int | None:
        """Ends a step that the training function left the loop in. Returns its index if it is to be repeated."""
        membership = self.membership
        step = self._step
        self._step = None
        if step is None:
            return None
        is_current = step.generation is membership.generation  # otherwise an evaluation joined the next one
        outcome = step.outcome
        failure = outcome.failure or (self._end_step(step, more_steps=False) if outcome.is_done else None)
        if failure is not None:
            membership.failures.record(step.index, f"step {step.index}", failure)
            if is_current or self.state.is_torn:
                membership.peer_failed(failure, in_step=True)
        return step.index if outcome.failure is not None else None

    def _gather_weights_sha256(self, generation: Generation) -> list[str]:
        generation.strategy.reshard()
        weights = self.state.weights_sha256()
        with generation.activity.within("collective"):
            return [digest.decode() for digest in generation.group.all_gather_bytes(weights.encode())]

    def _commit_final_state(self, generation: Generation) -> None:
        """Commits the state, unless it is committed, with up to `max_failed_saves` retries. Collective."""
        for retries_left in range(self.job.config.checkpoint.max_failed_saves, -1, -1):
            if self._is_durable(generation):
                break
            self.membership.commit(may_fail=retries_left > 0)
        else:
            if not self._is_durable(generation):
                raise CheckpointError(
                    f"step {self.state.position.step} has no commit, although its save reported no error. Run the same "
                    "command again: it resumes from the newest commit."
                )
        with generation.activity.within("collective"):
            generation.group.barrier()

    def _is_durable(self, generation: Generation) -> bool:
        """Returns whether the current state is committed, once the running save has ended. Collective."""
        group = generation.group
        answer = None
        if group.rank == 0:
            with generation.activity.within(STORING, self.checkpointer.worked_s):
                answer = b"yes" if self.checkpointer.is_committed(self.state.position.step, group) else b""
        # The other ranks may still write their shares, for which rank 0 waits.
        with generation.activity.within("collective", self.checkpointer.worked_s):
            return bool(group.broadcast_bytes(answer))

    def progress(self) -> dict[str, Any]:
        """Returns the position of the run, for the summary."""
        position = self.state.position
        return {
            "steps": position.step,
            "total_steps": self.job.total_steps,
            "epochs": position.step / self.job.shape.steps_per_epoch,
            "samples": position.samples,
            "samples_sha256": position.samples_sha256,
        }
