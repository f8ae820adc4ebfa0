"""The reaction of a step to NaN and infinity.

All ranks decide alike without a collective of their own: the losses of all micro-batches travel in the control
exchange, and the norm of the reduced gradients is equal on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from elastic_ddp.errors import NonFiniteError, shorten
from elastic_ddp.worker.loss_scale import LossScale

if TYPE_CHECKING:
    from elastic_ddp.data.feed import MicroBatchFeed
    from elastic_ddp.distributed.process_group import ProcessGroup
    from elastic_ddp.distributed.step_agreement import MicroBatchRecord

Policy = Literal["stop", "skip", "ignore"]
"""The values of `on_nonfinite`."""


def reason_to_skip(
    step: int,
    losses: Sequence[float],
    norm: float,
    find_gradients: Callable[[], list[str]],
    find_rows: Callable[[int], str],
    policy: Policy,
    loss_scale: LossScale | None,
    clips: bool,
) -> str | None:
    """Returns why a step must not change the weights, or None.

    Args:
        step: the step's index.
        losses: of each micro-batch.
        norm: the total 2-norm of the gradients.
        find_gradients: returns the names of parameters whose gradient is not finite. Collective.
        find_rows: describes the rows of a micro-batch. Collective.
        policy: what to do about values that are not finite.
        loss_scale: of the step. With one, gradients may overflow now and then.
        clips: whether gradients are clipped, which needs a finite norm.

    Raises:
        NonFiniteError: the policy is to stop.
    """
    bad = [m for m, loss in enumerate(losses) if not math.isfinite(loss)]
    may_overflow = loss_scale is not None and not (bad or loss_scale.is_smallest)
    if loss_scale is not None and not math.isfinite(norm) and (may_overflow or policy == "ignore"):
        return f"gradients overflow at a loss scale of {loss_scale.scale:g}"
    if policy == "ignore" or not (bad or not math.isfinite(norm)):
        return None
    if bad:
        others = f", and {len(bad) - 1} more are not finite" if bad[1:] else ""
        problem = f"the loss of micro-batch {bad[0]} is {losses[bad[0]]}{others}. It has {find_rows(bad[0])}"
    elif names := find_gradients():
        problem = f"the gradient of {shorten(names, 5)} is NaN or infinite, though the loss is finite"
    elif clips:
        problem = f"the norm of all gradients is {norm}, though each of them is finite, so they cannot be clipped"
    else:
        return None  # only the squares in the norm overflow, and nothing uses it
    if policy == "stop":
        activations = ", activations above 65504 (use bf16)" if loss_scale is not None else ""
        raise NonFiniteError(
            f"step {step}: {problem}. The weights were not changed. Common causes are a learning rate that is too "
            f"high, gradients that need clip_grad_norm{activations}, and rows that hold NaN. The run resumes from its "
            'newest commit, with a lower learning rate and checkpoint.hyperparameters = "code", or with on_nonfinite = '
            '"skip", which leaves out such steps. For other data, clip_grad_norm or precision, use another name; '
            "run.load_weights can start it from this run's weights."
        )
    return problem


def rows_of(
    records: Mapping[int, MicroBatchRecord], feed: MicroBatchFeed, group: ProcessGroup, micro_batch: int
) -> str:
    """Returns text for the rows of a micro-batch, which is in the records of one rank. Collective."""
    own = records.get(micro_batch)
    text = feed.locate(own.row_ids.tolist()) if own is not None else ""
    return b"".join(group.all_gather_bytes(text.encode())).decode()


def weights_error(step: int, names: Sequence[str]) -> NonFiniteError:
    """Returns the error for weights that an optimizer made NaN or infinite."""
    return NonFiniteError(
        f"after {step} steps the weights of {shorten(names, 5)} are NaN or infinite, though the gradients were finite. "
        "They are not committed. Check the optimizer, or lower the learning rate and set checkpoint.hyperparameters = "
        '"code"; the run then resumes from its newest commit. on_nonfinite = "ignore" commits them.'
    )
