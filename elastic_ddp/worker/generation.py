"""`Generation`: a stretch of training with a fixed set of workers. `open` forms it, `close` ends it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from elastic_ddp.data.feed import InlineFeed, MicroBatchFeed
from elastic_ddp.data.feed_cache import FeedCache
from elastic_ddp.data.order import FeedPlan
from elastic_ddp.distributed import cublas
from elastic_ddp.distributed.assignment import Assignment
from elastic_ddp.distributed.buffer_sync import StepBuffers
from elastic_ddp.distributed.parameter_guard import ParameterGuard
from elastic_ddp.distributed.process_group import ProcessGroup, to_host
from elastic_ddp.distributed.reduction_tree import processing_order
from elastic_ddp.distributed.state_transfer import check_same_model
from elastic_ddp.distributed.strategy import Strategy
from elastic_ddp.rendezvous.hang import Activity
from elastic_ddp.worker.clock import WorkerClock
from elastic_ddp.worker.loss_scale import unit_of
from elastic_ddp.worker.state_sharing import GenerationInputs, share_state
from elastic_ddp.worker.train_state import ChangedBy, TrainState

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_ddp.config.run_config import RunConfig
    from elastic_ddp.worker.job import Job


def feeds_of(job: Job, device: torch.device) -> FeedCache:
    """Returns the cache of a worker's feeds of the run's training set."""
    config = job.config

    def make(micro_batches: tuple[int, ...], first_step: int, before_reading: Callable[[], object]) -> MicroBatchFeed:
        plan = FeedPlan(
            rows_per_group=job.index.group_rows,
            shape=job.shape,
            seed=config.seed,
            options=config.data,
            micro_batches=micro_batches,
            first_step=first_step,
            last_step=job.total_steps,
            weights=job.weights,
        )
        functions: dict[str, Any] = {"transform": job.transform, "collate_fn": job.collate_fn}
        options: dict[str, Any] = {"before_reading": before_reading, "hang_timeout_s": config.hang_timeout_s}
        make_feed = MicroBatchFeed if job.debugged is None else InlineFeed
        return make_feed(job.index, plan, **functions, device=device, **options)

    return FeedCache(make)


def micro_batches_of(config: RunConfig, rank: int, world_size: int) -> tuple[int, ...]:
    """Returns the micro-batches that a rank computes in every step, in its order."""
    return tuple(processing_order(strategy_of(config).deal(config.num_micro_batches, world_size)[rank]))


def strategy_of(config: RunConfig) -> type[Strategy]:
    """Returns the strategy, DDP or FSDP, that a run trains its model with."""
    if config.strategy == "fsdp":
        from elastic_ddp.distributed.fsdp import FSDPStrategy  # the import takes a second, which DDP runs save

        return FSDPStrategy
    from elastic_ddp.distributed.ddp import DDPStrategy

    return DDPStrategy


@dataclass
class Generation:
    """A process group whose ranks hold the same state, with this rank's strategy and feed."""

    group: ProcessGroup
    config: RunConfig
    state: TrainState
    strategy: Strategy
    feed: MicroBatchFeed
    feeds: FeedCache
    clock: WorkerClock = field(default_factory=WorkerClock)
    weight_unit: float | None = None
    """Set by the first call of `unit_of_weights`."""
    evaluation_feed: MicroBatchFeed | None = None
    is_closed: bool = False

    def __post_init__(self) -> None:
        model = self.state.model
        assert model is not None
        self.buffers = StepBuffers(model.module, model.buffer_rules)
        self.parameters = ParameterGuard(model.module)
        self._of_updates: dict[int, Strategy] = {}  # by the id of the optimizer; 0 for functions
        self._has_compared_mirrors = False

    @classmethod
    def open(cls, inputs: GenerationInputs, assignment: Assignment, attempt: int = 0) -> Generation:
        """Forms the process group and brings all ranks to the same state. `attempt` counts failed attempts in a row."""
        job = inputs.job
        state = inputs.state
        feeds = inputs.feeds
        step = assignment.first_step
        micro_batches = micro_batches_of(job.config, assignment.rank, assignment.world_size)
        with ExitStack() as on_error:

            def on_forming(group: ProcessGroup) -> None:
                on_error.callback(group.close, intact=False)
                inputs.on_forming(group)

            def open_feed(step: int) -> MicroBatchFeed:
                feed = feeds.open(micro_batches, step)
                on_error.callback(feeds.close, feed)
                return feed

            feeds.discard_unfit(micro_batches, step)
            group = ProcessGroup.form(
                assignment,
                store=inputs.store,
                device=inputs.device,
                timeout_s=job.config.collective_timeout_s,
                shares_device=job.config.shares_gpu,
                attempt=attempt,
                on_forming=on_forming,
            )
            inputs.clock.formed()
            if job.config.reduction == "canonical":
                cublas.settle(inputs.device, state.module)
            # Known to all ranks if one holds the state. The feed then reads its first rows during the transfer.
            feed = open_feed(step) if step is not None else None
            check_same_model(state.module, group, state.optimizers)
            assert state.model is not None
            strategy = strategy_of(job.config)(state.model, job.config, group, inputs.clock.phases.enter)
            on_error.callback(strategy.close)
            share_state(inputs, group, strategy)
            feed = feed or open_feed(state.position.step)
            generation = cls(group, job.config, state, strategy, feed, feeds, inputs.clock)
            on_error.pop_all()
            return generation

    @property
    def activity(self) -> Activity:
        return self.clock.activity

    @property
    def number(self) -> int:
        """The generation's number in the session, from 1."""
        return self.group.assignment.generation

    def strategy_of(self, by: ChangedBy) -> Strategy:
        """Returns the strategy that computes the gradients of an update."""
        if by is None:
            return self.strategy
        optimizers = [by] if isinstance(by, torch.optim.Optimizer) else self.state.optimizers
        key = id(by) if isinstance(by, torch.optim.Optimizer) else 0
        if key not in self._of_updates:
            assert self.state.model is not None
            groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            trained = [parameter for group in groups for parameter in group["params"]]
            make = type(self.strategy)
            self._of_updates[key] = make(self.state.model, self.config, self.group, self.clock.phases.enter, trained)
        return self._of_updates[key]

    def unit_of_weights(
        self, strategy: Strategy, weight: float | None, largest: float, *, is_first: bool, is_last: bool
    ) -> float:
        """Returns the divisor of weights in the backward, so that float16 holds gradients: see `loss_scale.unit_of`.

        Called before the backward of a micro-batch, whose weight is given, with the largest weight of this rank in the
        update so far. With fp16, the weight of micro-batch 0 in the first update of the run decides, at every world
        size: rank 0 computes it first and sends its weight. If that is 0, the mean weight of a step decides at its end.

        A float16 hook gets the gradients in the last backward. The largest weight of a generation's first step decides.
        """
        if self.weight_unit is None:
            loss_scale = self.state.loss_scale
            if loss_scale is not None and not is_first:
                self.weight_unit = loss_scale.weight_unit
            elif loss_scale is not None:
                with self.activity.within("collective"):
                    own = str(0.0 if weight == 0 else unit_of(weight)).encode() if self.group.rank == 0 else None
                    self.weight_unit = float(self.group.broadcast_bytes(own))
            elif strategy.sends_fp16:
                if not is_last:
                    return 1.0
                with self.activity.within("collective"):
                    largest = max(map(float, self.group.all_gather_bytes(str(largest).encode())))
                unit = unit_of(largest)
                strategy.divide_kept(unit)
                self.weight_unit = unit if largest else None
                return unit
            else:
                self.weight_unit = 1.0
        return self.weight_unit or 1.0

    def clip_gradients(
        self, strategy: Strategy, log: Callable[[torch.Tensor], None], *, checks: bool
    ) -> torch.Tensor | None:
        """Clips the gradients. Returns their norm before, as `to_host` does, or None if nothing needs it.

        Collective with FSDP. Passes the norm to `log` if it clips. With `checks`, the norm is always needed.
        """
        self.clock.phases.enter("optimizer")  # the activity stays in a place of waiting, because of FSDP
        max_norm = self.config.clip_grad_norm
        ignores = self.config.on_nonfinite == "ignore"
        if max_norm is None and ignores and not checks:
            return None
        norm = strategy.check_value() if max_norm is None else strategy.gradient_norm()
        norm_on_host = to_host(norm)  # before the clipping, which the device does while the host launches the optimizer
        if max_norm is not None:
            log(norm)
            # A norm of NaN would make all gradients NaN, and the error could not name the parameters at fault.
            finite = norm if ignores else norm.nan_to_num(0.0, posinf=0.0)
            strategy.clip_gradients(max_norm, finite)
        return norm_on_host

    def mirror_gradients(self) -> None:
        """Sends the gradients of each shard to the rank that mirrors it. Collective; nothing without mirrors."""
        if self.state.mirror is not None:
            self.state.mirror.receive_gradients()
            self.group.synchronize()

    def compare_mirrors(self, *, is_wanted: bool) -> bool:
        """Compares shards with their mirrors after a step, if wanted or due. Returns whether it did. Collective.

        Raises:
            ConfigError: a shard and its mirror differ, or registered state cannot outlive a worker.
        """
        mirror = self.state.mirror
        if mirror is None or not (is_wanted or mirror.is_due):
            return False
        with self.activity.within("collective"):
            if not self._has_compared_mirrors:
                self.state.check_outlives(self.group)
            mirror.compare()
        self._has_compared_mirrors = True
        return True

    def vote(self) -> None:
        """Returns when every rank can finish the step without the others. The last collective of a step.

        With DDP, the ranks need no vote: the state of any of them is whole.
        """
        if not self.strategy.replicates_state and self.group.world_size > 1:
            self.group.vote()

    def abort(self) -> None:
        """Ends every wait of this rank for peers or data, and every wait of peers for this rank. Thread-safe."""
        self.group.abort()
        self.feed.interrupt()
        evaluation_feed = self.evaluation_feed  # the training thread may set it to None
        if evaluation_feed is not None:
            evaluation_feed.interrupt()

    def close(self, *, intact: bool) -> None:
        """Ends the generation on this rank. See `ProcessGroup.close` for `intact`."""
        self.is_closed = True
        self.feeds.close(self.feed)
        for strategy in (self.strategy, *self._of_updates.values()):
            strategy.close()
        self.group.close(intact=intact)
