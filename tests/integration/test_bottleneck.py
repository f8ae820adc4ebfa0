"""`status` names what bounds a live run."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import elastic_ddp as ed
from elastic_ddp.cli.main import app
from elastic_ddp.driver.run_handle import get_run
from elastic_ddp.errors import ConfigError
from tests.integration import jobs

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.usefixtures("local_ray")]

FORWARD_S = 0.01
"""How long the forward of a micro-batch takes at least, in the runs that communication does not bound."""
WITHIN_S = 120.0


def train_with(forward_s: Callable[[ed.Run], float], numel: int = 1) -> Callable[[ed.Run], None]:
    """A training function whose forwards take a while. `numel`: parameters that need no computation to speak of."""

    def train(run: ed.Run) -> None:
        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(jobs.FEATURES, 1)
                self.bias = torch.nn.Parameter(torch.zeros(numel))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.layer(x) + self.bias.mean()

        model = run.prepare(Model())
        run.prepare(torch.optim.SGD(model.parameters(), lr=0.001))
        for step in run.steps():
            with step:
                for batch in step.micro_batches():
                    time.sleep(forward_s(run))
                    step.backward(model(batch["x"]).square().mean())
                step.optimize()

    return train


def slow_transform(rows: dict[str, np.ndarray], random: np.random.Generator) -> dict[str, np.ndarray]:
    time.sleep(0.005 * len(rows["y"]))
    return rows


def verdict_on(folder: Path, train: Callable[[ed.Run], None], expected: str, **options: Any) -> str:
    """Returns what `status` prints of a run of two workers, as soon as it has the expected verdict."""
    name = expected.replace(" ", "-")
    settings = {"steps": 100_000, "clip_grad_norm": None, "log_every_steps": 10, **options.pop("settings", {})}
    config = jobs.settings(str(folder / "runs"), name, 2, **settings)
    trainer = ed.ElasticTrainer(train, str(folder / "data"), config, **options)
    found, end = None, time.monotonic() + WITHIN_S
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(trainer.fit)
        try:
            while found != expected:
                assert not result.done(), result.result()
                assert time.monotonic() < end, get_run(name).status()
                time.sleep(0.2)
                try:
                    found = (get_run(name).status()["bottleneck"] or {}).get("kind")
                except ConfigError:  # it has not started
                    continue
            shown = CliRunner().invoke(app, ["status", name])
            assert shown.exit_code == 0, shown.exception
            return " ".join(shown.output.split())
        finally:
            get_run(name).stop()
            result.result()


def test_status_names_a_slow_rank(folder: Path) -> None:
    train = train_with(lambda run: FORWARD_S * (2 if run.rank == 1 else 1))
    text = verdict_on(folder, train, "slow rank")
    assert "bound by slow rank: rank 1 is slow: the work takes" in text and "most of all in forward" in text


def test_status_names_a_slow_transform(folder: Path) -> None:
    text = verdict_on(folder, train_with(lambda run: FORWARD_S), "data", transform=slow_transform)
    assert "bound by data: " in text and " for data " in text and "data.concurrency" in text


def test_status_names_communication(folder: Path) -> None:
    train = train_with(lambda run: 0.0, numel=4_000_000)
    text = verdict_on(folder, train, "communication", settings={"micro_batch_size": 24})
    assert "bound by communication" in text and "ddp.bucket_cap_mb" in text
