"""The interface between a step and the way the model is distributed: replicated (DDP) or sharded (FSDP)."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from elastic_ddp import torch_internals
from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.distributed.reduction_tree import micro_batch_ranges, processing_order
from elastic_ddp.errors import ConfigError, shorten
from elastic_ddp.tensors.digest import digest_named
from elastic_ddp.tensors.state_tree import Layout, gather_full, local_part

if TYPE_CHECKING:
    from elastic_ddp.distributed.prepared_model import PreparedModel


def unused_parameters_error(names: Sequence[str], fix: str) -> ConfigError:
    """Returns the error for a loss that does not depend on some trained parameters."""
    return ConfigError(
        f"the loss does not depend on {len(names)} of the trained parameters: {shorten(names, 5)}. Either {fix}, or "
        "freeze them with requires_grad_(False)."
    )


def own_backward_error(names: Sequence[str] = ()) -> ConfigError:
    """Returns the error for parameters whose gradients did not come from `step.backward`."""
    which = f" of {shorten(names, 5)}" if names else ""
    return ConfigError(
        f"gradients{which} changed in the loop over step.micro_batches() without step.backward. To clip, set "
        "clip_grad_norm. For other edits, change parameter.grad after the loop, before step.optimize(). If a second "
        "backward() added to them, add up the losses of a batch and call step.backward(loss) once for it."
    )


def ignore(phase: str) -> str:
    """The `enter_phase` of a strategy whose phases are not measured."""
    return phase


class Marks(NamedTuple):
    """Numbers for each of some tensors. Some number differs after a gradient was changed in place or replaced."""

    tensors: list[int]
    gradients: list[int]
    versions: list[int]
    places: list[int]
    """The gradients' addresses in memory: a freed gradient may have the id of a later one."""

    def changed(self, before: Marks) -> set[int]:
        """Returns the positions of the gradients that have changed."""
        then = dict(zip(before.tensors, zip(*before[1:], strict=True), strict=True))
        now = zip(self.tensors, zip(*self[1:], strict=True), strict=True)
        return {position for position, (tensor, mark) in enumerate(now) if then.get(tensor, _NO_GRADIENT) != mark}


def gradients_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    return list(map(_get_gradient, tensors))


_get_gradient, _is_trained = operator.attrgetter("grad"), operator.attrgetter("requires_grad")
_NONE = torch.empty(0)
"""Stands for a missing gradient."""
_NO_GRADIENT = id(_NONE), torch_internals.version(_NONE), _NONE.data_ptr()


class Strategy(ABC):
    """Computes and reduces the gradients of a generation.

    Every rank creates it, and calls `shard` when all ranks hold the same state. A step then calls `begin_step`, and for
    each micro-batch `prepare_forward` and `backward`. After the last one, parameters (or this rank's shards of them)
    hold the mean gradient of the global batch.

    `enter_phase("communication")` is called when this rank waits for others; afterwards `enter_phase` restores the
    previous phase.

    With `trains`, it computes the gradients of these parameters only, and all others need none.

    Attributes:
        parameters: the model's parameters by name, as the step began.
        trained: the trained ones.
        modules: all modules of the model, as the step began.
    """

    replicates_state = True
    """Whether every rank holds the full state, which then outlives the generation."""
    deal: Callable[[int, int], list[range]] = staticmethod(micro_batch_ranges)
    """Returns the micro-batches of each rank, from M and the world size."""

    def __init__(
        self,
        model: PreparedModel,
        config: RunConfig,
        group: ProcessGroup,
        enter_phase: Callable[[str], str] = ignore,
        trains: Iterable[torch.nn.Parameter] | None = None,
    ) -> None:
        self._enter_phase = enter_phase
        self._trains = None if trains is None else {id(parameter) for parameter in trains}
        self.ranges = self.deal(config.num_micro_batches, group.world_size)
        self.micro_batches = processing_order(self.ranges[group.rank])
        """This rank's micro-batches, in the order in which it computes them."""
        self.micro_batch_size = config.micro_batch_size
        self.sends_fp16 = config.ddp.comm_hook == "fp16"
        self._group = group
        self._model = model
        self.trained = self._find_trained()
        self._num_steps = 0

    def shard(  # noqa: B027
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        rows: Mapping[str, torch.Tensor] = MappingProxyType({}),
        *,
        begins: bool = False,
    ) -> None:
        """Prepares the full model and its optimizers for training: with FSDP, shards them. DDP changes nothing.

        `rows` may have this rank's rows of the parameters, which become its shards. With `begins`, the model gets its
        first weights; otherwise the caller loads the tensors that `rows` lacks.
        """

    def layout(self, optimizers: Sequence[torch.optim.Optimizer]) -> Layout | None:
        """Returns how the state's tensors are sharded after `shard`, or None if every rank holds all of them."""
        return None

    def _find_trained(self) -> dict[str, torch.nn.Parameter]:
        """Sets `parameters` to the model's parameters, and returns the trained parameters."""
        self.parameters = dict(self._model.module.named_parameters())
        self._found = self._look_for_parameters()
        return {
            name: parameter
            for name, parameter in self.parameters.items()
            if parameter.requires_grad and (self._trains is None or id(parameter) in self._trains)
        }

    def _look_for_parameters(self) -> tuple[list[int], list[bool]]:
        """Returns what differs after parameters were added, replaced, frozen or unfrozen. Names would take longer."""
        self.modules = torch_internals.modules_of(self._model.module)
        found = torch_internals.parameters_of(self.modules)
        return list(map(id, found)), list(map(_is_trained, found))

    def begin_step(self, rows: np.ndarray) -> None:
        """Begins a step. `rows` has the number of rows of each of the M micro-batches, shape (M,).

        Raises:
            ConfigError: the set of trained parameters changed since the generation began.
        """
        if self._look_for_parameters() != self._found:
            self._check_trained()
        self._rows = rows
        self._num_steps += 1
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # between backwards, parameters and their gradients
        self._left: Marks | None = None  # after the last backward
        self._before: Marks | None = None  # before it, if gradients of earlier ones were put back
        self._digests: dict[str, int] = {}
        self.num_leaves = int(np.count_nonzero(rows))
        self.divisor = int(rows.sum()) / self.micro_batch_size  # M except in the short last step of an epoch
        with_rows = [m for m in self.micro_batches if rows[m]]
        self.to_compute = with_rows or self.micro_batches[-1:]
        """This rank's micro-batches with rows, in order, or one of padding with weight 0, for the collectives."""

    def _check_trained(self) -> None:
        trained = self._find_trained()
        names = sorted(trained.keys() | self.trained.keys())
        changed = [name for name in names if trained.get(name) is not self.trained.get(name)]
        if changed:
            raise ConfigError(
                f"parameters {shorten(changed, 5)} were added, replaced, frozen or unfrozen inside run.steps(). A run "
                "trains the same parameters in every step. To freeze some for a while, train the others in "
                "step.update(optimizer), or give them a param_group of their own, and a LambdaLR whose function is 0 "
                "for it until then."
            )

    def _accumulators(self) -> list[tuple[str, torch.Tensor]]:
        """Returns the tensors into whose `grad` backwards accumulate, with the names of their parameters."""
        return list(self.trained.items())

    def _mark_gradients(self) -> Marks:
        tensors = [tensor for _, tensor in self._accumulators()]
        gradients = [_NONE if gradient is None else gradient for gradient in gradients_of(tensors)]
        local = self._local(gradients)
        return Marks(
            list(map(id, tensors)),
            list(map(id, gradients)),
            torch_internals.versions(local),
            torch_internals.addresses(local),
        )

    def _local(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the parts of gradients that count their changes."""
        return gradients

    def _record_gradients(self) -> None:
        """Records the gradients for `check_gradients`, and their bits as rarely as `ParameterGuard` does."""
        self._left = self._mark_gradients()
        compares_bits = not self._num_steps & (self._num_steps - 1)
        self._digests = digest_named(dict(self._gradients())) if compares_bits else {}

    def check_gradients(self) -> None:
        """Raises a ConfigError if gradients changed since the last backward of the step."""
        changed: set[str] = set()
        if self._left is None:  # between two backwards, there are none
            changed = {name for name, tensor in self._accumulators() if tensor.grad is not None}
        elif (now := self._mark_gradients()) != self._left:
            accumulators = self._accumulators()
            changed = {accumulators[position][0] for position in now.changed(self._left)}
        if not changed and self._digests:
            digests = digest_named(dict(self._gradients()))
            changed = {name for name, digest in self._digests.items() if digests[name] != digest}
        if changed:
            raise own_backward_error(sorted(changed))

    def _unused(self) -> list[str]:
        """Returns the names of parameters that got no gradient from the last backward of the step."""
        if self._before is not None:
            used = self._mark_gradients().changed(self._before)
            return [name for position, (name, _) in enumerate(self._accumulators()) if position not in used]
        return [name for name, tensor in self._accumulators() if tensor.grad is None]

    def check_not_cleared(self) -> None:
        """Raises a ConfigError if no gradient of the step is left. Some may be None: their parameters do not change."""
        had_gradients = self._left is not None and any(gradient != id(_NONE) for gradient in self._left.gradients)
        if had_gradients and not self._gradients():
            raise ConfigError(
                "all gradients are None in step.optimize(), so it would train nothing. Remove the code that sets them "
                "to None after the last step.backward: step.optimize() clears them."
            )

    @contextmanager
    def _accumulating(self, *, is_last: bool) -> Iterator[None]:
        """The context of every backward. Between backwards, gradients are not on the parameters, so none is lost."""
        self.check_gradients()
        for tensor, gradient in self._kept:
            tensor.grad = gradient
        self._before = self._mark_gradients() if self._kept and is_last else None
        self._kept.clear()
        yield
        if is_last:
            self._record_gradients()
        else:
            self._put_away()

    def _put_away(self) -> None:
        tensors = [tensor for _, tensor in self._accumulators()]
        gradients = zip(tensors, gradients_of(tensors), strict=True)
        self._kept = [(tensor, gradient) for tensor, gradient in gradients if gradient is not None]
        for tensor in tensors:
            tensor.grad = None

    def weight(self, micro_batch: int) -> float:
        """Returns a micro-batch's weight in the step's sum: its rows in units of full micro-batches."""
        return int(self._rows[micro_batch]) / self.micro_batch_size

    def _factor(self, micro_batch: int, weight: float | None) -> float:
        """Returns the factor of a micro-batch's mean loss; 0 for padding."""
        return self.weight(micro_batch) if weight is None or not self._rows[micro_batch] else weight

    def min_forwards(self, rows: np.ndarray) -> int:
        """Returns the number of forwards that every rank must run, because collectives in them involve all ranks.

        A rank with fewer micro-batches runs dummy forwards, whose results are discarded. `rows` is as in `begin_step`.
        """
        return 0

    @abstractmethod
    def prepare_forward(self, micro_batch: int | None) -> None:
        """Prepares the model. Called before the forward of each micro-batch; None for another rank's micro-batch."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, micro_batch: int, weight: float | None = None) -> None:
        """Runs the backward of a micro-batch's mean loss. The backward of the last one reduces the gradients.

        With a weight, which all micro-batches of a step must then have, parameters hold the sum of the weighted
        gradients after the last one. A weight of 0 counts as gradients of 0, whatever the loss is.

        Raises:
            ConfigError: some trained parameter would get no gradient.
        """

    def _run_backward(self, loss: torch.Tensor, *, is_last: bool, zeroed: Iterable[torch.Tensor] = ()) -> None:
        """Calls `loss.backward()`. In a step's last backward, the time after this rank's gradients is communication.

        The gradients of `zeroed` are zeros, whatever the loss is: 0 * inf would be NaN. The backward still runs as
        usual, since ranks must reduce the same buckets in the same order.
        """
        if is_last:
            torch_internals.call_after_gradients(loss, lambda: self._enter_phase("communication"))
        hooks = [parameter.register_hook(torch.zeros_like) for parameter in zeroed]
        try:
            loss.backward()
        finally:
            for hook in hooks:
                hook.remove()
        self._enter_phase("backward")

    def watch(self, micro_batches: Collection[int], record: Callable[[int, torch.Tensor], None]) -> None:
        """Makes the step call `record` with each of these micro-batches, and digests of its gradient alone."""
        raise NotImplementedError

    def compute_again(self, loss: torch.Tensor, micro_batch: int, weight: float | None = None) -> torch.Tensor:
        """Runs the backward of another rank's micro-batch, and returns the digests that its owner records."""
        raise NotImplementedError

    def dummy_backward(self, loss: torch.Tensor) -> None:
        """Runs the backward of a dummy forward, after the backwards of micro-batches."""
        raise NotImplementedError

    def reshard(self) -> None:  # noqa: B027
        """Frees parameters that a forward without a backward gathered. Call it before using parameters elsewhere."""

    def divide_kept(self, divisor: float) -> None:
        """Divides the gradients that the step has added up on this rank, in place. Called before the last backward."""
        if self._kept and divisor != 1.0:
            torch_internals.divide([gradient for _, gradient in self._kept], divisor)

    def divide_gradients(self, divisor: float) -> None:
        """Divides the reduced gradients of all parameters, in place."""
        torch_internals.divide([local_part(gradient) for _, gradient in self._gradients()], divisor)
        self._record_gradients()

    def gradient_norm(self) -> torch.Tensor:
        """Returns the total 2-norm of the gradients, equal on all ranks. Collective with FSDP."""
        gradients = [gradient for _, gradient in self._gradients()]
        return gather_full(torch.nn.utils.get_total_norm(gradients))

    def check_value(self) -> torch.Tensor:
        """Returns a number that is finite if all gradients are, equal on all ranks. Collective with FSDP."""
        return self.gradient_norm()

    def clip_gradients(self, max_norm: float, norm: torch.Tensor) -> None:
        """Scales the gradients, whose total 2-norm is `norm`, to a norm of at most `max_norm`."""
        torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), max_norm, norm)

    def clear_gradients(self) -> None:
        """Sets the gradients of all parameters to None, also of parameters in no optimizer."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def nonfinite_gradients(self) -> list[str]:
        """Returns the names of parameters whose gradient has a NaN or an infinity. Collective with FSDP."""
        is_finite = {name: gather_full(gradient.isfinite().all()) for name, gradient in self._gradients()}
        return [name for name, finite in is_finite.items() if not finite]

    def _gradients(self) -> list[tuple[str, torch.Tensor]]:
        gradients = zip(self.parameters, gradients_of(self.parameters.values()), strict=True)
        return [(name, gradient) for name, gradient in gradients if gradient is not None]

    @abstractmethod
    def close(self) -> None:
        """Releases the process group."""
