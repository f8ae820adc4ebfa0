"""Several NCCL ranks on one GPU: bits, failures of each rank at each place, joins, drains, FSDP, and leaks.

NCCL 2.30 or newer can share a GPU. If torch's own NCCL is older (`torch.cuda.nccl.version()`), preload the library of
the package `nvidia-nccl-cu13`, or `nvidia-nccl-cu12` for a torch with CUDA 12. Install it into a folder of its own,
because torch pins the version in its environment:

    pip install --no-deps --target nccl 'nvidia-nccl-cu13>=2.30'
    LD_PRELOAD=$PWD/nccl/nvidia/nccl/lib/libnccl.so.2 NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=1 \\
        pytest tests/gpu/test_several_ranks.py -s

`NCCL_NVLS_ENABLE=0` turns off reductions in NVLink switches (NVLink SHARP), which ranks on one GPU cannot use.
`NCCL_MAX_CTAS=1` gives each kernel of NCCL one block, so that the kernels of all ranks fit on the GPU together.

The memory that generations leave behind is read off the device, so run that test without others beside it.

With `TEST_DEVICE=cpu`, the same tests run on the CPU over gloo.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from elastic_ddp.distributed import fsdp_rounds, nccl
from elastic_ddp.distributed.process_group import ProcessGroup, is_peer_failure
from elastic_ddp.worker.run import Run
from tests.inside_run import generation_of, is_ready_to_change
from tests.ranks import PROCESSES, run_ranks
from tests.workers import Workers, running

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(60, func_only=True)]

DEVICE = torch.device(os.environ.get("TEST_DEVICE", "cuda:0"))
WITHIN_S = 30.0 if DEVICE.type == "cuda" else 45.0
"""A run takes a few seconds. A test that waits longer fails with what each worker does."""
STEPS, FIRST_FAULT, SECOND_FAULT = 7, 2, 4
GENERATIONS = 10
LEAK_BYTES = 64 << 20
FREED_WITHIN_S = 5.0
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
"""Makes NCCL use sockets, as between hosts."""
Place = Literal["forward", "exchange", "optimizer", "connecting"]


@pytest.fixture(scope="module", autouse=True)
def _imports() -> None:
    """Imports what all ranks use, which takes up to a minute on a cold machine, before the first test is timed."""
    process = PROCESSES.Process(target=int)
    process.start()
    process.join()


@pytest.fixture(autouse=True)
def _can_share_the_gpu() -> None:
    if DEVICE.type == "cuda" and (why_not := nccl.why_not_share_gpus()) is not None:
        pytest.skip(why_not)


class Model(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            torch.nn.Linear(3, 32),
            torch.nn.BatchNorm1d(32),
            torch.nn.Tanh(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(32, 64),
            torch.nn.Tanh(),
            torch.nn.Linear(64, 1),
        )


@dataclass(frozen=True)
class Fault:
    """A signal that the worker of a rank sends to itself at a place of a step; with `marker`, once."""

    place: Place
    how: int
    rank: int
    step: int
    world_size: int
    marker: Path | None = None

    def strike(self, run: Run, place: Place) -> None:
        if (place, run.rank, run.position.step, run.world_size) == (self.place, self.rank, self.step, self.world_size):
            if self.marker is not None:
                if self.marker.exists():
                    return
                self.marker.touch()
            if place == "exchange":
                time.sleep(0.5)  # the other ranks have begun to wait
            os.kill(os.getpid(), self.how)


def train(run: Run, faults: tuple[Fault, ...] = (), hold: Path | None = None) -> None:
    """Trains. With `hold`, no worker ends step 2 before that file exists and the membership is to change."""

    def strike(place: Place) -> None:
        for fault in faults:
            fault.strike(run, place)

    class FaultyAdamW(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            super().step()
            strike("optimizer")

    torch.manual_seed(0)
    model: Any = run.prepare(Model(), shard=torch.nn.Linear if run.config.strategy == "fsdp" else None)
    optimizer = run.prepare(FaultyAdamW(model.parameters(), lr=0.05))
    run.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
    _strike_in_exchanges(lambda: strike("exchange"))
    _strike_while_nccl_connects(faults)
    for step in run.steps():
        with step:
            for batch in step.micro_batches():
                loss = model(batch["x"]).square().mean()
                strike("forward")
                while hold is not None and step.index == FIRST_FAULT and not _may_go_on(run, hold):
                    time.sleep(0.01)
                step.backward(loss)
            step.optimize()


def _strike_in_exchanges(strike: Callable[[], None]) -> None:
    """Calls `strike` before this rank takes part in an exchange of a bucket but the first, or in FSDP's scatters."""
    exchange, count = dist.all_to_all_single, 0

    def faulty_exchange(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count > 1:
            strike()
        return exchange(*args, **options)

    dist.all_to_all_single = faulty_exchange
    scatter = fsdp_rounds.reduce_scatter_single

    def faulty_scatter(*args: Any, **options: Any) -> Any:
        strike()
        return scatter(*args, **options)

    fsdp_rounds.reduce_scatter_single = faulty_scatter


def _strike_while_nccl_connects(faults: tuple[Fault, ...]) -> None:
    """Lets faults strike before this rank takes part in the collective in which NCCL connects the ranks."""
    all_reduce = dist.all_reduce

    def faulty_all_reduce(value: torch.Tensor, *args: Any, **options: Any) -> Any:
        for fault in faults:
            place = fault.place, fault.rank, fault.world_size
            if value.is_cuda and value.numel() == 1 and place == ("connecting", dist.get_rank(), dist.get_world_size()):
                os.kill(os.getpid(), fault.how)
        return all_reduce(value, *args, **options)

    dist.all_reduce = faulty_all_reduce


def _may_go_on(run: Run, hold: Path) -> bool:
    """Whether the membership has changed, or this worker is ready for the change."""
    if generation_of(run) is None or generation_of(run).number > 1:
        return True
    return hold.exists() and is_ready_to_change(run, run.position.step + 1)


def settings_of(**changes: Any) -> dict[str, Any]:
    resources = {"CPU": 1.0, "GPU": 0.3} if DEVICE.type == "cuda" else {"CPU": 1.0}
    return {
        "steps": STEPS,
        "global_batch_size": 12,
        "micro_batch_size": 2,
        "clip_grad_norm": 1.0,
        "ddp": {"bucket_cap_mb": 0.002},
        "heartbeat_timeout_s": 2.5 if DEVICE.type == "cuda" else 6.0,
        "resources_per_worker": resources,
        **changes,
    }


Fit = Callable[..., tuple[Workers, dict[str, Any]]]


@pytest.fixture
def fit(tmp_path: Path) -> Fit:
    """Trains with a number of workers. Returns them, after they have exited, and the outcome."""

    def run(
        count: int,
        faults: tuple[Fault, ...] = (),
        *,
        hold: Path | None = None,
        meanwhile: Callable[[Workers], object] = lambda workers: None,
        environment: dict[str, str] | None = None,
        **changes: Any,
    ) -> tuple[Workers, dict[str, Any]]:
        begun, settings = time.monotonic(), settings_of(**changes)
        body = partial(train, faults=faults, hold=hold)
        with running(tmp_path / "run", body, DEVICE, count, environment=environment or {}, **settings) as workers:
            outcome = workers.finish(WITHIN_S, meanwhile)
        took = time.monotonic() - begun
        print(f"\n  {workers.world_sizes()} workers, {took:.1f} s", flush=True)
        return workers, outcome

    return run


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Returns the outcome of an undisturbed run with a number of workers. Each is trained once."""

    @cache
    def run(count: int, strategy: str = "ddp") -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("calm")
        with running(folder, train, DEVICE, count, **settings_of(strategy=strategy)) as workers:
            return workers.finish(WITHIN_S)

    return run


def assert_same_bits(one: dict[str, Any], other: dict[str, Any]) -> None:
    for key in ("weights_sha256", "samples_sha256", "samples"):
        assert one[key] == other[key], key


def lose_two(fit: Fit, place: Place, how: int, rank: int, **options: Any) -> dict[str, Any]:
    """Loses one of three workers, then one of two. Returns the outcome."""
    first = Fault(place, how, rank, FIRST_FAULT, world_size=3)
    second = Fault(place, how, rank % 2, SECOND_FAULT, world_size=2)
    workers, outcome = fit(3, (first, second), **options)
    assert workers.world_sizes() == [3, 2, 1]
    return outcome


def replace_the_dead(workers: Workers) -> None:
    """Starts one worker after the first death."""
    if len(workers.alive()) < len(workers.all) == 2:
        workers.start(1)


def _form_and_end_generations(group: ProcessGroup) -> dict[str, list[float]]:
    """Forms generations one after the other. Rank 0 aborts every second one while it waits in a collective alone."""
    faulthandler.dump_traceback_later(0.8 * WITHIN_S)
    seen: dict[str, list[float]] = {"free_bytes": [], "freed_s": [], "formed_s": []}
    for number in range(1, GENERATIONS + 1):
        value = torch.ones(1 << 20, device=DEVICE)
        dist.all_reduce(value)
        group.synchronize()
        assert float(value[-1]) == group.world_size
        if DEVICE.type == "cuda":
            seen["free_bytes"].append(torch.cuda.mem_get_info()[0])
        if number % 2:
            group.barrier()
        elif group.rank:
            time.sleep(0.7)
        else:
            seen["freed_s"].append(_seconds_to_free(group, value))
        group.close(intact=bool(number % 2))
        begun, options = time.monotonic(), {"device": group.device, "timeout_s": 60, "shares_device": True}
        group = ProcessGroup.form(replace(group.assignment, generation=number + 1), store=group.store, **options)
        seen["formed_s"].append(round(time.monotonic() - begun, 3))
    faulthandler.cancel_dump_traceback_later()
    return seen


def _seconds_to_free(group: ProcessGroup, value: torch.Tensor) -> float:
    """Aborts the group from another thread, and returns when the wait for the other ranks then ended."""
    aborted = 0.0

    def abort() -> None:
        nonlocal aborted
        aborted = time.monotonic()
        group.abort()

    timer = threading.Timer(0.3, abort)
    timer.start()
    try:
        dist.all_reduce(value)
        group.synchronize()
        raise AssertionError("the collective ended without the other ranks")
    except Exception as error:
        assert is_peer_failure(error), error
    freed_s = time.monotonic() - aborted
    timer.join()
    return round(freed_s, 3)


@pytest.mark.parametrize("world_size", [2, 3])
def test_aborts_free_waiting_ranks_and_ten_generations_leave_no_memory(world_size: int) -> None:
    seen, *_ = run_ranks(world_size, _form_and_end_generations, device=DEVICE)
    print(f"\n  {seen}", flush=True)
    assert max(seen["freed_s"]) < FREED_WITHIN_S
    if DEVICE.type == "cuda":
        assert seen["free_bytes"][-1] >= seen["free_bytes"][2] - LEAK_BYTES, "communicators are not freed"


@pytest.mark.parametrize("count", [2, 3])
def test_canonical_bits_are_those_of_one_rank(calm: Any, count: int) -> None:
    assert_same_bits(calm(count), calm(1))


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("place", ["exchange", "forward", "optimizer"])
def test_survivors_of_two_killed_ranks_have_the_bits_of_a_calm_run(
    fit: Fit, calm: Any, place: Place, rank: int
) -> None:
    assert_same_bits(lose_two(fit, place, signal.SIGKILL, rank), calm(1))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_lost_while_nccl_connects_does_not_block_its_peer(fit: Fit, calm: Any, how: int) -> None:
    if DEVICE.type == "cpu":
        pytest.skip("gloo has no such place")
    first = Fault("forward", signal.SIGKILL, 0, FIRST_FAULT, world_size=3)
    workers, outcome = fit(3, (first, Fault("connecting", how, 1, FIRST_FAULT, world_size=2)))
    assert workers.world_sizes() == [3, 1]
    assert_same_bits(outcome, calm(1))


def test_a_worker_joins_with_the_same_bits(fit: Fit, calm: Any, tmp_path: Path) -> None:
    hold = tmp_path / "go"

    def add_one(workers: Workers) -> None:
        if len(workers.all) == 2 and workers.started():
            workers.start(1)
            hold.touch()

    workers, outcome = fit(2, hold=hold, meanwhile=add_one, max_workers=3)
    assert workers.world_sizes() == [2, 3]
    assert_same_bits(outcome, calm(1))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_drained_worker_leaves_without_a_lost_step(fit: Fit, calm: Any, tmp_path: Path, rank: int) -> None:
    hold = tmp_path / "go"

    def drain(workers: Workers) -> None:
        if not hold.exists() and workers.started():
            hold.touch()
            workers.all[rank].process.terminate()

    workers, outcome = fit(3, hold=hold, meanwhile=drain)
    assert workers.world_sizes() == [3, 2]
    lost: list[Any] = workers.rendezvous.events("worker_failed")
    assert not [event for event in lost if event.generation == 1]  # at its end the test kills the others
    assert_same_bits(outcome, calm(1))


@pytest.mark.parametrize(
    ("how", "place"), [(signal.SIGKILL, "exchange"), (signal.SIGSTOP, "forward")], ids=["killed", "stopped"]
)
def test_fsdp_goes_on_with_a_replacement_and_the_same_bits(
    fit: Fit, calm: Any, tmp_path: Path, how: int, place: Place
) -> None:
    fault = Fault(place, how, 1, SECOND_FAULT, world_size=2, marker=tmp_path / "struck")
    changes: Any = {"strategy": "fsdp", "min_workers": 2, "checkpoint": {"every_steps": 2}}
    workers, outcome = fit(2, (fault,), meanwhile=replace_the_dead, **changes)
    assert workers.world_sizes() == [2, 2]
    assert_same_bits(outcome, calm(2, "fsdp"))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_survivors_over_sockets_have_the_bits_of_a_calm_run(fit: Fit, calm: Any, how: int) -> None:
    """Only over sockets does NCCL itself notice a dead peer."""
    assert_same_bits(lose_two(fit, "exchange", how, 1, environment=SOCKETS), calm(1))


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("place", ["exchange", "forward", "optimizer"])
def test_survivors_of_two_stopped_ranks_have_the_bits_of_a_calm_run(
    fit: Fit, calm: Any, place: Place, rank: int
) -> None:
    assert_same_bits(lose_two(fit, place, signal.SIGSTOP, rank), calm(1))
