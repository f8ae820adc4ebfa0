"""`StepPlan`: what the updates of one step have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from elastic_ddp.worker.outcome import FirstError
from elastic_ddp.worker.saved_parameters import SavedParameters
from elastic_ddp.worker.verification import Verification

if TYPE_CHECKING:
    from elastic_ddp.distributed.strategy import Strategy
    from elastic_ddp.worker.generation import Generation


@dataclass
class StepPlan:
    """The next step of a generation.

    Attributes:
        generation: the generation that runs the step.
        index: the step's number.
        rows: the number of rows of each micro-batch, shape (M,).
        votes: returns this rank's votes.
        is_logged: whether the values of the step are gathered.
        begin_verification: begins to verify an update, given its strategy and its number; None if the step is not
            verified.
        first_update: the number of the first update that is not done yet.
    """

    generation: Generation
    rows: np.ndarray
    votes: Callable[[], dict[str, int]] = dict
    is_logged: bool = False
    begin_verification: Callable[[Strategy, int], Verification] | None = None
    index: int = field(init=False)
    first_update: int = field(init=False)
    first_error: FirstError = field(init=False, default_factory=FirstError)
    _saved: SavedParameters | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        state = self.generation.state
        self.index, self.first_update = state.position.step, len(state.updates)

    def save_parameters(self) -> None:
        """Keeps the parameters and buffers, which a function is about to change, for `put_back`."""
        if self._saved is None:
            self._saved = SavedParameters(self.generation.state.module)

    def put_back(self, *, with_buffers: bool) -> None:
        """Puts back what functions have changed, if one has."""
        saved, self._saved = self._saved, None
        if saved is not None:
            saved.put_back(with_buffers=with_buffers)
