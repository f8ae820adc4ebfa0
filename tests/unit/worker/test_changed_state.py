"""Buffers and parameters that a forward changes follow a rule, or are an error that names them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

from elastic_ddp.distributed.buffer_sync import StepBuffers
from elastic_ddp.distributed.parameter_guard import ParameterGuard, changed_parameters_error
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import ConfigError
from elastic_ddp.worker.generation import strategy_of
from elastic_ddp.worker.run import Run
from elastic_ddp.worker.step import Step
from tests.ranks import run_ranks
from tests.unit.distributed.test_fsdp import data
from tests.unit.distributed.test_fsdp import prepared as prepared_shards
from tests.unit.single_worker import FakeFeed, FakeIndex, NewRun, compute_gradients, prepared

ONE_MICRO_BATCH = {"global_batch_size": 2, "micro_batch_size": 2}


class Changing(nn.Module):
    """A layer and `change(model, x)` in every forward."""

    def __init__(self, change: Callable[[Any, torch.Tensor], object]) -> None:
        super().__init__()
        self.layer, self.frozen = nn.Linear(3, 1), nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(4, 3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("total", torch.zeros(3))
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.change(self, x)
        y: torch.Tensor = self.layer(x)
        return y


Place = Literal["top", "computed", "optimized", "between"]
"""In a step: at the top of the block, before and after `step.optimize()`; and after the block."""


def train(
    run: Run,
    model: Any,
    place: Place = "between",
    act: Callable[[Step, Any], object] = lambda step, model: None,
    buffers: dict[str, str] | None = None,
) -> Any:
    """Trains, and calls `act` at a place of each step. Returns the model."""
    run.prepare(model, buffers=buffers)
    run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))

    def reach(reached: Place) -> None:
        if reached == place:
            act(step, model)

    for step in run.steps():
        with step:
            reach("top")
            compute_gradients(step, model)
            reach("computed")
            step.optimize()
            reach("optimized")
        reach("between")
    return model


def enqueue(model: Any, x: torch.Tensor) -> None:
    model.queue[: len(x)] = x


def replace_queue(model: Any, x: torch.Tensor) -> None:
    model.queue = torch.cat([x[:1], model.queue[:-1]])


def count(model: Any, x: torch.Tensor) -> None:
    model.seen += len(x)


@pytest.mark.parametrize("settings", [{}, ONE_MICRO_BATCH], ids=["several", "one micro-batch"])
@pytest.mark.parametrize("change", [enqueue, replace_queue, count])
def test_a_buffer_that_a_forward_changes_is_an_error_that_names_it(
    new_run: NewRun, change: Callable[[Any, torch.Tensor], object], settings: dict[str, Any]
) -> None:
    name = "seen" if change is count else "queue"
    with pytest.raises(ConfigError, match=rf"changed buffers: {name}\..*after step.optimize\(\).*{{'{name}': 'sum'}}"):
        train(new_run(**settings), Changing(change))


def change_all(model: Any, x: torch.Tensor) -> None:
    count(model, x)
    enqueue(model, x)
    model.total += x.sum(0)


def test_each_rule_combines_the_changes_of_a_step_as_documented(new_run: NewRun) -> None:
    batches = []

    def record(module: Any, inputs: tuple[torch.Tensor]) -> None:
        batches.append(inputs[0])

    model = Changing(change_all)
    model.register_forward_pre_hook(record)
    train(new_run(steps=1), model, buffers={"seen": "sum", "queue": "first", "tot*": "sum"})
    assert len(batches) == 4 and model.seen == 8
    assert torch.equal(model.queue[:2], batches[0]) and not model.queue[2:].any()
    assert torch.allclose(model.total, torch.cat(batches).sum(0))
    batches.clear()
    model = Changing(change_all)
    model.register_forward_pre_hook(record)
    train(new_run(steps=1, folder="mean"), model, buffers={"seen": "first", "queue": "first", "total": "mean"})
    assert model.seen == 2 and torch.allclose(model.total, torch.stack([x.sum(0) for x in batches]).mean(0))


WRONG_RULES: dict[str, tuple[Any, str]] = {
    "no dict": (["queue"], r"buffers=\['queue'\]. Give a dict of names and rules"),
    "rule": ({"queue": "per_step"}, r"buffers=\{'queue': 'per_step'\}. Use one of 'mean', which averages"),
    "name": ({"keys*": "sum"}, "no such buffer. It has queue, seen, total"),
    "mean of integers": ({"seen": "mean"}, "seen has torch.int64, which has no mean"),
    "sum of booleans": ({"mask": "sum"}, "mask has torch.bool, which is not summed"),
}


@pytest.mark.parametrize(("rules", "message"), WRONG_RULES.values(), ids=WRONG_RULES)
def test_a_wrong_rule_for_buffers_is_refused_before_the_first_step(new_run: NewRun, rules: Any, message: str) -> None:
    model = Changing(count)
    if "mask" in rules:
        model.register_buffer("mask", torch.ones(2, dtype=torch.bool))
    with pytest.raises(ConfigError, match=message):
        new_run().prepare(model, buffers=rules)


def test_rules_for_buffers_of_no_model_are_refused(new_run: NewRun) -> None:
    run = new_run()
    optimizer = torch.optim.SGD(run.prepare(nn.Linear(3, 1)).parameters())
    with pytest.raises(ConfigError, match="got a SGD with shard, buffers or param_init_fn"):
        run.prepare(optimizer, buffers={"queue": "sum"})


class OwnNorm(nn.BatchNorm1d):
    """A user's subclass."""


NORMS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm": lambda: nn.BatchNorm1d(3),
    "subclass": lambda: OwnNorm(3),
    "InstanceNorm": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten()
    ),
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
    "older spectral": lambda: nn.utils.spectral_norm(nn.Linear(3, 3)),
}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_statistics_of_torchs_normalization_layers_need_no_rule(new_run: NewRun, norm: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(norm(), nn.Linear(3, 1))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    train(new_run(), model)
    assert any(not torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def average_in_place(model: Any, x: torch.Tensor) -> None:
    model.frozen.weight.mul_(0.9)


def average_past_torch(model: Any, x: torch.Tensor) -> None:
    model.frozen.weight.data.mul_(0.9)


def replace_data(model: Any, x: torch.Tensor) -> None:
    model.frozen.weight.data = model.frozen.weight.data * 0.9


def average_from_the_third_step(model: Any, x: torch.Tensor) -> None:
    model.calls = getattr(model, "calls", 0) + 1
    if model.calls > 8:
        model.frozen.weight.data.mul_(0.9)


CHANGED_PARAMETERS = (average_in_place, average_past_torch, replace_data, average_from_the_third_step)


@pytest.mark.parametrize("change", CHANGED_PARAMETERS, ids=lambda change: change.__name__)
def test_a_parameter_that_a_forward_changes_is_an_error_that_names_it(
    new_run: NewRun, change: Callable[[Any, torch.Tensor], object]
) -> None:
    run = new_run()
    with pytest.raises(ConfigError, match=r"parameters frozen.weight changed in the step before step.optimize\(\)"):
        train(run, Changing(change))
    assert run.position.step <= 3


def test_an_embedding_that_renormalizes_itself_in_a_forward_is_an_error(new_run: NewRun) -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(2, 4, max_norm=0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.embedding((x > 0).long())
            return y

    with pytest.raises(ConfigError, match=r"Embedding\(max_norm=0.1\).*Leave out.*renorm_\(2.0, 0, 0.1\)"):
        train(new_run(), Tokens())


def still(model: Any, x: torch.Tensor) -> None:
    """Changes nothing."""


def test_changes_in_the_block_after_optimize_are_kept(new_run: NewRun) -> None:
    def change(step: Step, model: Any) -> None:
        with torch.no_grad():
            model.frozen.weight.fill_(step.index)
            model.seen += 8
        model.queue = torch.full((4, 3), float(step.index))

    model = train(new_run(), Changing(still), "optimized", change)
    assert model.seen == 48 and (model.frozen.weight == 5).all() and (model.queue == 5).all()


def change_weight(step: Step, model: Any) -> None:
    model.frozen.weight.data.mul_(0.9)


def change_seen(step: Step, model: Any) -> None:
    model.seen += 8


def change_total(step: Step, model: Any) -> None:
    model.total.fill_(0.5)


def exchange_weights(step: Step, model: Any) -> None:
    """Evaluates other weights, and puts back its own."""
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict({name: torch.zeros_like(value) for name, value in saved.items()})
    model.load_state_dict(saved)


TOP = r"not in a forward: total\. .*after step.optimize\(\).*also for the next step.*plain attribute"


@pytest.mark.parametrize(
    ("place", "change", "buffers", "message"),
    [
        ("between", change_weight, None, r"^frozen.weight changed between two steps.*after step.optimize\(\)"),
        ("between", change_seen, None, r"^seen changed between two steps.*after step.optimize\(\)"),
        ("computed", change_seen, {"seen": "sum"}, r"before step.optimize\(\), and not in a forward: seen"),
        ("top", change_total, None, TOP),
        ("top", change_total, {"total": "sum"}, TOP),
        ("computed", exchange_weights, None, "To evaluate other weights, .* exchange them there and put them back"),
    ],
)
def test_a_change_outside_of_the_forward_and_before_optimize_is_an_error_with_the_fix(
    new_run: NewRun, place: Place, change: Callable[[Step, Any], object], buffers: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(new_run(), Changing(still), place, change, buffers)


def test_weights_may_be_exchanged_between_two_steps_and_put_back(new_run: NewRun) -> None:
    train(new_run(), Changing(still), "between", exchange_weights)


def evaluate(run: Run, model: Any, monkeypatch: pytest.MonkeyPatch) -> float:
    index = SimpleNamespace(from_bytes=lambda data: FakeIndex(num_rows=12), to_bytes=lambda: b"")
    monkeypatch.setattr("elastic_ddp.worker.evaluation.MicroBatchFeed", FakeFeed)
    monkeypatch.setattr("elastic_ddp.worker.evaluation.DatasetIndex", index)
    monkeypatch.setattr("elastic_ddp.worker.evaluation.open_index", lambda *of, **options: index)
    return run.evaluate(lambda model, batch: model(batch["x"]).square().mean(), "held-out")


def test_an_evaluation_leaves_buffers_as_they_are(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_evaluation(model: Any, x: torch.Tensor) -> None:
        if not model.training:
            count(model, x)

    for buffers, ends_well in ({"seen": "sum"}, True), ({}, False):
        run = new_run(folder=str(ends_well), steps=1)
        model = train(run, Changing(in_evaluation), buffers=buffers)
        if ends_well:
            evaluate(run, model, monkeypatch)
            assert model.seen == 0
        else:
            with pytest.raises(ConfigError, match=r"in run.evaluate changed buffers: seen\..*{'seen': 'first'}"):
                evaluate(run, model, monkeypatch)


def test_an_evaluation_may_come_before_optimize(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(steps=2)
    model = train(
        run, Changing(count), "computed", lambda step, model: evaluate(run, model, monkeypatch), {"seen": "sum"}
    )
    assert model.seen == 16


@pytest.mark.parametrize("settings", [{}, ONE_MICRO_BATCH], ids=["several", "one micro-batch"])
@pytest.mark.parametrize("options", [{}, {"reduction": "native"}, {"ddp": {"find_unused_parameters": True}}])
def test_a_backward_beside_that_of_the_step_is_an_error(
    new_run: NewRun, options: dict[str, Any], settings: dict[str, Any]
) -> None:
    run = new_run(**settings, **options)
    model = prepared(run)
    step = next(run.steps())
    with pytest.raises(ConfigError, match=r"without step.backward.*call step.backward\(loss\) once"), step:
        for batch in step.micro_batches():
            (0.5 * model(batch["x"]).square().mean()).backward()
            step.backward(0.5 * model(batch["x"]).square().mean())


def test_gradients_of_inputs_may_be_computed_in_a_loss(new_run: NewRun) -> None:
    run = new_run(steps=1)
    model = prepared(run, nn.Linear(3, 1))
    for step in run.steps():
        with step:
            for batch in step.micro_batches():
                x = batch["x"].requires_grad_()
                y = model(x)
                (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
                step.backward(y.square().mean() + (slope.norm(dim=1) - 1).square().mean())
            step.optimize()


class Averaging(nn.Module):
    """Changes a part of itself in its forward."""

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.blocks, self.average = nn.ModuleList([nn.Linear(5, 5)]), nn.Linear(5, 5).requires_grad_(False)
        self.changes = changes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.changes:
            with torch.no_grad():
                self.average.weight.mul_(0.9)
        y: torch.Tensor = self.blocks[0](x) + self.average(x)
        return y


def wrong_fsdp_step(group: ProcessGroup, wrong: str) -> str:
    config, state = prepared_shards("fsdp", "SGD", model=Averaging(changes=wrong == "parameter"))
    assert state.model is not None
    strategy = strategy_of(config)(state.model, config, group)
    strategy.shard(state.optimizers)
    strategy.begin_step(np.array([3, 3, 3, 3]))
    try:
        for m in strategy.to_compute:
            strategy.prepare_forward(m)
            if wrong == "backward":
                state.module(data(0, m)).square().mean().backward()
            strategy.backward(state.module(data(0, m)).square().mean(), m)
    except ConfigError as error:
        return str(error)
    return "no error"


def wrong_fsdp_steps(group: ProcessGroup) -> list[str]:
    return [wrong_fsdp_step(group, wrong) for wrong in ("parameter", "backward")]


def test_with_fsdp_changed_parameters_and_other_backwards_are_errors_too() -> None:
    for changed, other in run_ranks(2, wrong_fsdp_steps):
        assert "average.weight changed" in changed and "without step.backward" in other


def test_a_layer_of_the_user_that_limits_its_norms_is_named_with_what_to_do() -> None:
    layer = torch.nn.Linear(2, 2)
    layer.max_norm = 1.0  # type: ignore[assignment]
    assert "Change parameters in the block after step.optimize()" in str(changed_parameters_error(["weight"], layer))


def test_parameters_that_are_swapped_in_a_rare_step_are_found() -> None:
    """Torch does not count it, and bits are compared in few steps."""
    model = torch.nn.Linear(2, 2)
    guard = ParameterGuard(model)
    for number in range(1, 6):
        guard.begin(dict(model.named_parameters()))
        if number == 5:
            model.weight.data = model.weight.data.clone()
            with pytest.raises(ConfigError, match="parameters weight changed in the step"):
                guard.check()
        else:
            guard.check()
        guard.end()


def test_a_submodule_that_a_forward_creates_is_found_after_that_forward() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    buffers = StepBuffers(model)
    buffers.begin()
    model.add_module("late", torch.nn.BatchNorm1d(2))
    with pytest.raises(ConfigError, match="was created by a forward"):
        buffers.end_micro_batch(0, 1.0)
