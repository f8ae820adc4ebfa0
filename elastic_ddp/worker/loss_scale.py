"""The weights of losses, and `LossScale`, the dynamic loss scale of fp16, by the rule of `torch.amp.GradScaler`.

Float16 rounds small gradients to zero. So the loss is multiplied by a scale before the backward, and the reduced
gradients are divided by the scale. If the gradients overflow, the step is skipped and the scale is halved. After
`GROWTH_INTERVAL` steps without overflow, the scale is doubled. Powers of two scale without rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from elastic_ddp.errors import ConfigError
from elastic_ddp.worker.logged_values import is_one_number

GROWTH_INTERVAL = 2000
MAX_SCALE, MIN_SCALE = 2.0**100, 2.0**-14
"""An overflow at the smallest scale has another cause than float16."""


@dataclass(frozen=True)
class LossScale:
    """The scale of the next step. All ranks update it alike."""

    scale: float = 2.0**16
    growth_tracker: int = 0
    """Steps without overflow since the scale last changed."""
    weight_unit: float = 1.0
    """Weights of losses are divided by this power of two in the backward; see `unit_of`. After a first weight of 0, the
    unit is 0 until a step with other weights ends."""

    @property
    def is_smallest(self) -> bool:
        return self.scale == MIN_SCALE

    def after(self, *, overflow: bool) -> LossScale:
        """Returns the scale after one more step."""
        if overflow:
            return replace(self, scale=max(self.scale / 2, MIN_SCALE), growth_tracker=0)
        if self.growth_tracker + 1 == GROWTH_INTERVAL:
            return replace(self, scale=min(self.scale * 2, MAX_SCALE), growth_tracker=0)
        return replace(self, growth_tracker=self.growth_tracker + 1)


def unit_of(weight: float | None) -> float:
    """Returns the largest power of two that is not above a weight; 1 for no weight, or 0.

    Divided by this power, numbers of tokens are small enough for float16.
    """
    return math.ldexp(1.0, math.frexp(weight)[1] - 1) if weight else 1.0


def check_weight(caller: str, weight: Any) -> float:
    """Returns the weight of a loss as a number. Raises a ConfigError unless the weight is a finite number from 0."""
    number = float(weight) if is_one_number(weight) else math.nan
    if not 0.0 <= number < math.inf:
        raise ConfigError(
            f"{caller} got weight={weight!r}. Give one finite number that is not negative: what the loss is a mean "
            "over, for example the number of tokens."
        )
    return number
