"""`Run`: the argument of a training function, one worker's view of the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from elastic_ddp.data.user_code import environment
from elastic_ddp.distributed.buffer_sync import check_rules, resolve_views
from elastic_ddp.distributed.first_weights import FirstWeights
from elastic_ddp.distributed.prepared_model import PreparedModel, ShardBy, unit_predicate
from elastic_ddp.errors import ConfigError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.hyperparameters import Every
from elastic_ddp.worker.state_checks import check_model, check_sync_batch_norm
from elastic_ddp.worker.step import Step
from elastic_ddp.worker.train_state import Position, Stateful
from elastic_ddp.worker.weight_files import KeyMapping, check_mapping

if TYPE_CHECKING:
    from elastic_ddp.config.run_config import RunConfig
    from elastic_ddp.data.files import Source
    from elastic_ddp.data.map_style import InMemory
    from elastic_ddp.data.work import CollateFn, Transform
    from elastic_ddp.distributed.process_group import ProcessGroup
    from elastic_ddp.tensors.state_tree import Layout
    from elastic_ddp.worker.evaluation import LossFunction
    from elastic_ddp.worker.generation import Generation
    from elastic_ddp.worker.loop import Loop

Thing = TypeVar("Thing")
Module = TypeVar("Module", bound=torch.nn.Module)


class Run:
    """The argument of the training function: prepare what trains, then loop over `steps()`.

    Example:
        ```python
        def train(run: ed.Run):
            model = run.prepare(Net())
            optimizer = run.prepare(torch.optim.AdamW(model.parameters(), lr=3e-4))
            for step in run.steps():
                with step:
                    for batch in step.micro_batches():
                        step.backward(loss_fn(model, batch))
                    step.optimize()
        ```

    Attributes:
        config: the run's configuration.
        device: the device that this worker trains on.
    """

    def __init__(self, loop: Loop) -> None:
        self.config: RunConfig = loop.job.config
        self.device = loop.device
        self._loop = loop
        self._state = loop.state

    def prepare(
        self,
        thing: Thing,
        *,
        shard: ShardBy | None = None,
        buffers: Mapping[str, str] | None = None,
        param_init_fn: Callable[[torch.nn.Module], object] | None = None,
        every: Every = "step",
    ) -> Thing:
        """Adds a model, an optimizer, or a scheduler to the run.

        Call it on every rank, in the same order, before `steps()`. `Step.optimize` steps prepared optimizers and
        schedulers. Commits save and restore prepared objects; restored values are in place from the first step on.

        A model may be built under `torch.device("meta")`. It then gets its weights from `reset_parameters()` of its
        modules or from `param_init_fn`; the random numbers of a module depend on the seed and its name. With FSDP,
        `steps()` initializes the model and moves it to the device, unit by unit: no rank has the whole model.

        With FSDP, `steps()` replaces parameters by shards, also in the optimizer. References taken earlier are stale.

        Args:
            thing: a model, an optimizer of its parameters, or a scheduler of a prepared optimizer.
            shard: for FSDP, the submodules to shard as one unit each: a class, a tuple of classes, or a function from
                a module to a bool. Adds to `fsdp.shard_classes`.
            buffers: the rule for each buffer that a forward changes, by name or glob pattern, for example
                `{"*.usage": "sum"}`. `"mean"` averages the changes over the rows of the global batch, `"sum"` adds the
                changes of all micro-batches, `"first"` keeps what micro-batch 0 leaves. Statistics of torch's
                normalization layers need no entry; a change of any other buffer is an error.
            param_init_fn: for a model on the meta device, in place of `reset_parameters()`: initializes a module's own
                parameters and buffers, in place. The run calls it with each module that has tensors on the meta device,
                submodules first.
            every: for a scheduler, whether it is stepped after each `step` or after the last step of each `epoch`.

        Returns:
            `thing` itself. A model is moved to `device`, with FSDP in `steps()`; calls of it, `model(x)`, go through
            DDP or FSDP. Calls of its copies do not.

        Raises:
            ConfigError: the run cannot train `thing`, or no submodule matches `shard`, or no buffer matches `buffers`.
        """
        if self._loop.has_begun:
            raise ConfigError("run.prepare was called inside run.steps(). Prepare everything before the loop.")
        is_scheduler = isinstance(thing, torch.optim.lr_scheduler.LRScheduler)
        if every not in ("step", "epoch") or (every == "epoch" and not is_scheduler):
            raise ConfigError(
                f"run.prepare got every={every!r} with a {type(thing).__name__}. A scheduler takes 'step' or 'epoch'; "
                "leave it out for a model or an optimizer."
            )
        if isinstance(thing, torch.nn.Module):
            return self._prepare_model(thing, shard, {} if buffers is None else buffers, param_init_fn)
        if any(option is not None for option in (shard, buffers, param_init_fn)):
            raise ConfigError(
                f"run.prepare got a {type(thing).__name__} with shard, buffers or param_init_fn, which are for a model."
            )
        if isinstance(thing, torch.optim.Optimizer):
            self._state.add_optimizer(thing)
        elif isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
            self._state.add_scheduler(thing, every)
        else:
            raise ConfigError(
                f"run.prepare got a {type(thing).__name__}; it takes a model, an optimizer, or a scheduler. "
                "Use run.register(name, thing) for other objects with state."
            )
        return thing

    def _prepare_model(
        self,
        module: Module,
        shard: ShardBy | None,
        buffers: Mapping[str, str],
        param_init_fn: Callable[[torch.nn.Module], object] | None,
    ) -> Module:
        if self._state.model is not None:
            raise ConfigError(
                "run.prepare got a second model. Prepare one torch.nn.Module that holds both. Its forward "
                "calls them, or step.update trains them in turns."
            )
        check_model(module)
        check_sync_batch_norm(module, self.config, self._loop.job.shape)
        check_rules(module, buffers)
        config = self.config
        is_fsdp = config.strategy == "fsdp"  # which gathers parameters in this precision itself
        first_weights = FirstWeights(config.seed, param_init_fn)
        if not is_fsdp:
            first_weights.make(dict(module.named_modules()), self.device)
            module.to(self.device)
        resolve_views(module)
        self._state.model = PreparedModel(
            module,
            device=self.device,
            bf16=config.precision == "bf16" and not is_fsdp,
            fp16=config.precision == "fp16" and not is_fsdp,
            is_unit=unit_predicate(module, config.fsdp.shard_classes, shard) if is_fsdp else lambda _: False,
            buffer_rules=buffers,
            first_weights=first_weights,
        )
        return module

    def load_weights(
        self,
        uri: str | PathLike[str],
        *,
        step: int | None = None,
        strict: bool = True,
        key_mapping: KeyMapping | None = None,
    ) -> None:
        """Starts the run from the weights of another run or of a file, for fine-tuning.

        Call it on every rank, after `prepare(model)` and before `steps()`, which reads the weights. A run that has a
        commit of its own resumes from its commit. Optimizer and data start afresh. The other run may be training.

        Args:
            uri: the other run's folder, `<storage>/<name>`; a `.safetensors` file, or a `.pt` file of `torch.save`, of
                which only weights are loaded; or the folder of a Hugging Face model, with `model.safetensors` or its
                index. In any storage; relative paths start at the driver's working directory.
            step: the step of the commit to read; by default the newest that is intact.
            strict: require the same parameter and buffer names. If false, names that only one model has are logged, and
                at least one name must match. Shapes must always match; dtypes are converted, and conversions logged.
            key_mapping: renames the saved tensors: a dict of replacements by regular expression, applied in order, such
                as `{"^": "base."}` for a prefix; or a function from a name to the new one, or to None to leave it out.

        Raises:
            ConfigError: called too early or too late, or `key_mapping` is invalid. `steps()` raises it if the weights
                do not exist or do not fit the model.
            CheckpointError: from `steps()`: no commit is intact, or a file is damaged.
        """
        if self._loop.has_begun:
            raise ConfigError("run.load_weights was called inside run.steps(). Call it before the loop.")
        if self._state.model is None:
            raise ConfigError("run.load_weights was called before a model was prepared. Call run.prepare(model) first.")
        check_mapping(key_mapping)
        from elastic_ddp.worker.pretrained import PretrainedWeights

        source = Storage(environment().resolve(os.fspath(uri))).uri
        weights = PretrainedWeights(source, step, strict, key_mapping)
        module = self._state.module
        client = self._loop.client

        def load(group: ProcessGroup, layout: Layout | None) -> list[str]:
            return weights.load(module, group, client.record, client.activity, layout)

        self._state.load_initial_weights = load

    def register(self, name: str, thing: Stateful) -> None:
        """Adds an object with `state_dict()` and `load_state_dict()` to every commit.

        Call it on every rank, before `steps()`. The state holds plain values and tensors. Every rank must update it in
        the same way, inside `with step`.

        With FSDP, tensors computed from parameters are `DTensor`s. `state_dict()` must return them as
        `tensor.full_tensor()`, and `load_state_dict()` receives full tensors. Both run on every rank.

        Raises:
            ConfigError: called inside the loop, `thing` lacks one of the two methods, or the name is taken.
        """
        if self._loop.has_begun:
            raise ConfigError(f"run.register({name!r}) was called inside run.steps(). Register before the loop.")
        if not isinstance(thing, Stateful):
            raise ConfigError(
                f"run.register({name!r}) got a {type(thing).__name__} without state_dict and load_state_dict. Add both "
                "methods, or wrap it in an object that has them."
            )
        if name in self._state.registered:
            raise ConfigError(f"run.register got the name {name!r} twice. Give each object a name of its own.")
        self._state.registered[name] = thing

    def steps(self) -> Iterator[Step]:
        """Yields the remaining steps of the run, from step 0 or from the newest commit.

        Call it on every rank. Use each step in a `with` block. If a worker fails during a step, the same step is
        yielded again with the same samples. A worker that joins a running training first receives a warm-up step, which
        computes gradients alone and ends before the optimizer; then it receives the same step again.

        Raises:
            ConfigError: no model or no optimizer is prepared, or a step was not run.
        """
        if self._state.model is None or not self._state.optimizers:
            raise ConfigError(
                "run.steps() was called before a model and an optimizer were prepared. Call run.prepare for both."
            )
        return self._loop.steps()

    def evaluate(
        self,
        loss_fn: LossFunction,
        data: Source | InMemory,
        *,
        transform: Transform | None = None,
        collate_fn: CollateFn | None = None,
        compute_metrics: Callable[[Any], Any] | None = None,
        name: str | None = None,
    ) -> Any:
        """Returns the mean of `loss_fn` over a held-out data set; each row counts once.

        Collective: call it on every rank at the same place, inside or after the loop over `steps()`. Let only
        `step.index` decide whether to call it. The model runs in eval mode without gradients. The result is identical
        on all ranks and at every world size.

        Args:
            loss_fn: maps (model, batch) to the batch's mean loss, a scalar tensor; or to a tuple of the loss and
                its weight, as in `Step.backward`; or to a dict of either by name. By default the weight is the number
                of rows. With `compute_metrics`, it returns values of each row instead: a tensor of shape `(rows, ...)`,
                or a dict of such tensors.
            data: Parquet files or a data set in memory, as in `ElasticTrainer`. Relative paths start at the driver's
                working directory. A data set in memory must be the same on all ranks.
            transform: applied to the rows, as in `ElasticTrainer`; the training transform is not.
            collate_fn: maps rows to a batch, as in `ElasticTrainer`.
            compute_metrics: for metrics that are no means, for example F1 or AUC. Maps the values of all rows, in
                stored order, as one CPU tensor or a dict of them, to a number or a dict of numbers. Rank 0 calls it.
            name: the metric's name in the ledger, in `RunResult.metrics`, and for `checkpoint.best_metric`; by default
                `validation_loss`. For a dict, the prefix of the names, by default `validation`, so that
                `{"accuracy": ...}` is `validation_accuracy`.

        Returns:
            A float, or a dict of floats if `loss_fn` or `compute_metrics` returned one. All are NaN if a worker failed
            and not all survivors repeat the evaluation, and in a warm-up step.

        Raises:
            ConfigError: called before the loop, or a function returned something else.
            DataError: the data set cannot be read.
        """

        # Imported late: programs name `ed.Run` in annotations, and would import Ray Data before they start Ray.
        from elastic_ddp.worker.evaluation import evaluate

        def measure(generation: Generation) -> Any:
            return evaluate(generation, self._loop.job, loss_fn, data, transform, collate_fn, compute_metrics)

        return self._loop.measure(name, measure)

    @property
    def rank(self) -> int:
        """This worker's rank now; before the first step the expected one, or 0. Weights must not depend on it."""
        return self._loop.rank

    @property
    def world_size(self) -> int:
        """The number of workers now; before the first step the expected one, or 0. Weights must not depend on it."""
        return self._loop.world_size

    @property
    def position(self) -> Position:
        """The steps done and the samples consumed so far."""
        return self._state.position

    @property
    def total_steps(self) -> int:
        """The number of steps of the whole run."""
        return self._loop.job.total_steps

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps of an epoch, the same at every world size."""
        return self._loop.job.shape.steps_per_epoch
