"""Kills a worker and then the driver of a run: `python examples/survive.py`, about a minute on two cores.

Trains the same small job twice: without failures, and with a killed worker and a killed driver, after which it resumes
on another number of workers. Both runs have the same weights and the same samples.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
from rich.console import Console

import elastic_ddp as ed
from elastic_ddp.cli.run_summary import render
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry import read_ledger

ROWS, FEATURES = 20_003, 32


def train(run: ed.Run) -> None:
    layers = [torch.nn.Linear(FEATURES, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 4)]
    model = run.prepare(torch.nn.Sequential(*layers))
    run.prepare(torch.optim.AdamW(model.parameters(), lr=3e-3))
    for step in run.steps():
        with step:
            for batch in step.micro_batches():
                step.backward(torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"]))
            step.optimize()
        time.sleep(0.01)  # leaves time to kill a worker


def fit(folder: Path, name: str, workers: int) -> None:
    ray.init("local", num_cpus=4, include_dashboard=False, logging_level="error")
    config = {"name": name, "storage": str(folder / "runs"), "steps": 400, "checkpoint": {"every_steps": 25}}
    config |= {"global_batch_size": 48, "micro_batch_size": 8, "min_workers": workers, "max_workers": workers}
    ed.ElasticTrainer(train, str(folder / "data"), config).fit()


@contextmanager
def driver(folder: Path, name: str, workers: int) -> Iterator[subprocess.Popen[bytes]]:
    """Runs this file as the driver of a run in another process, which is killed at the end of the block."""
    process = subprocess.Popen([sys.executable, __file__, str(folder), name, str(workers)], start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for_step(folder: Path, step: int) -> list[Any]:
    """Waits until the run with failures has done `step` steps. Returns the events of its ledger."""
    while True:
        events = read_ledger(Storage(str(folder / "runs" / "with-failures")))
        if any(event.event == "steps_completed" and event.step >= step for event in events):
            return events
        time.sleep(0.1)


def main(folder: Path) -> None:
    (folder / "data").mkdir()
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, FEATURES)).astype(np.float32)
    y = (x @ random.normal(size=(FEATURES, 4))).argmax(1)
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), FEATURES), "y": y})
    pq.write_table(table, folder / "data" / "rows.parquet", row_group_size=500)

    with driver(folder, "without-failures", 1) as process:
        assert process.wait() == 0
    with driver(folder, "with-failures", 2):
        members = [event for event in wait_for_step(folder, 130) if event.event == "generation_formed"][-1].members
        os.kill(members[0]["pid"], signal.SIGKILL)
        wait_for_step(folder, 260)
    with driver(folder, "with-failures", 3) as process:
        assert process.wait() == 0

    names = ("without-failures", "with-failures")
    runs = [json.loads((folder / "runs" / name / "summary.json").read_text()) for name in names]
    Console().print(*map(render, runs), sep="\n\n")
    for key in ("weights_sha256", "samples_sha256"):
        assert runs[0][key] == runs[1][key], key
    print("\nBoth runs have the same weights and the same samples, bit for bit.")


if __name__ == "__main__":
    if len(sys.argv) == 4:
        fit(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1:]:
        print(__doc__)
    else:
        with tempfile.TemporaryDirectory(prefix="survive-", ignore_cleanup_errors=True) as temporary:
            main(Path(temporary))
