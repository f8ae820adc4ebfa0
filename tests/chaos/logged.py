"""A driver whose run has all loggers, loses two workers, and is killed once: `logged.py FOLDER NAME`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

import elastic_ddp as ed
from tests.integration import jobs

EVALUATE_EVERY = 10
KILLED_AT = 16
"""Steps done when rank 0 is killed."""


class JsonLines:
    """A logger that a user could have written."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def start(self, run: ed.LoggedRun) -> int | None:
        return max((step for step, _ in self.read()), default=None)

    def read(self) -> list[tuple[int, dict[str, float]]]:
        lines = self._file.read_text().splitlines(keepends=True) if self._file.exists() else []
        return [(record["step"], record["values"]) for record in map(json.loads, lines)]

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps({"step": step, "values": values}) + "\n")

    def finish(self, status: str) -> None:
        self._file.with_suffix(".status").write_text(status)


def main() -> None:
    import ray

    folder, name = Path(sys.argv[1]), sys.argv[2]
    held_out, markers, driver = str(folder / "held-out"), folder / name, os.getpid()
    markers.mkdir(exist_ok=True)
    faults = [
        jobs.kill_once(str(markers / "first"), rank=1, step=8),
        jobs.kill_once(str(markers / "second"), rank=0, step=KILLED_AT),
        jobs.kill_once(str(markers / "driver"), rank=0, step=27, pid=driver),
    ]

    def train(run: ed.Run) -> None:
        model = run.prepare(jobs.Model())
        run.prepare(torch.optim.AdamW(model.parameters(), lr=0.02))
        for step in run.steps():
            if step.index and step.index % EVALUATE_EVERY == 0:
                run.evaluate(jobs.loss_fn, held_out)
            with step:
                for batch in step.micro_batches():
                    loss = jobs.loss_fn(model, batch)
                    step.log(twice=2 * loss)
                    step.backward(loss)
                    for fault in faults:
                        fault(run, step.index)
                step.optimize()

    ray.init("local", num_cpus=4, include_dashboard=False, logging_level="WARNING")
    loggers = ["tensorboard", "wandb", "mlflow"]
    changes = {"min_workers": 1, "resize_interval_s": 1.0, "loggers": loggers}
    config = jobs.settings(str(folder / "runs"), name, 2, **changes)
    own = JsonLines(folder / f"{name}.jsonl")
    print(ed.ElasticTrainer(train, str(folder / "data"), config, loggers=[own]).fit())


if __name__ == "__main__":
    main()
