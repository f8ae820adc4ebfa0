"""One optimizer step, as the user's loop sees it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from elastic_ddp.distributed.process_group import is_peer_failure
from elastic_ddp.distributed.step_agreement import Agreed, ControlExchange, MicroBatchRecord, digest_rows, to_host
from elastic_ddp.errors import ConfigError, PeerFailedError, format_exception
from elastic_ddp.worker.seeding import seed_all

if TYPE_CHECKING:
    from elastic_ddp.data.micro_batches import MicroBatch
    from elastic_ddp.worker.generation import Generation


class Step:
    """A step of a run, from `run.steps()`. Every rank runs it the same way::

        with step:
            for batch in step.micro_batches():
                step.backward(loss_fn(model, batch))
            step.optimize()

    When a peer is lost, the block ends where it is, and what comes after the block runs although the step was not made.
    So everything that belongs to a step, such as an update of registered state, goes into the block, after `optimize`.
    From the first change that `optimize` makes to the end of the block a step is made as a whole or not at all: where a
    collective of the optimizer's or the user's own breaks in there, the user's function begins again in this worker.
    """

    def __init__(
        self, generation: Generation, rows: np.ndarray, epoch: int, votes: Callable[[], dict[str, bool]]
    ) -> None:
        self.generation = generation
        """Whose workers make it."""
        self._state = generation.state
        self._activity = generation.activity
        self._control = ControlExchange(rows)
        self._votes = votes
        self._records: dict[int, MicroBatchRecord] = {}
        self._logged: dict[str, dict[int | None, float]] = {}
        self._current: int | None = None
        self._is_idle = False
        """Whether the pass at hand counts for nothing, and is made because other ranks need its forward."""
        self._is_in_block = False
        self._failed: Exception | None = None
        """What came up in the step and may have been caught in it, which it cannot be made after."""
        self._batches: Iterator[MicroBatch] = iter(())
        self._begun_at = generation.state.position
        self.index = self._begun_at.step
        """The step's number, from 0."""
        self.epoch = epoch
        """The pass over the data set that the step belongs to, from 0."""
        self.loss = math.nan
        """After `optimize`: the mean over the global batch of what `backward` was given, the same on every rank. NaN
        where a step was not made."""
        self.agreed: Agreed | None = None
        """What the ranks agreed on; set once the step is made."""
        self.failure: str | None = None
        """How a peer was lost in the step, which then was not made, and comes again."""

    def __enter__(self) -> Step:
        self._is_in_block = True
        self._state.module.zero_grad(set_to_none=True)
        self.generation.strategy.begin_step(self._control.rows)
        self.generation.buffers.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._current, self._is_in_block = None, False
        # The traceback of what failed holds on to the process group, which is about to be left.
        failed, self._failed = self._failed, None
        if error is None or isinstance(error, Exception):
            error = failed or error
        was_changing, self._state.is_changing = self._state.is_changing, False
        if error is not None and is_peer_failure(error):
            self.failure = format_exception(error)
            if was_changing:
                self._state.is_torn, self._state.position = True, self._begun_at
                self.agreed, self.loss = None, math.nan
            self.generation.buffers.put_back()
            self._state.module.zero_grad(set_to_none=True)
            return True
        if kind is None and error is not None:
            raise self._caught(error) from error
        if error is None and self.agreed is None:
            raise ConfigError(
                f"step {self.index} ended without step.optimize(); call it as the last line of `with step`"
            )
        return False

    def micro_batches(self) -> Iterator[dict[str, torch.Tensor]]:
        """This rank's micro-batches: dicts of tensors on the run's device, of shape `(rows, ...)`.

        Every micro-batch has `micro_batch_size` rows, but in the last step of an epoch, where it may be shorter. Random
        generators (torch's, NumPy's, Python's) are seeded for each, so dropout is the same at every world size. They
        are seeded as well when a step begins, after its last micro-batch, and before the optimizer.

        With FSDP a rank that has fewer of them than others gets copies of its first one before it: those others need
        its forward and backward, and these count for nothing.
        """
        if not self._is_in_block:
            raise ConfigError(f"step {self.index} was used outside its block; write `with step:` around it")
        if self._records:
            raise ConfigError(f"step.micro_batches of step {self.index} was called twice; loop over it once")
        try:
            with self.capture_first_error():
                yield from self._micro_batches()
        finally:  # also where the loop ends early
            if self.agreed is None:  # not where somebody keeps the iterator, and lets it go in another step
                seed_all(self.generation.seed, self.index, "end")

    def _micro_batches(self) -> Iterator[dict[str, torch.Tensor]]:
        if self.generation.is_closed:
            raise PeerFailedError("a peer was lost between the begin of the loop's body and that of the step")
        strategy = self.generation.strategy
        to_compute = set(strategy.to_compute)
        idle = strategy.least_forwards(self._control.rows) - len(to_compute)
        self._batches = self.generation.feed.step(self.index)
        self._activity.enter("data")
        for batch in self._batches:
            if batch.index not in to_compute:
                continue
            for _ in range(idle):  # before the first, as the gradients are reduced with the last one
                yield from self._pass(batch, is_dummy=True)
            idle = 0
            yield from self._pass(batch)
            self._activity.enter("data")
        self._current = None

    def _pass(self, batch: MicroBatch, *, is_dummy: bool = False) -> Iterator[dict[str, torch.Tensor]]:
        """A micro-batch's forward and backward."""
        strategy = self.generation.strategy
        self._current, self._is_idle = batch.index, is_dummy
        self._records[batch.index] = MicroBatchRecord(batch.num_rows, digest_rows(batch.row_ids), _NOT_YET)
        self._activity.enter("forward")
        strategy.prepare_forward(batch.index)
        seed_all(self.generation.seed, self.index, batch.index)
        yield dummy_batch(batch, strategy.micro_batch_size) if is_dummy or not batch.num_rows else batch.rows
        self._check_unharmed()
        if self._records[batch.index].loss is _NOT_YET:
            raise ConfigError(
                f"step {self.index}: micro-batch {batch.index} was left without step.backward(loss); call it "
                "exactly once for each batch"
            )

    def backward(self, loss: torch.Tensor) -> None:
        """Backward of a micro-batch's loss: a scalar, the mean over the rows of the micro-batch.

        Call it once for each batch of `micro_batches()`. The last call of a step reduces the gradients over all ranks.
        """
        if self._current is None or self._records[self._current].loss is not _NOT_YET:
            raise ConfigError("step.backward is for the batch at hand: call it once for each batch of micro_batches()")
        if loss.numel() != 1:
            raise ConfigError(
                f"step.backward got a loss of shape {tuple(loss.shape)}; give the mean over the batch's rows"
            )
        with self.capture_first_error():
            self._backward(loss, self._current)

    def _backward(self, loss: torch.Tensor, micro_batch: int) -> None:
        generation, record = self.generation, self._records[micro_batch]
        is_last = micro_batch == generation.strategy.to_compute[-1] and not self._is_idle
        self._activity.enter("reduction" if is_last else "backward")
        value = to_host(loss.detach())
        if self._is_idle:
            generation.strategy.idle_backward(loss)
            generation.buffers.end_micro_batch(micro_batch, None)
            record.loss = value
            return
        generation.strategy.backward(loss, micro_batch)
        generation.buffers.end_micro_batch(
            micro_batch, generation.strategy.weight(micro_batch) if record.num_rows else None
        )
        record.loss = value
        if is_last:
            self._control.votes = {**self._votes(), "buffers_changed": generation.buffers.changed}
            real = {m: each for m, each in self._records.items() if each.num_rows}
            self._control.start(real, generation.group.world_size)

    @property
    def is_under_way(self) -> bool:
        """Whether its block has begun, and it is not made."""
        return self._is_in_block and self.agreed is None

    @contextmanager
    def capture_first_error(self) -> Iterator[None]:
        """What fails in here is what the step fails with, even if it is caught in the block. The first one: what
        follows from it is not what is to be told."""
        try:
            yield
        except Exception as error:
            self._failed = self._failed or error
            raise

    def _check_unharmed(self) -> None:
        if self._failed is not None:
            if is_peer_failure(self._failed):
                raise self._failed
            raise self._caught(self._failed) from self._failed

    def _caught(self, error: BaseException) -> ConfigError:
        return ConfigError(
            f"step {self.index}: {format_exception(error)} was caught in the training function, and the step cannot be "
            "made after it: gradients of a part of its rows are missing. Let it out of `with step`"
        )

    def log(self, **values: float | torch.Tensor) -> None:
        """Logs scalars under their names. Within `micro_batches()` they are averaged over the rows of the global batch;
        after it they have to be the same on every rank. Written to the ledger every `log_every_steps` steps."""
        for name, value in values.items():
            if isinstance(value, torch.Tensor | np.ndarray) and math.prod(value.shape) != 1:
                raise ConfigError(f"step.log got {name} of shape {tuple(value.shape)}; log one number under a name")
            if not isinstance(value, torch.Tensor | float | int | np.number | np.ndarray):
                raise ConfigError(f"step.log got {name}={value!r}; log a number")
            number = value.detach() if isinstance(value, torch.Tensor) else value
            self._logged.setdefault(name, {})[self._current] = number  # type: ignore[assignment]

    def optimize(self) -> None:
        """Clips, steps the optimizers, clears the gradients and steps the schedulers. The last line of a step.

        The mean gradient of the global batch is in the parameters from the last `backward` on.
        """
        self._check_unharmed()
        with self.capture_first_error():
            self._optimize()

    def _optimize(self) -> None:
        generation, state = self.generation, self._state
        strategy = generation.strategy
        done = {m for m, record in self._records.items() if record.loss is not _NOT_YET and not self._is_idle}
        missing = [m for m in strategy.to_compute if m not in done]
        if missing:
            raise ConfigError(
                f"step.optimize of step {self.index} came before micro-batches {missing} were computed; loop over "
                "all of step.micro_batches() first"
            )
        if self.agreed is not None:
            raise ConfigError(f"step.optimize was called twice in step {self.index}")
        for _ in self._batches:  # a loop that ended early leaves padding behind, which is not the next step's
            pass
        if generation.clip_grad_norm is not None:
            self.log(grad_norm=strategy.clip_grad_norm(generation.clip_grad_norm))
        # All communication of a step comes before anything changes: a peer that is lost in it leaves a step undone,
        # never half done. That of an optimizer, or of the user after this, does not.
        self._activity.enter("reduction")
        agreed = self._control.wait()
        if agreed.votes["buffers_changed"]:
            generation.buffers.combine(
                ranges=strategy.ranges,
                num_leaves=strategy.num_leaves,
                divisor=strategy.divisor,
                group=generation.group,
            )
        generation.group.synchronize()
        self._activity.enter("optimizer")
        state.is_changing = True
        seed_all(generation.seed, self.index, "optimize")
        for optimizer in state.optimizers:
            optimizer.step()
        # All of the model's, also those in no optimizer: a gradient that stayed would be clipped with the next.
        state.module.zero_grad(set_to_none=True)
        for scheduler in state.schedulers:
            scheduler.step()
        self.loss = agreed.loss
        state.position = state.position.after(int(self._control.rows.sum()), agreed.row_digests)
        self.agreed = agreed
        self._activity.enter("between steps")

    def metrics(self) -> dict[str, Any]:
        """What was logged, as plain numbers by name and micro-batch. Waits for the device."""
        return {name: {str(m): float(value) for m, value in places.items()} for name, places in self._logged.items()}


def dummy_batch(batch: MicroBatch, size: int) -> dict[str, torch.Tensor]:
    """Rows for a pass that counts for nothing: copies, as the user's loop may change what it gets. A micro-batch
    without any has padding in the size of a full one: a layer like BatchNorm refuses a single row."""
    if batch.num_rows:
        return {name: column.clone() for name, column in batch.rows.items()}
    return {name: column[:1].expand(size, *column.shape[1:]).clone() for name, column in batch.rows.items()}


_NOT_YET = torch.tensor(float("nan"))
"""Stands where a micro-batch's loss will be."""
