"""What is slow in a model's first step, done by a newcomer alone, while others still train without it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from elastic_ddp.distributed.buffer_sync import StepBuffers
from elastic_ddp.distributed.process_group import is_missing_group
from elastic_ddp.worker.seeding import seed_all
from elastic_ddp.worker.step import Step

if TYPE_CHECKING:
    from elastic_ddp.data.micro_batches import MicroBatch
    from elastic_ddp.rendezvous.messages import PlannedAssignment
    from elastic_ddp.worker.train_state import TrainState


class WarmupStep(Step):
    """A step that ends where others would be needed, and comes again, like one in which a peer is lost.

    The user's function gets it from `run.steps()` before the first real one: a forward and a backward of a micro-batch
    compile what is to be compiled, and load what a device needs. It leaves no trace in the model, and the optimizer is
    not stepped.

    Args:
        state: of this worker; its model is used as it is.
        batch: the rows to do it with; they are not used up.
        place: where this worker is likely to be, and in which step.
        epoch: of that step.
        seed: the run's.
    """

    def __init__(
        self, state: TrainState, batch: MicroBatch, *, place: PlannedAssignment, epoch: int, seed: int
    ) -> None:
        self._state, self._batch, self._seed = state, batch, seed
        self._buffers = StepBuffers(state.module)
        self.place = place
        self.index = place.step
        self.epoch = epoch
        self.loss = math.nan
        self.agreed = None
        self.failure = None

    def __enter__(self) -> Step:
        self._state.module.zero_grad(set_to_none=True)
        self._buffers.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._buffers.revert()
        self._state.module.zero_grad(set_to_none=True)
        # A collective of the user's own needs the others. It is made in the step itself.
        return isinstance(error, _Over) or (error is not None and is_missing_group(error))

    def micro_batches(self) -> Iterator[dict[str, torch.Tensor]]:
        assert self._state.model is not None
        self._state.model.use_replica(None)
        seed_all(self._seed, self.index, self._batch.index)
        yield self._batch.rows

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def log(self, **values: float | torch.Tensor) -> None:
        pass

    def optimize(self) -> None:
        self._buffers.end_micro_batch(self._batch.index, None)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # what goes wrong on the device goes wrong here
        raise _Over


class _Over(BaseException):
    """Ends a rehearsal where a step would need the other ranks. Not an Exception: `except Exception` lets it pass."""
