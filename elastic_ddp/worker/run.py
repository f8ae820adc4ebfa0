"""What a user's training function is given: the run, as one worker sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from elastic_ddp.distributed.buffer_sync import own_buffers
from elastic_ddp.distributed.prepared_model import PreparedModel, ShardBy, units_of
from elastic_ddp.errors import ConfigError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.evaluation import evaluate
from elastic_ddp.worker.generation import Generation
from elastic_ddp.worker.loop import Loop
from elastic_ddp.worker.pretrained import Weights
from elastic_ddp.worker.step import Step
from elastic_ddp.worker.train_state import Position, Stateful, check_model

if TYPE_CHECKING:
    from elastic_ddp.config.run_config import RunConfig
    from elastic_ddp.data.source import Transform

Prepared = TypeVar("Prepared")


class Run:
    """A run inside a worker. `prepare` what trains, then loop over `steps()`.

    Attributes:
        config: the run's configuration.
        device: where this worker trains.
    """

    def __init__(self, loop: Loop) -> None:
        self.config: RunConfig = loop.job.config
        self.device = loop.device
        self._loop, self._state = loop, loop.state

    def prepare(self, thing: Prepared, *, shard: ShardBy | None = None) -> Prepared:
        """Makes a model, an optimizer or a scheduler part of the run; every rank calls it in the same order.

        A model is moved to the device and comes back wrapped (`PreparedModel`): replicated by DDP or sharded by FSDP,
        with bf16 where the configuration says so. Optimizers and schedulers come back as they are, and are stepped,
        saved and restored by the run. State of an interrupted run is restored when `steps()` starts, which is also when
        a model is sharded, or refused by the name of a parameter that cannot be; the optimizer then has the sharded
        parameters in the place of those it was built from, and whatever else took those has not (take them in the loop,
        from the model). With FSDP this is done again whenever membership changes, with a model built anew.

        Args:
            thing: what to prepare.
            shard: for a model and `strategy = "fsdp"`: the parts of it that are gathered one at a time, as a class of
                modules, several, or a callable from a module to whether it is one; beside `fsdp.shard_classes`.

        Raises:
            ConfigError: a second model, an optimizer of other parameters, a scheduler of another optimizer, no part to
                shard where some were named, or anything else; `register` is for other things with state.
        """
        if self._loop.has_begun:
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
        """Has the run begin with the weights of another run, for fine-tuning: the `state_dict` of the model, and
        nothing of its optimizer or its position. Every rank calls it, after `prepare(model)`.

        It is for the beginning of a run: one that has a commit of its own goes on from that, and a worker that comes
        later gets what the others have. They are read when `steps()` begins, by all ranks together; the other run may
        go on meanwhile. What is not there, does not fit the model, or cannot be used, is said then, before the first
        step.

        Args:
            uri: the other run's folder, `<storage>/<name>`. A relative path begins at the worker's working directory.
            step: of its commit; by default the newest that can be used.
            strict: refuse names that only one of the two has. Otherwise those are logged, and in the ledger, and one of
                them at least has to be the same. Shapes have to be the same in any case; other dtypes are converted to
                the model's, which is logged, too.

        Raises:
            ConfigError: it came before a model was prepared, or inside the loop. From `steps()`: there is no such
                commit, or it does not fit the model; the names that are missing there, or unexpected, are said.
            CheckpointError: from `steps()`: none can be used.
        """
        if self._loop.has_begun:
            raise ConfigError("run.load_weights was called inside run.steps(); call it before the loop")
        if self._state.model is None:
            raise ConfigError("run.load_weights came before a model was prepared; call run.prepare(model) first")
        weights = Weights(Storage(uri).uri, step, strict)
        module, client = self._state.module, self._loop.client
        self._state.begin_with = lambda group: weights.load(module, group, client.say, client.activity)

    def register(self, name: str, thing: Stateful) -> None:
        """Adds user state to every commit: anything with `state_dict()` of plain values and tensors, and
        `load_state_dict()`. It has to be updated in the same way on every rank.

        With FSDP parameters are `DTensor`s, and so is what is computed from them, such as a moving average. Its
        `state_dict()` has to return whole tensors, as `tensor.full_tensor()`, which every rank calls when a commit is
        due; `load_state_dict()` gets whole ones. Every rank calls it, before the loop over `steps()`.

        Raises:
            ConfigError: it came later, `thing` lacks one of the two methods, or the name is taken.
        """
        if self._loop.has_begun:
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
        they train makes its first step twice, too: at first alone, up to `optimize` (see `WarmupStep`), so that nobody
        waits for what is slow in it.
        """
        if self._state.model is None or not self._state.optimizers:
            raise ConfigError(
                "run.steps() came before a model and an optimizer were prepared; call run.prepare for both"
            )
        return self._loop.steps()

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

        def measure(generation: Generation) -> float:
            return evaluate(generation, self._loop.job, loss_fn, data, transform, self.device)

        return self._loop.measure(name, measure)

    @property
    def rank(self) -> int:
        """This worker's rank in the current generation, before its first the one that it is likely to get, or 0. For
        logging: nothing that changes weights may depend on it."""
        return self._loop.rank

    @property
    def world_size(self) -> int:
        """Workers of the current generation; before the first as for `rank`."""
        return self._loop.world_size

    @property
    def position(self) -> Position:
        """Steps done and rows consumed."""
        return self._state.position

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self._loop.job.total_steps
