"""Draws the picture of the README: `python benchmarks/picture.py` trains a small GPT while three workers are killed.

The run has up to three workers. At each of three steps one of them, chosen by a seed, gets SIGKILL. The picture shows
world size and training loss over time, as the ledger has them, and is written to docs/img/run.svg.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch

import elastic_ddp as ed
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry import read_ledger

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
NAME, WORKERS, STEPS = "picture", 3, 420
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
    """Runs the driver, in a process of its own: killed workers do not touch the one that draws."""
    from text import text_windows

    data, _ = text_windows(None, context=64, storage=str(folder / "runs"))
    ray.init("local", num_cpus=WORKERS + 1, include_dashboard=False, logging_level="error")
    config = {"name": NAME, "storage": str(folder / "runs"), "steps": STEPS, "log_every_steps": 1}
    config |= {"global_batch_size": 48, "micro_batch_size": 8, "min_workers": 1, "max_workers": WORKERS}
    ed.ElasticTrainer(train, data, config).fit()


def record(folder: Path, seed: int) -> list[dict[str, Any]]:
    """Runs the job, kills workers, and returns the events of its ledger, with one named `kill` for each kill."""
    chance = random.Random(seed)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")])}
    command = [sys.executable, __file__, "--drive", str(folder)]
    driver = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True)
    kills: list[dict[str, Any]] = []
    try:
        for step in KILL_AT:
            while True:
                events = [event.to_json() for event in read_ledger(Storage(str(folder / "runs" / NAME)))]
                done = max((event["step"] for event in events if event["event"] == "steps"), default=0)
                formed = [event for event in events if event["event"] == "rendezvous"]
                if done >= step and formed[-1]["world_size"] == WORKERS:
                    break
                if driver.poll() is not None:
                    raise SystemExit(f"the run ended with exit code {driver.returncode} before step {step}")
                time.sleep(0.2)
            os.kill(chance.choice(formed[-1]["members"])["pid"], signal.SIGKILL)
            kills.append({"event": "kill", "at": time.time()})
        if driver.wait() != 0:
            raise SystemExit(f"the run ended with exit code {driver.returncode}")
    finally:
        driver.kill()
        driver.wait()
    return [event.to_json() for event in read_ledger(Storage(str(folder / "runs" / NAME)))] + kills


def draw(events: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "elastic_ddp"  # the same bytes for the same run
    steps = [event for event in events if event["event"] == "steps"]
    begin = steps[0]["at"]
    end = steps[-1]["at"] - begin
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 4), height_ratios=[1, 2])
    formed = [event for event in events if event["event"] == "generation"]
    times = [event["at"] - begin for event in formed]
    above.step([*times, end], [*(event["world_size"] for event in formed), formed[-1]["world_size"]], where="post")
    above.set(ylabel="workers", ylim=(0, WORKERS + 0.5), yticks=range(WORKERS + 1))
    below.plot([event["at"] - begin for event in steps], [event["loss"] for event in steps], linewidth=1)
    below.set(xlabel="seconds", ylabel="training loss", xlim=(0, end))
    for number, kill in enumerate(event for event in events if event["event"] == "kill"):
        for axes in (above, below):
            axes.axvline(kill["at"] - begin, color="tab:red", linestyle="--", linewidth=1)
        below.annotate(
            "a worker is killed" if number == 0 else "killed",
            (kill["at"] - begin, below.get_ylim()[1]),
            xytext=(4, -12),
            textcoords="offset points",
            color="tab:red",
            fontsize=9,
        )
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="decides which workers are killed")
    parser.add_argument("--file", type=Path, default=ROOT / "docs" / "img" / "run.svg")
    parser.add_argument("--drive", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        fit(options.drive)
        return
    with tempfile.TemporaryDirectory(prefix="picture-", ignore_cleanup_errors=True) as folder:
        draw(record(Path(folder), options.seed), options.file)
    print(f"written to {options.file}")


if __name__ == "__main__":
    main()
