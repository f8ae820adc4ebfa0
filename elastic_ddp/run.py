"""What a user's training function is given: the run, as one worker sees it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from elastic_ddp.commits import Commits
from elastic_ddp.config import RunConfig
from elastic_ddp.elastic.assembly import PREPARE_S
from elastic_ddp.elastic.link import RendezvousLink, RunStopped
from elastic_ddp.elastic.messages import Prospect
from elastic_ddp.errors import ConfigError, ElasticDDPError, PeerLostError, WorkersLostError
from elastic_ddp.evaluation import evaluate
from elastic_ddp.generation import Generation, feeds_of, micro_batches_of
from elastic_ddp.job import Job
from elastic_ddp.parallel.ddp import PreparedModel
from elastic_ddp.parallel.process_group import Assignment, is_lost_peer
from elastic_ddp.state import flatten
from elastic_ddp.step import Step
from elastic_ddp.telemetry.account import Account
from elastic_ddp.train_state import Position, Stateful, TrainState

if TYPE_CHECKING:
    from elastic_ddp.data.source import Transform

Prepared = TypeVar("Prepared")
Result = TypeVar("Result")

FORMED_AGAIN = 10
"""Times that a generation may break while it forms, before something else than a death is taken for the cause."""
LONG_STEP_S = 1.0
"""Steps beside which the tenth of a second is nothing that the first rows take to come."""
LOSSES_IN_A_ROW = 3
"""Times that the same processes lose the same step before it is taken for a fault in it rather than in a connection."""


class Run:
    """A run inside a worker. `prepare` what trains, then loop over `steps()`.

    Attributes:
        config: the run's configuration.
        device: where this worker trains.
    """

    def __init__(self, job: Job, link: RendezvousLink, device: torch.device) -> None:
        self.config: RunConfig = job.config
        self.device = device
        self._job = job
        self._link = link
        self._state = TrainState()
        self._generation: Generation | None = None
        self._commits = Commits(job, link)
        self._feeds = feeds_of(job, device)
        self._preparing_since: float | None = None
        """Since when this worker gets ready for another generation."""
        self._account = Account()
        self._activity = link.activity
        self._holds_state = False
        self._was_first = False
        self._step: Step | None = None

    # What the user calls.

    def prepare(self, thing: Prepared) -> Prepared:
        """Makes a model, an optimizer or a scheduler part of the run; every rank calls it in the same order.

        A model is moved to the device and comes back wrapped (`PreparedModel`): replicated by DDP, with bf16 autocast
        where the configuration says so. Optimizers and schedulers come back as they are, and are stepped, saved and
        restored by the run. State of an interrupted run is restored when `steps()` starts.

        Raises:
            ConfigError: a second model, an optimizer of other parameters, a scheduler of another optimizer, or
                anything else; `register` is for other things with state.
        """
        if self._generation is not None:
            raise ConfigError("run.prepare was called inside run.steps(); prepare everything before the loop")
        if isinstance(thing, torch.nn.Module):
            return self._prepare_model(thing)  # type: ignore[return-value]
        if isinstance(thing, torch.optim.Optimizer):
            self._state.add_optimizer(thing)
        elif isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
            self._state.add_scheduler(thing)
        else:
            raise ConfigError(
                f"run.prepare got a {type(thing).__name__}; it takes a model, an optimizer or a scheduler. "
                "Use run.register(name, thing) for other things with state"
            )
        return thing

    def _prepare_model(self, module: torch.nn.Module) -> PreparedModel:
        if self._state.model is not None:
            raise ConfigError(
                "run.prepare got a second model; write a torch.nn.Module that holds the parts and whose forward calls "
                "them, and prepare that"
            )
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            raise ConfigError("run.prepare got a DistributedDataParallel; give it the plain model, it wraps it itself")
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ConfigError(
                "run.prepare got a model without a parameter that requires a gradient; there is nothing to train"
            )
        if any(getattr(part, "sparse", False) and isinstance(part, torch.nn.Embedding) for part in module.modules()):
            raise ConfigError(
                "run.prepare got an Embedding(sparse=True); sparse gradients cannot be reduced, use sparse=False"
            )
        bf16 = self.config.precision == "bf16"
        self._state.model = PreparedModel(module.to(self.device), device=self.device, bf16=bf16)
        return self._state.model

    def register(self, name: str, thing: Stateful) -> None:
        """Adds user state to every commit: anything with `state_dict()` of plain values and tensors, and
        `load_state_dict()`. It has to be updated in the same way on every rank."""
        if self._holds_state:
            raise ConfigError(f"run.register got {name} inside run.steps(); register everything before the loop")
        if not isinstance(thing, Stateful):
            raise ConfigError(
                f"run.register got {name}, a {type(thing).__name__}, without state_dict and load_state_dict"
            )
        if name in self._state.registered:
            raise ConfigError(f"run.register got {name} twice; give each thing a name of its own")
        self._state.registered[name] = thing

    def steps(self) -> Iterator[Step]:
        """The steps of the run from where it stands: from the first, or from the newest commit.

        A step that loses a peer comes again, with the same samples, in the next generation.
        """
        if self._state.model is None or not self._state.optimizers:
            raise ConfigError(
                "run.steps() came before a model and an optimizer were prepared; call run.prepare for both"
            )
        losses = 0
        lost: str | None = None
        while True:
            if self._generation is None:
                self._generation = self._next_generation(lost)
                losses = losses if self._generation.group.assignment.again else 0
            if self.position.step >= self._job.total_steps:
                return
            generation, self._step = self._generation, self._next_step()
            yield self._step
            step, self._step = self._step, None
            if step.agreed is None and step.lost is None:
                raise ConfigError(f"step {step.index} was skipped; every step has to run, in `with step`")
            lost = step.lost
            # An evaluation after the step may have found a peer lost too, and a new generation: then there is nobody
            # to end this step with, and what was voted for is voted for again.
            if lost is None and self._generation is generation:
                lost = self._end_step(step)
            if lost is None:
                losses = 0
                continue
            losses += 1
            if self._generation is generation:
                self._account.lost(in_step=True)
                self.close(intact=False)
            if losses == LOSSES_IN_A_ROW:
                raise WorkersLostError(
                    f"step {step.index} was lost {losses} times in a row by the same workers, none of which died, so "
                    f"it is not tried again. The last time: {lost}. If a rank needs longer than others in it, raise "
                    "collective_timeout_s"
                )

    def evaluate(
        self,
        loss_fn: Callable[[Any, dict[str, torch.Tensor]], torch.Tensor],
        data: str | list[str],
        *,
        transform: Transform | None = None,
        name: str = "validation",
    ) -> float:
        """The exact mean of a loss over a held-out data set: each row once, spread over the workers.

        Every rank calls it at the same place, inside or after the loop over `steps()`; the result is the same on every
        rank and at every world size. The model is in eval mode and without gradients meanwhile.

        Args:
            loss_fn: from the model and a batch to the mean loss over the batch's rows.
            data: Parquet, as for `ElasticTrainer`.
            transform: as for `ElasticTrainer`, whose own is not applied here.
            name: of the result, in the record.
        """
        if self._generation is None:
            raise ConfigError("run.evaluate was called before run.steps(); call it inside the loop or after it")
        if self.rank == 0:
            self._link.say("evaluating", name=name)
        value = self._together(
            lambda generation: evaluate(generation, self._job, loss_fn, data, transform, self.device)
        )
        if self.rank == 0:
            self._link.say("evaluation", step=self.position.step, name=name, loss=value)
        return value

    @property
    def rank(self) -> int:
        """This worker's rank in the current generation; 0 before the first. For logging: nothing that changes
        weights may depend on it."""
        return self._generation.group.rank if self._generation else 0

    @property
    def world_size(self) -> int:
        """Workers of the current generation; 0 before the first."""
        return self._generation.group.world_size if self._generation else 0

    @property
    def position(self) -> Position:
        """Steps done and rows consumed."""
        return self._state.position

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self._job.total_steps

    # Generations and steps.

    def _next_generation(self, lost: str | None, *, between_steps: bool = True) -> Generation:
        """The next generation in which steps are made, formed again if a peer is lost while it forms."""
        account = self._account.seconds()
        if not self._holds_state:
            self._warm_up()
        attempt = 0
        while attempt < FORMED_AGAIN:
            self._activity.enter("rendezvous")
            step = self.position.step if self._holds_state else None
            assignment = self._link.join(
                step=step,
                between_steps=between_steps,
                lost=lost,
                committed=self._commits.durable_step,
                account=account,
                while_waiting=self._read_ahead,
            )
            lost = None
            attempt = attempt + 1 if assignment.again else 0
            try:
                generation = self._open(assignment, attempt)
                if not assignment.brief:
                    return generation
                self._hand_on(generation)
            except BaseException as error:
                if not is_lost_peer(error):
                    raise
                lost = f"{type(error).__name__}: {error}"
            # Here the traceback is gone, and with it what held the process group.
            self._link.cut_when_broken(None)
            self.close(intact=False)
            account = self._account.seconds()
        raise WorkersLostError(
            f"a generation of the same workers broke {FORMED_AGAIN} times while it formed, though none of them died. "
            f"The last time: {lost}. Look at the network between the nodes"
        )

    def _warm_up(self) -> None:
        """What nobody is to wait for when this worker joins: all that is slow the first time in a process."""
        flatten(self._state.state_dict())  # what cannot be saved is refused now, not by the first commit
        self._read_ahead(self._link.ask_for_prospect() or Prospect(rank=0, world_size=1, step=0))
        self._feeds.wait()  # the first pipeline takes seconds
        # A generation's end looks for garbage that holds on to its process group, which takes 0.2 s among all that has
        # been imported and built, and next to nothing among what is new since now.
        gc.collect()
        gc.freeze()

    def _read_ahead(self, prospect: Prospect) -> bool:
        """Has the rows of a place that this worker may get read. Returns whether the first of them are there."""
        if prospect.step >= self.total_steps:
            return True
        micro_batches = micro_batches_of(
            prospect.rank, num_micro_batches=self.config.num_micro_batches, world_size=prospect.world_size
        )
        return self._feeds.prepare(micro_batches, prospect.step)

    def _is_ready_to_change(self, steps_done: int) -> bool:
        """Whether membership may change after the step at hand, for all that this worker knows."""
        if not self._link.reconfigure_requested:
            self._preparing_since = None
            return self._link.is_deaf  # it will not hear, and is in nobody's way
        if self._preparing_since is None:
            self._preparing_since = time.monotonic()
        prospect = self._link.prospect
        if prospect is None or self._account.step_s >= LONG_STEP_S:
            return True
        is_ready = self._read_ahead(prospect._replace(step=steps_done))
        return is_ready or time.monotonic() - self._preparing_since >= PREPARE_S

    def _open(self, assignment: Assignment, attempt: int = 0) -> Generation:
        """Takes this worker's place in a generation."""
        self._account.begin()
        self._activity.enter("hand-over")
        generation = Generation.open(
            assignment,
            job=self._job,
            state=self._state,
            device=self.device,
            feeds=self._feeds,
            load_state=self._commits.load_newest,
            on_forming=lambda group: self._link.cut_when_broken(group.cut),
            on_formed=self._account.formed,
            activity=self._activity,
            attempt=attempt,
        )
        self._link.cut_when_broken(generation.cut)
        self._account.ready()
        self._activity.enter("between steps")
        was_first, self._was_first = self._was_first, assignment.rank == 0
        self._holds_state = True
        if assignment.rank == 0:
            self._link.say(
                "generation",
                generation=assignment.generation,
                world_size=assignment.world_size,
                first_step=self.position.step,
                reason="resume" if assignment.reason == "start" and self.position.step else assignment.reason,
            )
            if not was_first:
                self._commits.look()
        return generation

    def _hand_on(self, generation: Generation) -> None:
        """In a brief generation, whoever was to get the state has it now. If that was nobody, it is committed."""
        self._generation = generation
        if not generation.group.assignment.receivers:
            self._commit()
        self.close(intact=True, reason="those who go handed the state on")

    def _together(self, what: Callable[[Generation], Result]) -> Result:
        """Something that all ranks do together outside of steps, done again in a new generation if a peer is lost in
        it. Nobody can join meanwhile."""
        lost = self._step.lost if self._step is not None else None
        losses = 0
        while losses < LOSSES_IN_A_ROW:
            if lost is not None:
                self._account.lost(in_step=False)
                self.close(intact=False)
                self._generation = self._next_generation(lost, between_steps=False)
                losses = losses if self._generation.group.assignment.again else 0
            assert self._generation is not None
            self._account.mark()
            try:
                return what(self._generation)
            except BaseException as error:
                if not is_lost_peer(error):
                    raise
                lost = f"{type(error).__name__}: {error}"
                losses += 1
        raise WorkersLostError(
            f"what all workers do together outside of steps was lost {LOSSES_IN_A_ROW} times in a row, though none of "
            f"them died. The last time: {lost}. If a rank needs longer than others there, raise collective_timeout_s"
        )

    def _next_step(self) -> Step:
        assert self._generation is not None
        step, shape = self.position.step, self._job.shape
        return Step(self._generation, shape.rows(step), shape.epoch_of(step), lambda: self._votes(step + 1))

    def _votes(self, steps_done: int) -> dict[str, bool]:
        """What this rank wants to happen after the step at hand. Rank 0's clock counts, and its ear; membership
        changes when all are ready for that."""
        reconfigure = self._is_ready_to_change(steps_done)
        if self.rank != 0:
            return {"reconfigure": reconfigure}
        return {
            "commit": self._commits.are_due(steps_done),
            "stop": self._link.stop_requested,
            "reconfigure": reconfigure,
        }

    def _end_step(self, step: Step) -> str | None:
        """Does what the ranks agreed on at the end of a step, when the user's loop is through with it. Returns how a
        peer was lost meanwhile; the step itself is done."""
        assert self._generation is not None and step.agreed is not None
        last = self.position.step == self._job.total_steps
        first_step_s = self._account.step_done()
        if self.rank == 0:
            self._link.progress(**self._newest(step))
            if first_step_s is not None:
                self._link.say("first_step", generation=self._generation.number, seconds=first_step_s)
        if step.index % self.config.log_every_steps == 0 or last:
            try:
                with self._activity.within("collective"):
                    metrics = self._generation.gather_metrics(step, self._job.shape.rows(step.index))
            except RuntimeError as error:
                if not is_lost_peer(error):
                    raise
                return f"{type(error).__name__}: {error}"
            if self.rank == 0:
                number, account = self._generation.number, self._account.seconds()
                self._link.say("steps", generation=number, **self._newest(step), metrics=metrics, account=account)
        if step.agreed.votes["commit"] or step.agreed.votes["stop"]:
            try:
                self._commit()
            except PeerLostError as error:  # the others went on without this worker
                return str(error)
        if step.agreed.votes["stop"]:
            raise RunStopped("stop was requested")
        if step.agreed.votes["reconfigure"] == self.world_size and not last:
            self.close(intact=True, reason="workers were to join or leave")
        return None

    def _newest(self, step: Step) -> dict[str, Any]:
        return {
            "step": self.position.step,
            "epoch": step.epoch,
            "loss": step.loss,
            "samples": self.position.samples,
            "world_size": self.world_size,
        }

    # Commits.

    def _commit(self) -> None:
        """Makes the state durable. Rank 0 writes, the others go on."""
        assert self._generation is not None
        self._commits.note(self.position.step)
        if self.rank == 0:
            with self._account.checkpoint(), self._activity.within("commit"):
                self._commits.write(self._state, generation=self._generation.number, account=self._account.seconds())

    def finish(self) -> dict[str, Any]:
        """After the user's function: the last commit, and what the summary says of the run. Every rank calls it."""
        if self._generation is None:
            raise ConfigError("the training function returned without looping over run.steps(); nothing was trained")
        if self._step is not None and self._step.agreed is not None:  # a loop that ended early left it open
            step, self._step = self._step, None
            self._end_step(step)
        weights = self._state.weights_sha256()
        everyone = [digest.decode() for digest in self._together(lambda generation: self._compare(generation, weights))]
        if len(set(everyone)) > 1:
            raise ElasticDDPError(
                f"ranks ended with different weights: {dict(enumerate(everyone))}; something in the training function "
                "depends on the rank, the host or the time, or uses a nondeterministic operation"
            )
        self._together(lambda generation: self._commit_the_end())
        return {"weights_sha256": weights, **self.progress()}

    def _compare(self, generation: Generation, weights: str) -> list[bytes]:
        with self._activity.within("collective"):
            return generation.group.all_gather_bytes(weights.encode())

    def _commit_the_end(self) -> None:
        if self._commits.step != self.position.step:
            self._commit()

    def progress(self) -> dict[str, Any]:
        """How far the run is, as the summary says it."""
        return {
            "steps": self.position.step,
            "total_steps": self.total_steps,
            "epochs": self.position.step / self._job.shape.steps_per_epoch,
            "samples": self.position.samples,
            "samples_sha256": self.position.samples_sha256,
        }

    def shut_down(self) -> None:
        """Nothing is read any more. For the end of the run in this worker, after `close`."""
        self._feeds.shut_down()

    def close(self, *, intact: bool, reason: str = "the run ended") -> None:
        """Leaves the generation, if there is one; `intact` when all its members do, for that reason."""
        generation, self._generation = self._generation, None
        if generation is not None:
            self._link.cut_when_broken(None)
            if generation.group.rank == 0:
                self._link.say(
                    "generation_ended",
                    generation=generation.number,
                    last_step=self.position.step,
                    reason=reason if intact else "a peer was lost",
                    account=self._account.seconds(),
                )
            generation.close(intact=intact)
