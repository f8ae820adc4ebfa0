"""The canonical reduction in DDP: its bits, its memory, and its errors when a peer fails."""

from __future__ import annotations

import ctypes
import gc
import math
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.distributed import canonical_reduction
from elastic_ddp.distributed.ddp import DDPStrategy
from elastic_ddp.distributed.prepared_model import PreparedModel
from elastic_ddp.distributed.process_group import ProcessGroup, is_peer_failure
from tests.ranks import form, run_ranks

MICRO_BATCHES, MICRO_BATCH_SIZE = 12, 4
FULL = [MICRO_BATCH_SIZE] * MICRO_BATCHES
SHORT = [4, 4, 4, 4, 4, 4, 4, 2, 2, 0, 0, 0]
"""The last step of an epoch. With three ranks, the third has one micro-batch with rows."""
MANY_BUCKETS, ONE_BUCKET = 0.00001, 25.0
CPU = torch.device("cpu")


class Model(torch.nn.Sequential):
    """Parameters whose sizes three ranks cannot divide evenly."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(7, 11), torch.nn.Tanh(), torch.nn.Linear(11, 5), torch.nn.Linear(5, 1))


def config(bucket_cap_mb: float) -> RunConfig:
    return RunConfig(
        name="test",
        storage="memory://test",
        steps=1,
        global_batch_size=MICRO_BATCHES * MICRO_BATCH_SIZE,
        micro_batch_size=MICRO_BATCH_SIZE,
        ddp={"bucket_cap_mb": bucket_cap_mb},
    )


def loss_of(model: torch.nn.Module, micro_batch: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(micro_batch)
    # Gradients of very different magnitudes: almost any other order of additions gives other bits.
    return model(torch.randn(max(rows, 1), 7, generator=generator)).square().mean() * 10 ** (micro_batch % 4)


def new_model() -> Model:
    torch.manual_seed(3)
    return Model()


def gradients_of(model: torch.nn.Module) -> list[bytes]:
    return [parameter.grad.numpy().tobytes() for parameter in model.parameters() if parameter.grad is not None]


class Trained:
    """A model in DDP that is trained step by step."""

    def __init__(self, group: ProcessGroup, bucket_cap_mb: float) -> None:
        self.model = new_model()
        prepared = PreparedModel(self.model, device=CPU, bf16=False)
        self.strategy = DDPStrategy(prepared, config(bucket_cap_mb), group)
        assert self.strategy._reduction is not None
        self.reduction = self.strategy._reduction
        self.bucket_sizes: list[int] = []
        hook = self.reduction.hook

        def counted(state, bucket):  # type: ignore[no-untyped-def] # DDP checks annotations, as objects
            self.bucket_sizes.append(bucket.buffer().numel())
            return hook(state, bucket)

        self.reduction.hook = counted  # type: ignore[method-assign]
        self.held: list[int] = []
        """The number of partial sums before each backward of the last step."""
        self.buckets: list[int] = []
        """The number of buckets of each step."""

    def step(self, rows: Sequence[int]) -> list[bytes]:
        self.model.zero_grad(set_to_none=True)
        self.strategy.begin_step(np.array(rows))
        self.held = []
        self.bucket_sizes.clear()
        for micro_batch in self.strategy.to_compute:
            self.strategy.prepare_forward(micro_batch)
            loss = loss_of(self.model, micro_batch, rows[micro_batch])
            self.held.append(len(self.reduction._sums))
            self.strategy.backward(loss, micro_batch)
        self.buckets.append(len(self.bucket_sizes))
        return gradients_of(self.model)


def three_steps(group: ProcessGroup) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, bucket_cap_mb in (("many", MANY_BUCKETS), ("one", ONE_BUCKET), ("shared", MANY_BUCKETS)):
        group.shares_device = name == "shared"
        trained = Trained(group, bucket_cap_mb)
        # DDP rebuilds its buckets after the first backward.
        gradients = [trained.step(FULL), trained.step(FULL)]
        held = trained.held
        gradients.append(trained.step(SHORT))
        left = len(trained.reduction._sums)
        results[name] = {"gradients": gradients, "buckets": trained.buckets, "held": held, "left": left}
        trained.strategy.close()
    return results


def fail_in_every_collective(group: ProcessGroup) -> list[tuple[str, bool, float]]:
    """Rank 2 fails in each collective of the reduction. Returns errors, whether they are peer failures, and seconds."""
    errors = []
    for number, collective in enumerate(("all_to_all_single", "all_gather_single"), start=2):
        group = form(group, number)
        trained = Trained(group, MANY_BUCKETS)
        trained.step(FULL)
        module: Any = dist if collective == "all_to_all_single" else canonical_reduction
        real = getattr(module, collective)
        if group.rank == 2:
            setattr(module, collective, _fail)
        began = time.monotonic()
        try:
            trained.step(FULL)
            errors.append(("nothing was raised", False, time.monotonic() - began))
        except Exception as error:
            errors.append((str(error), is_peer_failure(error), time.monotonic() - began))
        setattr(module, collective, real)
        trained.strategy.close()
        del trained
        group.close(intact=False)
    return errors


def _fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("this rank failed")


def everything(group: ProcessGroup) -> tuple[dict[str, Any], list[tuple[str, bool, float]]]:
    """Runs all of it in one set of processes, because starting them takes longest."""
    gc.freeze()  # closing a group collects garbage, which takes seconds with all loaded modules
    steps = three_steps(group)
    if group.world_size == 1:
        return steps, []
    group.barrier()
    group.close(intact=True)
    return steps, fail_in_every_collective(group)


@cache
def results(world_size: int) -> list[Any]:
    return run_ranks(world_size, everything)


def tree_sum(gradients: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Adds neighbours until one is left; an odd one moves up."""
    while len(gradients) > 1:
        pairs = [gradients[at : at + 2] for at in range(0, len(gradients), 2)]
        gradients = [
            pair[0] if len(pair) == 1 else [left + right for left, right in zip(*pair, strict=True)] for pair in pairs
        ]
    return gradients[0]


def explicit(rows: Sequence[int]) -> list[bytes]:
    """Returns the mean gradient of a step, from plain autograd in one process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in `run_ranks`
    model = new_model()
    gradients = []
    for micro_batch in range(np.count_nonzero(rows)):
        weight = rows[micro_batch] / MICRO_BATCH_SIZE
        loss = loss_of(model, micro_batch, rows[micro_batch]) * weight
        gradients.append(list(torch.autograd.grad(loss, list(model.parameters()))))
    total = tree_sum(gradients)
    torch.set_num_threads(threads)
    return [(gradient / (sum(rows) / MICRO_BATCH_SIZE)).numpy().tobytes() for gradient in total]


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_gradient_is_the_tree_sum_bit_by_bit_however_it_is_exchanged(world_size: int) -> None:
    """In one bucket or many, and also if ranks share a device."""
    expected = [explicit(FULL), explicit(FULL), explicit(SHORT)]
    for steps, _ in results(world_size):
        assert steps["many"]["buckets"][1] > 2 > steps["one"]["buckets"][1] == 1
        for kind in ("one", "many", "shared"):
            assert steps[kind]["gradients"] == expected, kind
            held = steps[kind]["held"]
            assert len(held) == MICRO_BATCHES / world_size
            assert 2 <= max(held) <= math.log2(MICRO_BATCHES / world_size) + 1
            assert steps[kind]["left"] == 0


def test_a_peer_that_fails_in_a_step_causes_an_error_and_no_hang() -> None:
    for *survivors, failed in zip(*(errors for _, errors in results(3)), strict=True):
        assert "this rank failed" in failed[0]
        for message, peer_failed, seconds in survivors:
            assert peer_failed and seconds < 10, message


# Memory.

SHARE = 16
"""The number of micro-batches of each rank."""
_M_MMAP_THRESHOLD = -3


def peak_copies(group: ProcessGroup, canonical_reduction: str, bucket_cap_mb: float) -> float:
    """Returns the peak memory of a step beyond that before it, in copies of the gradients."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)  # returns freed memory to the system at once
    changes = {"reduction": canonical_reduction, "global_batch_size": SHARE * group.world_size, "micro_batch_size": 1}
    strategy_config = config(bucket_cap_mb).model_copy(update=changes)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(10)))
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    strategy = DDPStrategy(PreparedModel(model, device=CPU, bf16=False), strategy_config, group)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = peak_bytes()
    for _ in range(2):
        strategy.begin_step(np.full(SHARE * group.world_size, 1))
        for micro_batch in strategy.to_compute:
            strategy.prepare_forward(micro_batch)
            strategy.backward(model(torch.ones(1, 1024)).sum(), micro_batch)
        model.zero_grad()
    strategy.close()
    return (peak_bytes() - before) / num_bytes


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@pytest.mark.chaos
@pytest.mark.parametrize(("world_size", "bucket_cap_mb"), [(1, 1000.0), (2, 5.0)])
def test_the_memory_of_a_step_is_within_its_bound(world_size: int, bucket_cap_mb: float) -> None:
    native, canonical = (
        max(run_ranks(world_size, peak_copies, canonical_reduction, bucket_cap_mb))
        for canonical_reduction in ("native", "canonical")
    )
    assert canonical - native <= math.log2(SHARE) + 1
