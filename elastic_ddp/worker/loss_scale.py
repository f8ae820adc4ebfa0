"""`LossScale`: the dynamic loss scale of fp16 training, by the rule of `torch.amp.GradScaler`.

Float16 rounds small gradients to zero. So the loss is multiplied by a scale before the backward, and the reduced
gradients are divided by it. If they overflow, the step is skipped and the scale is halved. After `GROWTH_INTERVAL`
steps without overflow it is doubled. Powers of two scale without rounding.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as validated

GROWTH_INTERVAL = 2000
MAX_SCALE, MIN_SCALE = 2.0**100, 2.0**-14
"""Gradients that overflow at the smallest scale have another cause than float16."""


@validated(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class LossScale:
    """The scale of the next step. All ranks update it alike."""

    scale: Annotated[float, Field(ge=MIN_SCALE, le=MAX_SCALE)] = 2.0**16
    growth_tracker: Annotated[int, Field(ge=0, lt=GROWTH_INTERVAL)] = 0
    """Steps without overflow since the scale last changed."""
    weight_unit: Annotated[float, Field(ge=0, lt=math.inf)] = 1.0
    """Weights of losses are divided by this power of two in the backward; see `loss_weight.unit_of`. 0 if the first
    weight of the run was 0, until a step has others."""

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
