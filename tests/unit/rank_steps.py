"""Steps on several ranks, without Ray: a real strategy and real collectives, fake rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.data.feed_cache import FeedCache
from elastic_ddp.data.order import EpochShape
from elastic_ddp.distributed.prepared_model import PreparedModel
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.telemetry.events import PhasesMeasured
from elastic_ddp.telemetry.phases import combine
from elastic_ddp.worker.clock import WorkerClock
from elastic_ddp.worker.generation import Generation, strategy_of
from elastic_ddp.worker.loss_scale import LossScale
from elastic_ddp.worker.step import Step
from elastic_ddp.worker.step_plan import StepPlan
from elastic_ddp.worker.train_state import TrainState
from tests.unit.single_worker import CPU, fake_feed

Body = Callable[[Step, Any], Any]
"""What a training function does in the block of a step, with the prepared model."""


def config_of(**changes: Any) -> RunConfig:
    """Six micro-batches of two rows. Buckets are so small that each model has several."""
    settings: dict[str, Any] = {
        "name": "test",
        "storage": "memory://test",
        "steps": 5,
        "global_batch_size": 12,
        "micro_batch_size": 2,
        "max_workers": 6,
        "ddp": {"bucket_cap_mb": 0.0001},
    }
    return RunConfig(**{**settings, **changes})


def open_generation(
    group: ProcessGroup,
    config: RunConfig,
    state: TrainState,
    shape: EpochShape,
    make_feed: Callable[[EpochShape, Sequence[int]], Any] = fake_feed,
) -> Generation:
    """Forms a generation on the ranks of a group. With FSDP, shards the model."""
    assert state.model is not None
    clock = WorkerClock()
    strategy = strategy_of(config)(state.model, config, group, clock.phases.enter)
    strategy.shard(state.optimizers)
    feed = make_feed(shape, strategy.micro_batches)
    return Generation(group, config, state, strategy, feed, FeedCache(lambda *_: feed), clock)


def run_steps(
    group: ProcessGroup,
    config: RunConfig,
    module: torch.nn.Module,
    body: Body,
    *,
    num_rows: int = 1000,
    measured: list[PhasesMeasured] | None = None,
) -> dict[str, Any]:
    """Trains with AdamW. Returns the hashes of the run, and what `body` returned in each step.

    A module may have `is_unit`, the `rules` of its buffers, and `trained()`, the parameters of the optimizer. Appends
    the events about the phases of steps to `measured`.
    """
    is_ddp = config.strategy == "ddp"
    bf16, fp16 = (is_ddp and config.precision == precision for precision in ("bf16", "fp16"))
    is_unit: Any = getattr(module, "is_unit", lambda submodule: False)
    rules: Any = getattr(module, "rules", {})
    prepared = PreparedModel(module, device=CPU, bf16=bf16, fp16=fp16, is_unit=is_unit, buffer_rules=rules)
    state = TrainState(model=prepared, loss_scale=LossScale() if config.precision == "fp16" else None)
    trained: Any = getattr(module, "trained", module.parameters)
    optimizer = torch.optim.AdamW(trained(), lr=0.05)
    state.add_optimizer(optimizer)
    state.add_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
    shape = EpochShape(num_rows, config.num_micro_batches, config.micro_batch_size)
    generation = open_generation(group, config, state, shape)
    clock, strategy = generation.clock, generation.strategy
    state.layout = strategy.layout(state.optimizers)
    returned, losses = [], []
    counts = [len(owned) for owned in strategy.ranges]
    assert config.steps
    clock.phases.begin(0)
    for index in range(config.steps):
        step = Step(StepPlan(generation, shape.rows(index), is_logged=True), shape.epoch_of(index))
        with step:
            returned.append(body(step, module))
        losses.append(step.loss)
        event = combine(step.outcome.phases, generation=1, micro_batches=counts)
        if measured is not None and event is not None:
            measured.append(event)
        clock.phases.step_done(index + 1)
    result = {
        "returned": returned,
        "losses": losses,
        "weights": state.weights_sha256(),
        "samples": state.position.samples_sha256,
        "loss_scale": state.loss_scale,
    }
    strategy.close()
    return result
