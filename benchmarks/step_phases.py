"""What it costs to measure the phases of steps: one run, in which they are on and off in turns."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from gpt import GPT, next_byte_loss
from windows import write_random_windows

import elastic_ddp as ed
from elastic_ddp import torch_internals
from elastic_ddp.worker.phase_clock import PhaseClock

FOLDERS = (str(Path(__file__).parent), str(Path(__file__).parents[1] / "examples"))
TURN_STEPS = 4
WARMUP_STEPS = 20


class Switch:
    """Turns the measurement of this process on and off: there is no setting for it."""

    is_on = True

    def install(self) -> None:
        """Call it before the first step."""
        enter, step_done, call_after = PhaseClock.enter, PhaseClock.step_done, torch_internals.call_after_gradients

        def enter_if_on(clock: PhaseClock, phase: str) -> str:
            return enter(clock, phase) if self.is_on else phase

        def step_done_if_on(clock: PhaseClock, step: int) -> None:
            if self.is_on:
                step_done(clock, step)

        def call_after_if_on(loss: torch.Tensor, function: Callable[[], object]) -> None:
            if self.is_on:
                call_after(loss, function)

        PhaseClock.enter, PhaseClock.step_done = enter_if_on, step_done_if_on  # type: ignore[method-assign]
        torch_internals.call_after_gradients = call_after_if_on


def make_train(model: dict[str, Any], times: Path) -> Callable[[ed.Run], None]:
    """Returns a training function that writes the end of each step on rank 0, and its CPU time then, to a file."""

    def train(run: ed.Run) -> None:
        switch = Switch()
        switch.install()
        prepared = run.prepare(GPT(**model))
        run.prepare(torch.optim.AdamW(prepared.parameters(), lr=1e-3))
        lines: list[str] = []
        for step in run.steps():
            switch.is_on = step.index // TURN_STEPS % 2 == 0
            with step:
                for batch in step.micro_batches():
                    step.backward(next_byte_loss(prepared, batch))
                step.optimize()
            lines.append(f"{time.perf_counter()} {time.process_time()}\n")
        if run.rank == 0:
            times.write_text("".join(lines))

    return train


def ratios(ends: Sequence[float]) -> tuple[list[float], float]:
    """Returns the duration of each turn with phases, relative to the turns before and after it, and that of a step.

    Against the mean of both neighbors, so that a machine that gets faster or slower favors neither side.
    """
    turns = [
        ends[first + TURN_STEPS - 1] - ends[first - 1]
        for first in range(WARMUP_STEPS, len(ends) - TURN_STEPS + 1, TURN_STEPS)
    ]
    without = statistics.median(turns[1::2]) / TURN_STEPS
    return [2 * turns[turn] / (turns[turn - 1] + turns[turn + 1]) for turn in range(2, len(turns) - 1, 2)], without


def compare_phases(
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
                name=f"phases-{count}",
                storage=str(folder / "runs"),
                steps=WARMUP_STEPS + 2 * TURN_STEPS * rounds,
                global_batch_size=micro_batch_size * count * workers,
                micro_batch_size=micro_batch_size,
                min_workers=workers,
                max_workers=workers,
                clip_grad_norm=1.0,
                log_every_steps=2 * TURN_STEPS + 1,
                checkpoint=ed.CheckpointConfig(every_steps=1_000_000),
            )
            times = folder / f"times-{count}"
            ed.ElasticTrainer(make_train(model, times), str(folder / "data"), config).fit()
            lines = [[float(value) for value in line.split()] for line in times.read_text().splitlines()]
            (measured, step_s), (of_cpu, cpu_s) = (ratios(column) for column in zip(*lines, strict=True))
            figure = {"micro_batches_per_worker": count, "step_s": step_s, "ratios": measured}
            figures.append({**figure, "cpu_s": cpu_s, "cpu_ratios": of_cpu})
            print(f"M/W = {count}, with phases relative to without:")
            for what, found, seconds in (("a step", measured, step_s), ("CPU time of rank 0", of_cpu, cpu_s)):
                low, median, high = statistics.quantiles(found, n=4)
                print(f"  {what} of {1000 * seconds:.0f} ms: {median:.4f} (quartiles {low:.3f} to {high:.3f})")
        ray.shutdown()
    return figures
