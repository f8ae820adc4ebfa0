"""The weight of a loss, as a training function gives it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from elastic_ddp.errors import ConfigError


def check_weight(caller: str, weight: Any) -> float:
    """Returns the weight of a loss as a number. Raises a ConfigError if it is none, or negative or not finite."""
    is_number = isinstance(weight, torch.Tensor | float | int | np.number)
    if not is_number or math.prod(np.shape(weight)) != 1 or not 0.0 <= (number := float(weight)) < math.inf:
        raise ConfigError(
            f"{caller} got weight={weight!r}. Give one finite number that is not negative: what the loss is a mean "
            "over, such as the number of tokens."
        )
    return number


def unit_of(weight: float | None) -> float:
    """Returns the largest power of two that is not above a weight; 1 for no weight, or 0.

    Divided by it, numbers of tokens are small enough for float16. Powers of two divide without rounding.
    """
    return math.ldexp(1.0, math.frexp(weight)[1] - 1) if weight else 1.0
