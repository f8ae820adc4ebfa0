"""Fixtures of the tests that need no Ray."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_ddp.config import RunConfig
from elastic_ddp.job import Job
from elastic_ddp.run import Run
from elastic_ddp.storage import Storage
from tests.unit.alone import CPU, FakeFeed, FakeIndex, FakeLink, NewRun


@pytest.fixture(scope="module")
def _a_small_heap() -> Iterator[None]:
    """Closing a process group collects garbage: not among all the modules that are loaded, which takes 0.2 s."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def new_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _a_small_heap: None) -> Iterator[NewRun]:
    """Makes runs on one worker, with a real process group. One in the folder of another finds its commits."""
    monkeypatch.setattr("elastic_ddp.generation.MicroBatchFeed", FakeFeed)
    stores: list[dist.TCPStore] = []
    runs: list[Run] = []

    def make(num_rows: int = 80, folder: str = "run", **changes: Any) -> Run:
        for run in runs:
            run.close(intact=True)
        settings = {"name": "test", "storage": str(tmp_path), "steps": 6, "global_batch_size": 8, "micro_batch_size": 2}
        index: Any = FakeIndex(num_rows)
        job = Job(
            config=RunConfig(**{**settings, **changes}),
            train=lambda run: None,
            index=index,
            transform=None,
            storage=Storage(tmp_path).at(folder),
        )
        stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        link: Any = FakeLink(stores[-1].port)
        torch.manual_seed(0)
        runs.append(Run(job, link, CPU))
        return runs[-1]

    yield make
    for run in runs:
        run.close(intact=True)
