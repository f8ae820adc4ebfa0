"""Workers of a run as processes, without Ray: a rendezvous in this process, and a training function with faults.

The workers run `elastic_ddp.worker.main.work`, so all but the data and Ray is real: the rendezvous and its heartbeats,
process groups, generations, steps, commits.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.rendezvous.members import Member
from elastic_ddp.rendezvous.messages import RendezvousOptions
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.job import Job, WorkerContext
from tests.ranks import CPU, PROCESSES
from tests.unit.inprocess_rendezvous import InProcessRendezvous, get
from tests.unit.single_worker import PEER_FAILURE, FakeFeed, FakeIndex, StepCounter

LIMIT_S = 60.0
NODE = "127.0.0.1"
WIDTH = 7  # rows do not divide evenly between the ranks
IN_STEP = ("forward", "exchange", "mirror", "vote", "voted", "optimizer")
"""Places in a step: in a forward, in the exchange of a unit's gradients, in the message to the mirror, before and after
the vote, and between the steps of two optimizers."""
HAND_OVER, MOVE, COMPARE_TASKS = "hand-over", "move", "compare tasks"
"""Between generations, where there is no step: before the state changes hands, while rows move, and after that, before
members that are in a task go on with it."""


BETWEEN = (HAND_OVER, MOVE, COMPARE_TASKS)


@dataclass(frozen=True)
class Fault:
    """What happens to a worker at a place of a step."""

    worker: int
    place: str
    step: int = 3
    kind: str = "kill"
    """`kill`, `stop` (SIGSTOP), or `fail`: it raises the failure of a peer."""

    def act(self) -> None:
        if self.kind == "fail":
            raise dist.DistNetworkError(PEER_FAILURE)
        os.kill(os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)


@dataclass(frozen=True)
class Plan:
    """A run: its settings, its faults, and what it trains."""

    folder: Path
    settings: dict[str, Any]
    faults: tuple[Fault, ...] = ()
    make_model: Callable[[], torch.nn.Module] | None = None
    """By default `Model`."""
    make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None
    """Of all trained parameters but one; by default AdamW."""
    after_optimize: Callable[[torch.nn.Module], None] | None = None
    """Called in the block of each step, at its end."""
    evaluates_at: int | None = None
    """The step before which the run evaluates; a worker strikes there at the place `evaluation`."""
    register: Callable[[torch.nn.Module], Any] | None = None
    """Makes an object to register."""
    pause_s: float = 0.0
    """How long a step waits while `Workers.hold` holds the run."""
    free_bytes: int | None = None
    """The free memory of each worker; None for that of the machine."""
    num_rows: int = 1200
    num_nodes: int = 0
    """On how many nodes the workers are; 0 for one each."""

    @property
    def config(self) -> RunConfig:
        return RunConfig(
            **{
                "name": "test",
                "storage": str(self.folder),
                "steps": 8,
                "global_batch_size": 12,
                "micro_batch_size": 2,
                "max_workers": 4,
                "strategy": "fsdp",
                "log_every_steps": 1,
                "fsdp": {"shard_classes": ["Block"]},
                "checkpoint": {"every_steps": 1000},
                **self.settings,
            }
        )


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.dropout = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.inner(x).tanh())


class Model(torch.nn.Module):
    """Two blocks, tied weights, a frozen parameter, and a buffer that a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.norm = torch.nn.BatchNorm1d(WIDTH)
        self.encode = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.decode = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.decode.weight = self.encode.weight
        self.scale = torch.nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.decode(self.encode(self.norm(x))) * self.scale


class Checkpointed(torch.nn.Module):
    """Blocks whose activations are computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = torch.nn.Linear(3, WIDTH), torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Compiled(Checkpointed):
    """Compiled blocks, each a unit of FSDP. `Workers.num_graphs` counts the graphs."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend="aot_eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def train(run: Any, plan: Plan, strike: Callable[[str, int], None]) -> None:
    """The training function."""
    model = run.prepare((plan.make_model or Model)())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    make_optimizer = plan.make_optimizer or partial(torch.optim.AdamW, lr=0.05)
    bodies: Any = run.prepare(make_optimizer(trained[1:]))
    run.prepare(torch.optim.SGD(trained[:1], lr=0.05, momentum=0.9))
    run.prepare(StepLR(bodies, 2, 0.7))
    counter = StepCounter()
    run.register("counter", counter)
    if plan.register is not None:
        run.register("more", plan.register(model))
    for step in run.steps():
        if (plan.folder / "hold").exists():
            time.sleep(plan.pause_s)
        if plan.evaluates_at == step.index:
            run.evaluate(lambda *_: torch.zeros(()), "held-out")
        with step:
            for batch in step.micro_batches():
                output = model(batch["x"])
                strike("forward", step.index)
                step.backward(output.square().mean())
            step.optimize()
            if plan.after_optimize is not None:
                plan.after_optimize(model)
            if plan.make_model is Compiled:
                count = torch._dynamo.utils.counters["stats"]["unique_graphs"]
                (plan.folder / f"graphs-{run._loop.client.member.id}").write_text(str(count))
            counter.steps.append(step.index)
    assert counter.steps == list(range(run.config.steps)), counter.steps


# In a worker's process.


class RemoteRendezvous:
    """A handle of the rendezvous in the parent process."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock, self._numbers = connection, threading.Lock(), itertools.count()
        self._pending: dict[int, Future[Any]] = {}
        threading.Thread(target=self._receive, daemon=True).start()

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> Future[Any]:
            answer: Future[Any] = Future()
            with self._lock:
                number = next(self._numbers)
                self._pending[number] = answer
                self._connection.send((number, method, arguments))
            return answer

        return SimpleNamespace(remote=remote)

    def _receive(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, value = self._connection.recv()
                self._pending.pop(number).set_result(value)


def _work(connection: Connection, plan: Plan, worker: int, group_size: int) -> None:
    """The process of a worker."""
    import elastic_ddp.rendezvous.client as client
    import elastic_ddp.worker.evaluation as evaluation
    import elastic_ddp.worker.generation as generation
    import elastic_ddp.worker.membership as membership
    import elastic_ddp.worker.mirror as mirror
    from elastic_ddp import signals
    from elastic_ddp.worker.main import work

    generation.MicroBatchFeed = FakeFeed  # type: ignore[misc]
    evaluation.evaluate = lambda generation, *_: _evaluate(generation, plan, strike)
    if plan.free_bytes is not None:
        mirror.free_bytes = membership.free_bytes = lambda device: plan.free_bytes  # type: ignore[attr-defined]
    client.ray = SimpleNamespace(get=get, exceptions=ray.exceptions)  # type: ignore[attr-defined]
    signals.on_sigterm = lambda listener: None
    torch.manual_seed(0)
    remaining = [fault for fault in plan.faults if fault.worker == worker]
    loops: list[Any] = []

    def strike(place: str, step: int) -> None:
        for fault in [each for each in remaining if each.place == place and (place in BETWEEN or each.step == step)]:
            remaining.remove(fault)
            fault.act()

    _strike_inside(lambda place: strike(place, loops[-1].state.position.step if loops else 0))

    def train_and_note(run: Any) -> None:
        loops.append(run._loop)
        train(run, plan, strike)

    index: Any = FakeIndex(plan.num_rows)
    job = Job(
        config=plan.config, train=train_and_note, index=index, transform=None, storage=Storage(plan.folder).at("run")
    )
    node = f"10.0.0.{worker % plan.num_nodes if plan.num_nodes else worker}"
    member = Member(
        id=f"w{worker}",
        group_size=group_size,
        rank_in_group=worker % group_size,
        node=node,
        node_id=node,
        pid=os.getpid(),
    )
    with suppress(ImportError):
        import elastic_ddp.worker.main as main

        main.use_interface_of = lambda node: None
    work(job, RemoteRendezvous(connection), WorkerContext(member, CPU, {"CPU": 64.0}))


def _evaluate(generation: Any, plan: Plan, strike: Callable[[str, int], None]) -> float:
    """Stands for an evaluation: one collective, which ends when the test lets it."""
    assert plan.evaluates_at is not None
    (plan.folder / "evaluates").touch()
    strike("evaluation", plan.evaluates_at)
    while (plan.folder / "hold").exists() and not generation.group.aborted:
        time.sleep(0.01)
    generation.group.vote()
    return 1.0


def _strike_inside(strike: Callable[[str], None]) -> None:
    """Makes places in the package strike."""
    from elastic_ddp.distributed import shard_moves
    from elastic_ddp.distributed.fsdp_rounds import CanonicalSum
    from elastic_ddp.distributed.process_group import ProcessGroup
    from elastic_ddp.worker import generation
    from elastic_ddp.worker.membership import WorkerMembership
    from elastic_ddp.worker.mirror import Mirror

    def before(owner: Any, name: str, place: str) -> None:
        function = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            strike(place)
            return function(*arguments, **named)

        setattr(owner, name, call)

    before(CanonicalSum, "_exchange", "exchange")
    before(Mirror, "receive_gradients", "mirror")
    before(ProcessGroup, "vote", "vote")
    before(shard_moves, "_move", MOVE)
    before(generation, "share_plain", HAND_OVER)
    before(WorkerMembership, "_compare_tasks", COMPARE_TASKS)
    vote, step = ProcessGroup.vote, torch.optim.SGD.step

    def vote_and_strike(group: ProcessGroup) -> None:
        vote(group)
        strike("voted")

    def strike_and_step(*arguments: Any, **named: Any) -> Any:
        strike("optimizer")
        return step(*arguments, **named)

    ProcessGroup.vote = vote_and_strike  # type: ignore[method-assign]
    torch.optim.SGD.step = strike_and_step  # type: ignore[method-assign]


# In the process of the test.


class Workers:
    """The workers of a run, and their rendezvous."""

    def __init__(self, plan: Plan) -> None:
        self.plan, config = plan, plan.config
        self.rendezvous = InProcessRendezvous(
            RendezvousOptions(
                min_workers=config.min_workers,
                max_workers=config.max_workers,
                heartbeat_timeout_s=config.heartbeat_timeout_s,
                num_micro_batches=config.num_micro_batches,
            )
        )
        self.processes: list[Any] = []

    def start(self, num: int) -> None:
        """Starts workers, which form a group."""
        first = len(self.processes)
        for worker in range(first, first + num):
            here, there = PROCESSES.Pipe()
            process = PROCESSES.Process(target=_work, args=(there, self.plan, worker, num if not first else 1))
            process.start()
            there.close()
            self.processes.append(process)
            threading.Thread(target=self._serve, args=(here,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        lock = threading.Lock()

        def send(number: int, answer: Future[Any]) -> None:
            with lock, suppress(OSError):
                connection.send((number, answer.result()))

        with suppress(EOFError, OSError):
            while True:
                number, method, arguments = connection.recv()
                answer = getattr(self.rendezvous, method).remote(*arguments)
                answer.add_done_callback(lambda done, number=number: send(number, done))

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Slows the run down, so that it does not end before what the test does."""
        (self.plan.folder / "hold").touch()
        try:
            yield
        finally:
            (self.plan.folder / "hold").unlink()

    def wait_for_size(self, size: int) -> None:
        """Waits until a generation of this size has completed a step."""
        coordinator = self.rendezvous.actor._coordinator

        def has_size() -> bool:
            current, progress = coordinator.membership.current, coordinator.event_log.progress
            return current is not None and len(current.members) == size and progress.get("world_size") == size

        self.wait(has_size, f"a generation of {size}")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < end, f"{what} did not come: {self.events()[-5:]}"
            assert not self.rendezvous.has_ended.is_set() or condition(), f"the run ended before {what}"
            time.sleep(0.01)

    def events(self) -> list[dict[str, Any]]:
        return [event.to_json() for event in self.rendezvous.actor._coordinator.event_log._events]

    def of(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events() if event["event"] == name]

    def outcome(self) -> dict[str, Any]:
        """Waits for the end of the run, and returns what a test compares."""
        assert self.rendezvous.has_ended.wait(LIMIT_S), f"the run did not end: {self.events()[-5:]}"
        outcome = self.rendezvous.actor._coordinator.event_log.outcome
        assert outcome is not None and outcome["status"] == "finished", outcome
        return {key: outcome[key] for key in ("steps", "weights_sha256", "samples_sha256")}

    def error(self) -> str:
        """Waits for the end of the run, and returns how it failed."""
        assert self.rendezvous.has_ended.wait(LIMIT_S), f"the run did not end: {self.events()[-5:]}"
        outcome = self.rendezvous.actor._coordinator.event_log.outcome
        assert outcome is not None and outcome["status"] == "failed", outcome
        return f"{outcome['kind']}: {outcome['error']}"

    def generations(self) -> list[tuple[int, int]]:
        """Returns the world size and the first step of each generation that made steps."""
        return [(each["world_size"], each["first_step"]) for each in self.of("generation")]

    def num_graphs(self, worker: int) -> int:
        """Returns how many graphs a worker with `Compiled` has compiled."""
        return int((self.plan.folder / f"graphs-w{worker}").read_text())

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.rendezvous.close()


@contextmanager
def workers(plan: Plan) -> Iterator[Workers]:
    running = Workers(plan)
    try:
        yield running
    finally:
        running.end()
