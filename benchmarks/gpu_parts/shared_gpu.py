"""How much of the exchange of gradients overlaps the backward: several ranks on one GPU, which NCCL 2.30 allows.

Ray takes no part: each rank is a process that trains with the strategy of a generation on one batch.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gpt import GPT, next_byte_loss
from torch.profiler import ProfilerActivity, profile, record_function

from gpu_parts.gate import STEP_LABEL
from gpu_parts.host import use_deterministic_algorithms
from gpu_parts.trace import Trace
from gpu_parts.train import CLIP_NORM, Side, random_batch

LEAST_NCCL = 2_30_00
SWITCH = "NCCL_MULTI_RANK_GPU_ENABLE"


def reason_to_skip(device: str) -> str | None:
    """Returns why ranks cannot share the GPU, or None."""
    if device != "cuda":
        return None
    if os.environ.get(SWITCH) != "1":
        return f"set {SWITCH}=1 in the environment: ranks then share a GPU"
    version = nccl_version()
    if version is not None and version < LEAST_NCCL:
        return (
            f"NCCL is {version}, and ranks share a GPU from {LEAST_NCCL} on; preload libnccl.so.2 of a newer "
            "nvidia-nccl-cu13, as benchmarks/README.md has it"
        )
    return None


def nccl_version() -> int | None:
    """Returns the version of the library that torch has loaded, such as 23102 for 2.31.2; None if it is not found."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return version.value


def measure(side: Side, *, ranks: int, steps: int, timeout_s: float) -> list[dict[str, Any]]:
    """Returns what rank 0 and the others measured, in rank order. Raises RuntimeError with the ranks' errors."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], []
    context = multiprocessing.get_context("spawn")
    for rank in range(ranks):
        receiving, sending = context.Pipe(duplex=False)
        processes.append(context.Process(target=run_rank, args=(sending, side, rank, ranks, store.port, steps)))
        processes[-1].start()
        sending.close()
        pipes.append(receiving)
    try:
        deadline, answers = time.monotonic() + timeout_s, []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise RuntimeError(f"rank {rank} has not finished within {timeout_s:.0f} s")
            try:
                answers.append(pipe.recv())
            except EOFError:
                answers.append({"error": f"rank {rank} died"})
    finally:
        for process in processes:
            process.kill()
            process.join()
    if errors := [answer["error"] for answer in answers if "error" in answer]:
        raise RuntimeError("\n".join(errors))
    return answers


def run_rank(answer: Any, side: Side, rank: int, ranks: int, port: int, steps: int) -> None:
    try:
        answer.send(train(side, rank, ranks, port, steps))
    except BaseException:
        answer.send({"error": f"rank {rank}: {traceback.format_exc()}"})


def train(side: Side, rank: int, ranks: int, port: int, steps: int) -> dict[str, Any]:
    from elastic_ddp.config.run_config import RunConfig
    from elastic_ddp.distributed.assignment import Assignment
    from elastic_ddp.distributed.ddp import DDPStrategy
    from elastic_ddp.distributed.prepared_model import PreparedModel
    from elastic_ddp.distributed.process_group import ProcessGroup
    from elastic_ddp.distributed.torch_store import StoreConnection

    setting, on_gpu = side.setting, side.device == "cuda"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if side.name == "canonical":  # as a worker does
        use_deterministic_algorithms()
    config = RunConfig(
        name="overlap",
        storage=side.folder,
        steps=1,
        global_batch_size=setting.micro_batch_size * setting.micro_batches,
        micro_batch_size=setting.micro_batch_size,
        max_workers=ranks,
        reduction="canonical" if side.name == "canonical" else "native",
        precision="bf16",
    )
    store = StoreConnection()
    store.connect_with_retry(lambda: ("127.0.0.1", port))
    place = Assignment(
        generation=1, rank=rank, world_size=ranks, store_host="127.0.0.1", store_port=port, reason="start"
    )
    group = ProcessGroup.form(place, store=store, device=device, timeout_s=120)
    torch.manual_seed(0)
    module = GPT(**setting.model).to(device)
    strategy = DDPStrategy(PreparedModel(module, device=device, bf16=True), config, group)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    rows = np.full(setting.micro_batches, setting.micro_batch_size, dtype=np.int64)
    batch = random_batch(side)

    def step() -> None:
        strategy.begin_step(rows)
        for micro_batch in strategy.to_compute:
            strategy.prepare_forward(micro_batch)
            strategy.backward(next_byte_loss(module, batch), micro_batch)
        strategy.clip_gradients(CLIP_NORM, strategy.gradient_norm())
        group.synchronize()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    group.synchronize()
    group.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    group.synchronize()
    step_ms = 1000 * (time.perf_counter() - begin) / steps
    group.barrier()
    path = Path(side.folder) / f"overlap-{side.name}-{rank}.json"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        step()
        for _ in range(steps):
            with record_function(STEP_LABEL):
                step()
        group.synchronize()
    profiler.export_chrome_trace(str(path))
    group.barrier()
    return {"untraced_step_ms": step_ms, **Trace(path).exchange()}
