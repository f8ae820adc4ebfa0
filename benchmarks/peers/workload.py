"""The workload of every system: a small MLP on 64 rows a step, with a wait that makes a step about 50 ms long.

The wait stands for the computation of a large model. With real computation, three workers on two cores would slow each
other down, and a system would get faster by losing one. Restarted workers import this file, so it imports little.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

FEATURES = 256
WIDTH = 1024
GLOBAL_BATCH_SIZE = 64
WAIT_S = 0.04
ROWS_IN_MEMORY = 8192


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, FEATURES))


def make_rows() -> torch.Tensor:
    """Returns a data set of shape `(ROWS_IN_MEMORY, FEATURES)`, the same in every process."""
    return torch.randn(ROWS_IN_MEMORY, FEATURES, generator=torch.Generator().manual_seed(0))


def share_of(
    rows: torch.Tensor, *, step: int, rank: int, world_size: int, global_batch_size: int = GLOBAL_BATCH_SIZE
) -> torch.Tensor:
    """Returns a rank's share of a step's global batch, whose rows depend on the step alone."""
    first, last = (global_batch_size * bound // world_size for bound in (rank, rank + 1))
    indices = torch.arange(step * global_batch_size + first, step * global_batch_size + last)
    return rows[indices % len(rows)]


def loss_fn(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x).square().mean()


def wait() -> None:
    """Waits once in each step, on each worker."""
    time.sleep(WAIT_S)


@dataclass(frozen=True)
class StepEnd:
    """A worker has completed an optimizer step."""

    time: float
    step: int
    rank: int
    world_size: int
    pid: int


class StepLog:
    """A worker's file with one line for each completed step."""

    def __init__(self, folder: str) -> None:
        self._file = open(f"{folder}/steps-{os.getpid()}", "a", buffering=1)  # noqa: SIM115 - open until the process exits

    def step_ended(self, step: int, *, rank: int, world_size: int) -> None:
        self._file.write(f"{time.time()} {step} {rank} {world_size}\n")


def read_steps(folder: Path) -> list[StepEnd]:
    """Returns the completed steps of all workers, by time."""
    ends = []
    for path in folder.glob("steps-*"):
        pid = int(path.name.partition("-")[2])
        for line in path.read_text().splitlines(keepends=True):
            fields = line.split()
            if len(fields) == 4 and line.endswith("\n"):  # otherwise the line is being written
                step, rank, world_size = map(int, fields[1:])
                ends.append(StepEnd(float(fields[0]), step, rank, world_size, pid))
    return sorted(ends, key=lambda end: end.time)
