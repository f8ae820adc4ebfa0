"""`WarmupStep`: the slow parts of a first step, done by a new worker alone while the others train."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any

import torch

from elastic_ddp.distributed.buffer_sync import StepBuffers
from elastic_ddp.distributed.process_group import is_missing_group
from elastic_ddp.seeding import seed_all
from elastic_ddp.worker.logged_values import Means
from elastic_ddp.worker.step import Step
from elastic_ddp.worker.step_plan import Outcome
from elastic_ddp.worker.update import only_trained

if TYPE_CHECKING:
    from elastic_ddp.data.micro_batches import MicroBatch
    from elastic_ddp.rendezvous.messages import PlannedAssignment
    from elastic_ddp.worker.train_state import TrainState


class WarmupStep(Step):
    """A step that ends before the first collective, and is then yielded again as a real step.

    `Run.steps` yields it to a new worker before its first step. The forward and backward of one micro-batch
    trigger compilation and initialize the device. Model and optimizer do not change.
    """

    def __init__(
        self, state: TrainState, batch: MicroBatch, *, planned: PlannedAssignment, epoch: int, seed: int
    ) -> None:
        self.planned = planned
        self.index = planned.step
        self.epoch = epoch
        self._state = state
        self._batch = batch
        self._seed = seed
        self._buffers = StepBuffers(state.module)
        self.outcome = Outcome()
        self._is_in_update = False

    def __enter__(self) -> Step:
        self._state.module.zero_grad(set_to_none=True)
        self._buffers.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._buffers.revert()
        self._state.module.zero_grad(set_to_none=True)
        # A collective of the training function needs the other ranks. The real step runs it.
        return isinstance(error, _WarmupEnded) or (error is not None and is_missing_group(error))

    def micro_batches(self) -> Iterator[Any]:
        assert self._state.model is not None
        self._state.model.use_replica(None)
        seed_all(self._seed, self.index, self._batch.index)
        with self._state.model.autocast(is_enabled=True) if self._is_in_update else nullcontext():
            yield self._batch.rows

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        loss.backward()

    @contextmanager
    def update(self, by: object, *, name: str | None = None) -> Iterator[Any]:
        groups = getattr(by, "param_groups", None)
        parameters = list(self._state.module.parameters())
        trained = parameters if groups is None else [parameter for group in groups for parameter in group["params"]]
        self._is_in_update = True
        with only_trained(parameters, trained):
            yield SimpleNamespace(name=name, loss=math.nan, skipped=False, is_repeated=False)
            self.optimize()

    @property
    def metrics(self) -> Means:
        return Means()

    def log(self, **values: float | torch.Tensor) -> None:
        pass

    def gather(self, **rows: torch.Tensor) -> None:
        pass

    def optimize(self) -> None:
        self._buffers.end_micro_batch(self._batch.index, None)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # raises errors of the device here
        raise _WarmupEnded


class _WarmupEnded(BaseException):
    """Ends the block of a warm-up step. Not an Exception, so that `except Exception` does not catch it."""
