"""Runs with FSDP and faults, in processes without Ray: all but the data and Ray is real; see `tests.workers`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

from tests.inside_run import member_of
from tests.unit.single_worker import CPU, PEER_FAILURE, StepCounter
from tests.workers import Workers, running

LIMIT_S = 60.0
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
    param_init_fn: Callable[[torch.nn.Module], object] | None = None
    weights: Path | None = None
    """Where `run.load_weights` finds weights."""
    key_mapping: dict[str, str] | None = None
    strict: bool = True
    make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None
    """Of all trained parameters but one; by default AdamW."""
    after_optimize: Callable[[torch.nn.Module], None] | None = None
    """Called in the block of each step, at its end."""
    evaluates_at: int | None = None
    """The step before which the run evaluates; a worker strikes there at the place `evaluation`."""
    register: Callable[[torch.nn.Module], Any] | None = None
    """Makes an object to register."""
    pause_s: float = 0.0
    """How long a step waits while `hold` holds the run."""
    free_bytes: int | None = None
    """The free memory of each worker; None for that of the machine."""
    num_rows: int = 1200
    num_nodes: int = 16
    """The workers are on these nodes in turns."""

    @property
    def all_settings(self) -> dict[str, Any]:
        return {
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
    """Compiled blocks, each a unit of FSDP. `num_graphs` counts the graphs."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend="aot_eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def train(run: Any, plan: Plan) -> None:
    """The training function."""
    strike.run = run
    model = run.prepare((plan.make_model or Model)(), param_init_fn=plan.param_init_fn)
    if plan.weights is not None:
        run.load_weights(plan.weights, key_mapping=plan.key_mapping, strict=plan.strict)
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
                strike("forward")
                step.backward(output.square().mean())
            step.optimize()
            if plan.after_optimize is not None:
                plan.after_optimize(model)
            if plan.make_model is Compiled:
                count = torch._dynamo.utils.counters["stats"]["unique_graphs"]
                (plan.folder / f"graphs-{member_of(run).id}").write_text(str(count))
            counter.steps.append(step.index)
    assert counter.steps == list(range(run.config.steps)), counter.steps


def set_up(plan: Plan, worker: int) -> None:
    """Makes a worker's process strike at its places."""
    import elastic_ddp.worker.evaluation as evaluation
    import elastic_ddp.worker.mirror as mirror
    import elastic_ddp.worker.worker_membership as membership

    global strike
    strike = Striker([fault for fault in plan.faults if fault.worker == worker])
    evaluation.evaluate = lambda generation, *_: _evaluate(generation, plan)
    if plan.free_bytes is not None:
        mirror.free_bytes = membership.free_bytes = lambda device: plan.free_bytes  # type: ignore[attr-defined]
    torch.manual_seed(0)
    _strike_inside()


class Striker:
    """The faults of this process. Each strikes once."""

    def __init__(self, faults: list[Fault]) -> None:
        self._faults = faults
        self.run: Any = None
        """The run, once the training function has begun."""

    def __call__(self, place: str) -> None:
        step = 0 if self.run is None else self.run.position.step
        for fault in [each for each in self._faults if each.place == place and (place in BETWEEN or each.step == step)]:
            self._faults.remove(fault)
            fault.act()


strike = Striker([])


def _evaluate(generation: Any, plan: Plan) -> float:
    """Stands for an evaluation: one collective, which ends when the test lets it."""
    (plan.folder / "evaluates").touch()
    strike("evaluation")
    while (plan.folder / "hold").exists() and not generation.group.aborted:
        time.sleep(0.01)
    generation.group.vote()
    return 1.0


def _strike_inside() -> None:
    """Makes places in the package strike."""
    from elastic_ddp.distributed import shard_moves
    from elastic_ddp.distributed.fsdp_rounds import Reduction
    from elastic_ddp.distributed.process_group import ProcessGroup
    from elastic_ddp.worker import state_sharing
    from elastic_ddp.worker.mirror import Mirror
    from elastic_ddp.worker.worker_membership import WorkerMembership

    def before(owner: Any, name: str, place: str) -> None:
        function = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            strike(place)
            return function(*arguments, **named)

        setattr(owner, name, call)

    before(Reduction, "_exchange", "exchange")
    before(Mirror, "receive_gradients", "mirror")
    before(ProcessGroup, "vote", "vote")
    before(shard_moves, "_move", MOVE)
    before(state_sharing, "_move_shards", HAND_OVER)
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


@contextmanager
def workers(plan: Plan) -> Iterator[Workers]:
    """The workers of a run. None is started."""
    nodes = [f"10.0.0.{number}" for number in range(plan.num_nodes)]
    options: dict[str, Any] = {"nodes": nodes, "num_rows": plan.num_rows, "set_up": partial(set_up, plan)}
    with running(plan.folder, partial(train, plan=plan), CPU, 0, **options, **plan.all_settings) as run:
        yield run


@contextmanager
def hold(plan: Plan) -> Iterator[None]:
    """Slows a run down, so that it does not end before what the test does."""
    (plan.folder / "hold").touch()
    try:
        yield
    finally:
        (plan.folder / "hold").unlink()


def wait_for_size(run: Workers, size: int) -> None:
    """Waits until a generation of this size has completed a step."""
    coordinator = run.rendezvous.actor._coordinator

    def has_size() -> bool:
        current, progress = coordinator.membership.current, coordinator.event_log.progress
        return current is not None and len(current.members) == size and progress.get("world_size") == size

    run.wait(has_size, f"a generation of {size}", LIMIT_S)


def hashes(run: Workers, timeout_s: float = LIMIT_S) -> dict[str, Any]:
    """Waits for the end of the run, and returns what a test compares."""
    outcome = run.finish(timeout_s)
    return {key: outcome[key] for key in ("steps", "weights_sha256", "samples_sha256")}


def generations(run: Workers) -> list[tuple[int, int]]:
    """Returns the world size and the first step of each generation that made steps."""
    return [(each.world_size, each.first_step) for each in run.started()]


def steps_of_commits(run: Workers) -> list[int]:
    commits: list[Any] = run.rendezvous.events("commit_succeeded")
    return [commit.step for commit in commits]


def num_graphs(plan: Plan) -> int:
    """Returns how many graphs the first worker has compiled with `Compiled`."""
    return int((plan.folder / "graphs-worker-0").read_text())
