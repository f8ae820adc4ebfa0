"""Twenty minutes of trouble: `python benchmarks/soak.py` trains while workers are killed, frozen, sent away and added.

Every twenty seconds on average something happens, drawn from a seed: a worker is killed (SIGKILL), crashes (SIGSEGV),
gets SIGTERM, falls silent (SIGSTOP), the run is made smaller or larger, the rendezvous' process is killed, or a node
dies with all its processes or is drained by Ray, and another is started in its place. The goodput of the run, from its
ledger, is printed beside the target of 95 %, and the time that the ledger accounts for beside that of a clock outside,
from which it may differ by 1 %. Weights and samples are compared, by hash, with those of a calm run of as many steps on
one worker.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
from peers.ray_cluster import Nodes
from rich.console import Console
from rich.table import Table

import elastic_ddp as ed

STEP_S = 0.05
"""Every step takes at least so long: what is measured is not the model."""
ROWS, WIDTH = 131_072, 256
"""128 MiB: more than pipelines hold ready, so that they are at work when membership changes."""
EVENTS = {
    "kill": 4,
    "segfault": 2,
    "sigterm": 3,
    "freeze": 1,
    "resize": 4,
    "kill rendezvous": 1,
    "lose node": 2,
    "drain node": 2,
}
"""What happens, and how often."""
SIGNALS = {
    "kill": signal.SIGKILL,
    "segfault": signal.SIGSEGV,
    "sigterm": signal.SIGTERM,
    "freeze": signal.SIGSTOP,
}
"""What is sent to a worker."""
TARGET = 0.95
MAY_MISS = 0.01
"""Of the wall time, by which the parts of the goodput may miss it."""

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


class Trouble:
    """Makes it. In the main thread, where alone Ray lets nodes be started."""

    def __init__(self, name: str, nodes: Nodes, seed: int, every_s: float) -> None:
        self.made: Counter[str] = Counter()
        self._nodes = nodes
        self._run_name, self._random, self._every_s = name, random.Random(seed), every_s

    def make_until(self, run: Future[Any]) -> None:
        while wait([run], timeout=self._random.uniform(0.5, 1.5) * self._every_s).not_done:
            with suppress(ed.ElasticDDPError, ProcessLookupError):
                self.made[self._make()] += 1

    def _make(self) -> str:
        run = ed.get_run(self._run_name)
        status = run.status()
        pids = [member["pid"] for member in status["members"]]
        stay = [member for member in status["members"] if member["node_id"] != self._nodes.newest]
        # The last holder of the state is not what this is about.
        can_be = {"lose node": bool(stay), "drain node": True, "resize": True, "kill rendezvous": True}
        possible = {kind: often for kind, often in EVENTS.items() if can_be.get(kind, len(pids) > 1)}
        (kind,) = self._random.choices(list(possible), list(possible.values()))
        if kind == "resize":
            run.resize(self._random.randint(1, 3))
        elif kind == "kill rendezvous":
            os.kill(status["pid"], signal.SIGKILL)
        elif kind == "lose node":
            for pid in self._nodes.forget_newest():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._nodes.add()
        elif kind == "drain node":
            self._nodes.drain_newest()
            self._nodes.add()
        else:
            os.kill(self._random.choice(pids), SIGNALS[kind])
        return kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--every-s", type=float, default=20.0, help="seconds between two events, on average")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    nodes = Nodes(3)
    ray.init(nodes.address, logging_level="WARNING")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "data").mkdir()
        write_rows(folder / "data")
        steps = round(options.minutes * 60 / STEP_S)
        trouble = Trouble("stormy", nodes, options.seed, options.every_s)
        with ThreadPoolExecutor(1) as thread:
            run = thread.submit(timed, lambda: fit(folder, "stormy", steps, STEP_S, (1, 3)))
            trouble.make_until(run)
        stormy, outside_s = run.result()
        calm = fit(folder, "calm", steps, 0.0, (1, 1))
        report(options.seed, trouble.made, stormy, calm, outside_s)
    ray.shutdown()
    nodes.shut_down()
    same = all(stormy.summary[key] == calm.summary[key] for key in ("weights_sha256", "samples_sha256", "samples"))
    is_whole = abs(sum(parts_of(stormy).values()) / outside_s - 1) <= MAY_MISS
    raise SystemExit(0 if same and is_whole and stormy.summary["goodput"]["goodput"] >= TARGET else 1)


def timed(run: Callable[[], ed.RunResult]) -> tuple[ed.RunResult, float]:
    """Its result, and for how many seconds it ran by a clock outside of it."""
    began = time.monotonic()
    return run(), time.monotonic() - began


def parts_of(run: ed.RunResult) -> dict[str, float]:
    """Seconds of each part of its goodput."""
    return {part: each for part, each in run.summary["goodput"].items() if part not in ("goodput", "total")}


def report(seed: int, made: Counter[str], stormy: ed.RunResult, calm: ed.RunResult, outside_s: float) -> None:
    summary, goodput = stormy.summary, stormy.summary["goodput"]
    table = Table(title=f"soak, seed {seed}", box=None)
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("steps", f"{stormy.steps:,}")
    table.add_row("events", ", ".join(f"{count} x {kind}" for kind, count in sorted(made.items())))
    table.add_row("generations", str(len(summary["generations"])))
    table.add_row("goodput", f"{100 * goodput['goodput']:.2f} %  (target {100 * TARGET:g} %)")
    for part, seconds in parts_of(stormy).items():
        table.add_row(f"  {part}", f"{seconds:.1f} s")
    accounted_s = sum(parts_of(stormy).values())
    missed = accounted_s / outside_s - 1
    table.add_row("  all parts", f"{accounted_s:.1f} s  ({100 * missed:+.2f} % of {outside_s:.1f} s outside)")
    for key in ("weights_sha256", "samples_sha256"):
        table.add_row(key, "as the calm run's" if stormy.summary[key] == calm.summary[key] else "NOT THE CALM RUN'S")
    console.print(table)
    results = Path(__file__).with_name("results")
    results.mkdir(exist_ok=True)
    (results / "soak.json").write_text(
        json.dumps({"seed": seed, "made": made, "goodput": goodput, "outside_s": outside_s}, indent=1)
    )


if __name__ == "__main__":
    main()
