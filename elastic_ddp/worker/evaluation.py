"""The exact mean of a loss over a held-out data set, identical bits at every world size."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from elastic_ddp.data.feed import InlineFeed, MicroBatchFeed
from elastic_ddp.data.files import Source, entries_of
from elastic_ddp.data.index import DatasetIndex, open_index
from elastic_ddp.data.map_style import MapStyleIndex, check_data, has_columns, index_in_memory, is_parquet
from elastic_ddp.data.order import EpochShape, FeedPlan
from elastic_ddp.data.user_code import environment
from elastic_ddp.distributed.buffer_sync import StepBuffers
from elastic_ddp.errors import ConfigError
from elastic_ddp.seeding import preserve_rng_state, seed_all
from elastic_ddp.worker.evaluated_values import CollectedMeans, CollectedRows
from elastic_ddp.worker.job import has_commits

if TYPE_CHECKING:
    from elastic_ddp.data.map_style import InMemory
    from elastic_ddp.data.work import CollateFn, Transform
    from elastic_ddp.worker.generation import Generation
    from elastic_ddp.worker.job import Job


LossFunction = Callable[[Any, Any], Any]
"""Maps a model and a batch to the batch's mean loss, or to another value that `Run.evaluate` lists."""


def evaluate(
    generation: Generation,
    job: Job,
    loss_fn: LossFunction,
    data: Source | InMemory,
    transform: Transform | None,
    collate_fn: CollateFn | None,
    compute_metrics: Callable[[Any], Any] | None,
) -> Any:
    """Returns the mean loss over a data set, or other metrics of it; see `Run.evaluate`. Collective.

    Rows are cut into micro-batches like an epoch, in stored order; the reduction tree adds their losses.
    """
    config = job.config
    strategy = generation.strategy
    device = generation.group.device
    prepared = generation.state.model
    assert prepared is not None
    model = prepared.module
    check_data(data, transform)
    is_converted = transform is not None or collate_fn is not None
    index = _share_index(generation, job, data, is_converted)
    shape = EpochShape(index.num_rows, config.num_micro_batches, config.micro_batch_size)
    plan = FeedPlan(
        rows_per_group=index.group_rows,
        shape=shape,
        seed=config.seed,
        # Without CPUs: the pipelines of the training, which wait meanwhile, may reserve all that are left.
        options=config.data.model_copy(update={"shuffle": False, "num_cpus_per_task": 0.0}),
        micro_batches=tuple(strategy.micro_batches),
        first_step=0,
        last_step=shape.steps_per_epoch,
    )
    collected = (
        CollectedMeans(shape.steps_per_epoch, config.num_micro_batches)
        if compute_metrics is None
        else CollectedRows(compute_metrics)
    )
    options: dict[str, Any] = {"transform": transform, "collate_fn": collate_fn, "device": device}
    buffers = StepBuffers(model, prepared.buffer_rules)
    make_feed = MicroBatchFeed if job.debugged is None else InlineFeed
    feed = generation.evaluation_feed = make_feed(index, plan, **options, hang_timeout_s=config.hang_timeout_s)
    try:
        buffers.begin()
        with torch.no_grad(), _eval_mode(model), preserve_rng_state(device):
            for step in range(shape.steps_per_epoch):
                rows = shape.rows(step)
                num_own = int(np.count_nonzero(rows[list(strategy.micro_batches)]))
                num_dummies = strategy.min_forwards(rows) - num_own
                for batch in feed.step(step):
                    generation.activity.enter("evaluation")
                    for _ in range(num_dummies):
                        loss_fn(model, copy.deepcopy(batch.rows))
                        buffers.end_evaluated_batch()
                    num_dummies = 0
                    if batch.num_rows:
                        seed_all(config.seed, "evaluate", step, batch.index)
                        collected.add(step, batch, loss_fn(model, batch.rows))
                        buffers.end_evaluated_batch()
    finally:
        strategy.reshard()
        generation.evaluation_feed = None
        feed.close()
    generation.activity.enter("collective")
    return collected.combine(generation.group)


def _share_index(
    generation: Generation, job: Job, data: Source | InMemory, is_converted: bool
) -> DatasetIndex | MapStyleIndex:
    """Rank 0 opens the index of Parquet files and sends it to all ranks. Each rank uses its own data set in memory."""
    if not is_parquet(data):
        own = index_in_memory(data, job.config.data.columns if has_columns(data) else None, identify=False)
        own.check_columns(is_converted=is_converted)
        own = own.share() if job.debugged is None else own
        generation.activity.enter("collective")
        num_rows = int(generation.group.broadcast_bytes(str(own.num_rows).encode()))
        if num_rows != own.num_rows:
            raise ConfigError(
                f"run.evaluate got {num_rows:,} rows on rank 0 and {own.num_rows:,} on rank {generation.group.rank}. "
                "Pass the same data set on every rank."
            )
        return own
    generation.activity.enter("collective")
    encoded = None
    if generation.group.rank == 0:
        paths = [environment().resolve(entry) for entry in entries_of(data)]
        source = paths if isinstance(data, list | tuple) else paths[0]
        columns = job.config.data.columns
        index = open_index(source, job.storage, columns, may_replace=lambda: not has_commits(job.storage))
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
