"""Trains a job in this process for `ElasticTrainer.debug`, without Ray."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.errors import ConfigError
from elastic_ddp.seeding import preserve_rng_state
from elastic_ddp.telemetry import Ledger, new_session, read_ledger, summarize
from elastic_ddp.telemetry.event import Event
from elastic_ddp.telemetry.events import RunFinished, SessionEnded, SessionStarted, Warned
from elastic_ddp.telemetry.versions import versions
from elastic_ddp.worker.job import Job
from elastic_ddp.worker.local_client import LocalClient
from elastic_ddp.worker.main import debug


def train_here(job: Job, note: Callable[[str], None]) -> dict[str, Any]:
    """Runs the training function in this thread, and returns the summary. The job's storage gets the ledger."""
    config = job.config
    if config.use_gpu and not torch.cuda.is_available():
        raise ConfigError(
            f"resources_per_worker={dict(config.resources_per_worker)} asks for a GPU, and torch finds none on this "
            "machine. Debug on one that has a GPU, or set resources_per_worker = {CPU = 1}."
        )
    device = torch.device("cuda", torch.cuda.current_device()) if config.use_gpu else torch.device("cpu")
    ledger = Ledger(job.storage, new_session(1))

    def record(event: Event) -> None:
        ledger.append(event)
        if isinstance(event, Warned):
            note(f"warning: {event.text}")

    started = SessionStarted(total_steps=job.total_steps, config=config.recorded(), versions=versions())
    ledger.append(started)
    with _environment(config), preserve_rng_state(device):
        outcome = debug(job, LocalClient(record), device)
    ledger.append(RunFinished(**outcome))
    ledger.append(SessionEnded())
    ledger.close()
    return summarize(read_ledger(job.storage))


@contextmanager
def _environment(config: RunConfig) -> Iterator[None]:
    """Sets the variables of workers, and makes `breakpoint()` open pdb: Ray, once connected, sets its own debugger."""
    before, except_hook, num_threads = dict(os.environ), sys.excepthook, torch.get_num_threads()
    is_deterministic, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    if before.get("PYTHONBREAKPOINT", "").startswith("ray."):
        del os.environ["PYTHONBREAKPOINT"]
    os.environ.update(config.env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        torch.set_num_threads(num_threads)
        torch.use_deterministic_algorithms(is_deterministic)
        torch.backends.cudnn.benchmark = benchmark
        sys.excepthook = except_hook  # torch's prefixes each line of a traceback with the rank
