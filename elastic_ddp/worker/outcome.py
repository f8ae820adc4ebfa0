"""`Outcome`: how a step ended on one rank, and `FirstError`, which decides that it failed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from elastic_ddp.distributed.process_group import is_peer_failure
from elastic_ddp.distributed.step_agreement import Agreement
from elastic_ddp.errors import ConfigError, format_exception
from elastic_ddp.worker.verification import Dispute


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a step, or one of its updates, ended: it is done, or it is repeated because of a failure, or neither yet."""

    agreed: Agreement | None = None
    """What all ranks know if it is done; None for an update that was done before the step was repeated."""
    loss: float = math.nan
    """The mean loss over the global batch."""
    skip_reason: str | None = None
    """Why the change was left out."""
    gathered: Mapping[str, torch.Tensor] | None = None
    """The rows that `Step.gather` collected; None before the change."""
    phases: Sequence[dict[str, Any]] = ()
    """What all ranks measured since the last logged step."""
    failure: str | None = None
    """How a worker failed, so that the step is repeated."""
    dispute: Dispute | None = field(default=None, repr=False)
    """Why the step is repeated, if it was verified."""

    @property
    def is_done(self) -> bool:
        return self.agreed is not None

    def after(self, before: Outcome) -> Outcome:
        """Returns the outcome of a step up to this update, from the one up to the update before."""
        return replace(
            self,
            agreed=self.agreed or before.agreed,
            skip_reason=self.skip_reason or before.skip_reason,
            gathered=self.gathered or before.gathered or {},
            phases=before.phases or self.phases,
        )

    def failed(self, error: BaseException) -> Outcome:
        """Returns the outcome of a step that failed with this error, although updates may have been done."""
        failure = format_exception(error) if is_peer_failure(error) else None
        return replace(self, agreed=None, loss=math.nan, failure=failure, dispute=getattr(error, "dispute", None))


class FirstError:
    """The first error of a step, which then fails with it, even if the training function catches the error."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Keeps an error raised in this context, unless there is one already."""
        try:
            yield
        except Exception as error:
            self._error = self._error or error
            raise

    def take(self) -> Exception | None:
        """Returns the error and forgets it: its traceback would keep the process group alive."""
        error, self._error = self._error, None
        return error

    def raise_again(self, where: object) -> None:
        """Raises the error, if there is one. `where` names the step or the update."""
        if self._error is not None:
            if is_peer_failure(self._error):
                raise self._error
            raise caught_error(self._error, where) from self._error


def caught_error(error: BaseException, where: object) -> ConfigError:
    """Returns the error for a training function that caught an error inside a step."""
    return ConfigError(
        f"{where!r}: the training function caught {format_exception(error)}. Gradients are missing after it, so the "
        "step cannot continue. Do not catch errors inside `with step`."
    )
