"""Runs the job of the picture in the README: a small GPT trains while three workers are killed.

The run has up to three workers. At each of three steps one of them, chosen by a seed, gets SIGKILL. Matplotlib draws
the picture from the ledger:

    pip install matplotlib
    python benchmarks/picture.py --output docs/img/run.svg
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import ray
import torch

import elastic_ddp as ed
from elastic_ddp.report.history import read_history
from elastic_ddp.report.marks import LOOKS
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry import read_ledger
from elastic_ddp.telemetry.events import GenerationFormed, StepsCompleted

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
NAME, WORKERS, STEPS = "three-kills", 3, 420
KILL_AT = (90, 200, 310)
"""Steps after which a worker is killed."""


def train(run: ed.Run) -> None:
    from gpt import GPT, next_byte_loss

    model = run.prepare(GPT(context=64, width=64, layers=2, heads=2))
    run.prepare(torch.optim.AdamW(model.parameters(), lr=3e-3))
    for step in run.steps():
        with step:
            for batch in step.micro_batches():
                step.backward(next_byte_loss(model, batch))
            step.optimize()
        time.sleep(0.15)  # replacements take 10 s to start; the picture should show them join


def fit(folder: Path) -> None:
    """Runs the driver, in a process of its own: killed workers do not touch the one that kills."""
    from text import text_windows

    data, _ = text_windows(None, context=64, storage=str(folder))
    ray.init("local", num_cpus=WORKERS + 1, include_dashboard=False, logging_level="error")
    config = {"name": NAME, "storage": str(folder), "steps": STEPS, "log_every_steps": 1}
    config |= {"global_batch_size": 48, "micro_batch_size": 8, "min_workers": 1, "max_workers": WORKERS}
    ed.ElasticTrainer(train, data, config).fit()


def record(folder: Path, seed: int) -> None:
    """Runs the job and kills workers."""
    chance = random.Random(seed)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")])}
    command = [sys.executable, __file__, "--drive", "--storage", str(folder)]
    driver = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        for step in KILL_AT:
            while True:
                events = read_ledger(Storage(str(folder / NAME)))
                done = max((event.step for event in events if isinstance(event, StepsCompleted)), default=0)
                formed = [event for event in events if isinstance(event, GenerationFormed)]
                if done >= step and formed[-1].world_size == WORKERS:
                    break
                if driver.poll() is not None:
                    raise SystemExit(f"the run ended with exit code {driver.returncode} before step {step}")
                time.sleep(0.2)
            os.kill(chance.choice(formed[-1].members)["pid"], signal.SIGKILL)
        if driver.wait() != 0:
            raise SystemExit(f"the run ended with exit code {driver.returncode}")
    finally:
        driver.kill()
        driver.wait()


def draw(folder: Path, file: Path) -> None:
    """Draws the workers above the training loss. A line is a failure, and a triangle a worker that joins."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    history = read_history(read_ledger(Storage(str(folder))))
    gray = "#6e7781"  # readable on a white and on a black page
    pyplot.rcParams |= dict.fromkeys(("text.color", "xtick.color", "ytick.color", "axes.labelcolor"), gray)
    pyplot.rcParams["svg.fonttype"] = "none"
    figure, (workers, loss) = pyplot.subplots(2, sharex=True, figsize=(8, 4.4), height_ratios=(1, 3), layout="tight")
    at, sizes = zip(*history.sizes, strict=True)
    workers.fill_between(at, sizes, step="post", alpha=0.15)
    workers.step(at, sizes, where="post")
    loss.plot([point.at for point in history.points], [point.event.loss for point in history.points])
    for mark in history.marks:
        look = LOOKS[mark.kind]
        if mark.kind == "joined":
            workers.plot(mark.at, mark.world_size, "^", color=look.color)
        else:
            for axis in (workers, loss):
                axis.axvline(mark.at, color=look.color, linestyle=":")
        workers.annotate(mark.kind, (mark.at, 1.05 * max(sizes)), color=look.color, annotation_clip=False)
    workers.set_ylabel("workers")
    loss.set(ylabel="training loss", xlabel="time in the run (s)", xlim=(history.points[0].at, history.seconds))
    for axis in (workers, loss):
        axis.grid(axis="y", alpha=0.3)
        axis.spines[:].set_visible(False)
    figure.savefig(file, transparent=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="decides which workers are killed")
    parser.add_argument("--storage", type=Path, default=Path("runs"), help="folder of the run, which must be new in it")
    parser.add_argument("--output", type=Path, default=Path("docs/img/run.svg"), help="the picture")
    parser.add_argument("--drive", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    storage = options.storage.resolve()
    if options.drive:
        fit(storage)
    elif (storage / NAME).exists():
        parser.error(f"{storage / NAME} exists. Remove it, or use another --storage.")
    else:
        record(storage, options.seed)
        draw(storage / NAME, options.output)


if __name__ == "__main__":
    main()
