"""NaN and infinity in a step: what they are called, and the error about them.

All ranks decide alike without a collective of their own: the losses of all micro-batches travel in the control
exchange, and the norm of the reduced gradients is equal on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from elastic_ddp.errors import NonFiniteError, shorten

_CAUSES = (
    "Common causes are a learning rate that is too high, gradients that need clip_grad_norm, and rows that hold NaN"
)


def describe(losses: Sequence[float], norm: float, find_gradients: Callable[[], list[str]]) -> str | None:
    """Returns which loss or gradient of a step is not finite, or None.

    Args:
        losses: of each micro-batch.
        norm: the total 2-norm of the gradients.
        find_gradients: returns the names of parameters whose gradient is not finite. Collective.
    """
    if bad := [m for m, loss in enumerate(losses) if not math.isfinite(loss)]:
        others = f", and {len(bad) - 1} more micro-batches" if bad[1:] else ""
        return f"the loss of micro-batch {bad[0]} is {losses[bad[0]]}{others}"
    if math.isfinite(norm):
        return None
    if names := find_gradients():
        return f"the gradient of {shorten(names, 5)} is NaN or infinite, though the loss is finite"
    return f"the norm of all gradients is {norm}, though each of them is finite"


def step_error(step: int, problem: str) -> NonFiniteError:
    """Returns the error for a step that was not applied."""
    return NonFiniteError(
        f"step {step}: {problem}. The weights were not changed. {_CAUSES}. Fix the cause, or set "
        'on_nonfinite = "skip" to leave out such steps; the run then resumes from its newest commit.'
    )


def weights_error(step: int, names: Sequence[str]) -> NonFiniteError:
    """Returns the error for weights that an optimizer made NaN or infinite."""
    return NonFiniteError(
        f"after {step} steps the weights of {shorten(names, 5)} are NaN or infinite, though the gradients were finite. "
        "They are not committed. Lower the learning rate or check the optimizer; the run then resumes from its newest "
        'commit. on_nonfinite = "ignore" commits them.'
    )
