"""The exact mean of a loss over a held-out data set, the same bits at every world size."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from elastic_ddp.data.feed import MicroBatchFeed
from elastic_ddp.data.index import DatasetIndex, open_index
from elastic_ddp.data.order import EpochShape, FeedPlan
from elastic_ddp.distributed.reduction_tree import Node, fold_to_root
from elastic_ddp.worker.job import has_commits
from elastic_ddp.worker.seeding import as_before, seed_all
from elastic_ddp.worker.step import dummy_batch

if TYPE_CHECKING:
    from elastic_ddp.data.source import Transform
    from elastic_ddp.worker.generation import Generation
    from elastic_ddp.worker.job import Job


def evaluate(
    generation: Generation,
    job: Job,
    loss_fn: Callable[[Any, dict[str, torch.Tensor]], torch.Tensor],
    data: str | list[str],
    transform: Transform | None,
    device: torch.device,
) -> float:
    """See `Run.evaluate`. The data set is cut into micro-batches like an epoch of training, in stored order; every
    micro-batch's loss goes into a slot of its own, and the slots are added along the reduction tree."""
    config, group = job.config, generation.group
    generation.activity.enter("collective")
    found = None
    if group.rank == 0:
        columns = config.data.columns
        found = open_index(data, job.storage, columns, may_replace=lambda: not has_commits(job.storage)).to_bytes()
    index = DatasetIndex.from_bytes(group.broadcast_bytes(found))
    shape = EpochShape(index.num_rows, config.num_micro_batches, config.micro_batch_size)
    plan = FeedPlan(
        rows_per_group=index.group_rows,
        shape=shape,
        seed=config.seed,
        options=config.data.model_copy(update={"shuffle": False}),
        micro_batches=tuple(generation.strategy.micro_batches),
        first_step=0,
        last_step=shape.steps_per_epoch,
    )
    feed = MicroBatchFeed(index, plan, transform=transform, device=device)
    generation.also_reading = feed
    model = generation.state.model
    assert model is not None
    sums = torch.zeros(shape.steps_per_epoch, config.num_micro_batches, dtype=torch.float64)
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), as_before(device):
            for step in range(shape.steps_per_epoch):
                rows = shape.rows(step)
                own = int(np.count_nonzero(rows[list(generation.strategy.micro_batches)]))
                idle = generation.strategy.min_forwards(rows) - own
                for batch in feed.step(step):
                    generation.activity.enter("evaluation")
                    for _ in range(idle):
                        loss_fn(model, dummy_batch(batch, config.micro_batch_size))
                    idle = 0
                    if batch.num_rows:
                        seed_all(config.seed, "evaluate", step, batch.index)
                        sums[step, batch.index] = float(loss_fn(model, batch.rows)) * batch.num_rows
    finally:
        generation.strategy.reshard()
        generation.also_reading = None
        feed.close()
        for module, training in was_training.items():
            module.training = training
    generation.activity.enter("collective")
    if group.world_size > 1:
        dist.all_reduce(sums)  # every slot is one rank's and zero on the others
    slots = {Node(0, place): value for place, value in enumerate(sums.reshape(-1).tolist())}
    return fold_to_root(slots, len(slots), lambda left, right: left + right) / index.num_rows
