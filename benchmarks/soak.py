"""Twenty minutes of trouble: `python benchmarks/soak.py` trains while workers are killed, frozen, sent away and added.

Every twenty seconds on average something happens, drawn from a seed: a worker is killed (SIGKILL), gets SIGTERM, falls
silent (SIGSTOP), the run is made smaller or larger, or the rendezvous' process is killed. The goodput of the run, from
its ledger, is printed beside the target of 95 %, and its weights and samples are compared, by hash, with those of a
calm run of as many steps on one worker.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
from rich.console import Console
from rich.table import Table

import elastic_ddp as ed

STEP_S = 0.05
"""Every step takes at least so long: what is measured is not the model."""
ROWS, WIDTH = 131_072, 256
"""128 MiB: more than pipelines hold ready, so that they are at work when membership changes."""
EVENTS = {"kill": 5, "sigterm": 3, "freeze": 1, "resize": 4, "kill rendezvous": 1}
"""What happens, and how often."""
SIGNALS = {"kill": signal.SIGKILL, "sigterm": signal.SIGTERM, "freeze": signal.SIGSTOP}
"""What is sent to a worker."""
TARGET = 0.95

console = Console()


def write_rows(folder: Path) -> None:
    random_rows = np.random.default_rng(0)
    x = random_rows.standard_normal((ROWS, WIDTH)).astype(np.float32)
    columns = {"x": pa.FixedSizeListArray.from_arrays(x.ravel(), WIDTH), "y": x.sum(axis=1)}
    pq.write_table(pa.table(columns), folder / "rows.parquet", row_group_size=1024)


def make_train(step_s: float):  # type: ignore[no-untyped-def]
    def train(run: ed.Run) -> None:
        model = run.prepare(
            torch.nn.Sequential(
                torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(WIDTH, 1)
            )
        )
        run.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3))
        for step in run.steps():
            end = time.monotonic() + step_s
            with step:
                for batch in step.micro_batches():
                    step.backward(torch.nn.functional.mse_loss(model(batch["x"]).squeeze(-1), batch["y"]))
                time.sleep(max(0.0, end - time.monotonic()))
                step.optimize()

    return train


def fit(folder: Path, name: str, steps: int, step_s: float, workers: tuple[int, int]) -> ed.RunResult:
    config = {
        "name": name,
        "storage": str(folder / "runs"),
        "steps": steps,
        "global_batch_size": 48,
        "micro_batch_size": 8,
        "min_workers": workers[0],
        "max_workers": workers[1],
        "heartbeat_timeout_s": 2.0,
        "drain_deadline_s": 10.0,
        "max_restarts": -1,
        "log_every_steps": 20,
        "checkpoint": {"every_seconds": 30.0},
    }
    return ed.ElasticTrainer(make_train(step_s), str(folder / "data"), config).fit()


class Trouble(threading.Thread):
    """Makes it, until `over` is set."""

    def __init__(self, name: str, seed: int, every_s: float) -> None:
        super().__init__(name="trouble", daemon=True)
        self.over = threading.Event()
        self.made: Counter[str] = Counter()
        self._run_name, self._random, self._every_s = name, random.Random(seed), every_s

    def run(self) -> None:
        while not self.over.wait(self._random.uniform(0.5, 1.5) * self._every_s):
            with suppress(ed.ElasticDDPError, ProcessLookupError):
                self.made[self._make()] += 1

    def _make(self) -> str:
        run = ed.get_run(self._run_name)
        status = run.status()
        pids = [member["pid"] for member in status["members"]]
        # The last holder of the state is not what this is about.
        possible = {kind: often for kind, often in EVENTS.items() if kind not in SIGNALS or len(pids) > 1}
        (kind,) = self._random.choices(list(possible), list(possible.values()))
        if kind == "resize":
            run.resize(self._random.randint(1, 3))
        elif kind == "kill rendezvous":
            os.kill(status["pid"], signal.SIGKILL)
        else:
            os.kill(self._random.choice(pids), SIGNALS[kind])
        return kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--every-s", type=float, default=20.0, help="seconds between two events, on average")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    ray.init("local", num_cpus=3, include_dashboard=False, logging_level="WARNING")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "data").mkdir()
        write_rows(folder / "data")
        steps = round(options.minutes * 60 / STEP_S)
        trouble = Trouble("stormy", options.seed, options.every_s)
        trouble.start()
        stormy = fit(folder, "stormy", steps, STEP_S, (1, 3))
        trouble.over.set()
        trouble.join()
        calm = fit(folder, "calm", steps, 0.0, (1, 1))
        report(options.seed, trouble.made, stormy, calm)
    ray.shutdown()
    same = all(stormy.summary[key] == calm.summary[key] for key in ("weights_sha256", "samples_sha256", "samples"))
    raise SystemExit(0 if same and stormy.summary["goodput"]["goodput"] >= TARGET else 1)


def report(seed: int, made: Counter[str], stormy: ed.RunResult, calm: ed.RunResult) -> None:
    summary, goodput = stormy.summary, stormy.summary["goodput"]
    table = Table(title=f"soak, seed {seed}", box=None)
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("steps", f"{stormy.steps:,}")
    table.add_row("events", ", ".join(f"{count} x {kind}" for kind, count in sorted(made.items())))
    table.add_row("generations", str(len(summary["generations"])))
    table.add_row("goodput", f"{100 * goodput['goodput']:.2f} %  (target {100 * TARGET:g} %)")
    for part, seconds in goodput.items():
        if part not in ("goodput", "useful"):
            table.add_row(f"  {part}", f"{seconds:.1f} s")
    for key in ("weights_sha256", "samples_sha256"):
        table.add_row(key, "as the calm run's" if stormy.summary[key] == calm.summary[key] else "NOT THE CALM RUN'S")
    console.print(table)
    results = Path(__file__).with_name("results")
    results.mkdir(exist_ok=True)
    (results / "soak.json").write_text(json.dumps({"seed": seed, "made": made, "goodput": goodput}, indent=1))


if __name__ == "__main__":
    main()
