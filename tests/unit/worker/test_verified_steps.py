"""Verified steps find a worker that computes wrong values, and go on without it. On real workers, without Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from elastic_ddp.checkpoint import CommitCatalog
from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.errors import ConfigError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.job import COMMITS
from tests.fsdp_workers import hashes, wait_for_size
from tests.inside_run import member_of
from tests.unit.single_worker import CPU
from tests.workers import Workers, running

STEPS, AT = 6, 2
SETTINGS: dict[str, Any] = {
    "steps": STEPS,
    "global_batch_size": 12,
    "micro_batch_size": 2,
    "max_workers": 3,
    "checkpoint": {"every_steps": 1000},
    "log_every_steps": 1,
}


@dataclass(frozen=True)
class Fault:
    """A worker that computes wrong values from a step on."""

    worker: int
    kind: str


class Net(torch.nn.Module):
    """Has dropout, and statistics that a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8)
        self.mixed = torch.nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.dropout, self.head = torch.nn.Dropout(0.2), torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = torch.nn.functional.conv2d(x.mean(1)[:, None, None, None].expand(-1, 3, 5, 5), self.mixed).mean()
        return self.head(self.dropout(self.norm(self.body(x)).tanh())) + mixed  # type: ignore[no-any-return]


def flip(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor with one bit flipped."""
    flipped = tensor.detach().clone()
    flipped.view(-1).view(torch.int32)[0] ^= 1 << 12
    return flipped


def break_down(kind: str, run: Any, model: Any, optimizer: Any) -> Callable[[int], None]:
    """Makes this worker compute wrong values. Returns what to call at the end of each step."""
    count = 0

    def gradient(grad: torch.Tensor) -> torch.Tensor:
        nonlocal count
        if run.position.step < AT or (kind == "once" and count):
            return grad
        count += 1
        return flip(grad)

    def activation(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal count
        if run.position.step < AT or not torch.is_grad_enabled():
            return output
        count += 1
        return output + (flip(output) - output.detach()) if count % 3 == 1 else output

    def at_end(step: int) -> None:
        if step != AT:
            return
        with torch.no_grad():
            if kind == "weight":
                model.head.weight.copy_(flip(model.head.weight))
            if kind == "optimizer's memory":  # past the count of changes, as a fault of the memory is
                optimizer.state[model.body.weight]["exp_avg"].to_local().data.add_(1.0)
            if kind == "optimizer":
                state = optimizer.state[model.body.weight]["exp_avg"]
                state.copy_(flip(state))

    if kind in ("gradient", "once"):
        model.head.weight.register_hook(gradient)
    if kind == "activation":
        model.body.register_forward_hook(activation)
    return at_end


class Checkpointed(Net):
    """Computes a part of the forward again in the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.body, x.clone().requires_grad_(), use_reentrant=True).tanh()
        return self.head(self.dropout(self.norm(hidden)))  # type: ignore[no-any-return]


def train(run: Any, fault: Fault | None, *, is_weighted: bool = False, variant: str = "") -> None:
    net = Checkpointed() if variant == "reentrant" else Net()
    if variant == "reentrant":
        del net.mixed  # which that forward leaves out
    if variant == "compiled":
        net.compile(backend="aot_eager")
    if run.config.strategy == "fsdp":  # which takes contiguous parameters only
        net.mixed = torch.nn.Parameter(net.mixed.detach().contiguous())
    model = run.prepare(net)
    optimizer = run.prepare(torch.optim.AdamW(model.parameters(), lr=0.05))
    is_faulty = fault is not None and member_of(run).id == f"worker-{fault.worker}"
    at_end = break_down(fault.kind, run, model, optimizer) if fault is not None and is_faulty else None
    for step in run.steps():
        with step:
            for batch in step.micro_batches():
                loss = model(batch["x"]).square().mean()
                step.backward(loss, weight=len(batch["x"]) * 1.5 if is_weighted else None)
                batch["x"].zero_()  # a batch is the training function's own
            step.optimize()
            if at_end is not None:
                at_end(step.index)


def run_of(folder: Path, size: int, fault: Fault | None = None, **changes: Any) -> tuple[dict[str, Any], Workers]:
    with workers(folder, size, fault, **changes) as run:
        run.start(size)
        return hashes(run), run


@contextmanager
def workers(
    folder: Path, size: int, fault: Fault | None = None, *, is_weighted: bool = False, variant: str = "", **changes: Any
) -> Iterator[Workers]:
    """The workers of a run, each on a node of its own. None is started."""
    folder.mkdir(exist_ok=True)
    options: dict[str, Any] = {"nodes": [f"10.0.0.{number}" for number in range(size)], "num_rows": 250}
    function = partial(train, fault=fault, is_weighted=is_weighted, variant=variant)
    with running(folder, function, CPU, 0, **{**options, **SETTINGS, **changes}) as run:
        yield run


def corruptions(run: Workers) -> list[Any]:
    return list(run.rendezvous.events("corruption_found"))


ONE_EACH = {"global_batch_size": 6}
"""One micro-batch for each of three ranks: all of them are computed twice in a verified step."""


@pytest.fixture(scope="module")
def calm_with_one_each(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_of(tmp_path_factory.mktemp("calm"), 1, **ONE_EACH)[0]


def test_verified_steps_change_no_bits_and_raise_no_alarm(tmp_path: Path) -> None:
    calm = run_of(tmp_path / "calm", 1)[0]
    found, run = run_of(tmp_path, 3, verify={"every_steps": 1, "action": "stop"})
    assert found == calm and not corruptions(run)
    verified: Any = list(run.rendezvous.events("step_verified"))
    assert [event.step for event in verified] == list(range(STEPS))
    assert {event.micro_batches for event in verified} == {3}
    newest = CommitCatalog(Storage(tmp_path).at("run").at(COMMITS)).latest()
    assert newest is not None and newest.record["verified_step"] == STEPS - 1


@pytest.mark.parametrize(
    "changes",
    [
        {"global_batch_size": 28, "micro_batch_size": 4, "is_weighted": True, "steps": 10},  # seven of up to 4 rows
        pytest.param({"precision": "fp16"}, marks=pytest.mark.chaos),
        pytest.param({"precision": "bf16", "clip_grad_norm": 0.1}, marks=pytest.mark.chaos),
        pytest.param({"ddp": {"find_unused_parameters": True}}, marks=pytest.mark.chaos),
        pytest.param(ONE_EACH, marks=pytest.mark.chaos),
        pytest.param({"variant": "compiled"}, marks=pytest.mark.chaos),
        pytest.param({"variant": "reentrant"}, marks=pytest.mark.chaos),
    ],
    ids=lambda changes: ", ".join(map(str, changes.values() if "variant" in changes else changes)),
)
def test_no_kind_of_job_raises_an_alarm(tmp_path: Path, changes: dict[str, Any]) -> None:
    calm = run_of(tmp_path / "calm", 1, **changes)[0]
    found, run = run_of(tmp_path / "verified", 3, verify={"every_steps": 1, "action": "stop"}, **changes)
    assert found == calm and not corruptions(run)


@pytest.mark.chaos
def test_the_first_step_of_a_worker_that_joins_is_verified(tmp_path: Path) -> None:
    changes = {"steps": 400, "data": {"drop_last": True}, "verify": {"every_steps": 1_000, "action": "stop"}}
    with workers(tmp_path, 3, **changes) as run:
        run.start(2)
        wait_for_size(run, 2)
        run.start(1)
        wait_for_size(run, 3)
        hashes(run)
    verified: list[Any] = list(run.rendezvous.events("step_verified"))
    joined: Any = run.started()[1]
    assert joined.world_size == 3 and [event.step for event in verified] == [0, joined.first_step]


def test_the_run_goes_on_or_stops_as_its_action_says(tmp_path: Path, calm_with_one_each: dict[str, Any]) -> None:
    fault = Fault(1, "gradient")
    found, run = run_of(tmp_path / "warn", 3, fault, verify={"every_steps": 3, "action": "warn"}, **ONE_EACH)
    assert found["steps"] == STEPS and found != calm_with_one_each
    assert [corruption.rank for corruption in corruptions(run)] == [1, 1] and run.world_sizes()[-1] == 3
    (tmp_path / "stop").mkdir()
    with workers(tmp_path / "stop", 2, fault, verify={"every_steps": 3, "action": "drain"}, **ONE_EACH) as run:
        run.start(2)
        outcome = run.finish(60.0, status="failed")
    assert outcome["kind"] == "CorruptionError" and outcome["steps"] == AT
    assert "ranks 0 and 1 compute different bits" in outcome["error"] and "10.0.0.0" in outcome["error"]


def test_a_rollback_resumes_from_before_the_first_wrong_step(
    tmp_path: Path, calm_with_one_each: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"verify": {"every_steps": 2, "action": "rollback"}, "checkpoint": {"every_steps": 1}}
    found, run = run_of(tmp_path, 3, Fault(1, "gradient"), **options, **ONE_EACH)
    assert found == calm_with_one_each
    assert [corruption.step for corruption in corruptions(run)] == [3]
    assert [(each.world_size, each.first_step) for each in run.started()][-1] == (2, 1), "that state was verified"


@pytest.mark.parametrize("action", ["drain", "rollback"])
def test_a_commit_that_finds_another_state_asks_for_a_verified_step(tmp_path: Path, action: str) -> None:
    """Without periodic verified steps. The commit is left out, and the rank at fault leaves before the next one."""
    options: dict[str, Any] = {"verify": {"action": action}, "checkpoint": {"every_steps": 1}}
    found, run = run_of(tmp_path / "fault", 3, Fault(0, "weight"), steps=40, **options, **ONE_EACH)
    assert found["steps"] == 40 and run.world_sizes()[-1] == 2
    if action == "rollback":  # which begins anew if no state was verified
        assert found == run_of(tmp_path / "calm", 1, steps=40, **ONE_EACH)[0]
    [corruption] = corruptions(run)
    assert corruption.rank == 0 and "rank 0 has different parameters, buffers or optimizer state" in corruption.text
    [failed] = [event for event in run.rendezvous.events("commit_failed") if "Replicas" in event.error]
    assert not failed.counts and "rank 0 holds other values of model.head.weight than" in failed.error


def test_a_faulty_worker_is_not_replaced_on_the_only_node(tmp_path: Path, calm_with_one_each: dict[str, Any]) -> None:
    options: dict[str, Any] = {"verify": {"every_steps": 1, "action": "drain"}, "nodes": ["10.0.0.0"] * 3}
    found, run = run_of(tmp_path, 3, Fault(1, "gradient"), **options, **ONE_EACH)
    assert found == calm_with_one_each and len(corruptions(run)) == 1
    assert [event.num_workers for event in run.rendezvous.events("resize_requested")] == [2]
    assert run.world_sizes()[-1] == 2


def test_a_person_asks_for_a_verified_step(tmp_path: Path) -> None:
    with workers(tmp_path, 2, steps=4_000, data={"drop_last": True}) as run:
        assert run.rendezvous.ask("verify").startswith("fewer than two workers train now")
        run.start(2)
        wait_for_size(run, 2)
        assert run.rendezvous.ask("verify") == 1
        run.wait(lambda: run.rendezvous.ask("verified", 1) == "", "the verified step", 30.0)
        run.rendezvous.ask("stop")
        run.finish(30.0, status="stopped")
    verified: list[Any] = list(run.rendezvous.events("step_verified"))
    assert [event.request for event in verified] == [1], "and no other step"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reduction": "native"}, "compares the bits of gradients"),
        ({"strategy": "fsdp", "fsdp": {"mirror": False}}, "compares shards with their mirrors"),
    ],
)
def test_what_has_no_equal_bits_is_not_verified(changes: dict[str, Any], message: str) -> None:
    settings = {**SETTINGS, "name": "test", "storage": "memory://test", "verify": {"every_steps": 10}, **changes}
    with pytest.raises(ConfigError, match=message):
        RunConfig(**settings)


def test_with_fsdp_mirrors_are_compared(tmp_path: Path) -> None:
    options: dict[str, Any] = {"strategy": "fsdp", "verify": {"every_steps": 3}}
    run = run_of(tmp_path / "calm", 2, **options)[1]
    verified: list[Any] = list(run.rendezvous.events("step_verified"))
    assert [event.step for event in verified] == [3, 6]
    (tmp_path / "fault").mkdir()
    with workers(tmp_path / "fault", 2, Fault(1, "optimizer's memory"), **options) as run:
        run.start(2)
        outcome = run.finish(60.0, status="failed")
    assert "differs from its mirror" in outcome["error"] and outcome["steps"] == 3


@pytest.mark.parametrize(
    "kind",
    [
        "gradient",
        "weight",
        *(pytest.param(kind, marks=pytest.mark.chaos) for kind in ("once", "activation", "optimizer")),
    ],
)
def test_a_faulty_worker_is_named_and_leaves_and_the_bits_are_those_of_a_calm_run(
    tmp_path: Path, calm_with_one_each: dict[str, Any], kind: str
) -> None:
    found, run = run_of(tmp_path, 3, Fault(1, kind), verify={"every_steps": 1, "action": "drain"}, **ONE_EACH)
    assert found == calm_with_one_each
    [corruption] = corruptions(run)
    assert corruption.rank == 1 and corruption.action == "drain" and "10.0.0.1" in corruption.text
    assert corruption.step == (AT + 1 if kind in ("weight", "optimizer") else AT)
    assert run.world_sizes()[-1] == 2
