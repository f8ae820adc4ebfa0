"""Runs on Ray that read a map-style data set with a collate function, drop short batches and weight micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from torch.utils.data import Dataset

import elastic_ddp as ed
from elastic_ddp.errors import DataError
from tests.integration import jobs

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

ROWS, STEPS = 207, 24


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    ray.init("local", num_cpus=4, include_dashboard=False, logging_level="WARNING")
    yield
    ray.shutdown()


class Augmented(Dataset[dict[str, Any]]):
    """Random rows of different lengths."""

    def __init__(self) -> None:
        self.x = np.random.default_rng(0).normal(size=(ROWS, jobs.FEATURES)).astype(np.float32)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, Any]:
        noise = np.random.normal(scale=0.01, size=jobs.FEATURES).astype(np.float32)
        tokens = torch.randint(9, (row % 5 + 1,))
        return {"x": self.x[row] + noise, "tokens": tokens, "y": row % jobs.CLASSES, "name": f"row {row}"}


def pad(rows: list[dict[str, Any]]) -> dict[str, Any]:
    tokens = torch.nn.utils.rnn.pad_sequence([row["tokens"] for row in rows], batch_first=True)
    x = torch.tensor(np.stack([row["x"] for row in rows])) + 0.01 * tokens.float().mean(1, keepdim=True)
    y = torch.tensor([row["y"] for row in rows])
    return {"x": x + 0.01 * torch.rand(()), "y": y, "names": rows[0]["name"], "num_tokens": tokens.count_nonzero()}


def fit(folder: Path, name: str, workers: int, *, fault: Any = None, data: Any = None, concurrency: int = 1) -> Any:
    def train(run: ed.Run) -> None:
        model = run.prepare(jobs.Model())
        run.prepare(torch.optim.AdamW(model.parameters(), lr=0.02))
        for step in run.steps():
            with step:
                for batch in step.micro_batches():
                    assert batch["names"].startswith("row ")
                    step.backward(jobs.loss_fn(model, batch), weight=batch["num_tokens"])
                    if fault is not None:
                        fault(run, step.index)
                step.optimize()
        run.evaluate(jobs.loss_fn, Augmented(), collate_fn=pad)

    data_config, verify = {"concurrency": concurrency, "drop_last": True}, {"every_steps": 1, "action": "stop"}
    config = jobs.settings(str(folder), name, workers, steps=STEPS, data=data_config, verify=verify)
    return ed.ElasticTrainer(train, data or Augmented(), config, collate_fn=pad).fit()


def test_a_killed_worker_changes_neither_weights_nor_samples_of_map_style_data(tmp_path: Path) -> None:
    calm = fit(tmp_path, "calm", 1, concurrency=2)
    marker = tmp_path / "killed"
    disturbed = fit(tmp_path, "disturbed", 2, fault=jobs.kill_once(str(marker), rank=1, step=13))
    assert marker.exists() and len(disturbed.summary["generations"]) > 1
    assert disturbed.summary["verified_step"] >= 13 and not disturbed.summary["corruptions"]
    assert calm.samples == STEPS * 48  # ROWS is no multiple of it: the rest of each epoch is dropped
    assert disturbed.samples_sha256 == calm.samples_sha256
    assert disturbed.weights_sha256 == calm.weights_sha256
    assert disturbed.metrics["validation_loss"] == calm.metrics["validation_loss"]

    class Failing(Augmented):
        def __getitem__(self, row: int) -> dict[str, Any]:
            if row == 77:  # which the driver does not read
                raise KeyError("label")
            return super().__getitem__(row)

    with pytest.raises(DataError, match=r"data\[77\] raised KeyError\('label'\) in micro-batch \d of step \d"):
        fit(tmp_path, "fails", 1, data=Failing())
