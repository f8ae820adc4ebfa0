"""`Step`: one optimizer step, as the training function's loop sees it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from elastic_ddp.data.micro_batches import MicroBatch
from elastic_ddp.distributed.host_number import to_host
from elastic_ddp.distributed.process_group import is_peer_failure
from elastic_ddp.distributed.row_gather import RowGather
from elastic_ddp.distributed.step_agreement import Agreement, ControlExchange, MicroBatchRecord
from elastic_ddp.distributed.zero_grad import allow_zero_grad, refuse_zero_grad
from elastic_ddp.errors import ConfigError, PeerFailedError, format_exception
from elastic_ddp.rendezvous.user_place import frames_of_error
from elastic_ddp.seeding import seed_all
from elastic_ddp.worker.logged_values import LoggedValues, Means
from elastic_ddp.worker.loss_weight import check_weight, unit_of
from elastic_ddp.worker.nonfinite import reason_to_skip, rows_of
from elastic_ddp.worker.verdict import Verdict
from elastic_ddp.worker.verification import Dispute, StepDisputedError, Verification

if TYPE_CHECKING:
    from elastic_ddp.worker.generation import Generation


class Step:
    """One optimizer step, yielded by `Run.steps`. Every rank runs it in the same way.

    If a worker fails during the block, the block ends without an error and the step is yielded again. Code after the
    block still runs, so put everything that belongs to the step into the block. If `optimize` had begun to change the
    state, the training function starts again on this worker, with the state of a peer or of the newest commit.

    Example:
        ```python
        with step:
            for batch in step.micro_batches():
                step.backward(loss_fn(model, batch))
            step.optimize()
        ```

    Attributes:
        index: the step's number, from 0.
        epoch: the epoch that the step belongs to, from 0.
        is_last_of_epoch: whether the epoch ends with this step.
        loss: the mean loss over the global batch, identical on all ranks; NaN before `optimize`.
        skipped: whether `optimize` left model, optimizers and schedulers unchanged; see `on_nonfinite`.
    """

    def __init__(
        self,
        generation: Generation,
        rows: np.ndarray,
        epoch: int,
        votes: Callable[[], dict[str, int]],
        *,
        is_logged: bool = False,
        begin_verification: Callable[[Generation], Verification] | None = None,
        act_on: Callable[[Verdict, Verification], None] = lambda verdict, verification: None,
    ) -> None:
        self.generation = generation
        self._begin_verification, self._act_on = begin_verification, act_on
        self.verification: Verification | None = None  # set in the block of a verified step
        self._checked: int | None = None  # the micro-batch of another rank that this one computes now
        self._state = generation.state
        self._activity = generation.activity
        self._control = ControlExchange(rows)
        self._votes = votes
        self._records: dict[int, MicroBatchRecord] = {}
        self._logged, self._is_logged = LoggedValues(), is_logged
        self._gather, self._gathered = RowGather(), dict[str, torch.Tensor]()
        self._current: int | None = None
        self._record: MicroBatchRecord | None = None  # of the current micro-batch
        self._is_dummy = False  # whether the current forward and backward are only for other ranks' collectives
        self._num_left = 0  # backwards of this rank that are to come
        self._is_in_block = self._has_begun = False
        self._first_error: Exception | None = None
        self._feed: Iterator[MicroBatch] = iter(())
        self._start = generation.state.position
        self.index = self._start.step
        self.epoch, self.loss = epoch, math.nan
        self.agreed: Agreement | None = None  # set when the step is done
        self.skip_reason: str | None = None
        self.phases: list[dict[str, Any]] = []  # what all ranks measured since the last logged step
        self.dispute: Dispute | None = None  # why the step is repeated, if it was verified
        self.failure: str | None = None  # how a worker failed in this step, which is then repeated

    def __enter__(self) -> Step:
        self._is_in_block = True
        self._activity.begin(f"step {self.index}", is_users=True)
        if not self.generation.is_closed:  # else `micro_batches` ends the block
            self.generation.strategy.begin_step(self._control.rows)
            self.generation.strategy.clear_gradients()
            self.generation.buffers.begin(self.generation.strategy.modules)
            self.generation.parameters.begin(self.generation.strategy.parameters)
            if self._begin_verification is not None:
                self.verification = self._begin_verification(self.generation)
            self._has_begun = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._current, self._is_in_block = None, False
        allow_zero_grad()
        # Cleared, because its traceback would keep the process group alive.
        first_error, self._first_error = self._first_error, None
        if error is None or isinstance(error, Exception):
            error = first_error or error
        was_changing, self._state.is_changing = self._state.is_changing, False
        if isinstance(error, StepDisputedError):
            self.dispute = error.dispute
        if error is not None and is_peer_failure(error):
            self.failure = format_exception(error)
            self._activity.failed_at(frames_of_error(error.__traceback__))
            if was_changing:
                self._state.is_torn, self._state.position = True, self._start
                self.agreed, self.loss = None, math.nan
            if self._has_begun:
                self.generation.buffers.revert()
            if self._state.finish_step is None:
                self._state.module.zero_grad(set_to_none=True)
            return True
        if kind is None and error is not None:
            raise self._caught_error(error) from error
        if error is None and self.agreed is None:
            raise ConfigError(
                f"step {self.index} ended without step.optimize(). Call it as the last line of `with step`."
            )
        if error is None:
            self.generation.strategy.reshard()  # the block may have called the model
            self.generation.parameters.end()
            if self._state.mirror is not None:
                self._state.mirror.check_unchanged()
        return False

    def micro_batches(self) -> Iterator[Any]:
        """Yields this rank's micro-batches: dicts of tensors on the run's device, of shape `(rows, ...)`.

        With a `collate_fn` or a map-style data set, they are what the collate function returned. Tensors in its dicts,
        lists, tuples and named tuples are on the run's device, and objects with a method `to` as well.

        Call it once in each step. A micro-batch has `micro_batch_size` rows, or fewer in the last step of an epoch. The
        generators of torch, NumPy and Python are seeded before each, so dropout is the same at every world size.

        In a verified step (`verify.every_steps`), a rank also gets a micro-batch of another rank, which does not count.
        With FSDP, a rank with fewer micro-batches than others receives its last one a second time. The copy takes part
        in the collectives and does not count.

        Raises:
            ConfigError: called outside the block or twice, or a batch is left without `backward`.
        """
        if not self._is_in_block:
            raise ConfigError(f"step {self.index} was used outside its block. Write `with step:` around it.")
        if self._records:
            raise ConfigError(f"step.micro_batches of step {self.index} was called twice. Loop over it once.")
        try:
            with self.capture_first_error():
                yield from self._micro_batches()
        finally:  # also if the loop ends early
            if self.agreed is None:  # an iterator that is kept may be closed during a later step
                seed_all(self.generation.seed, self.index, "end")

    def _micro_batches(self) -> Iterator[Any]:
        if self.generation.is_closed:
            raise PeerFailedError("a worker failed before the step began")
        strategy = self.generation.strategy
        self.generation.buffers.check_untouched()
        refuse_zero_grad(self._state.module, strategy.parameters.values())
        to_compute = strategy.to_compute
        num_dummies = max(0, strategy.min_forwards(self._control.rows) - len(to_compute))
        self._num_left = len(to_compute) + num_dummies
        self._feed = self.generation.feed.step(self.index)
        self._activity.enter("data")
        for batch in self._feed:
            if batch.index not in to_compute:
                continue
            if self.verification is not None:
                self.verification.keep(batch.index, batch.rows)
                if batch.index == to_compute[-1]:
                    yield from self._micro_batches_of_others(self.verification)
            num_copies = num_dummies if batch.index == to_compute[-1] else 0
            copies = [copy.deepcopy(batch.rows) for _ in range(num_copies)]  # the training function may change a batch
            yield from self._micro_batch(batch, batch.rows)
            for rows in copies:
                yield from self._micro_batch(batch, rows, is_dummy=True)
            self._activity.enter("data")
        strategy.check_gradients()
        self._activity.enter("between steps")  # the user's code up to `optimize`
        self._current, self._is_dummy = None, False

    def _micro_batches_of_others(self, verification: Verification) -> Iterator[Any]:
        """Yields what a verified step computes again. It takes part in nothing else."""
        self._activity.enter("collective")
        for micro_batch, rows in verification.exchange():
            self._checked = micro_batch
            yield from self._micro_batch(MicroBatch(micro_batch, rows, _NO_IDS), rows, is_dummy=True)
            self._checked = None

    def _micro_batch(self, batch: MicroBatch, rows: Any, *, is_dummy: bool = False) -> Iterator[Any]:
        """Yields the rows of a micro-batch and checks that `backward` was called for them."""
        strategy = self.generation.strategy
        self._current, self._is_dummy = batch.index, is_dummy
        self._record = record = MicroBatchRecord(batch.row_ids, _NO_LOSS)
        if not is_dummy:
            self._records[batch.index] = record
        self._activity.enter("forward")
        strategy.prepare_forward(batch.index if self._checked is None else None)
        seed_all(self.generation.seed, self.index, batch.index)
        yield rows
        self._raise_first_error()
        if record.loss is _NO_LOSS:
            raise ConfigError(
                f"step {self.index}: micro-batch {batch.index} was left without step.backward(loss). Call it exactly "
                "once for each batch."
            )

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        """Computes the gradients of one micro-batch.

        Call it once for each batch of `micro_batches()`, with the mean loss over its rows, a tensor with one element.
        The last call of a step reduces the gradients over all ranks to the mean over the global batch.

        Args:
            loss: the mean loss of the micro-batch.
            weight: what `loss` is a mean over, such as the number of tokens that are not masked; by default the number
                of rows. Give it for all micro-batches of a step, or for none. A micro-batch of weight 0 does not count,
                whatever its loss is. A tensor on a GPU is read before the backward, which waits for the forward.

        Raises:
            ConfigError: called without a current batch or twice for it, or `loss` is no single number, or `weight` is
                not a finite number from 0, or is missing for some micro-batches.
        """
        if self._current is None or self._record is None or self._record.loss is not _NO_LOSS:
            raise ConfigError("step.backward is for the current batch. Call it once for each batch of micro_batches().")
        if loss.numel() != 1:
            raise ConfigError(
                f"step.backward got a loss of shape {tuple(loss.shape)}. Give the mean over the batch's rows."
            )
        with self.capture_first_error():
            weight = None if weight is None else check_weight("step.backward", weight)
            self._backward(loss, self._current, self._record, weight)

    def _compute_again(self, loss: torch.Tensor, verification: Verification, weight: float | None) -> None:
        """Runs the backward of another rank's micro-batch, with what its owner does to the loss."""
        assert self._checked is not None and self._record is not None
        generation = self.generation
        self._activity.enter("backward")
        unit = generation.unit_of_weights(self.index, weight, 1.0 if weight is None else weight, is_last=False)
        divided = None if weight is None else weight / unit
        scale = self._state.loss_scale.scale if self._state.loss_scale is not None else 1.0
        scaled = loss if scale == 1.0 else loss * scale
        verification.record(self._checked, generation.strategy.compute_again(scaled, self._checked, divided))
        generation.buffers.end_micro_batch(self._checked, None)
        self._record.loss = loss.detach()

    def _backward(self, loss: torch.Tensor, micro_batch: int, record: MicroBatchRecord, weight: float | None) -> None:
        if self._checked is not None and self.verification is not None:
            return self._compute_again(loss, self.verification, weight)
        self._num_left -= 1
        generation, is_last = self.generation, not self._num_left
        largest = 1.0 if weight is None else max(weight, *(each.weight or 0.0 for each in self._records.values()))
        # Before the section, which begins later on other ranks.
        unit = generation.unit_of_weights(self.index, weight, largest, is_last=is_last)
        self._activity.enter("reduction" if is_last else "backward")
        if is_last:
            self._activity.begin(f"the reduction of step {self.index}")
        value, counts = to_host(loss.detach()), record.num_rows and not self._is_dummy
        scale = self._state.loss_scale.scale if self._state.loss_scale is not None else 1.0
        divided = None if weight is None else weight / unit
        if self._is_dummy:
            generation.strategy.dummy_backward(loss)
        else:
            generation.strategy.backward(loss if scale == 1.0 else loss * scale, micro_batch, divided)
        generation.buffers.end_micro_batch(micro_batch, generation.strategy.weight(micro_batch) if counts else None)
        record.loss, record.weight = value, weight
        if is_last:
            gathered = self._gather.signature(generation.strategy.to_compute)
            self._control.votes = {**self._votes(), "buffers_changed": generation.buffers.changed, "gathered": gathered}
            with_rows = {index: record for index, record in self._records.items() if record.num_rows}
            self._control.start(with_rows, generation.group.world_size)
            if weight is not None:
                self._activity.enter("collective")
            total_weight = None if weight is None else self._control.wait().total_weight
            if (divisor := scale * ((total_weight or unit) / unit)) != 1.0:
                generation.strategy.divide_gradients(divisor)

    @property
    def is_last_of_epoch(self) -> bool:
        return self._state.is_last_of_epoch(self.index)

    @property
    def in_progress(self) -> bool:
        """Whether the block has begun and `optimize` is not done."""
        return self._is_in_block and self.agreed is None

    @contextmanager
    def capture_first_error(self) -> Iterator[None]:
        """Makes the step fail with the first error raised in this context, even if the training function catches it."""
        try:
            yield
        except Exception as error:
            self._first_error = self._first_error or error
            raise

    def _raise_first_error(self) -> None:
        if self._first_error is not None:
            if is_peer_failure(self._first_error):
                raise self._first_error
            raise self._caught_error(self._first_error) from self._first_error

    def _caught_error(self, error: BaseException) -> ConfigError:
        return ConfigError(
            f"step {self.index}: the training function caught {format_exception(error)}. Gradients are missing after "
            "it, so the step cannot continue. Do not catch errors inside `with step`."
        )

    def log(self, **values: float | torch.Tensor) -> None:
        """Logs scalars by name; the ledger records them every `log_every_steps` steps.

        Values are numbers, or tensors with one element. Inside the loop over `micro_batches()`, they are averaged over
        the rows of the global batch. After it, a value counts for its rank's rows; after `optimize`, rank 0's does.

        Raises:
            ConfigError: a value is no single number.
        """
        if not self._is_dummy:
            self._logged.log(self._current, values)

    def gather(self, **rows: torch.Tensor) -> None:
        """Collects rows of the current batch by name, such as keys or codes, for `gathered`.

        Call it for every batch, before its `backward`. Each value has the batch's rows as its first dimension. The
        ranks exchange the rows in `optimize`, with one collective.

        Raises:
            ConfigError: called elsewhere, or a value does not have the batch's rows.
        """
        if self._current is None or self._record is None or self._record.loss is not _NO_LOSS:
            raise ConfigError("step.gather is for the current batch. Call it before step.backward of that batch.")
        if not self._is_dummy:
            self._gather.add(self._current, self._record.num_rows, rows)

    @property
    def gathered(self) -> dict[str, torch.Tensor]:
        """What `gather` collected from the global batch, by name: tensors of shape `(rows, ...)` on the run's device.

        In the order of the micro-batches, identical on all ranks and at every world size. Available after `optimize`.
        """
        if self.agreed is None:
            raise ConfigError(f"step.gathered of step {self.index} was read before step.optimize(), which fills it.")
        return self._gathered

    def optimize(self) -> None:
        """Clips the gradients, steps the optimizers, clears the gradients, and steps the schedulers.

        Call it on every rank, once, after the loop over `micro_batches()`.

        Raises:
            ConfigError: called before all micro-batches are computed, or twice.
            NonFiniteError: a loss or a gradient is NaN or infinite, and `on_nonfinite` is `stop`.
        """
        self._raise_first_error()
        with self.capture_first_error():
            self._optimize()

    def _optimize(self) -> None:
        generation, state, strategy = self.generation, self._state, self.generation.strategy
        done = {m for m, record in self._records.items() if record.loss is not _NO_LOSS}
        missing = [m for m in strategy.to_compute if m not in done]
        if missing := missing or strategy.to_compute[-1:] * self._num_left:  # a copy of the last one is missing
            raise ConfigError(
                f"step.optimize of step {self.index} was called before micro-batches {missing} were computed. Loop "
                "over all of step.micro_batches() first."
            )
        if self.agreed is not None:
            raise ConfigError(f"step.optimize was called twice in step {self.index}. Call it once.")
        allow_zero_grad()  # an optimizer may call it
        strategy.check_not_cleared()
        generation.parameters.check()
        generation.buffers.check_untouched()
        for _ in self._feed:  # a loop that ended early leaves padding, which must not enter the next step
            pass
        # All collectives of the step come before the first change: a failure in them leaves the state intact.
        self._activity.enter("collective")
        agreed = self._control.wait()
        rows, signatures = self._control.rows, agreed.votes["gathered"]
        self._gathered = self._gather.exchange(signatures, rows, strategy.ranges, generation.group)
        if agreed.votes["buffers_changed"]:
            generation.buffers.combine(strategy.ranges, strategy.num_leaves, strategy.divisor, generation.group)
        norm = generation.clip_gradients(self.log)
        self._activity.enter("collective")
        if self._is_logged:
            self.phases = self._logged.gather(generation.group, rows, strategy.ranges, generation.phases.take())
        total_norm = generation.group.synchronize(norm)  # the only wait for the end of the backward
        if self.verification is not None:  # first, because a device that is at fault may compute a NaN
            verdict = self.verification.conclude(state.replicated(), list(strategy.trained))
            self._act_on(verdict, self.verification)
        self.skip_reason = self._find_reason_to_skip(agreed, total_norm)
        if not self.skipped:
            generation.mirror_gradients()
        with state.in_doubt(None if self.skipped else self._step_optimizers):
            generation.vote()
        self._activity.enter("optimizer")
        self._update(agreed, total_norm)
        self.loss = agreed.loss
        state.position = state.position.after(int(rows.sum()), agreed.row_digests)
        self.agreed = agreed
        self._activity.enter("between steps")
        self._activity.begin(f"the code after step {self.index}", is_users=True)

    def _find_reason_to_skip(self, agreed: Agreement, norm: float | None) -> str | None:
        """Returns why the step must not change the model; None if it may. Collective if a value is not finite."""
        generation = self.generation
        if agreed.total_weight == 0:
            return "the weights of all micro-batches are 0"
        if norm is None:
            return None
        find_rows = partial(rows_of, self._records, generation.feed, generation.group)
        finds, policy = (generation.strategy.nonfinite_gradients, find_rows), generation.on_nonfinite
        clips, scale = generation.clip_grad_norm is not None, self._state.loss_scale
        return reason_to_skip(self.index, agreed.losses, norm, *finds, policy, scale, clips)

    def _step_optimizers(self) -> None:
        self._state.step_optimizers(partial(seed_all, self.generation.seed, self.index, "optimize"))

    def _update(self, agreed: Agreement, norm: float | None) -> None:
        """Changes the state, each rank by itself."""
        generation, state, loss_scale = self.generation, self._state, self._state.loss_scale
        state.is_changing = True
        if self.skipped:
            generation.buffers.revert()
        else:
            self._step_optimizers()
            generation.strategy.reshard()  # a forward before this gathered what has changed
        state.step_schedulers(is_skipped=self.skipped)
        # Of the whole model: a gradient of a parameter in no optimizer would count in the next clipping.
        generation.strategy.clear_gradients()
        if loss_scale is not None:
            self.log(loss_scale=loss_scale.scale)
            overflow, unit = not math.isfinite(norm or 0.0), generation.weight_unit
            if unit == 0 and agreed.total_weight:
                unit = generation.weight_unit = unit_of(agreed.total_weight / generation.strategy.num_leaves)
            state.loss_scale = replace(loss_scale, weight_unit=1.0 if unit is None else unit).after(overflow=overflow)

    @property
    def skipped(self) -> bool:
        return self.skip_reason is not None

    @property
    def metrics(self) -> Means:
        """The means over the global batch of what `log` got, by name; NaN for a name without a value.

        Complete after `optimize` in every `log_every_steps`-th step from step 0 on and in the last step, alike on all
        ranks. In other steps it lacks what was logged inside the loop. A later value is the one that this rank logged.
        """
        return self._logged.means


_NO_IDS = np.zeros(0, dtype=np.int64)
_NO_LOSS = torch.tensor(float("nan"))
"""The loss of a micro-batch before its backward."""
