"""`Step`: one step of a run, as the training function's loop sees it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from elastic_ddp.data.micro_batches import MicroBatch
from elastic_ddp.distributed.process_group import is_peer_failure
from elastic_ddp.errors import ConfigError, PeerFailedError
from elastic_ddp.rendezvous.user_place import frames_of_error
from elastic_ddp.worker.logged_values import Means
from elastic_ddp.worker.step_plan import Outcome, StepPlan, caught_error
from elastic_ddp.worker.update import Update, name_of, only_trained

if TYPE_CHECKING:
    from elastic_ddp.distributed.step_agreement import Agreement


class Step:
    """One step, yielded by `Run.steps`. Every rank runs it in the same way.

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
        loss: the mean loss over the global batch, identical on all ranks; NaN before `optimize`. With several updates,
            the loss of the last one.
        skipped: whether `optimize` left model, optimizers and schedulers unchanged; see `on_nonfinite`. With several
            updates, whether one of them was skipped.
    """

    def __init__(self, plan: StepPlan, epoch: int) -> None:
        self.index = plan.index
        self.epoch = epoch
        self.generation = plan.generation
        self._plan = plan
        self._state = plan.generation.state
        self._activity = plan.generation.activity
        self._start = self._state.position
        self._update = Update(plan)  # the current one, or the last one
        self._num_updates = 0  # that `update` was called for
        self._is_in_update = False
        self._waiting: list[Update] = []  # of functions, which count when an optimizer has stepped
        self._kept: list[MicroBatch] = []  # the micro-batches of the first of several updates
        self._metrics: dict[str, float] = {}  # of the updates before the current one
        self._is_in_block = False
        self.outcome = Outcome()

    def __enter__(self) -> Step:
        self._is_in_block = True
        self._activity.begin(f"step {self.index}", is_users=True)
        if not self.generation.is_closed:  # else `micro_batches` ends the block
            self._update.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._is_in_block = False
        self._update.end()
        self._kept.clear()
        first_error = self._plan.take_first_error()
        if error is None or isinstance(error, Exception):
            error = first_error or error
        was_changing = self._state.is_changing
        self._state.is_changing = False
        # Without updates, a step stays done if code after `optimize` raises an error of its own.
        if error is not None and (self._num_updates or is_peer_failure(error)):
            self.outcome = self.outcome.failed(error)
        if error is not None and self.outcome.failure is not None:
            self._activity.failed_at(frames_of_error(error.__traceback__))
            if was_changing:
                self._state.is_torn = True
                self._state.position = self._start
            if self._update.has_begun:
                self.generation.buffers.revert()
            self._plan.put_back(with_buffers=True)
            if self._state.finish_step is None:
                self._state.module.zero_grad(set_to_none=True)
            return True
        self._plan.put_back(with_buffers=True)
        if kind is None and error is not None:
            raise caught_error(error, self._update) from error
        if error is None:
            self._end()
        return False

    def _end(self) -> None:
        """Ends a block without errors."""
        agreed = self.outcome.agreed
        if agreed is None and self._num_updates:
            raise ConfigError(
                f"step {self.index} was repeated after {len(self._state.updates)} updates, and its block calls no more "
                "than these now. Call the same updates each time."
            )
        if agreed is None:
            raise ConfigError(
                f"step {self.index} ended without step.optimize(). Call it as the last line of `with step`."
            )
        if self._waiting:
            raise ConfigError(
                f"step {self.index} ended with the update {self._waiting[-1].name!r}, whose change is put back "
                "before the next optimizer steps. Let an update of an optimizer follow."
            )
        if self._num_updates:
            self._state.step_schedulers(is_skipped=True)  # schedulers of epochs
            self._advance(agreed)
        self.generation.strategy.reshard()  # the block may have called the model
        self.generation.parameters.end()
        if self._state.mirror is not None:
            self._state.mirror.check_unchanged()

    def _advance(self, agreed: Agreement) -> None:
        state = self._state
        state.position = state.position.after(int(self._plan.rows.sum()), agreed.row_digests)
        state.updates = []

    # One update, or several.

    def micro_batches(self) -> Iterator[Any]:
        """Yields this rank's micro-batches: dicts of tensors on the run's device, of shape `(rows, ...)`.

        With a `collate_fn` or a map-style data set, the micro-batches are the results of the collate function. Tensors
        in its dicts, lists, tuples and named tuples are on the run's device, and objects with a method `to` as well.

        Call it once in each step, or in each update. A micro-batch has `micro_batch_size` rows, or fewer in the last
        step of an epoch. The generators of torch, NumPy and Python are seeded before each, so dropout is the same at
        every world size.

        In a verified step (`verify.every_steps`), a rank also gets a micro-batch of another rank, which does not count.
        With FSDP, a rank with fewer micro-batches than others receives its last one a second time. The copy takes part
        in the collectives and does not count.

        Raises:
            ConfigError: called outside the block or twice, or a batch is left without `backward`.
        """
        if not self._is_in_block:
            raise ConfigError(f"step {self.index} was used outside its block. Write `with step:` around it.")
        if self._num_updates and not self._is_in_update:
            raise ConfigError(
                f"step.micro_batches of step {self.index} was called outside its updates. Loop over it in `with "
                "step.update(optimizer):`."
            )
        return iter(()) if self._update.is_repeated else self._update.micro_batches(self._batches())

    def _batches(self) -> Iterator[MicroBatch]:
        """Yields the micro-batches of this rank. Each of several updates gets copies, which it may change."""
        if not self._num_updates:
            yield from self.generation.feed.step(self.index)
            return
        is_first = not self._kept
        for batch in self.generation.feed.step(self.index) if is_first else list(self._kept):
            if is_first:
                self._kept.append(batch)
            yield replace(batch, rows=copy.deepcopy(batch.rows))

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        """Computes the gradients of one micro-batch.

        Call it once for each batch of `micro_batches()`, with the mean loss over its rows, a tensor with one element.
        The last call of a step reduces the gradients over all ranks to the mean over the global batch.

        Args:
            loss: the mean loss of the micro-batch.
            weight: the number of units that `loss` averages over, for example unmasked tokens; by default the number of
                rows. Give it for all micro-batches of a step, or for none. A micro-batch of weight 0 does not count,
                whatever its loss is. A tensor on a GPU is read before the backward, which waits for the forward.

        Raises:
            ConfigError: called without a current batch or twice for it, or `loss` is no single number, or `weight` is
                not a finite number from 0, or is missing for some micro-batches.
        """
        self._update.backward(loss, weight)

    def optimize(self) -> None:
        """Clips the gradients, steps the optimizers, clears the gradients, and steps the schedulers.

        Call it on every rank, once, after the loop over `micro_batches()`.

        Raises:
            ConfigError: called before all micro-batches are computed, or twice, or beside `update`.
            NonFiniteError: a loss or a gradient is NaN or infinite, and `on_nonfinite` is `stop`.
        """
        if self._num_updates:
            raise ConfigError(
                f"step.optimize was called in step {self.index}, beside step.update. An update steps its optimizer at "
                "the end of its block. Remove step.optimize()."
            )
        if self.outcome.is_done:
            raise ConfigError(f"step.optimize was called twice in step {self.index}. Call it once.")
        self._update.optimize("step.optimize")
        self.outcome = self._update.outcome.after(self.outcome)
        self._update.count()
        assert self.outcome.agreed is not None
        self._advance(self.outcome.agreed)
        self._activity.begin(f"the code after step {self.index}", is_users=True)

    @contextmanager
    def update(self, by: torch.optim.Optimizer | Callable[[], object], *, name: str | None = None) -> Iterator[Update]:
        """The context of one of several updates in a step, each with a loop of its own over `micro_batches()`.

        The block trains only parameters of its optimizer; the others need no gradient. At the end of the block the run
        clips the gradients, steps the optimizer and the optimizer's schedulers, and clears the gradients. If a worker
        fails, the block of the step runs again, and updates that are done yield no micro-batches.

        Every rank calls it, for the same updates in the same order in each run of the block.

        Args:
            by: a prepared optimizer; or a function that changes parameters in place, with the gradients of all
                parameters of prepared optimizers at hand, for example the ascent of SAM. It is called without recording
                gradients. The run restores these parameters before the next optimizer steps.
            name: names the update's metrics, `<name>_loss` and, with `clip_grad_norm`, `<name>_grad_norm`. By default
                "optimizer_0" for the first prepared optimizer, and so on, or the name of the function.

        Raises:
            ConfigError: nested, or beside `step.optimize`; the optimizer is not prepared, or shares parameters with
                another one; the block left micro-batches without `backward`; or the run's strategy is FSDP.
            NonFiniteError: as `optimize`.

        Example:
            ```python
            with step:
                with step.update(critic_optimizer, name="critic"):
                    for batch in step.micro_batches():
                        step.backward(critic_loss(gan, batch))
                with step.update(generator_optimizer, name="generator"):
                    for batch in step.micro_batches():
                        step.backward(generator_loss(gan, batch))
            ```
        """
        self._check_update(by)
        state = self._state
        number = self._num_updates
        update = Update(self._plan, number=number, name=name or name_of(by, state.optimizers), by=by)
        self._metrics |= self._update.metrics
        self._update = update
        self._num_updates += 1
        self._is_in_update = True
        try:
            with self._plan.capture_first_error():
                if number < len(state.updates):
                    update.repeat(state.updates[number])
                    self.outcome = update.outcome.after(self.outcome)
                    yield update
                    return
                state.is_changing = False  # the changes of the update before are complete
                if self.generation.is_closed:
                    raise PeerFailedError("a worker failed before the update began")
                if update.is_temporary:
                    self._plan.save_parameters()
                self._activity.begin(repr(update), is_users=True)
                update.begin()
                with only_trained(update.strategy.parameters.values(), update.strategy.trained.values()):
                    yield update
                    update.optimize("the end")
                self.outcome = update.outcome.after(self.outcome)
                self._waiting.append(update)
                if not update.is_temporary:
                    state.updates = [*state.updates, *(each.count() for each in self._waiting)]
                    self._waiting.clear()
                self._activity.begin(f"the code after {update!r}", is_users=True)
        finally:
            update.end()
            self._is_in_update = False

    def _check_update(self, by: object) -> None:
        """Raises a ConfigError if `update` cannot be called now, or not with this argument."""
        optimizers = self._state.optimizers
        what = f"step.update of step {self.index}"
        if not self._is_in_block:
            raise ConfigError(f"step {self.index} was used outside its block. Write `with step:` around it.")
        if self._is_in_update:
            raise ConfigError(f"{what} was called in the block of another update. Let one update follow the other.")
        self._plan.raise_first_error(self._update)
        if not self._num_updates and self._update.has_micro_batches:
            raise ConfigError(
                f"{what} was called after a loop over step.micro_batches() has begun, outside of an update. Put each "
                "loop into the block of an update, and remove step.optimize()."
            )
        if not self.generation.strategy.replicates_state:
            raise ConfigError(
                f'{what} needs strategy = "ddp". With FSDP, the units of a sharded model exchange the gradients of all '
                "their parameters in one backward. Use step.optimize, once in a step."
            )
        if not isinstance(by, torch.optim.Optimizer):
            if not callable(by):
                raise ConfigError(f"{what} got {by!r}. Give a prepared optimizer, or a function.")
            return
        if not any(by is optimizer for optimizer in optimizers):
            raise ConfigError(
                f"{what} got a {type(by).__name__} that is not prepared. Give it to run.prepare before the loop."
            )
        own = {id(parameter) for group in by.param_groups for parameter in group["params"]}
        others = [group for other in optimizers if other is not by for group in other.param_groups]
        if not any(parameter.requires_grad for group in by.param_groups for parameter in group["params"]):
            raise ConfigError(f"{what} got a {type(by).__name__} of which no parameter needs a gradient.")
        if any(id(parameter) in own for group in others for parameter in group["params"]):
            raise ConfigError(
                f"{what} got a {type(by).__name__} that shares parameters with another prepared optimizer. Give each "
                "parameter to one optimizer."
            )

    # Values.

    def log(self, **values: float | torch.Tensor) -> None:
        """Logs scalars by name; the ledger records them every `log_every_steps` steps.

        Values are numbers, or tensors with one element. Values from the loop over `micro_batches()` are averaged over
        the rows of the global batch. A later value counts for its rank's rows; after `optimize`, rank 0's value counts.

        Raises:
            ConfigError: a value is no single number.
        """
        self._update.log(values)

    def gather(self, **rows: torch.Tensor) -> None:
        """Collects rows of the current batch by name, for example keys or codes, for `gathered`.

        Call it for every batch, before its `backward`. Each value has the batch's rows as its first dimension. The
        ranks exchange the rows in `optimize`, or at the end of the update, with one collective.

        Raises:
            ConfigError: called elsewhere, or a value does not have the batch's rows.
        """
        self._update.gather(rows)

    @property
    def gathered(self) -> dict[str, torch.Tensor]:
        """The gathered rows of the global batch, by name: tensors of shape `(rows, ...)` on the run's device.

        In the order of the micro-batches, identical on all ranks and at every world size. Available after `optimize`,
        or after the update that gathered them, until another update gathers rows.
        """
        if self.outcome.gathered is None:
            raise ConfigError(f"step.gathered of step {self.index} was read before step.optimize(), which fills it.")
        return dict(self.outcome.gathered)

    @property
    def is_last_of_epoch(self) -> bool:
        return self._state.is_last_of_epoch(self.index)

    @property
    def in_progress(self) -> bool:
        """Whether the block has begun, and the change of its current update is not done."""
        return self._is_in_block and not self._update.outcome.is_done

    @property
    def has_progressed(self) -> bool:
        """Whether this attempt has completed an update, which the next attempt does not repeat after a failure."""
        return len(self._state.updates) > self._plan.first_update

    def capture_first_error(self) -> AbstractContextManager[None]:
        """Makes the step fail with the first error raised in this context, even if the training function catches it."""
        return self._plan.capture_first_error()

    @property
    def loss(self) -> float:
        return self.outcome.loss

    @property
    def skipped(self) -> bool:
        return self.outcome.skip_reason is not None

    @property
    def metrics(self) -> Means:
        """The means over the global batch of logged values, by name; NaN for a name without a value.

        Complete after `optimize` in every `log_every_steps`-th step from step 0 on and in the last step, alike on all
        ranks. In other steps, values from inside the loop are missing. Values logged after `optimize` are this rank's
        own.
        """
        return Means({**self._metrics, **self._update.metrics})
