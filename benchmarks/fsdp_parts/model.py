"""The model of all parts: an MLP of equal blocks, each a unit of FSDP, so that a unit is small next to the model."""

from __future__ import annotations

import torch
from peers.workload import FEATURES

BLOCKS = 8
GLOBAL_BATCH_SIZE = 8
"""Rows of a step where time counts: so few that most of the time goes to the parameters."""
_WIDTH_STEP = 8  # a multiple of all world sizes, so that no shard is padded


class Block(torch.nn.Module):
    """A residual block with two equal matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


def width_of(parameters: int) -> int:
    """Returns the width with which the blocks have about this many parameters."""
    return max(1, round((parameters / BLOCKS / 8) ** 0.5 / _WIDTH_STEP)) * _WIDTH_STEP


def make_blocks(parameters: int) -> torch.nn.Sequential:
    """Returns the blocks alone, for rows of `width_of(parameters)` numbers."""
    torch.manual_seed(0)
    width = width_of(parameters)
    return torch.nn.Sequential(*(Block(width) for _ in range(BLOCKS)))


def make_model(parameters: int) -> torch.nn.Sequential:
    """Returns the blocks between two projections, for the rows of `peers/workload.py`."""
    blocks, width = make_blocks(parameters), width_of(parameters)
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, width), *blocks, torch.nn.Linear(width, FEATURES))
