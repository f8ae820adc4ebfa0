"""A layer whose forward is collective, as SyncBatchNorm's, trains as one process would with the micro-batches of all
ranks. Torch's SyncBatchNorm refuses CPUs, so a layer that exchanges the same statistics over gloo takes its place;
tests/gpu/test_sync_batch_norm.py runs the same training with torch's.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_reduce

from elastic_ddp.worker.run import Run
from tests.ranks import CPU
from tests.workers import running

STEPS, KILLED_AT = 5, 3
WITHIN_S = 120.0
SETTINGS = {
    "steps": STEPS,
    "global_batch_size": 8,
    "micro_batch_size": 2,
    "reduction": "native",
    "even_micro_batches": True,
    "data": {"drop_last": True},
}


class SyncedNorm(torch.nn.BatchNorm1d):
    """Normalizes rows of shape `(rows, features)` over all ranks of the default group, with gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or not dist.is_initialized() or dist.get_world_size() == 1:
            return super().forward(x)
        count = len(x) * dist.get_world_size()
        mean, square = all_reduce(torch.stack([x.sum(0), x.square().sum(0)])) / count
        variance = square - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, 0.1)
            self.running_var.lerp_(variance * count / (count - 1), 0.1)
            self.num_batches_tracked += 1
        return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


def make_model(norm: Callable[[int], torch.nn.Module]) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 8), norm(8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def loss_fn(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def train(run: Run, folder: Path, norm: Callable[[int], torch.nn.Module]) -> None:
    """Trains, and saves the rows of each micro-batch and the end. Rank 1 dies while rank 0 waits in a forward."""
    model = run.prepare(make_model(norm))
    run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps():
        with step:
            for number, batch in enumerate(step.micro_batches()):
                if (step.index, number, run.rank, run.world_size) == (KILLED_AT, 1, 1, 2):
                    os.kill(os.getpid(), signal.SIGKILL)
                torch.save(batch["x"].cpu(), folder / f"{step.index}-{run.world_size}-{run.rank}-{number}")
                step.backward(loss_fn(model, batch["x"]))
            step.optimize()
    if run.rank == 0:
        torch.save({name: value.cpu() for name, value in model.state_dict().items()}, folder / "end")


def train_in_one_process(folder: Path, world_sizes: list[int]) -> dict[str, torch.Tensor]:
    """Returns the state of a plain loop, whose micro-batches are those that ranks computed at the same time."""
    model = make_model(torch.nn.BatchNorm1d)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, world_size in enumerate(world_sizes):
        numbers = range(4 // world_size)
        start, ends = [buffer.clone() for buffer in model.buffers()], []
        for number in numbers:
            x = torch.cat([torch.load(folder / f"{step}-{world_size}-{rank}-{number}") for rank in range(world_size)])
            (loss_fn(model, x) / len(numbers)).backward()
            ends.append([buffer.clone() for buffer in model.buffers()])
            for buffer, value in zip(model.buffers(), start, strict=True):  # each micro-batch begins with these
                buffer.copy_(value)
        for buffer, values in zip(model.buffers(), zip(*ends, strict=True), strict=True):
            buffer.copy_(sum(values) / len(values))
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def assert_trains_like_one_process(
    folder: Path, norm: Callable[[int], torch.nn.Module], device: torch.device, **settings: Any
) -> None:
    with running(
        folder / "run", partial(train, folder=folder, norm=norm), device, 2, **SETTINGS, **settings
    ) as workers:
        workers.finish(WITHIN_S)
        assert workers.world_sizes() == [2, 1]
    end = torch.load(folder / "end")
    one = train_in_one_process(folder, [2] * KILLED_AT + [1] * (STEPS - KILLED_AT))
    for name in one.keys() - {"1.num_batches_tracked"}:
        torch.testing.assert_close(end[name], one[name], rtol=1e-4, atol=1e-5)


def test_a_collective_norm_trains_like_one_process_with_the_rows_of_all_ranks(tmp_path: Path) -> None:
    assert_trains_like_one_process(tmp_path, SyncedNorm, CPU)
