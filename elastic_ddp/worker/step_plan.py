"""`StepPlan`: the plan that all updates of one step share. `Outcome`: the result of a step or of an update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from elastic_ddp.distributed.process_group import is_peer_failure
from elastic_ddp.distributed.step_agreement import Agreement
from elastic_ddp.errors import ConfigError, format_exception
from elastic_ddp.worker.verification import Dispute, Verification

if TYPE_CHECKING:
    from elastic_ddp.distributed.strategy import Strategy
    from elastic_ddp.worker.generation import Generation


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a step, or of one of its updates: done, to be repeated because of a failure, or neither yet."""

    agreed: Agreement | None = None
    """The votes and records of all ranks. None before they agree in this attempt, and for a repeated update."""
    loss: float = math.nan
    """The mean loss over the global batch."""
    skip_reason: str | None = None
    """Why an update was skipped; None if no update was."""
    gathered: Mapping[str, torch.Tensor] | None = None
    """The rows that `Step.gather` collected; None before the update."""
    phases: Sequence[dict[str, Any]] = ()
    """What all ranks measured since the last logged step."""
    failure: str | None = None
    """How a worker failed, so that the step is repeated."""
    dispute: Dispute | None = field(default=None, repr=False)
    """Why the step is repeated, if it was verified."""

    @property
    def is_done(self) -> bool:
        """Whether all ranks agreed on the result in this attempt; False for a repeated update."""
        return self.agreed is not None

    def after(self, before: Outcome) -> Outcome:
        """Returns the outcome of a step up to this update. `before` is its outcome up to the previous update."""
        return replace(
            self,
            agreed=self.agreed or before.agreed,
            skip_reason=self.skip_reason or before.skip_reason,
            gathered=self.gathered or before.gathered or {},
            phases=before.phases or self.phases,
        )

    def failed(self, error: BaseException) -> Outcome:
        """Returns the outcome of a step that raised this error. `failure` is set only if the step is to be repeated."""
        failure = format_exception(error) if is_peer_failure(error) else None
        return replace(self, agreed=None, loss=math.nan, failure=failure, dispute=getattr(error, "dispute", None))


def caught_error(error: BaseException, where: object) -> ConfigError:
    """Returns the error for a training function that caught an error inside a step."""
    return ConfigError(
        f"{where!r}: the training function caught {format_exception(error)}. Gradients are missing after it, so the "
        "step cannot continue. Do not catch errors inside `with step`."
    )


@dataclass
class StepPlan:
    """The next step of a generation.

    Attributes:
        generation: the generation that runs the step.
        rows: the number of rows of each micro-batch, shape (M,).
        votes: returns this rank's votes on commit, stop, membership change, and more.
        is_logged: whether the values of the step are gathered.
        begin_verification: begins to verify an update, given its strategy and its number; None if the step is not
            verified.
        index: the step's number.
        first_update: the number of the first update that is not done yet.
    """

    generation: Generation
    rows: np.ndarray
    votes: Callable[[], dict[str, int]] = dict
    is_logged: bool = False
    begin_verification: Callable[[Strategy, int], Verification] | None = None

    def __post_init__(self) -> None:
        state = self.generation.state
        self.index = state.position.step
        self.first_update = len(state.updates)
        self._error: Exception | None = None
        self._saved_parameters: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._saved_buffers: list[tuple[torch.Tensor, torch.Tensor]] = []

    @contextmanager
    def capture_first_error(self) -> Iterator[None]:
        """Makes the step fail with the first error raised in this context, even if the training function catches it."""
        try:
            yield
        except Exception as error:
            self._error = self._error or error
            raise

    def take_first_error(self) -> Exception | None:
        """Returns the error and forgets it: its traceback would keep the process group alive."""
        error = self._error
        self._error = None
        return error

    def raise_first_error(self, where: object) -> None:
        """Raises the error again, if there is one. `where` names the step or the update."""
        if self._error is not None:
            if is_peer_failure(self._error):
                raise self._error
            raise caught_error(self._error, where) from self._error

    @torch.no_grad()
    def save_parameters(self) -> None:
        """Copies the trained parameters and the buffers, which a function is about to change, for `put_back`."""
        if not self._saved_parameters:
            module = self.generation.state.module
            trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
            self._saved_parameters = [(parameter, parameter.detach().clone()) for parameter in trained]
            self._saved_buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]

    @torch.no_grad()
    def put_back(self, *, with_buffers: bool) -> None:
        """Restores saved parameters bit for bit. With `with_buffers`, restores the buffers as well."""
        for tensor, saved in [*self._saved_parameters, *(self._saved_buffers if with_buffers else [])]:
            tensor.copy_(saved)
        self._saved_parameters = []
        self._saved_buffers = []
