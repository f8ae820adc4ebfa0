"""The exact mean of a loss over a held-out data set, identical bits at every world size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from elastic_ddp.data.feed import MicroBatchFeed
from elastic_ddp.data.files import Source, entries_of
from elastic_ddp.data.index import DatasetIndex, open_index
from elastic_ddp.data.order import EpochShape, FeedPlan
from elastic_ddp.distributed.reduction_tree import Node, fold_to_root
from elastic_ddp.seeding import preserve_rng_state, seed_all
from elastic_ddp.user_code import environment
from elastic_ddp.worker.job import has_commits
from elastic_ddp.worker.step import dummy_batch

if TYPE_CHECKING:
    from elastic_ddp.data.transform import Transform
    from elastic_ddp.worker.generation import Generation
    from elastic_ddp.worker.job import Job


def evaluate(
    generation: Generation,
    job: Job,
    loss_fn: Callable[[Any, dict[str, torch.Tensor]], torch.Tensor],
    data: Source,
    transform: Transform | None,
    device: torch.device,
) -> float:
    """Returns the mean loss over a data set; see `Run.evaluate`. Collective.

    Rows are cut into micro-batches like an epoch, in stored order; the reduction tree adds their losses.
    """
    config, strategy, model = job.config, generation.strategy, generation.state.module
    index = _share_index(generation, job, data)
    shape = EpochShape(index.num_rows, config.num_micro_batches, config.micro_batch_size)
    plan = FeedPlan(
        rows_per_group=index.group_rows,
        shape=shape,
        seed=config.seed,
        options=config.data.model_copy(update={"shuffle": False}),
        micro_batches=tuple(strategy.micro_batches),
        first_step=0,
        last_step=shape.steps_per_epoch,
    )
    # The sum of losses of each micro-batch; zero for those of other ranks.
    sums = torch.zeros(shape.steps_per_epoch, config.num_micro_batches, dtype=torch.float64)
    feed = generation.evaluation_feed = MicroBatchFeed(index, plan, transform=transform, device=device)
    try:
        with torch.no_grad(), _eval_mode(model), preserve_rng_state(device):
            for step in range(shape.steps_per_epoch):
                rows = shape.rows(step)
                num_own = int(np.count_nonzero(rows[list(strategy.micro_batches)]))
                num_dummies = strategy.min_forwards(rows) - num_own
                for batch in feed.step(step):
                    generation.activity.enter("evaluation")
                    for _ in range(num_dummies):
                        loss_fn(model, dummy_batch(batch, config.micro_batch_size))
                    num_dummies = 0
                    if batch.num_rows:
                        seed_all(config.seed, "evaluate", step, batch.index)
                        sums[step, batch.index] = float(loss_fn(model, batch.rows)) * batch.num_rows
    finally:
        strategy.reshard()
        generation.evaluation_feed = None
        feed.close()
    generation.activity.enter("collective")
    if generation.group.world_size > 1:
        dist.all_reduce(sums)
    leaves = {Node(0, place): value for place, value in enumerate(sums.reshape(-1).tolist())}
    return fold_to_root(leaves, len(leaves), lambda left, right: left + right) / index.num_rows


def _share_index(generation: Generation, job: Job, data: Source) -> DatasetIndex:
    """Rank 0 opens the index of the data set and sends it to all ranks."""
    generation.activity.enter("collective")
    encoded = None
    if generation.group.rank == 0:
        data = [environment().resolve(entry) for entry in entries_of(data)]
        index = open_index(data, job.storage, job.config.data.columns, may_replace=lambda: not has_commits(job.storage))
        encoded = index.to_bytes()
    return DatasetIndex.from_bytes(generation.group.broadcast_bytes(encoded))


@contextmanager
def _eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Puts the model into eval mode, and each module back into its own mode afterwards."""
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in was_training.items():
            module.training = training
