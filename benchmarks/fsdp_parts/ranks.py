"""Steps of elastic_ddp on several ranks without Ray: spawned processes, real collectives, random rows."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from elastic_ddp import RunConfig
from elastic_ddp.data.feed_cache import FeedCache
from elastic_ddp.data.micro_batches import MicroBatch
from elastic_ddp.data.order import EpochShape
from elastic_ddp.distributed.assignment import Assignment
from elastic_ddp.distributed.prepared_model import PreparedModel
from elastic_ddp.distributed.torch_store import StoreConnection
from elastic_ddp.worker.clock import WorkerClock
from elastic_ddp.worker.generation import Generation
from elastic_ddp.worker.state_sharing import GenerationInputs
from elastic_ddp.worker.step import Step
from elastic_ddp.worker.step_plan import StepPlan
from elastic_ddp.worker.train_state import TrainState
from fsdp_parts.model import Block

CPU = torch.device("cpu")
STEPS_PER_EPOCH = 1_000_000


def run_ranks(world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Returns the results of `body(place, *args)` in one process for each rank, in rank order.

    `place` returns the assignment of the rank in a generation, by the generation's number.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ProcessPoolExecutor(world_size, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_call, rank, world_size, store.port, body, args) for rank in range(world_size)]
        return [future.result() for future in futures]


def _call(rank: int, world_size: int, port: int, body: Callable[..., Any], args: Sequence[Any]) -> Any:
    torch.set_num_threads(1)

    def place(generation: int) -> Assignment:
        where: dict[str, Any] = {"store_host": "127.0.0.1", "store_port": port, "reason": "start"}
        return Assignment(generation=generation, rank=rank, world_size=world_size, **where)

    return body(place, *args)


class RandomFeed:
    """Random rows of `width` numbers, those of a micro-batch the same in every step."""

    is_ready = True

    def __init__(self, micro_batches: tuple[int, ...], first_step: int, *, rows: int, width: int) -> None:
        self.micro_batches, self.next_step = micro_batches, first_step
        ids = np.arange(rows)
        self._batches = [MicroBatch(index, torch.randn(rows, width), ids) for index in micro_batches]

    def step(self, step: int) -> Iterator[MicroBatch]:
        yield from self._batches

    def skip_to(self, step: int) -> None: ...

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


class Ranks:
    """This process's rank of a run: one generation with a model of blocks and AdamW."""

    def __init__(self, place: Assignment, config: RunConfig, model: torch.nn.Module, width: int) -> None:
        """Every rank calls it: it forms the process group and shards the model."""
        size = config.micro_batch_size
        self._shape = EpochShape(STEPS_PER_EPOCH * config.global_batch_size, config.num_micro_batches, size)
        self._model = model
        prepared = PreparedModel(model, device=CPU, bf16=False, is_unit=lambda unit: isinstance(unit, Block))
        self.state = TrainState(model=prepared, steps_per_epoch=STEPS_PER_EPOCH)
        self.state.add_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
        self.state.record_prepared()
        store = StoreConnection()
        store.connect_with_retry(lambda: (place.store_host, place.store_port))

        def make_feed(micro_batches: tuple[int, ...], first_step: int, _: Callable[[], object]) -> Any:
            return RandomFeed(micro_batches, first_step, rows=size, width=width)

        job: Any = SimpleNamespace(config=config, shape=self._shape, total_steps=STEPS_PER_EPOCH)
        inputs = GenerationInputs(
            job=job,
            state=self.state,
            device=CPU,
            store=store,
            feeds=FeedCache(make_feed),
            clock=WorkerClock(),
            restore=lambda group, shard: None,
            record=lambda event: None,
            on_forming=lambda group: None,
        )
        self.generation = Generation.open(inputs, place)

    def step(self, after_backward: Callable[[int], None] = lambda round: None) -> None:
        """Runs a step, and calls `after_backward` after each backward with its number."""
        index = self.state.position.step
        step = Step(StepPlan(self.generation, self._shape.rows(index)), 0)
        with step:
            for number, rows in enumerate(step.micro_batches()):
                step.backward(self._model(rows).square().mean())
                after_backward(number)
            step.optimize()
        assert step.outcome.failure is None, step.outcome.failure

    def close(self) -> None:
        self.generation.group.barrier()
        self.generation.close(intact=True)
