"""A stretch of training with fixed membership: its process group, its gradient strategy and its feed of data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from elastic_ddp.data.feed import MicroBatchFeed
from elastic_ddp.data.feed_cache import FeedCache
from elastic_ddp.data.order import FeedPlan
from elastic_ddp.distributed.buffer_sync import StepBuffers
from elastic_ddp.distributed.process_group import Assignment, ProcessGroup
from elastic_ddp.distributed.reduction_tree import micro_batch_ranges, processing_order
from elastic_ddp.distributed.state_transfer import check_same_model, transfer_state
from elastic_ddp.distributed.store import StoreConnection
from elastic_ddp.distributed.strategy import Strategy
from elastic_ddp.rendezvous.hang import Activity
from elastic_ddp.tensors.state_tree import Layout
from elastic_ddp.worker.train_state import TrainState

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_ddp.config.run_config import RunConfig
    from elastic_ddp.worker.job import Job


def feeds_of(job: Job, device: torch.device) -> FeedCache:
    """The feeds of a worker, of a run's training set."""
    config = job.config

    def make(micro_batches: tuple[int, ...], first_step: int, after: Callable[[], object]) -> MicroBatchFeed:
        plan = FeedPlan(
            rows_per_group=job.index.group_rows,
            shape=job.shape,
            seed=config.seed,
            options=config.data,
            micro_batches=micro_batches,
            first_step=first_step,
            last_step=job.total_steps,
        )
        return MicroBatchFeed(job.index, plan, transform=job.transform, device=device, before_reading=after)

    return FeedCache(make)


def micro_batches_of(rank: int, *, num_micro_batches: int, world_size: int) -> tuple[int, ...]:
    """What a rank computes in every step, in its order."""
    return tuple(processing_order(micro_batch_ranges(num_micro_batches, world_size)[rank]))


def strategy_of(config: RunConfig) -> type[Strategy]:
    """How a run spreads its model."""
    if config.strategy == "fsdp":
        from elastic_ddp.distributed.fsdp import FSDPStrategy  # takes a second, which replicated runs need not spend

        return FSDPStrategy
    from elastic_ddp.distributed.ddp import DDPStrategy

    return DDPStrategy


@dataclass
class Generation:
    """Opened by `open` when every member has its assignment, closed by `close` when that ends."""

    group: ProcessGroup
    state: TrainState
    strategy: Strategy
    buffers: StepBuffers
    feed: MicroBatchFeed
    feeds: FeedCache
    seed: int
    clip_grad_norm: float | None
    activity: Activity
    """Where this worker is; it outlives the generation."""
    also_reading: MicroBatchFeed | None = None
    """The feed of an evaluation, while there is one."""
    is_closed: bool = False
    """Whether this rank has left it."""

    @classmethod
    def open(
        cls,
        assignment: Assignment,
        *,
        job: Job,
        state: TrainState,
        device: torch.device,
        store: StoreConnection,
        feeds: FeedCache,
        restore: Callable[[ProcessGroup, Callable[[], Layout | None]], dict[str, Any] | None],
        on_forming: Callable[[ProcessGroup], None],
        on_formed: Callable[[], None],
        activity: Activity,
        attempt: int = 0,
    ) -> Generation:
        """Forms the process group and brings every rank to the same state. Every member calls it.

        Args:
            assignment: this member's place.
            job: what the run is.
            state: this rank's objects; on ranks that lag, overwritten by those of the most advanced.
            device: where the model is.
            store: this worker's connection to it.
            feeds: this worker's, of which it takes one.
            restore: called only if no rank holds a state: the one to start from, or None for what the user's function
                built on rank 0. Asks for the layout of the state once it knows that there is one.
            on_forming: told of the process group as soon as it can be cut.
            on_formed: called when it is formed.
            activity: this worker's.
            attempt: how often in a row that has failed.
        """
        forming: list[ProcessGroup] = []
        opened: list[MicroBatchFeed] = []
        strategy: Strategy | None = None
        owned = micro_batches_of(
            assignment.rank, num_micro_batches=job.config.num_micro_batches, world_size=assignment.world_size
        )

        def begin(group: ProcessGroup) -> None:
            forming.append(group)
            on_forming(group)

        try:
            feeds.discard_unfit(owned, assignment.first_step)
            group = ProcessGroup.form(
                assignment,
                store=store,
                device=device,
                timeout_s=job.config.collective_timeout_s,
                shares_device=job.config.shares_gpu,
                attempt=attempt,
                on_forming=begin,
            )
            on_formed()
            if assignment.first_step is not None:
                opened.append(feeds.open(owned, assignment.first_step))  # its first rows come while the state does
            check_same_model(state.module, group)
            assert state.model is not None
            strategy = strategy_of(job.config)(state.model, job.config, group)
            cls._share_state(group, state=state, strategy=strategy, restore=restore, activity=activity)
            if not opened:
                opened.append(feeds.open(owned, state.position.step))
            return cls(
                group,
                state,
                strategy,
                StepBuffers(state.module),
                opened[0],
                feeds,
                job.config.seed,
                job.config.clip_grad_norm,
                activity,
            )
        except BaseException:
            for feed in opened:
                feeds.close(feed)
            if strategy is not None:
                strategy.close()
            for group in forming:
                group.close(intact=False)
            raise

    @staticmethod
    def _share_state(
        group: ProcessGroup,
        *,
        state: TrainState,
        strategy: Strategy,
        restore: Callable[[ProcessGroup, Callable[[], Layout | None]], dict[str, Any] | None],
        activity: Activity,
    ) -> None:
        """Brings all ranks to the state of the most advanced, or to their parts of it."""

        def spread() -> Layout | None:
            strategy.shard(state.optimizers)
            state.layout = strategy.layout(state.optimizers)
            return state.layout

        source, receivers = group.assignment.source, group.assignment.receivers
        if source is None:
            if (restored := restore(group, spread)) is not None:
                state.load_state_dict(restored)
                return
            if state.load_initial_weights is not None:
                state.load_initial_weights(group)
            # Rank 0 speaks for all of them even at the very start: what a model draws its first weights from is the
            # user's business, that all ranks have the same ones is ours.
            source, receivers = 0, tuple(range(1, group.world_size))
        mine = state.state_dict() if group.rank == source and receivers else None
        received = transfer_state(mine, group, source=source, receivers=receivers, tick=activity.tick)
        if received is not None:
            state.load_state_dict(received)
        spread()

    @property
    def number(self) -> int:
        """As the rendezvous counts them, from 1."""
        return self.group.assignment.generation

    def abort(self) -> None:
        """Breaks whatever this rank and its peers wait for. From any thread."""
        self.group.abort()
        self.feed.interrupt()
        if (other := self.also_reading) is not None:
            other.interrupt()

    def close(self, *, intact: bool) -> None:
        """Ends the generation. See `ProcessGroup.close` for `intact`."""
        self.is_closed = True
        self.feeds.close(self.feed)
        self.strategy.close()
        self.group.close(intact=intact)
