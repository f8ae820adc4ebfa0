"""What a user's training function is given: the run, as one worker sees it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from elastic_ddp.commits import Commits
from elastic_ddp.config import RunConfig
from elastic_ddp.elastic.hang import STORING
from elastic_ddp.elastic.link import RendezvousLink, RunStopped
from elastic_ddp.errors import ConfigError, ElasticDDPError, WorkersLostError, described
from elastic_ddp.evaluation import evaluate
from elastic_ddp.generation import Generation
from elastic_ddp.job import Job, has_commits
from elastic_ddp.parallel.buffers import own_buffers
from elastic_ddp.parallel.prepared import PreparedModel, ShardBy, units_of
from elastic_ddp.parallel.process_group import is_lost_peer
from elastic_ddp.participation import LOSSES_IN_A_ROW, Participation, TrainAgain
from elastic_ddp.rehearsal import Rehearsal
from elastic_ddp.seeding import seed_all
from elastic_ddp.step import Step
from elastic_ddp.telemetry.account import CHANGED, UNMADE
from elastic_ddp.together import NotTogetherError
from elastic_ddp.train_state import Position, Stateful, TrainState, check_model
from elastic_ddp.weights import Weights

if TYPE_CHECKING:
    from elastic_ddp.data.source import Transform

Prepared = TypeVar("Prepared")


class Run:
    """A run inside a worker. `prepare` what trains, then loop over `steps()`.

    Attributes:
        config: the run's configuration.
        device: where this worker trains.
    """

    def __init__(self, job: Job, link: RendezvousLink, device: torch.device, commits: Commits | None = None) -> None:
        self.config: RunConfig = job.config
        self.device = device
        self._job = job
        self._link = link
        self._state = TrainState()
        self._commits = commits or Commits(job, link)
        self._participation = Participation(job, link, state=self._state, commits=self._commits, device=device)
        self._step: Step | None = None
        self._rehearsal: Rehearsal | None = None
        self._losses, self._lost_step = 0, -1
        """Times in a row that the same workers lost a step, and which."""

    # What the user calls.

    def prepare(self, thing: Prepared, *, shard: ShardBy | None = None) -> Prepared:
        """Makes a model, an optimizer or a scheduler part of the run; every rank calls it in the same order.

        A model is moved to the device and comes back wrapped (`PreparedModel`): replicated by DDP or sharded by FSDP,
        with bf16 where the configuration says so. Optimizers and schedulers come back as they are, and are stepped,
        saved and restored by the run. State of an interrupted run is restored when `steps()` starts, which is also when
        a model is sharded, or refused by the name of a parameter that cannot be; the optimizer then has the sharded
        parameters in the place of those it was built from.

        Args:
            thing: what to prepare.
            shard: for a model and `strategy = "fsdp"`: the parts of it that are gathered one at a time, as a class of
                modules, several, or a callable from a module to whether it is one; beside `fsdp.shard_classes`.

        Raises:
            ConfigError: a second model, an optimizer of other parameters, a scheduler of another optimizer, no part to
                shard where some were named, or anything else; `register` is for other things with state.
        """
        if self._participation.generation is not None or self._rehearsal is not None:
            raise ConfigError("run.prepare was called inside run.steps(); prepare everything before the loop")
        if isinstance(thing, torch.nn.Module):
            return self._prepare_model(thing, shard)  # type: ignore[return-value]
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

    def _prepare_model(self, module: torch.nn.Module, shard: ShardBy | None) -> PreparedModel:
        if self._state.model is not None:
            raise ConfigError(
                "run.prepare got a second model; write a torch.nn.Module that holds the parts and whose forward calls "
                "them, and prepare that"
            )
        check_model(module)
        is_replicated = self.config.strategy == "ddp"
        module.to(self.device)
        own_buffers(module)
        self._state.model = PreparedModel(
            module,
            device=self.device,
            bf16=self.config.precision == "bf16" and is_replicated,  # FSDP gathers parameters in bf16
            is_unit=(lambda part: False) if is_replicated else units_of(module, self.config.fsdp.shard_classes, shard),
        )
        return self._state.model

    def load_weights(self, uri: str, *, step: int | None = None, strict: bool = True) -> None:
        """Has the run begin with the weights of another run, for fine-tuning: parameters and buffers of the model, and
        nothing of its optimizer or its position. Every rank calls it, after `prepare(model)`.

        It is for the beginning of a run: one that has a commit of its own goes on from that. They are read when
        `steps()` begins, by all ranks together; the other run may go on meanwhile. What of them does not fit the model,
        or cannot be used, is said there, before the first step.

        Args:
            uri: the other run's folder, `<storage>/<name>`.
            step: of its commit; by default the newest that can be used.
            strict: refuse names that only one of the two has. Otherwise those are logged, and in the ledger, and one of
                them at least has to be the same. Shapes have to be the same in any case; other dtypes are converted to
                the model's, which is logged, too.

        Raises:
            ConfigError: there is no such commit. From `steps()`: it does not fit the model; the names that are missing
                there, or unexpected, are said.
            CheckpointError: from `steps()`: none can be used.
        """
        if self._participation.holds_state or self._rehearsal is not None:
            raise ConfigError("run.load_weights was called inside run.steps(); call it before the loop")
        if self._state.model is None:
            raise ConfigError("run.load_weights came before a model was prepared; call run.prepare(model) first")
        weights = Weights(uri, step, strict)
        if not weights.are_there() and not has_commits(self._job.storage):
            raise weights.nowhere()
        module, link = self._state.module, self._link
        self._state.begin_with = lambda group: weights.load(module, group, link.say, link.activity)

    def register(self, name: str, thing: Stateful) -> None:
        """Adds user state to every commit: anything with `state_dict()` of plain values and tensors, and
        `load_state_dict()`. It has to be updated in the same way on every rank.

        With FSDP parameters are `DTensor`s, and so is what is computed from them, such as a moving average. Its
        `state_dict()` has to return whole tensors, as `tensor.full_tensor()`, which every rank calls when a commit is
        due; `load_state_dict()` gets whole ones. Every rank calls it, before the loop over `steps()`.

        Raises:
            ConfigError: it came later, `thing` lacks one of the two methods, or the name is taken.
        """
        if self._participation.holds_state or self._rehearsal is not None:
            raise ConfigError(f"run.register got {name} inside run.steps(); register everything before the loop")
        if not isinstance(thing, Stateful):
            raise ConfigError(
                f"run.register got {name}, a {type(thing).__name__}, without state_dict and load_state_dict; give "
                "it both, or wrap it in an object that has them"
            )
        if name in self._state.registered:
            raise ConfigError(f"run.register got {name} twice; give each thing a name of its own")
        self._state.registered[name] = thing

    def steps(self) -> Iterator[Step]:
        """The steps of the run from where it stands: from the first, or from the newest commit.

        A step that loses a peer comes again, with the same samples, in the next generation. If that leaves it half made
        in this worker, the user's function begins again instead (see `Step`). A worker that is to join others while
        they train makes its first step twice, too: at first alone, up to `optimize` (see `Rehearsal`), so that nobody
        waits for what is slow in it.
        """
        if self._state.model is None or not self._state.optimizers:
            raise ConfigError(
                "run.steps() came before a model and an optimizer were prepared; call run.prepare for both"
            )
        part = self._participation
        lost: str | None = None
        while True:
            generation = part.generation
            if generation is None:
                if not part.holds_state:
                    self._rehearsal = part.warm_up()
                    if self._rehearsal is not None:
                        yield self._rehearsal
                        self._rehearsal = None
                generation = part.join(lost)
                self._forget_losses(generation)
            if self.position.step >= self._job.total_steps:
                return
            self._step = self._next_step(generation)
            yield self._step
            step, self._step = self._step, None
            if step.agreed is None and step.lost is None:
                raise ConfigError(f"step {step.index} was skipped; every step has to run, in `with step`")
            lost = step.lost if step.lost is not None else self._end_step(step)
            if lost is None:
                # Steps before it may be made once more, from a commit.
                self._losses = self._losses if step.index < self._lost_step else 0
                continue
            self._count_loss(step.index)
            if part.generation is generation or self._state.is_half_changed:
                part.account.lost(in_step=True)
                part.leave(intact=False)
            elif part.generation is not None:  # an evaluation after the step has got into another
                self._forget_losses(part.generation)
            self._check_losses(step.index, lost)

    def _count_loss(self, index: int) -> None:
        """A step lost a peer."""
        self._losses = self._losses + 1 if index >= self._lost_step else 1
        self._lost_step = index

    def _forget_losses(self, generation: Generation) -> None:
        """Unless a generation is formed by the workers of the one before, none of which has died."""
        self._losses = self._losses if generation.group.assignment.again else 0

    def _check_losses(self, index: int, lost: str | None) -> None:
        if self._losses >= LOSSES_IN_A_ROW:
            raise WorkersLostError(
                f"step {index} was lost {LOSSES_IN_A_ROW} times in a row by the same workers, none of which died, so "
                f"it is not tried again. The last time: {lost}. If a rank needs longer than others in it, raise "
                "collective_timeout_s"
            )

    def evaluate(
        self,
        loss_fn: Callable[[Any, dict[str, torch.Tensor]], torch.Tensor],
        data: str | list[str],
        *,
        transform: Transform | None = None,
        name: str = "validation_loss",
    ) -> float:
        """The exact mean of a loss over a held-out data set: each row once, spread over the workers.

        Every rank calls it at the same place, inside or after the loop over `steps()`; the result is the same on every
        rank and at every world size. The model is in eval mode and without gradients meanwhile.

        Decide by `step.index` alone whether to call it. It is NaN if a peer was lost in a step and not all of the
        others ask for it, or that left the step half made, and in a step that a newcomer rehearses.

        Args:
            loss_fn: from the model and a batch to the mean loss over the batch's rows.
            data: Parquet, as for `ElasticTrainer`.
            transform: as for `ElasticTrainer`, whose own is not applied here.
            name: under which `RunResult.metrics`, the ledger and `checkpoint.best_metric` know the result.

        Raises:
            ConfigError: it came before the loop over `steps()`.
            DataError: the data set cannot be read as asked.
        """
        part, step = self._participation, self._step
        if self._rehearsal is not None or self._state.is_half_changed:
            return math.nan
        if part.generation is None:
            raise ConfigError("run.evaluate was called before run.steps(); call it inside the loop or after it")
        if self.rank == 0:
            self._link.say("evaluating", name=name)

        def measure(generation: Generation) -> float:
            return evaluate(generation, self._job, loss_fn, data, transform, self.device)

        if step is not None and step.is_under_way:  # a part of it: where a peer is lost here, it comes again
            with step.remembering_failure():
                value = measure(part.generation)
        else:
            try:
                lost = step.lost if step is not None and step.generation is part.generation else None
                value = part.together(name, measure, lost=lost)
            except NotTogetherError:
                return math.nan
        self._commits.measured(self.position.step, {name: value})
        if self.rank == 0:
            self._link.say("evaluation", step=self.position.step, name=name, loss=value)
        return value

    @property
    def rank(self) -> int:
        """This worker's rank in the current generation, before its first the one that it is likely to get, or 0. For
        logging: nothing that changes weights may depend on it."""
        generation = self._participation.generation
        return generation.group.rank if generation else self._rehearsal.place.rank if self._rehearsal else 0

    @property
    def world_size(self) -> int:
        """Workers of the current generation; before the first as for `rank`."""
        generation = self._participation.generation
        return generation.group.world_size if generation else self._rehearsal.place.world_size if self._rehearsal else 0

    @property
    def has_met_others(self) -> bool:
        """Whether this worker has been in a generation."""
        return self._participation.holds_state

    @property
    def position(self) -> Position:
        """Steps done and rows consumed."""
        return self._state.position

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self._job.total_steps

    def again(self) -> Run:
        """The run for the user's function to begin again with, once `TrainAgain` has ended it, and the save at hand has
        ended: nobody restores an older commit meanwhile, as all wait for this worker."""
        self._link.activity.enter("start")
        self._participation.shut_down(save_within_s=math.inf)
        run = Run(self._job, self._link, self.device, Commits(self._job, self._link, self._commits))
        run._participation.follow(self._participation)
        run._losses, run._lost_step = self._losses, self._lost_step
        return run

    # Steps.

    def _next_step(self, generation: Generation) -> Step:
        step, shape = self.position.step, self._job.shape
        self._participation.tasks.begin_step(step)
        seed_all(self.config.seed, step, "begin")
        return Step(generation, shape.rows(step), shape.epoch_of(step), lambda: self._votes(step + 1))

    def _votes(self, steps_done: int) -> dict[str, bool]:
        """What this rank wants to happen after the step at hand. Rank 0's clock counts, and its ear; membership
        changes when all are ready for that."""
        reconfigure = self._participation.is_ready_to_change(steps_done)
        if self._state.is_spread and self._commits.is_resting:
            reconfigure = False  # it begins with a commit, and the last one has just failed
        if self.rank != 0:
            return {"reconfigure": reconfigure, "saving": self._commits.is_saving}
        return {
            "commit": self._commits.are_due(steps_done),
            "saving": self._commits.is_saving,
            "stop": self._link.stop_requested,
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
        part = self._participation
        # An evaluation after the step may have found a peer lost, and a new generation: then there is nobody to end
        # this step with, and what was voted for is voted for again.
        if part.generation is not step.generation:
            return None
        try:
            self._carry_out(step)
            goes_on = goes_on and self.position.step < self.total_steps
            if goes_on and step.agreed.votes["reconfigure"] == self.world_size:
                if self._state.is_spread and not self._made_durable(step.generation):
                    return None  # the next one begins from the newest commit, and that is an older one
                return part.leave(intact=True, reason=CHANGED)
        except Exception as error:
            if not is_lost_peer(error):
                raise
            return described(error)
        return None

    def _carry_out(self, step: Step) -> None:
        """What the ranks agreed on in a step, but for a change of membership."""
        assert step.agreed is not None
        part, generation = self._participation, step.generation
        first_step_s = part.account.step_done()
        metrics: dict[str, float] = {}
        if self.rank == 0:
            self._link.progress(**self._newest(step))
            if first_step_s is not None:
                self._link.say("first_step", generation=generation.number, seconds=first_step_s)
        if step.index % self.config.log_every_steps == 0 or self.position.step == self._job.total_steps:
            with part.activity.within("collective"):
                metrics = generation.gather_metrics(step, self._job.shape.rows(step.index))
            if self.rank == 0:
                newest, account = self._newest(step), part.account.seconds()
                self._link.say("steps", generation=generation.number, **newest, metrics=metrics, account=account)
        self._commits.measured(self.position.step, metrics | {"loss": step.loss})
        if self.rank == 0:
            self._commits.check()
        if step.agreed.votes["stop"]:
            self._commit_the_end(generation)
            raise RunStopped("stop was requested")
        if step.agreed.votes["commit"] and not step.agreed.votes["saving"]:
            part.save()
        elif step.agreed.votes["commit"] and self.rank == 0:
            self._commits.leave_out(self.position.step)

    def _newest(self, step: Step) -> dict[str, Any]:
        return {
            "step": self.position.step,
            "epoch": step.epoch,
            "loss": step.loss,
            "samples": self.position.samples,
            "world_size": self.world_size,
        }

    # The end.

    def finish(self) -> dict[str, Any]:
        """After the user's function: the last commit, and what the summary says of the run. Every rank calls it.

        Raises:
            TrainAgain: the loop ended with a step that lost a peer, and that nobody has made: it is still to be made.
                So it is where the loop ended with a rehearsal.
        """
        part = self._participation
        if self._rehearsal is not None:  # of a step with which the loop ends
            raise TrainAgain
        if part.generation is None:
            raise ConfigError("the training function returned without looping over run.steps(); nothing was trained")
        lost = unmade = None
        step, self._step = self._step, None  # a loop that ended early left it open
        if step is not None and step.lost is not None:
            unmade = step.index
            # Else an evaluation after it has got into another generation.
            if step.generation is part.generation or self._state.is_half_changed:
                lost = step.lost
                self._count_loss(step.index)
                self._check_losses(step.index, lost)
        elif step is not None and step.agreed is not None and step.generation is part.generation:
            lost = self._end_step(step, goes_on=False)
        part.tasks.end_steps()
        everyone = part.together("weights", self._compare, lost=lost)
        if lost is not None and part.generation is not None:
            self._forget_losses(part.generation)
        if len(set(everyone)) > 1:
            raise ElasticDDPError(
                f"ranks ended with different weights: {dict(enumerate(everyone))}; something in the training function "
                "depends on the rank, the host or the time, or uses a nondeterministic operation"
            )
        part.together("the last commit", self._commit_the_end)
        if self.position.step == unmade:
            part.leave(intact=True, reason=UNMADE)
            raise TrainAgain
        return {"weights_sha256": everyone[0], **self.progress()}

    def _compare(self, generation: Generation) -> list[str]:
        generation.strategy.settle()
        weights = self._state.weights_sha256()
        with generation.activity.within("collective"):
            return [digest.decode() for digest in generation.group.all_gather_bytes(weights.encode())]

    def _commit_the_end(self, generation: Generation) -> None:
        """Makes the state durable, and every rank sure of that: none of them leaves with it before. What the storage
        fails of is tried again, as often as saves may fail."""
        for tries_left in range(self.config.checkpoint.max_failed_saves, -1, -1):
            if self._is_durable(generation):
                break
            self._participation.commit(may_fail=tries_left > 0)
        with generation.activity.within("collective"):
            generation.group.meet()

    def _made_durable(self, generation: Generation) -> bool:
        """Makes the state durable, if the storage lets it. Returns on every rank whether it did."""
        if self._is_durable(generation):
            return True
        self._participation.save()
        return self._is_durable(generation)

    def _is_durable(self, generation: Generation) -> bool:
        """Whether there is a commit of the state as it is, once the save at hand has ended."""
        group, word = generation.group, None
        if group.rank == 0:
            with generation.activity.within(STORING, self._commits.worked_s):
                word = b"there" if self._commits.have(self.position.step, group) else b""
        # Rank 0 waits for the shares of the others, which are still being written.
        with generation.activity.within("collective", self._commits.worked_s):
            return bool(group.broadcast_bytes(word))

    def progress(self) -> dict[str, Any]:
        """How far the run is, as the summary says it."""
        return {
            "steps": self.position.step,
            "total_steps": self.total_steps,
            "epochs": self.position.step / self._job.shape.steps_per_epoch,
            "samples": self.position.samples,
            "samples_sha256": self.position.samples_sha256,
        }

    def close(self, *, intact: bool, reason: str | None = None) -> None:
        """Leaves the generation, if there is one; `intact` when all its members do, none of which is missed then."""
        self._participation.leave(intact=intact, reason=reason)

    def shut_down(self) -> None:
        """Nothing is read any more. For the end of the run in this worker, after `close`."""
        self._participation.shut_down(save_within_s=self.config.drain_deadline_s)
