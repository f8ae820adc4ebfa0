"""A run on one worker, without Ray: a fake rendezvous client, a fake feed, and a real process group."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import StepLR

from elastic_ddp.config.run_config import DataConfig
from elastic_ddp.data.micro_batches import MicroBatch
from elastic_ddp.data.order import EpochShape, FeedPlan
from elastic_ddp.data.user_calls import describe_rows
from elastic_ddp.distributed.assignment import Assignment, Resharding
from elastic_ddp.errors import ConfigError
from elastic_ddp.rendezvous.hang import Activity
from elastic_ddp.rendezvous.members import JoinRequest, Member
from elastic_ddp.rendezvous.messages import MemberRequest, PlannedAssignment, Signals
from elastic_ddp.telemetry.event import Event
from elastic_ddp.worker.generation import Generation
from elastic_ddp.worker.run import Run
from elastic_ddp.worker.step import Step
from elastic_ddp.worker.worker_membership import RestartTraining
from tests.inside_run import finish, leave, rendezvous_client_of, restart

CPU = torch.device("cpu")
PEER_FAILURE = "[gloo/transport/tcp/pair.cc] Connection closed by peer"


class FakeClient:
    """The rendezvous client of a run's only worker. Tests set its signals and read what it received."""

    member = Member(id="a", group_size=1, rank_in_group=0, node="127.0.0.1", pid=0)

    def __init__(self, store_port: int) -> None:
        self.stop_requested = False
        self.reconfigure_requested = False
        self.planned: PlannedAssignment | None = None
        self.disconnected = False
        self.commit_requested = self.verify_requested = 0
        self.planned_join: PlannedAssignment | None = None
        self.presumed_dead = False
        self.same_members = True
        """Whether each generation has the members of the one before."""
        self.activity = Activity()
        self.heartbeat = SimpleNamespace(
            paused=nullcontext, report_crashes=lambda: None, report_exits=lambda where: None
        )
        self.profile_requests: SimpleQueue[MemberRequest] = SimpleQueue()
        self.answers: list[tuple[int, dict[str, Any]]] = []
        """The numbers of requests, and what this worker has answered."""
        self.events: list[dict[str, Any]] = []
        self.joins: list[tuple[int | None, bool]] = []
        """The step of the state, and whether the worker was between steps, of each request to join."""
        self.are_resumable: list[bool] = []
        self.failures: list[str | None] = []
        self._store_port = store_port

    @property
    def signals(self) -> Signals:
        return Signals(
            stop=self.stop_requested,
            reconfigure=self.reconfigure_requested,
            planned=self.planned,
            commit=self.commit_requested,
            verify=self.verify_requested,
        )

    def join(self, request: JoinRequest, *, while_waiting: Any) -> Assignment:
        self.joins.append((request.step, request.between_steps))
        self.are_resumable.append(request.resumable)
        self.failures.append(request.failure)
        shards = request.shards
        reason = "workers joined" if self.reconfigure_requested else "start"
        reason = reason if request.failure is None else "worker failed"
        self.reconfigure_requested = False
        return Assignment(
            generation=len(self.joins),
            rank=0,
            world_size=1,
            store_host="127.0.0.1",
            store_port=self._store_port,
            # As if the others, who train when a newcomer plans its place, sent it their state: here, its own.
            source=None if request.step is None and self.planned_join is None else 0,
            first_step=request.step,
            resharding=None if shards is None else Resharding(shards.num, (shards.held,), (0,)),
            same_members=self.same_members and len(self.joins) > 1,
            in_collective_task=not request.between_steps,
            reason=reason,
        )

    def store_address(self) -> tuple[str, int]:
        return "127.0.0.1", self._store_port

    def plan_join(self) -> PlannedAssignment | None:
        return self.planned_join

    def why_not_commit(self, generation: int) -> str | None:
        return "this worker was presumed dead" if self.presumed_dead else None

    def record(self, event: Event) -> None:
        self.events.append(event.to_json())

    def progress(self, **newest: Any) -> None: ...

    def answer(self, number: int, **answer: Any) -> None:
        self.answers.append((number, answer))

    def set_abort(self, cut: Callable[[], None] | None) -> None: ...

    def events_of(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]

    def steps_of(self, name: str) -> list[int]:
        return [event["step"] for event in self.events_of(name)]


@dataclass
class FakeIndex:
    num_rows: int
    fingerprint: str = "fingerprint"
    compared_by: str = "by fingerprint"
    group_rows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))


class StepCounter:
    """Registered state: the steps that were counted."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"steps": list(self.steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = list(state["steps"])


class FakeFeed:
    """Rows that depend only on their ids, in one stream as from a real feed: what a step leaves, the next one gets."""

    def __init__(self, index: FakeIndex, plan: FeedPlan, **options: Any) -> None:
        self._shape = plan.shape
        self.micro_batches = plan.micro_batches
        self.is_ready = True
        self.skip_to(plan.first_step)

    def skip_to(self, step: int) -> None:
        self.next_step = step
        self._stream = self._all_from(step)

    def _all_from(self, first_step: int) -> Iterator[MicroBatch]:
        for step in itertools.count(first_step):
            for m in self.micro_batches:
                start, stop = self._shape.span(step, m)
                ids = np.arange(start, stop) * self._shape.num_micro_batches + m
                x = (
                    np.random.default_rng([step, m])
                    .normal(size=(len(ids) or self._shape.micro_batch_size, 3))
                    .astype(np.float32)
                )
                yield MicroBatch(m, {"x": torch.from_numpy(x)}, ids)

    def step(self, step: int) -> Iterator[MicroBatch]:
        assert step == self.next_step
        self.next_step += 1
        for _ in self.micro_batches:
            yield next(self._stream)

    def locate(self, row_ids: Sequence[int]) -> str:
        return describe_rows(row_ids)

    def wait(self) -> None: ...

    def peek(self) -> MicroBatch:
        return next(self._all_from(self.next_step))

    def interrupt(self) -> None: ...

    def release_pipeline(self) -> None: ...

    def close(self) -> None: ...


def fake_feed(shape: EpochShape, micro_batches: Sequence[int]) -> Any:
    """A feed of these micro-batches from step 0 on."""
    plan = FeedPlan(
        rows_per_group=np.zeros(0, np.int64),
        shape=shape,
        seed=0,
        options=DataConfig(),
        micro_batches=tuple(micro_batches),
        first_step=0,
        last_step=shape.steps_per_epoch,
    )
    return FakeFeed(FakeIndex(shape.num_rows), plan)


class Model(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))


NewRun = Callable[..., Run]


def client_of(run: Run) -> FakeClient:
    client: Any = rendezvous_client_of(run)
    return client


class PeerFailures:
    """Raises the failure of a peer when it is called with one of `places`, up to `times` times for each."""

    def __init__(self, *places: Any, times: int = 1) -> None:
        self._places, self._times = places, times
        self.raised: list[Any] = []

    def __call__(self, place: Any) -> None:
        if place in self._places and self.raised.count(place) < self._times:
            self.raised.append(place)
            raise dist.DistNetworkError(PEER_FAILURE)


def prepared(run: Run, module: torch.nn.Module | None = None) -> torch.nn.Module:
    model = run.prepare(module or Model())
    optimizer = run.prepare(torch.optim.AdamW(model.parameters(), lr=0.1))
    run.prepare(StepLR(optimizer, 2, 0.5))
    return model


def compute_gradients(step: Step, model: torch.nn.Module) -> None:
    """The forward and backward of every micro-batch."""
    for batch in step.micro_batches():
        step.backward(model(batch["x"]).square().mean())


def _nothing(step: Step) -> None: ...


def take_steps(
    run: Run,
    in_step: Callable[[Step], object] = _nothing,
    *,
    model: Any = None,
    in_block: Callable[[Step], object] = _nothing,
    after_block: Callable[[Step], object] = _nothing,
    last: int | None = None,
) -> None:
    """A training function.

    Args:
        run: the run.
        in_step: called in the middle of every step, between a forward and its backward.
        model: a prepared model with an optimizer; by default they are made here.
        in_block: called at the end of every block.
        after_block: called after every block.
        last: the step after which the function leaves the loop; by default the last one of the run.
    """
    model = prepared(run) if model is None else model
    for step in run.steps():
        with step:
            for place, batch in enumerate(step.micro_batches()):
                loss = model(batch["x"]).square().mean()
                if place == 1:
                    in_step(step)
                step.backward(loss)
            step.optimize()
            in_block(step)
        after_block(step)
        if step.index == last:
            break


def train(run: Run, in_step: Callable[[Step], object] = _nothing, **options: Any) -> dict[str, Any]:
    """Runs `take_steps`, and ends the run. Returns its outcome."""
    take_steps(run, in_step, **options)
    return finish(run)


def restarting(run: Run, body: Callable[[Run], Any]) -> Any:
    """Calls a training function again each time that it is to restart, as a worker does. Returns its result."""
    while True:
        try:
            return body(run)
        except RestartTraining:
            run = restart(run)


def break_down(step: Step) -> None:
    """Fails as a collective does if a peer dies."""
    raise dist.DistNetworkError(PEER_FAILURE)


def evaluate(run: Run) -> float:
    """Calls `run.evaluate`, whose result `evaluate_with` sets."""
    return run.evaluate(lambda *_: torch.zeros(()), "held-out")


def evaluate_with(monkeypatch: pytest.MonkeyPatch, function: Callable[[Generation], float]) -> None:
    """Makes every evaluation return `function(generation)`."""
    monkeypatch.setattr("elastic_ddp.worker.evaluation.evaluate", lambda generation, *_: function(generation))


def expect_config_error(run: Run, body: Callable[[Run], Any], *names: str) -> None:
    """Asserts that `body(run)` raises a ConfigError whose message has each of `names`."""
    with pytest.raises(ConfigError) as caught:
        body(run)
    assert [name for name in names if name not in str(caught.value)] == [], str(caught.value)


Place = Literal["optimizer", "block"]
"""In a step that changes the state: in the optimizer, or in the block after it."""


def train_and_count(
    run: Run, communicate: Callable[[Place, int], None], evaluates: bool = False, seed: int = 0
) -> tuple[Any, list[int]]:
    """A training function whose optimizer and block communicate after the first change. Restarts like a worker.

    Args:
        run: the run.
        communicate: called at both places, with the step.
        evaluates: whether each block also evaluates.
        seed: the seed of the initial weights.

    Returns:
        The outcome of the run, and the steps that the registered state has counted.
    """

    class CommunicatingAdamW(torch.optim.AdamW):
        def __init__(self, run: Run, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.run = run

        def step(self, closure: Any = None) -> None:
            super().step()
            communicate("optimizer", self.run.position.step)

    def train_once(run: Run) -> tuple[Any, list[int]]:
        torch.manual_seed(seed)
        model: Any = run.prepare(Model())
        run.prepare(StepLR(run.prepare(CommunicatingAdamW(run, model.parameters())), 2, 0.5))
        counter = StepCounter()
        run.register("counter", counter)

        def in_block(step: Step) -> None:
            communicate("block", step.index)
            if evaluates:
                evaluate(run)
            counter.steps.append(step.index)

        outcome = train(run, model=model, in_block=in_block)
        leave(run)
        return outcome, counter.steps

    return restarting(run, train_once)  # type: ignore[no-any-return]
