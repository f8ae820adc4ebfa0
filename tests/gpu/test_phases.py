"""The phases of steps on a GPU: CUDA events, without waiting for the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from elastic_ddp.worker.phase_clock import PhaseClock

pytestmark = pytest.mark.gpu

STEPS = 20


@contextmanager
def synchronizing_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_phases_add_up_to_the_time_of_the_device_without_waiting_for_it() -> None:
    device = torch.device("cuda")
    clock = PhaseClock(device)
    matrix = torch.zeros(4096, 4096, device=device)
    product = torch.empty_like(matrix)

    def work(times: int) -> None:  # so few kernels in all that the host need not wait for room in the queue
        for _ in range(times):
            torch.matmul(matrix, matrix, out=product)

    work(20)
    clock.begin(0)
    for step in range(2):  # not measured
        clock.step_done(step + 1)
    torch.cuda.synchronize()
    clock.step_done(3)
    clock.take()
    begin = time.perf_counter()
    with synchronizing_is_an_error():
        for step in range(STEPS):
            clock.follow("data")
            clock.follow("forward")
            work(2)
            clock.follow("reduction")
            work(4)
            clock.enter("communication")
            work(1)
            clock.follow("optimizer")
            work(1)
            clock.follow("between steps")
            clock.step_done(step + 4)
        launched_s = time.perf_counter() - begin
        behind = clock.take()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    with synchronizing_is_an_error():
        clock.step_done(STEPS + 4)
        rest = clock.take()
    assert launched_s < seconds / 2, "the host was ahead of the device"
    assert behind["num_steps"] < STEPS
    num_steps = behind["num_steps"] + rest["num_steps"]
    assert STEPS <= num_steps <= STEPS + 1
    phases = {
        phase: sum(taken["phases"][phase] * taken["num_steps"] for taken in (behind, rest)) for phase in rest["phases"]
    }
    assert sum(phases.values()) == pytest.approx(seconds, rel=0.02)
    assert phases["backward"] == pytest.approx(seconds / 2, rel=0.1)
    assert phases["communication"] == pytest.approx(seconds / 8, rel=0.1)
    assert phases["data"] < 0.01 * seconds
    assert rest["memory_bytes"] >= matrix.nbytes
