"""Fixtures of the unit tests, which need no Ray."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.distributed.torch_store import StoreConnection
from elastic_ddp.rendezvous import actor as rendezvous_module
from elastic_ddp.rendezvous.actor import Rendezvous
from elastic_ddp.rendezvous.messages import RendezvousOptions
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.job import Job
from elastic_ddp.worker.loop import Loop
from elastic_ddp.worker.run import Run
from tests.inside_run import leave
from tests.ranks import empty_store
from tests.unit.faulty import QUICK, Died
from tests.unit.inprocess_rendezvous import FAKE_RAY, InProcessRendezvous
from tests.unit.rendezvous_harness import LIMIT_S, OPTIONS, Play
from tests.unit.single_worker import CPU, FakeClient, FakeFeed, FakeIndex, NewRun


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Torch has one thread, as in workers. The threads of a small operation would wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def _frozen_heap() -> Iterator[None]:
    """Closing a process group collects garbage, which takes 0.2 s unless loaded modules are frozen."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def _connection() -> StoreConnection:
    """One connection for all runs on one worker. A new one takes seconds if a DNS response is lost."""
    return StoreConnection()


@pytest.fixture
def new_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _connection: StoreConnection, _frozen_heap: None
) -> Iterator[NewRun]:
    """Makes runs on one worker, with a real process group. A run in the folder of another finds its commits."""
    monkeypatch.setattr("elastic_ddp.worker.generation.MicroBatchFeed", FakeFeed)
    monkeypatch.setattr("elastic_ddp.worker.worker_membership.StoreConnection", lambda: _connection)
    runs: list[Run] = []

    def make(num_rows: int = 80, folder: str = "run", **changes: Any) -> Run:
        for run in runs:
            leave(run)
        settings = {"name": "test", "storage": str(tmp_path), "steps": 6, "global_batch_size": 8, "micro_batch_size": 2}
        index: Any = FakeIndex(num_rows)
        job = Job(
            config=RunConfig(**{**settings, **changes}),
            train=lambda run: None,
            index=index,
            transform=None,
            storage=Storage(tmp_path).at(folder),
        )
        client: Any = FakeClient(empty_store().port)
        torch.manual_seed(0)
        runs.append(Run(Loop(job, client, CPU)))
        return runs[-1]

    yield make
    for run in runs:
        leave(run)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Runs a scenario against a new rendezvous with short polls."""
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(rendezvous_module, "LONG_POLL_S", 0.05)

    def run(scenario: Callable[[Rendezvous], Awaitable[Any]], options: RendezvousOptions = OPTIONS) -> Any:
        async def within_time() -> Any:
            rendezvous = Rendezvous("lm", 100, options)
            try:
                return await asyncio.wait_for(scenario(rendezvous), LIMIT_S)
            finally:
                if rendezvous._heartbeats._server is not None:
                    rendezvous._heartbeats._server.close()

        return asyncio.run(within_time())

    return run


@pytest.fixture
def inprocess_rendezvous(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., InProcessRendezvous]]:
    """Starts a rendezvous in this process, for clients and drivers in it."""
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(rendezvous_module, "LONG_POLL_S", 0.05)
    monkeypatch.setattr("elastic_ddp.rendezvous.client.ray", FAKE_RAY)
    monkeypatch.setattr("elastic_ddp.driver.session.ray", FAKE_RAY)
    started: list[InProcessRendezvous] = []

    def start(options: RendezvousOptions = OPTIONS) -> InProcessRendezvous:
        started.append(InProcessRendezvous(options))
        return started[-1]

    yield start
    for rendezvous in started:
        rendezvous.close()


@pytest.fixture
def long_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes polls so long that a response means a change."""
    monkeypatch.setattr(rendezvous_module, "LONG_POLL_S", 1000.0)


@pytest.fixture
def quick_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks poll often while they save, states have many blocks, and threads may die like processes."""
    for patch in QUICK:
        monkeypatch.setattr(*patch)
    report = threading.excepthook
    monkeypatch.setattr(threading, "excepthook", lambda args: None if args.exc_type is Died else report(args))
