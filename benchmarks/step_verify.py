"""What a verified step costs: one run, in which every second step is verified."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import ray
import torch
from gpt import GPT, next_byte_loss
from windows import write_random_windows

import elastic_ddp as ed
from elastic_ddp.distributed import canonical_reduction, ddp
from elastic_ddp.worker import verification

FOLDERS = (str(Path(__file__).parent), str(Path(__file__).parents[1] / "examples"))
WARMUP_STEPS = 10
EVERY = 100
"""The interval for which the cost is printed."""


def make_train(model: dict[str, Any], times: Path) -> Callable[[ed.Run], None]:
    """Returns a training function that writes the end of each step on rank 0, and the seconds in digests in it."""

    def train(run: ed.Run) -> None:
        in_digests = 0.0

        def timed(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                nonlocal in_digests
                begin = time.perf_counter()
                found = function(*arguments)
                in_digests += time.perf_counter() - begin
                return found

            return call

        for module in (canonical_reduction, ddp, verification):
            module.digest_tensors = timed(module.digest_tensors)  # type: ignore[attr-defined]
        prepared = run.prepare(GPT(**model))
        run.prepare(torch.optim.AdamW(prepared.parameters(), lr=1e-3))
        lines = []
        for step in run.steps():
            with step:
                for batch in step.micro_batches():
                    step.backward(next_byte_loss(prepared, batch))
                step.optimize()
            lines.append([time.perf_counter(), in_digests])
        if run.rank == 0:
            times.write_text(json.dumps(lines))

    return train


def compare_verified(
    model: dict[str, Any],
    *,
    workers: int,
    micro_batch_size: int,
    rows: int,
    accumulate: Sequence[int],
    rounds: int,
) -> list[dict[str, Any]]:
    """Prints and returns the figures for each number of micro-batches per worker and step."""
    figures = []
    os.environ["PYTHONPATH"] = os.pathsep.join([*FOLDERS, os.environ.get("PYTHONPATH", "")])
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_random_windows(folder / "data", rows=rows, context=model["context"])
        ray.init("local", num_cpus=workers, include_dashboard=False, logging_level="warning")
        for count in accumulate:
            config = ed.RunConfig(
                name=f"verify-{count}",
                storage=str(folder / "runs"),
                steps=WARMUP_STEPS + 2 * rounds + 1,
                global_batch_size=micro_batch_size * count * workers,
                micro_batch_size=micro_batch_size,
                min_workers=workers,
                max_workers=workers,
                clip_grad_norm=1.0,
                log_every_steps=1_000_000,
                checkpoint=ed.CheckpointConfig(every_steps=1_000_000),
                verify=ed.VerifyConfig(every_steps=2, action="stop"),
            )
            times = folder / f"times-{count}"
            ed.ElasticTrainer(make_train(model, times), str(folder / "data"), config).fit()
            figures.append({"micro_batches_per_worker": count, **compare(json.loads(times.read_text()))})
            show(figures[-1])
        ray.shutdown()
    return figures


def compare(lines: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Compares each verified step with the mean of the steps before and after it."""
    steps = [end - begin for (begin, _), (end, _) in pairwise(lines)]
    digests = [end - begin for (_, begin), (_, end) in pairwise(lines)]
    # Step i is verified if i + 1 is even. steps[i] is the duration of step i + 1.
    verified = [at for at in range(WARMUP_STEPS, len(steps) - 1) if at % 2 == 0]
    extra = [2 * steps[at] / (steps[at - 1] + steps[at + 1]) - 1 for at in verified]
    return {
        "step_s": statistics.median(steps[at + 1] for at in verified),
        "verified_s": statistics.median(steps[at] for at in verified),
        "extra": extra,
        "digests_of_verified": [digests[at] / steps[at] for at in verified],
    }


def show(figure: dict[str, Any]) -> None:
    low, extra, high = statistics.quantiles(figure["extra"], n=4)
    digests = statistics.median(figure["digests_of_verified"])
    print(
        f"M/W = {figure['micro_batches_per_worker']}: a verified step takes {1000 * figure['verified_s']:.0f} ms, "
        f"another one {1000 * figure['step_s']:.0f} ms: {extra:.1%} more (quartiles {low:.1%} to {high:.1%}), which is "
        f"{extra / EVERY:.2%} of the time with verify.every_steps = {EVERY}. Digests take {digests:.1%} of a verified "
        "step."
    )
