"""What a change of membership costs: `python benchmarks/elasticity.py` prints a table and writes its figures as JSON.

A run on two workers, over gloo. Again and again one of them is killed (SIGKILL, rank 0 and rank 1 in turn); the other
goes on alone, and a replacement that Ray Train starts joins it. A stall is the time between two ends of steps that a
change lies between, less the median of the steps before it. All that the run tells the benchmark is when steps ended.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.table import Table

FEATURES = 256
ROWS = 131_072
TARGETS = {"kill a worker": 0.35, "add a worker": 0.15}


def write_dataset(folder: Path) -> None:
    """128 MiB: more than pipelines hold ready, so that they are at work when membership changes."""
    values = np.random.default_rng(0).normal(size=(ROWS * FEATURES,)).astype(np.float32)
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(values), FEATURES)})
    pq.write_table(table, folder / "rows.parquet", row_group_size=1024)


# The run.


def run(folder: str, width: int) -> None:
    import ray

    import elastic_ddp as ed

    def train(run: ed.Run) -> None:
        net = torch.nn.Sequential(torch.nn.Linear(FEATURES, width), torch.nn.ReLU(), torch.nn.Linear(width, FEATURES))
        model = run.prepare(net)
        run.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3))
        with open(f"{folder}/steps-{os.getpid()}", "w", buffering=1) as log:
            for step in run.steps():
                with step:
                    for batch in step.micro_batches():
                        step.backward((model(batch["x"]) - batch["x"]).square().mean())
                    step.optimize()
                if step.agreed is not None:
                    log.write(f"{time.time()} {step.index} {run.rank} {run.world_size}\n")

    config = {"name": "elasticity", "storage": folder, "steps": 10**6, "max_workers": 2, "resize_interval_s": 1.0}
    config |= {"global_batch_size": 64, "micro_batch_size": 16, "checkpoint": {"every_seconds": 3600.0}}
    ray.init("local", num_cpus=2, include_dashboard=False, logging_level="error")
    ed.ElasticTrainer(train, f"{folder}/data", config).fit()


# The faults.


@dataclass(frozen=True)
class StepEnd:
    time: float
    step: int
    rank: int
    world_size: int
    pid: int


def step_ends(folder: Path) -> list[StepEnd]:
    """Of all workers, in the order in which they happened."""
    ends = []
    for path in folder.glob("steps-*"):
        for line in path.read_text().splitlines():
            fields = line.split()
            if len(fields) == 4:
                ends.append(StepEnd(float(fields[0]), *map(int, fields[1:]), int(path.name.partition("-")[2])))  # type: ignore[call-arg]
    return sorted(ends, key=lambda end: end.time)


def wait_until(folder: Path, world_size: int, steps: int, process: subprocess.Popen[bytes]) -> list[StepEnd]:
    """The ends of steps, once the newest `steps` were all made by so many workers."""
    while True:
        ends = step_ends(folder)
        newest = [end for end in ends if ends and end.step > ends[-1].step - steps]
        if len(newest) >= steps * world_size and all(end.world_size == world_size for end in newest):
            return ends
        if process.poll() is not None:
            raise SystemExit("the run ended by itself")
        time.sleep(0.2)


def stalls(ends: list[StepEnd], kills: list[float]) -> dict[str, list[float]]:
    """Seconds by kind of change, each less a step's usual time."""
    first: dict[int, StepEnd] = {}
    for end in ends:
        first.setdefault(end.step, end)
    line = [first[step] for step in sorted(first)]
    found: dict[str, list[float]] = {name: [] for name in TARGETS}
    for place in range(1, len(line)):
        before, after = line[place - 1], line[place]
        around = line[max(0, place - 20) : place]
        usual = statistics.median(b.time - a.time for a, b in pairwise(around)) if place > 2 else 0.0
        gap = after.time - before.time - usual
        if any(before.time <= kill < after.time for kill in kills):
            found["kill a worker"].append(gap)
        elif after.world_size > before.world_size:
            found["add a worker"].append(gap)
    return found


def measure(folder: Path, *, cycles: int, width: int) -> dict[str, Any]:
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, __file__, "--run", str(folder), str(width)], stdout=log, stderr=log)
        kills: list[float] = []
        try:
            for cycle in range(cycles + 1):
                ends = wait_until(folder, 2, 40, process)
                if cycle < cycles:
                    victim = next(end.pid for end in reversed(ends) if end.rank == cycle % 2)
                    kills.append(time.time())
                    os.kill(victim, signal.SIGKILL)
                    wait_until(folder, 1, 20, process)
            process.send_signal(signal.SIGINT)
            process.wait(60)
        finally:
            if process.poll() is None:
                process.kill()
    made = [end.step for end in ends if end.rank == 0]
    return {"stalls": stalls(ends, kills), "steps": max(made) + 1, "steps_done_twice": len(made) - len(set(made))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/elasticity.json"))
    parser.add_argument("--cycles", type=int, default=8, help="kills, and so replacements")
    parser.add_argument("--width", type=int, default=1024, help="of the model's hidden layer")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)  # how the run is started
    options = parser.parse_args()
    if options.run:
        run(options.run[0], int(options.run[1]))
        return
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "data").mkdir()
        write_dataset(Path(name) / "data")
        results = measure(Path(name), cycles=options.cycles, width=options.width)
    versions = {name: version(name) for name in ("torch", "ray")}
    results["machine"] = {"cpus": os.cpu_count(), "python": platform.python_version(), **versions}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    table = Table("", "median s", "least", "most", "times", "target")
    for kind, seconds in results["stalls"].items():
        figures = [f"{value:.2f}" for value in (statistics.median(seconds), min(seconds), max(seconds))]
        table.add_row(kind, *figures, str(len(seconds)), f"{TARGETS[kind]}")
    console = Console()
    console.print(f"{results['machine']}")
    console.print(table)
    console.print(
        f"{results['steps']} steps, {results['steps_done_twice']} of them done twice; written to {options.output}"
    )


if __name__ == "__main__":
    main()
