"""What every system trains: a small MLP on 64 rows a step, with a wait in every step that makes it some 50 ms long.

The wait stands for a large model's computing. Real computing would make three workers on two cores slow each other
down, and whoever loses one would look faster. Workers import this whenever they restart: little but torch, therefore.
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
    """The data set of those that read none: `(ROWS_IN_MEMORY, FEATURES)`, the same in every process."""
    return torch.randn(ROWS_IN_MEMORY, FEATURES, generator=torch.Generator().manual_seed(0))


def share_of(rows: torch.Tensor, *, step: int, rank: int, world_size: int) -> torch.Tensor:
    """A rank's part of a step's global batch. It depends on the step alone which rows those are."""
    first, last = (GLOBAL_BATCH_SIZE * each // world_size for each in (rank, rank + 1))
    places = torch.arange(step * GLOBAL_BATCH_SIZE + first, step * GLOBAL_BATCH_SIZE + last)
    return rows[places % len(rows)]


def loss_fn(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x).square().mean()


def wait() -> None:
    """Once in every step, in every worker."""
    time.sleep(WAIT_S)


@dataclass(frozen=True)
class StepEnd:
    """A worker has completed a step: its optimizer has stepped."""

    time: float
    step: int
    rank: int
    world_size: int
    pid: int


class StepLog:
    """A worker's file, with a line for every step that it completed."""

    def __init__(self, folder: str) -> None:
        self._file = open(f"{folder}/steps-{os.getpid()}", "a", buffering=1)  # noqa: SIM115 - for the process's life

    def step_ended(self, step: int, *, rank: int, world_size: int) -> None:
        self._file.write(f"{time.time()} {step} {rank} {world_size}\n")


def read_steps(folder: Path) -> list[StepEnd]:
    """Of all workers, in the order in which they happened."""
    ends = []
    for path in folder.glob("steps-*"):
        pid = int(path.name.partition("-")[2])
        for line in path.read_text().splitlines(keepends=True):
            fields = line.split()
            if len(fields) == 4 and line.endswith("\n"):  # otherwise it is being written
                step, rank, world_size = map(int, fields[1:])
                ends.append(StepEnd(float(fields[0]), step, rank, world_size, pid))
    return sorted(ends, key=lambda end: end.time)
