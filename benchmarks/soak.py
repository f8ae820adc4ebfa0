"""Trains for 20 minutes under random faults: `python benchmarks/soak.py`.

Every 20 s on average one event happens, drawn from a seed: a worker gets SIGKILL, SIGSEGV, SIGTERM or SIGSTOP, the run
is resized, the rendezvous process is killed, or a node dies or is drained and another one replaces it. The benchmark
prints the run's goodput from its ledger with the target of 95 %. The time that the ledger accounts for may differ by
1 % from the wall time. Hashes of weights and samples must equal those of an undisturbed run on one worker.
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
"""Minimum duration of a step in seconds, so that the model does not matter."""
ROWS, WIDTH = 131_072, 256
"""128 MiB: more than pipelines prefetch, so that they are active when membership changes."""
EVENTS = {
    "kill": 4,
    "segfault": 2,
    "sigterm": 3,
    "freeze": 1,
    "resize": 4,
    "kill rendezvous": 1,
    "kill node": 2,
    "drain node": 2,
}
"""Events and their weights."""
SIGNALS = {
    "kill": signal.SIGKILL,
    "segfault": signal.SIGSEGV,
    "sigterm": signal.SIGTERM,
    "freeze": signal.SIGSTOP,
}
"""Signals sent to a worker."""
TARGET = 0.95
TOLERANCE = 0.01
"""Share of the wall time by which the parts of the goodput may differ from it."""

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


class FaultInjector:
    """Injects random events. Runs in the main thread, as Ray starts nodes only there."""

    def __init__(self, name: str, nodes: Nodes, seed: int, every_s: float) -> None:
        self.counts: Counter[str] = Counter()
        self._nodes = nodes
        self._run_name, self._random, self._every_s = name, random.Random(seed), every_s

    def inject_until(self, run: Future[Any]) -> None:
        while wait([run], timeout=self._random.uniform(0.5, 1.5) * self._every_s).not_done:
            with suppress(ed.ElasticDDPError, ProcessLookupError):
                self.counts[self._inject()] += 1

    def _inject(self) -> str:
        run = ed.get_run(self._run_name)
        status = run.status()
        pids = [member["pid"] for member in status["members"]]
        others = [member for member in status["members"] if member["node_id"] != self._nodes.newest]
        # The last worker that holds the state survives.
        is_possible = {"kill node": bool(others), "drain node": True, "resize": True, "kill rendezvous": True}
        possible = {kind: weight for kind, weight in EVENTS.items() if is_possible.get(kind, len(pids) > 1)}
        (kind,) = self._random.choices(list(possible), list(possible.values()))
        if kind == "resize":
            run.resize(self._random.randint(1, 3))
        elif kind == "kill rendezvous":
            os.kill(status["pid"], signal.SIGKILL)
        elif kind == "kill node":
            for pid in self._nodes.pop_newest():
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
        injector = FaultInjector("faults", nodes, options.seed, options.every_s)
        with ThreadPoolExecutor(1) as thread:
            run = thread.submit(timed, lambda: fit(folder, "faults", steps, STEP_S, (1, 3)))
            injector.inject_until(run)
        disturbed, wall_s = run.result()
        calm = fit(folder, "calm", steps, 0.0, (1, 1))
        report(options.seed, injector.counts, disturbed, calm, wall_s)
    ray.shutdown()
    nodes.shut_down()
    same = all(disturbed.summary[key] == calm.summary[key] for key in ("weights_sha256", "samples_sha256", "samples"))
    is_complete = abs(sum(parts_of(disturbed).values()) / wall_s - 1) <= TOLERANCE
    raise SystemExit(0 if same and is_complete and disturbed.summary["goodput"]["goodput"] >= TARGET else 1)


def timed(run: Callable[[], ed.RunResult]) -> tuple[ed.RunResult, float]:
    """Returns the result of a run and its wall time in seconds."""
    began = time.monotonic()
    return run(), time.monotonic() - began


def parts_of(run: ed.RunResult) -> dict[str, float]:
    """Returns the seconds of each part of the goodput."""
    return {part: seconds for part, seconds in run.summary["goodput"].items() if part not in ("goodput", "total")}


def report(seed: int, counts: Counter[str], disturbed: ed.RunResult, calm: ed.RunResult, wall_s: float) -> None:
    summary, goodput = disturbed.summary, disturbed.summary["goodput"]
    table = Table(title=f"soak, seed {seed}", box=None)
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("steps", f"{disturbed.steps:,}")
    table.add_row("events", ", ".join(f"{count} x {kind}" for kind, count in sorted(counts.items())))
    table.add_row("generations", str(len(summary["generations"])))
    table.add_row("goodput", f"{100 * goodput['goodput']:.2f} %  (target {100 * TARGET:g} %)")
    for part, seconds in parts_of(disturbed).items():
        table.add_row(f"  {part}", f"{seconds:.1f} s")
    accounted_s = sum(parts_of(disturbed).values())
    difference = accounted_s / wall_s - 1
    table.add_row("  all parts", f"{accounted_s:.1f} s  ({100 * difference:+.2f} % of {wall_s:.1f} s wall time)")
    for key in ("weights_sha256", "samples_sha256"):
        table.add_row(
            key, "same as undisturbed" if disturbed.summary[key] == calm.summary[key] else "DIFFERENT FROM UNDISTURBED"
        )
    console.print(table)
    results = Path(__file__).with_name("results")
    results.mkdir(exist_ok=True)
    (results / "soak.json").write_text(
        json.dumps({"seed": seed, "counts": counts, "goodput": goodput, "wall_s": wall_s}, indent=1)
    )


if __name__ == "__main__":
    main()
