"""`Update`: one pass over the micro-batches of a step, and the change of the model that it ends in."""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from elastic_ddp.data.micro_batches import MicroBatch
from elastic_ddp.distributed.parameter_guard import allow_zero_grad, refuse_zero_grad
from elastic_ddp.distributed.process_group import to_host
from elastic_ddp.distributed.row_gather import RowGather
from elastic_ddp.distributed.step_agreement import Agreement, ControlExchange, MicroBatchRecord
from elastic_ddp.errors import ConfigError, PeerFailedError
from elastic_ddp.seeding import seed_all
from elastic_ddp.worker.logged_values import LoggedValues
from elastic_ddp.worker.loss_scale import LossScale, check_weight, unit_of
from elastic_ddp.worker.nonfinite import reason_to_skip, rows_of
from elastic_ddp.worker.step_plan import Outcome, StepPlan
from elastic_ddp.worker.verification import Verification

if TYPE_CHECKING:
    from elastic_ddp.worker.train_state import ChangedBy


class Update:
    """One pass over the micro-batches of a step, and the change of the model that it ends in.

    `Step.update` yields each of several updates. A step without it has a single update, which steps all optimizers.

    Attributes:
        name: its name in metrics; "" if the step has a single update.
        loss: the mean loss over the global batch, identical on all ranks; NaN before the change.
        is_repeated: whether the update was done before a worker failed. Its loop over micro-batches yields nothing.
        skipped: whether the update was skipped; see `on_nonfinite`.
        current: the number of the micro-batch that the loop is at; None outside of the loop.
    """

    def __init__(
        self,
        plan: StepPlan,
        *,
        number: int = 0,
        name: str = "",
        by: ChangedBy = None,
    ) -> None:
        self.number = number
        self.name = name
        self.strategy = plan.generation.strategy_of(by)
        self._plan = plan
        self._by = by
        self._state = plan.generation.state
        self._activity = plan.generation.activity
        self._control = ControlExchange(plan.rows)
        self._records: dict[int, MicroBatchRecord] = {}
        self._logged = LoggedValues()
        self._gather = RowGather()
        self.current: int | None = None
        self._record: MicroBatchRecord | None = None  # of the current micro-batch
        self._is_dummy = False  # whether the current forward and backward are only for other ranks' collectives
        self._num_left = 0  # backwards of this rank that are to come
        self._feed: Iterator[MicroBatch] = iter(())
        self._verification: Verification | None = None
        self._checked: int | None = None  # the micro-batch of another rank that this one computes now
        self.outcome = Outcome()
        self._next_scale: LossScale | None = None  # of the next such update
        self.is_repeated = False
        self.has_begun = False
        self._metrics: dict[str, float] = {}  # of a repeated update

    def __repr__(self) -> str:
        return f"step {self._plan.index}" + (f", update {self.name!r}" if self.name else "")

    @property
    def loss(self) -> float:
        return self.outcome.loss

    @property
    def skipped(self) -> bool:
        return self.outcome.skip_reason is not None

    @property
    def is_part(self) -> bool:
        """Whether it is one of several updates of the step."""
        return self._by is not None

    @property
    def _vote(self) -> int:
        """A number that only this update of the step has; 0 if the step has a single update."""
        return zlib.crc32(f"{self.number} {self.name}".encode()) if self.is_part else 0

    @property
    def is_temporary(self) -> bool:
        """Whether a function changes the parameters, which are put back before the next optimizer steps."""
        return self.is_part and not isinstance(self._by, torch.optim.Optimizer)

    @property
    def has_micro_batches(self) -> bool:
        """Whether its loop over micro-batches has begun."""
        return bool(self._records)

    def repeat(self, record: dict[str, Any]) -> None:
        """Takes the results of this update from before a worker failed. Raises a ConfigError for another update."""
        if record["name"] != self.name:
            raise ConfigError(
                f"{self!r} was {record['name']!r} before the step was repeated. Call the same updates each time."
            )
        self.is_repeated = True
        self._metrics = record["metrics"]
        self.outcome = Outcome(**{name: record[name] for name in ("loss", "skip_reason", "gathered")})

    def begin(self) -> None:
        """Begins the update. Every rank calls it, unless the generation is closed."""
        generation = self._plan.generation
        strategy = self.strategy
        strategy.begin_step(self._control.rows)
        strategy.clear_gradients()
        generation.buffers.begin(strategy.modules)
        generation.parameters.begin(strategy.parameters)
        if self._plan.begin_verification is not None:
            self._verification = self._plan.begin_verification(strategy, self.number)
        self.has_begun = True

    def end(self) -> None:
        """Ends the update, which may have failed."""
        self.current = None
        allow_zero_grad()

    def _seed(self, what: int | str) -> None:
        later = (self.number,) if self.number else ()
        seed_all(self._plan.generation.config.seed, self._plan.index, what, *later)

    # Micro-batches.

    def micro_batches(self, batches: Iterator[MicroBatch]) -> Iterator[Any]:
        """Yields the rows of this rank's micro-batches; see `Step.micro_batches`. `batches` is the feed."""
        if self._records:
            raise ConfigError(f"step.micro_batches of {self!r} was called twice. Loop over it once.")
        try:
            with self._plan.capture_first_error():
                yield from self._micro_batches(batches)
        finally:  # also if the loop ends early
            if not self.outcome.is_done:  # an iterator that is kept may be closed during a later step
                self._seed("end")

    def _micro_batches(self, batches: Iterator[MicroBatch]) -> Iterator[Any]:
        if self._plan.generation.is_closed:
            raise PeerFailedError("a worker failed before the step began")
        strategy = self.strategy
        self._plan.generation.buffers.check_untouched()
        refuse_zero_grad(self._state.module, strategy.parameters.values())
        to_compute = strategy.to_compute
        num_dummies = max(0, strategy.min_forwards(self._control.rows) - len(to_compute))
        self._num_left = len(to_compute) + num_dummies
        self._feed = batches
        self._activity.enter("data")
        for batch in self._feed:
            if batch.index not in to_compute:
                continue
            if self._verification is not None:
                self._verification.keep(batch.index, batch.rows)
                if batch.index == to_compute[-1]:
                    yield from self._micro_batches_of_others(self._verification)
            num_copies = num_dummies if batch.index == to_compute[-1] else 0
            copies = [copy.deepcopy(batch.rows) for _ in range(num_copies)]  # the training function may change a batch
            yield from self._micro_batch(batch, batch.rows)
            for rows in copies:
                yield from self._micro_batch(batch, rows, is_dummy=True)
            self._activity.enter("data")
        strategy.check_gradients()
        self._activity.enter("between steps")  # the user's code up to `optimize`
        self.current = None
        self._is_dummy = False

    def _micro_batches_of_others(self, verification: Verification) -> Iterator[Any]:
        """Yields the rows of other ranks that a verified step computes again. These rows count nowhere else."""
        self._activity.enter("collective")
        for micro_batch, rows in verification.exchange():
            self._checked = micro_batch
            yield from self._micro_batch(MicroBatch(micro_batch, rows, _NO_IDS), rows, is_dummy=True)
            self._checked = None

    def _micro_batch(self, batch: MicroBatch, rows: Any, *, is_dummy: bool = False) -> Iterator[Any]:
        """Yields the rows of a micro-batch and checks that `backward` was called for them."""
        strategy = self.strategy
        record = MicroBatchRecord(batch.row_ids, _NO_LOSS)
        self.current = batch.index
        self._record = record
        self._is_dummy = is_dummy
        if not is_dummy:
            self._records[batch.index] = record
        self._activity.enter("forward")
        strategy.prepare_forward(batch.index if self._checked is None else None)
        self._seed(batch.index)
        with self._autocast(is_enabled=True):
            yield rows
        self._plan.raise_first_error(self)
        if record.loss is _NO_LOSS:
            raise ConfigError(
                f"{self!r}: micro-batch {batch.index} was left without step.backward(loss). Call it exactly once for "
                "each batch."
            )

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None) -> None:
        """Computes the gradients of the current micro-batch; see `Step.backward`."""
        if self.current is None or self._record is None or self._record.loss is not _NO_LOSS:
            raise ConfigError("step.backward is for the current batch. Call it once for each batch of micro_batches().")
        if loss.numel() != 1:
            raise ConfigError(
                f"step.backward got a loss of shape {tuple(loss.shape)}. Give the mean over the batch's rows."
            )
        if self.is_part and not loss.requires_grad:
            raise ConfigError(
                f"step.backward of {self!r} got a loss that does not depend on a parameter of its optimizer. Only "
                "these are trained in this update."
            )
        with self._plan.capture_first_error(), self._autocast(is_enabled=False):
            weight = None if weight is None else check_weight("step.backward", weight)
            self._backward(loss, self.current, self._record, weight)

    def _autocast(self, *, is_enabled: bool) -> AbstractContextManager[object]:
        """The context of the loop's body. In one of several updates it may call parts of the model."""
        assert self._state.model is not None
        return self._state.model.autocast(is_enabled=is_enabled) if self.is_part else nullcontext()

    def _compute_again(self, loss: torch.Tensor, verification: Verification, weight: float | None) -> None:
        """Runs the backward of another rank's micro-batch, with the same changes of the loss as on its owner."""
        assert self._checked is not None and self._record is not None
        self._activity.enter("backward")
        unit = self._unit_of_weights(weight, 1.0 if weight is None else weight, is_last=False)
        divided = None if weight is None else weight / unit
        scaled = loss if self._scale == 1.0 else loss * self._scale
        verification.record(self._checked, self.strategy.compute_again(scaled, self._checked, divided))
        self._plan.generation.buffers.end_micro_batch(self._checked, None)
        self._record.loss = loss.detach()

    def _backward(self, loss: torch.Tensor, micro_batch: int, record: MicroBatchRecord, weight: float | None) -> None:
        if self._checked is not None and self._verification is not None:
            return self._compute_again(loss, self._verification, weight)
        self._num_left -= 1
        generation = self._plan.generation
        strategy = self.strategy
        is_last = self._num_left == 0
        largest = 1.0 if weight is None else max(weight, *(each.weight or 0.0 for each in self._records.values()))
        # Before the section, which begins later on other ranks.
        unit = self._unit_of_weights(weight, largest, is_last=is_last)
        self._activity.enter("reduction" if is_last else "backward")
        if is_last:
            self._activity.begin(f"the reduction of {self!r}")
        value = to_host(loss.detach())
        counts = record.num_rows and not self._is_dummy
        scale = self._scale
        divided = None if weight is None else weight / unit
        if self._is_dummy:
            strategy.dummy_backward(loss)
        else:
            strategy.backward(loss if scale == 1.0 else loss * scale, micro_batch, divided)
        generation.buffers.end_micro_batch(micro_batch, strategy.weight(micro_batch) if counts else None)
        record.loss = value
        record.weight = weight
        if is_last:
            gathered = self._gather.signature(strategy.to_compute)
            votes = {"buffers_changed": generation.buffers.changed, "gathered": gathered, "update": self._vote}
            self._control.votes = {**self._plan.votes(), **votes}
            with_rows = {index: record for index, record in self._records.items() if record.num_rows}
            self._control.start(with_rows, generation.group.world_size)
            if weight is not None:
                self._activity.enter("collective")
            total_weight = None if weight is None else self._control.wait().total_weight
            divisor = scale * ((total_weight or unit) / unit)
            if divisor != 1.0:
                strategy.divide_gradients(divisor)

    @property
    def _scale(self) -> float:
        """The factor of losses that keeps gradients in the range of float16."""
        loss_scale = self._state.loss_scale_of(self._by)
        return 1.0 if loss_scale is None else loss_scale.scale

    def _unit_of_weights(self, weight: float | None, largest: float, *, is_last: bool) -> float:
        is_first = not (self._plan.index or self.number)
        return self._plan.generation.unit_of_weights(self.strategy, weight, largest, is_first=is_first, is_last=is_last)

    # Values.

    def log(self, values: dict[str, float | torch.Tensor]) -> None:
        if not self._is_dummy:
            self._logged.log(self.current, values)

    def gather(self, rows: dict[str, torch.Tensor]) -> None:
        if self.current is None or self._record is None or self._record.loss is not _NO_LOSS:
            raise ConfigError("step.gather is for the current batch. Call it before step.backward of that batch.")
        if not self._is_dummy:
            self._gather.add(self.current, self._record.num_rows, rows)

    @property
    def metrics(self) -> dict[str, float]:
        """The values logged in this update, and, with several updates, its loss."""
        own = {f"{self.name}_loss": self.loss} if self.is_part and self.outcome.is_done else {}
        return {**self._metrics, **self._logged.means, **own}

    # The change.

    def optimize(self, end_of: str) -> None:
        """Ends the reduction and changes the model. Error messages call the caller `end_of`."""
        self._plan.raise_first_error(self)
        with self._plan.capture_first_error():
            self.outcome = self._optimize(end_of)

    def _optimize(self, end_of: str) -> Outcome:
        generation = self._plan.generation
        state = self._state
        strategy = self.strategy
        done = {m for m, record in self._records.items() if record.loss is not _NO_LOSS}
        missing = [m for m in strategy.to_compute if m not in done]
        if not missing and self._num_left:
            missing = strategy.to_compute[-1:]  # a copy of it is missing
        if missing:
            raise ConfigError(
                f"{end_of} of {self!r} was called before micro-batches {missing} were computed. Loop over all of "
                "step.micro_batches() first."
            )
        allow_zero_grad()  # an optimizer may call it
        strategy.check_not_cleared()
        generation.parameters.check()
        generation.buffers.check_untouched()
        for _ in self._feed:  # a loop that ended early leaves padding, which must not enter the next step
            pass
        # All collectives of the step come before the first change: a failure in them leaves the state intact.
        self._activity.enter("collective")
        agreed = self._control.wait()
        if agreed.votes["update"] != generation.group.world_size * self._vote:
            raise ConfigError(
                f"{self!r} is another update on another rank. Call the same updates in the same order on every rank."
            )
        rows = self._control.rows
        gathered = self._gather.exchange(agreed.votes["gathered"], rows, strategy.ranges, generation.group)
        if agreed.votes["buffers_changed"]:
            generation.buffers.combine(strategy.ranges, strategy.num_leaves, strategy.divisor, generation.group)
        norm_name = f"{self.name}_grad_norm" if self.is_part else "grad_norm"
        loss_scale = state.loss_scale_of(self._by)
        norm = generation.clip_gradients(
            strategy, lambda norm: self.log({norm_name: norm}), checks=loss_scale is not None
        )
        self._activity.enter("collective")
        phases: list[dict[str, Any]] = []
        if self._plan.is_logged:
            own = generation.clock.phases.take() if self.number == self._plan.first_update else {}
            phases = self._logged.gather(generation.group, rows, strategy.ranges, own)
        total_norm = generation.group.synchronize(norm)  # the only wait for the end of the backward
        if self._verification is not None:  # first, because a device that is at fault may compute a NaN
            self._verification.conclude(state.replicated(), list(strategy.trained))
        skip_reason = self._find_reason_to_skip(agreed, total_norm)
        if skip_reason is None:
            generation.mirror_gradients()
        with state.in_doubt(self._step_optimizers if skip_reason is None else None):
            generation.vote()
        self._activity.enter("optimizer")
        self._apply(agreed, total_norm, is_skipped=skip_reason is not None)
        self._activity.enter("between steps")
        return Outcome(agreed=agreed, loss=agreed.loss, skip_reason=skip_reason, gathered=gathered, phases=phases)

    def count(self) -> dict[str, Any]:
        """Makes the update count: if a worker fails, the step resumes after it. Returns its results, for `repeat`."""
        if self._next_scale is not None:
            self._state.set_loss_scale(self._by, self._next_scale)
        done = {name: getattr(self.outcome, name) for name in ("loss", "skip_reason", "gathered")}
        return {"name": self.name, **done, "metrics": self.metrics}

    def _find_reason_to_skip(self, agreed: Agreement, norm: float | None) -> str | None:
        """Returns why the update must not change the model; None if it may. Collective if a value is not finite."""
        generation = self._plan.generation
        if agreed.total_weight == 0:
            return "the weights of all micro-batches are 0"
        if norm is None:
            return None
        return reason_to_skip(
            self._plan.index,
            agreed.losses,
            norm,
            find_gradients=self.strategy.nonfinite_gradients,
            find_rows=partial(rows_of, self._records, generation.feed, generation.group),
            policy=generation.config.on_nonfinite,
            loss_scale=self._state.loss_scale_of(self._by),
            clips=generation.config.clip_grad_norm is not None,
        )

    def _step_optimizers(self) -> None:
        self._state.step_optimizers(partial(self._seed, "optimize"), self._by)

    def _apply(self, agreed: Agreement, norm: float | None, *, is_skipped: bool) -> None:
        """Changes the state, each rank by itself."""
        generation = self._plan.generation
        state = self._state
        strategy = self.strategy
        loss_scale = state.loss_scale_of(self._by)
        state.is_changing = not self.is_temporary
        if is_skipped:
            generation.buffers.revert()
        if not self.is_temporary:
            self._plan.put_back(with_buffers=is_skipped)
        if not is_skipped:
            self._step_optimizers()
            strategy.reshard()  # a forward before this gathered what has changed
        state.step_schedulers(is_skipped=is_skipped, by=self._by)
        # Of the whole model: a gradient of a parameter in no optimizer would count in the next clipping.
        strategy.clear_gradients()
        if loss_scale is not None:
            self.log({f"{self.name}_loss_scale" if self.is_part else "loss_scale": loss_scale.scale})
            overflow = not math.isfinite(norm or 0.0)
            unit = generation.weight_unit
            if unit == 0 and agreed.total_weight:
                unit = generation.weight_unit = unit_of(agreed.total_weight / strategy.num_leaves)
            self._next_scale = replace(loss_scale, weight_unit=1.0 if unit is None else unit).after(overflow=overflow)


@contextmanager
def only_trained(parameters: Iterable[torch.nn.Parameter], trained: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """The context in which, of these parameters, only `trained` ones need a gradient."""
    ids = set(map(id, trained))
    frozen = [parameter for parameter in parameters if parameter.requires_grad and id(parameter) not in ids]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


def name_of(by: ChangedBy, optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Returns the default name of an update by one of these optimizers, or by a function."""
    number = next((number for number, optimizer in enumerate(optimizers) if optimizer is by), None)
    return getattr(by, "__name__", type(by).__name__) if number is None else f"optimizer_{number}"


_NO_IDS = np.zeros(0, dtype=np.int64)
_NO_LOSS = torch.tensor(float("nan"))
"""The loss of a micro-batch before its backward."""
