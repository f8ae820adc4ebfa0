"""Runs the workers of a run as processes with a real rendezvous, without Ray. A worker calls `worker.main.work`.

The test's process is the rendezvous and the controller: it replaces nothing, and kills workers that count as failed.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.rendezvous import client as client_module
from elastic_ddp.rendezvous.members import Member
from elastic_ddp.rendezvous.messages import RendezvousOptions
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry import events
from elastic_ddp.worker.job import Job, WorkerContext
from elastic_ddp.worker.run import Run
from tests.ranks import PROCESSES
from tests.unit.inprocess_rendezvous import FAKE_RAY, InProcessRendezvous
from tests.unit.single_worker import FakeFeed, FakeIndex

HERE = "127.0.0.1"
POLL_S = 0.02
ENDS_WITHIN_S = 10.0
"""How long a killed process may take to end: its driver may be busy."""
STACKS_WITHIN_S = 1.0
"""How long workers have to write their stacks, after a test has reached its time limit."""
LOG_BYTES = 12_000
"""How much of a worker's output a failed test shows."""
Train = Callable[[Run], None]


class DeviceFeed(FakeFeed):
    """A fake feed whose rows are on the run's device."""

    def __init__(self, index: FakeIndex, plan: Any, **options: Any) -> None:
        self._device = options["device"]
        super().__init__(index, plan, **options)

    def _all_from(self, first_step: int) -> Iterator[Any]:
        for batch in super()._all_from(first_step):
            batch.rows["x"] = batch.rows["x"].to(self._device)
            yield batch


class RemoteRendezvous:
    """The rendezvous of another process, called like the actor. Each thread has a connection of its own."""

    def __init__(self, address: str) -> None:
        self._address, self._of_thread = address, threading.local()

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any) -> Any:
            return SimpleNamespace(result=lambda timeout=None: self._call(method, arguments))

        return SimpleNamespace(remote=call)

    def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if not hasattr(self._of_thread, "connection"):
            self._of_thread.connection = Client(self._address)
        try:
            self._of_thread.connection.send((method, arguments))
            answer, error = self._of_thread.connection.recv()
        except (OSError, EOFError) as lost:
            raise ray.exceptions.RayActorError from lost
        if error is not None:
            raise error
        return answer


@dataclass(frozen=True)
class TestedJob:
    """What all workers of a run get; see `running`."""

    folder: Path
    train: Train
    device: torch.device
    settings: dict[str, Any]
    environment: dict[str, str]
    num_rows: int
    set_up: Callable[[int], object]


@dataclass
class Worker:
    number: int
    process: BaseProcess
    log: Path

    @property
    def id(self) -> str:
        return f"worker-{self.number}"


class Workers:
    """The workers of one run.

    Attributes:
        rendezvous: the run's rendezvous, in this process.
        all: the workers that were started.
    """

    def __init__(self, job: TestedJob, nodes: Sequence[str]) -> None:
        self.all: list[Worker] = []
        self._job, self._nodes = job, nodes
        config = RunConfig(**job.settings)
        self.rendezvous = InProcessRendezvous(
            RendezvousOptions(
                min_workers=config.min_workers,
                max_workers=config.max_workers,
                heartbeat_timeout_s=config.heartbeat_timeout_s,
                hang_timeout_s=config.hang_timeout_s,
                num_micro_batches=config.num_micro_batches,
                even_micro_batches=config.even_micro_batches,
                shard_size=config.shard_size,
            )
        )
        self._listener = Listener(family="AF_UNIX", backlog=64)
        threading.Thread(target=self._accept, name="calls", daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection = self._listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: Connection) -> None:
        with suppress(OSError, EOFError):
            while True:
                method, arguments = connection.recv()
                try:
                    answer = self.rendezvous.ask(method, *arguments), None
                except Exception as error:
                    answer = None, error
                connection.send(answer)

    def start(self, count: int) -> None:
        """Starts workers. Those started together form the first generation together."""
        first = len(self.all)
        for number in range(first, first + count):
            log = self._job.folder / f"worker-{number}.log"
            place = (number - first, count, self._nodes[number % len(self._nodes)])
            process = PROCESSES.Process(target=_work, args=(self._listener.address, number, place, log, self._job))
            process.start()
            self.all.append(Worker(number, process, log))

    def wait(self, condition: Callable[[], object], what: str, timeout_s: float) -> None:
        """Waits until a condition holds. Fails with what all workers were doing if it does not in time."""
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, f"{what} did not come within {timeout_s:g} s\n{self.describe()}"
            assert not self.rendezvous.has_ended.is_set() or condition(), f"the run ended before {what}"
            time.sleep(POLL_S)

    def finish(
        self,
        timeout_s: float,
        meanwhile: Callable[[Workers], object] = lambda workers: None,
        status: str = "finished",
    ) -> dict[str, Any]:
        """Waits until the run has ended and returns its outcome. Calls `meanwhile` again and again until then.

        Kills workers that the rendezvous counts as failed, as the controller does. Fails with what all workers were
        doing if the run ends with another status, or not in time.
        """
        end = time.monotonic() + timeout_s
        while not self.rendezvous.has_ended.is_set():
            directives = self.rendezvous.ask("supervise", [worker.id for worker in self.alive()], 0, {})
            for worker in self.alive():
                if directives is not None and worker.id in directives.failed:
                    worker.process.kill()
            meanwhile(self)
            assert time.monotonic() < end, f"the run has not ended within {timeout_s:g} s\n{self.describe()}"
            assert self.alive(), f"all workers have exited\n{self.describe()}"
            time.sleep(POLL_S)
        outcome: dict[str, Any] = self.rendezvous.actor._coordinator.event_log.outcome
        assert outcome["status"] == status, f"{outcome}\n{self.describe()}"
        return outcome

    def alive(self) -> list[Worker]:
        return [worker for worker in self.all if worker.process.is_alive()]

    def world_sizes(self) -> list[int]:
        """Returns the world size of each generation in which a step was made."""
        return [event.world_size for event in self.started()]

    def started(self) -> list[events.GenerationStarted]:
        """Returns the events of the generations that started, without those that only made the last commit."""
        started = self.rendezvous.events("generation_started")
        return [event for event in started if isinstance(event, events.GenerationStarted)]

    def describe(self) -> str:
        """Returns the events so far and, for each worker, its place and the end of its output with its stacks."""
        for worker in self.alive():
            with suppress(OSError):
                os.kill(worker.process.pid or 0, signal.SIGUSR1)
        time.sleep(STACKS_WITHIN_S)
        coordinator = self.rendezvous.actor._coordinator
        lines = [json.dumps(event.to_json(), default=str)[:600] for event in coordinator.event_log._events]
        places = coordinator.hangs.places()
        for worker in self.all:
            output = worker.log.read_text(errors="replace")[-LOG_BYTES:] if worker.log.exists() else ""
            state = "alive" if worker.process.is_alive() else f"exit code {worker.process.exitcode}"
            lines.append(f"--- {worker.id}: {state}, {places.get(worker.id)}\n{output}")
        return "\n".join(lines)

    def close(self) -> None:
        for worker in self.all:
            worker.process.kill()
        for worker in self.all:
            worker.process.join(ENDS_WITHIN_S)
        self._listener.close()
        self.rendezvous.close()


@contextmanager
def running(
    folder: Path,
    train: Train,
    device: torch.device,
    count: int,
    *,
    environment: Mapping[str, str] = MappingProxyType({}),
    nodes: Sequence[str] = (HERE,),
    num_rows: int = 1000,
    set_up: Callable[[int], object] = id,
    **settings: Any,
) -> Iterator[Workers]:
    """Starts a run with `count` workers in a folder, and kills what is left of it at the end of the block.

    Args:
        nodes: addresses of the nodes, which get the workers in turns.
        set_up: called in each worker's process with its number, before it works.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"name": "test", "storage": str(folder), "max_workers": count, **settings}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("ray.util.get_node_ip_address", lambda: HERE)
        patched.setattr("elastic_ddp.rendezvous.actor.LONG_POLL_S", 0.2)
        patched.setattr("elastic_ddp.rendezvous.planner.GROUP_WAIT_S", 60.0)  # a busy machine starts processes slowly
        workers = Workers(TestedJob(folder, train, device, settings, dict(environment), num_rows, set_up), nodes)
        try:
            workers.start(count)
            yield workers
        finally:
            workers.close()


def _work(address: str, number: int, place: tuple[int, int, str], log: Path, tested: TestedJob) -> None:
    """A worker process."""
    from elastic_ddp import signals
    from elastic_ddp.worker import generation, main

    os.environ.update(tested.environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR1, file=output, all_threads=True)
    signals.listen_for_sigterm()
    client_module.ray = FAKE_RAY  # type: ignore[assignment]
    generation.MicroBatchFeed = partial(DeviceFeed)  # type: ignore[assignment,misc]
    rank, size, node = place
    if node != HERE:
        main.use_interface_of = lambda node: None
    tested.set_up(number)
    index: Any = FakeIndex(tested.num_rows)
    storage = Storage(tested.folder).at("run")
    job = Job(config=RunConfig(**tested.settings), train=tested.train, index=index, transform=None, storage=storage)
    name = f"worker-{number}"
    identity = Member(id=name, rank_in_group=rank, group_size=size, node=node, node_id=node, pid=os.getpid())
    main.work(job, RemoteRendezvous(address), WorkerContext(identity, tested.device, {"CPU": 64.0}))
