"""Trains a job in this process for `ElasticTrainer.debug`, without Ray."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch

from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.distributed.assignment import Assignment
from elastic_ddp.distributed.hosted_store import HostedStore
from elastic_ddp.errors import ConfigError, WorkersFailedError
from elastic_ddp.rendezvous.client import RendezvousClient
from elastic_ddp.rendezvous.hang import Activity
from elastic_ddp.rendezvous.members import JoinRequest, Member
from elastic_ddp.rendezvous.messages import NO_SIGNALS, PlannedAssignment
from elastic_ddp.seeding import preserve_rng_state
from elastic_ddp.telemetry import Ledger, new_session, read_ledger, summarize
from elastic_ddp.telemetry.event import STARTED, Event
from elastic_ddp.telemetry.events import RunFinished, SessionEnded, SessionStarted, Warned
from elastic_ddp.telemetry.versions import versions
from elastic_ddp.worker.job import Job
from elastic_ddp.worker.main import debug

_HOST = "127.0.0.1"


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


class LocalClient(RendezvousClient):
    """The client of a run's only worker, in the driver's process, without a rendezvous and hang detection.

    `on_event` receives each event, with its time.
    """

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self.member = Member(id="debug", group_size=1, rank_in_group=0, node=_HOST, pid=os.getpid())
        self.activity = Activity()
        self.profile_requests = SimpleQueue()
        self.disconnected = False
        self.heartbeat = SimpleNamespace(paused=nullcontext)  # type: ignore[assignment]
        self.signals = NO_SIGNALS
        self._num_joined = 0
        self._on_event = on_event
        self._hosted = HostedStore(_HOST)

    def join(self, request: JoinRequest, **_: Any) -> Assignment:
        """Returns the place in the next generation. Raises a WorkersFailedError after a failure: there is no peer."""
        if request.failure is not None:
            raise WorkersFailedError(f"a collective failed, and this is the only worker: {request.failure}")
        self._num_joined += 1
        return Assignment(
            generation=self._num_joined,
            rank=0,
            world_size=1,
            store_host=_HOST,
            store_port=self._hosted.port,
            source=None if request.step is None else 0,
            first_step=request.step,
            reason=STARTED,
        )

    def store_address(self) -> tuple[str, int]:
        return _HOST, self._hosted.port

    def record(self, event: Event) -> None:
        self._on_event(event if event.at is not None else replace(event, at=time.time()))

    def plan_join(self) -> PlannedAssignment | None:
        return None

    def progress(self, **newest: Any) -> None: ...

    def set_abort(self, abort: Callable[[], None] | None) -> None: ...


@contextmanager
def _environment(config: RunConfig) -> Iterator[None]:
    """Sets the variables of workers, and makes `breakpoint()` open pdb: Ray, once connected, sets its own debugger."""
    before = dict(os.environ)
    except_hook = sys.excepthook
    num_threads = torch.get_num_threads()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    benchmark = torch.backends.cudnn.benchmark
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
