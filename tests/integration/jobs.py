"""The job of the integration tests: small, with all features whose result could depend on the world size."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import torch

import elastic_ddp as ed
from tests.inside_run import (
    checkpointer_of,
    is_ready_to_change,
    rendezvous_client_of,
    signals_of,
    wait_for_save_in_generation,
)

FEATURES, CLASSES, ROWS = 12, 4, 1003
STEPS = 44


def write_rows(
    folder: str, *, rows: int = ROWS, seed: int = 0, filesystem: pyarrow.fs.FileSystem | None = None
) -> None:
    """Writes three Parquet files with row groups of different sizes."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, FEATURES)).astype(np.float32)
    y = (x @ random.normal(size=(FEATURES, CLASSES))).argmax(1)
    bounds = [0, rows // 2, rows // 2 + 100, rows]
    for number, (low, high) in enumerate(pairwise(bounds)):
        table = pa.table(
            {
                "x": pa.FixedSizeListArray.from_arrays(pa.array(x[low:high].reshape(-1)), FEATURES),
                "y": pa.array(y[low:high]),
            }
        )
        pq.write_table(table, f"{folder}/part-{number}.parquet", row_group_size=37 + number, filesystem=filesystem)


class Model(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            torch.nn.Linear(FEATURES, 32),
            torch.nn.BatchNorm1d(32),
            torch.nn.Tanh(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(32, CLASSES),
        )


def loss_fn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def jitter(rows: dict[str, np.ndarray], random: np.random.Generator) -> dict[str, np.ndarray]:
    """A random transform."""
    return {**rows, "x": rows["x"] + random.normal(scale=0.01, size=rows["x"].shape).astype(np.float32)}


class Counter:
    """User state that counts the steps of the run."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def get_ready(run: ed.Run, at: int) -> None:
    """Waits until this worker can change its rank: steps are so short that the run could end before."""
    while signals_of(run).reconfigure and signals_of(run).failed_generation is None:
        if is_ready_to_change(run, at + 1):
            return
        time.sleep(0.01)


def finish_saving(run: ed.Run) -> None:
    """Waits for a save in progress: steps are so short that the next commit would be skipped."""
    wait_for_save_in_generation(run)


def make_train(
    fault: Callable[[ed.Run, int], None] | None = None,
    held_out: str | None = None,
    counter: Counter | None = None,
    *,
    waits_for_saves: bool = True,
) -> Callable[..., None]:
    """Returns a training function that calls `fault(run, step)` in every worker in the middle of each step."""

    def train(run: ed.Run) -> None:
        model = run.prepare(Model())
        optimizer = run.prepare(torch.optim.AdamW(model.parameters(), lr=0.02))
        run.prepare(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100))
        counted = counter or Counter()
        run.register("counter", counted)
        for step in run.steps():
            with step:
                for batch in step.micro_batches():
                    loss = loss_fn(model, batch)
                    step.log(twice=2 * loss)
                    get_ready(run, step.index)
                    if waits_for_saves:
                        finish_saving(run)
                    step.backward(loss)
                    if fault is not None:
                        fault(run, step.index)
                step.optimize()
                counted.steps += 1
                assert counted.steps == run.position.step
        if held_out is not None:
            run.evaluate(loss_fn, held_out)

    return train


def kill_once(marker: str, *, rank: int, step: int, pid: int | None = None) -> Callable[..., None]:
    """Returns a fault: in `step`, the worker of `rank` kills itself or `pid`, once. `marker` exists afterwards."""

    def fault(run: ed.Run, at: int) -> None:
        if run.rank == rank and at == step and not Path(marker).exists():
            Path(marker).touch()
            os.kill(os.getpid() if pid is None else pid, signal.SIGKILL)

    return fault


def hold(marker: str, *, step: int, world_size: int = 1) -> Callable[..., None]:
    """Returns a fault: rank 0 waits in `step` until `marker` exists.

    With fewer than `world_size` workers, it ends the step to let others join, and waits in the next one.
    """

    def fault(run: ed.Run, at: int) -> None:
        while run.rank == 0 and at >= step and not Path(marker).exists():
            if run.world_size < world_size and signals_of(run).reconfigure:
                return
            time.sleep(0.05)

    return fault


def hold_for_others(marker: str, *, step: int) -> Callable[..., None]:
    """Returns a fault: rank 0 waits in `step`, once, until others wait to join. `marker` exists from then on."""

    def fault(run: ed.Run, at: int) -> None:
        if run.rank == 0 and at == step and not Path(marker).exists():
            Path(marker).touch()
            while not signals_of(run).reconfigure:
                time.sleep(0.01)

    return fault


def kill_and_replace(marker: Path, *, rank: int, step: int) -> Callable[..., None]:
    """Returns a fault: a worker is killed in `step`, and the survivor waits for a replacement in `step + 2`."""
    kill = kill_once(str(marker), rank=rank, step=step)

    def fault(run: ed.Run, at: int) -> None:
        kill(run, at)
        if marker.exists() and run.world_size == 1 and at == step + 2:
            hold_for_others(str(marker.with_suffix(".held")), step=at)(run, at)

    return fault


def hold_until_asked(marker: str, *, step: int) -> Callable[..., None]:
    """Returns a fault: rank 0 waits in each step from `step` on until `marker` exists or a request arrives."""

    def fault(run: ed.Run, at: int) -> None:
        client = rendezvous_client_of(run)
        while run.rank == 0 and at >= step and not Path(marker).exists():
            if client.signals.reconfigure or client.signals.stop or checkpointer_of(run).schedule.is_requested:
                return
            time.sleep(0.01)

    return fault


def settings(storage: str, name: str, workers: int, **changes: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "name": name,
        "storage": storage,
        "steps": STEPS,
        "global_batch_size": 48,
        "micro_batch_size": 8,
        "min_workers": workers,
        "max_workers": workers,
        "clip_grad_norm": 1.0,
        "log_every_steps": 1,
        "heartbeat_timeout_s": 30.0,  # a busy machine must not look like a failure
        "checkpoint": {"every_steps": 10},
    }
    return {**defaults, **changes}


@contextmanager
def driver(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Runs `main` in another process, which is killed at the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.jobs", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
        env={**os.environ, **environment},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def drive(*arguments: str, timeout_s: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `main` in another process, and waits for its end."""
    with driver(*arguments, **environment) as process:
        output, errors = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def summary(folder: Path, name: str) -> Mapping[str, Any]:
    """Returns the summary of a run in the storage `runs` of a folder."""
    facts: Mapping[str, Any] = json.loads((folder / "runs" / name / "summary.json").read_text())
    return facts


def same_bits(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the runs of two summaries have the same weights and samples."""
    return all(one[key] == other[key] for key in ("weights_sha256", "samples_sha256", "samples"))


def main() -> None:
    """Drives the job: `jobs.py DATA STORAGE NAME MIN:MAX [ACTION MARKER STEP [WORLD_SIZE]]`.

    ACTION is what happens in STEP: `kill-driver` kills this process, `wait` waits until MARKER exists, `grow` until
    others wait to join, `ask` until a request arrives. With `evaluate FOLDER` the run ends with an evaluation of
    FOLDER. The variables LOGGERS and STANDBY_WORKERS are settings.
    """
    import ray

    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of scripts, such as in CI, ignore it
    data, storage, name, workers, *how = sys.argv[1:]
    fault = held_out = None
    if how and how[0] == "evaluate":
        held_out = how[1]
    elif how and how[0] == "wait":
        fault = hold(how[1], step=int(how[2]), world_size=int(how[3]) if how[3:] else 1)
    elif how and how[0] == "grow":
        fault = hold_for_others(how[1], step=int(how[2]))
    elif how and how[0] == "ask":
        fault = hold_until_asked(how[1], step=int(how[2]))
    elif how:
        fault = kill_once(how[1], rank=0, step=int(how[2]), pid=os.getpid())
    if "RAY_ADDRESS" in os.environ:
        ray.init(logging_level="WARNING")
    else:
        ray.init("local", num_cpus=4, include_dashboard=False, logging_level="WARNING")
    low, _, high = workers.partition(":")
    loggers = os.environ.get("LOGGERS", "").split()
    standbys = int(os.environ.get("STANDBY_WORKERS", "0"))
    changes = {"min_workers": int(low), "resize_interval_s": 1.0, "loggers": loggers, "standby_workers": standbys}
    config = settings(storage, name, int(high or low), **changes)
    print(ed.ElasticTrainer(make_train(fault, held_out), data, config, transform=jitter).fit())


if __name__ == "__main__":
    main()
