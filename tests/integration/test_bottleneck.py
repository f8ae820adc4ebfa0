"""`status` names what bounds a live run."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import elastic_ddp as ed
from elastic_ddp.driver.run_handle import get_run
from elastic_ddp.errors import ConfigError
from tests.integration import jobs
from tests.unit.cli.test_cli import invoke

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.usefixtures("local_ray")]

WITHIN_S = 120.0


def slow_transform(rows: dict[str, np.ndarray], random: np.random.Generator) -> dict[str, np.ndarray]:
    time.sleep(0.005 * len(rows["y"]))
    return rows


def train(run: ed.Run) -> None:
    model = run.prepare(torch.nn.Linear(jobs.FEATURES, 1))
    run.prepare(torch.optim.SGD(model.parameters(), lr=0.001))
    for step in run.steps():
        with step:
            for batch in step.micro_batches():
                time.sleep(0.01)
                step.backward(model(batch["x"]).square().mean())
            step.optimize()


def test_status_names_a_slow_transform(folder: Path) -> None:
    settings = {"steps": 100_000, "clip_grad_norm": None, "log_every_steps": 10}
    config = jobs.settings(str(folder / "runs"), "late", 2, **settings)
    trainer = ed.ElasticTrainer(train, str(folder / "data"), config, transform=slow_transform)
    found, end = None, time.monotonic() + WITHIN_S
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(trainer.fit)
        try:
            while found != "data":
                assert not result.done(), result.result()
                assert time.monotonic() < end, get_run("late").status()
                time.sleep(0.2)
                try:
                    found = (get_run("late").status()["bottleneck"] or {}).get("kind")
                except ConfigError:  # it has not started
                    continue
            text = " ".join(invoke("status", "late").output.split())
        finally:
            get_run("late").stop()
            result.result()
    assert "bound by data: " in text and " for data " in text and "data.concurrency" in text
