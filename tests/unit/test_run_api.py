"""The API of a training function: what it promises, and every way of getting it wrong with the answer to it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from elastic_ddp.checkpoint import CheckpointStore
from elastic_ddp.data.order import EpochShape
from elastic_ddp.distributed.prepared_model import PreparedModel
from elastic_ddp.errors import CheckpointError, ConfigError
from elastic_ddp.rendezvous.client import RunStopped
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.job import COMMITS
from elastic_ddp.worker.run import Run
from elastic_ddp.worker.step import Step
from elastic_ddp.worker.train_state import TrainState
from tests.unit.single_worker import CPU, Model, NewRun, client_of, expect_config_error, prepared, train

# Preparing.


def test_an_optimizer_before_the_model_is_refused(new_run: NewRun) -> None:
    optimizer = torch.optim.SGD(Model().parameters())
    expect_config_error(new_run(), lambda run: run.prepare(optimizer), "run.prepare", "optimizer before the model")


def test_an_optimizer_of_other_parameters_is_refused(new_run: NewRun) -> None:
    run = new_run()
    model = run.prepare(Model())
    other = torch.optim.SGD([*model.parameters(), *Model().parameters()])
    expect_config_error(run, lambda run: run.prepare(other), "6 parameters", "SGD", "model.parameters()")


def test_a_second_model_is_refused(new_run: NewRun) -> None:
    run = new_run()
    run.prepare(Model())
    expect_config_error(run, lambda run: run.prepare(Model()), "run.prepare", "second model", "forward")


def test_a_model_that_is_already_wrapped_is_refused(new_run: NewRun) -> None:
    kind = torch.nn.parallel.DistributedDataParallel
    wrapped = kind.__new__(kind)  # the constructor needs a process group
    expect_config_error(new_run(), lambda run: run.prepare(wrapped), "DistributedDataParallel", "plain model")


@pytest.mark.parametrize("model", [torch.nn.Tanh(), Model().requires_grad_(False)], ids=["no-parameters", "frozen"])
def test_a_model_without_trainable_parameters_is_refused(new_run: NewRun, model: torch.nn.Module) -> None:
    expect_config_error(new_run(), lambda run: run.prepare(model), "run.prepare", "requires a gradient")


def test_a_scheduler_that_needs_a_metric_is_registered_instead(new_run: NewRun) -> None:
    run = new_run()
    optimizer = run.prepare(torch.optim.SGD(run.prepare(Model()).parameters()))
    expect_config_error(run, lambda run: run.prepare(ReduceLROnPlateau(optimizer)), "ReduceLROnPlateau", "run.register")
    run.register("plateau", ReduceLROnPlateau(optimizer))


def test_a_scheduler_of_an_optimizer_that_was_not_prepared_is_refused(new_run: NewRun) -> None:
    run = new_run()
    optimizer = torch.optim.SGD(run.prepare(Model()).parameters())
    expect_config_error(run, lambda run: run.prepare(StepLR(optimizer, 1)), "StepLR", "optimizer")


def test_an_object_of_another_type_is_refused_by_prepare(new_run: NewRun) -> None:
    expect_config_error(new_run(), lambda run: run.prepare({"lr": 1}), "got a dict", "run.register(name, thing)")


def test_a_registered_object_needs_a_unique_name_and_both_methods(new_run: NewRun) -> None:
    run = new_run()
    run.register("other", Model())
    expect_config_error(run, lambda run: run.register("other", Model()), "'other' twice")
    nothing: Any = 3
    expect_config_error(run, lambda run: run.register("number", nothing), "'number'", "int", "load_state_dict")


def test_preparing_inside_the_loop_is_refused(new_run: NewRun) -> None:
    run = new_run()
    prepared(run)
    next(iter(run.steps()))
    expect_config_error(run, lambda run: run.prepare(Model()), "run.prepare", "run.steps()")


def test_registering_inside_or_after_the_loop_is_refused(new_run: NewRun) -> None:
    run = new_run(steps=2)
    model = prepared(run)
    for step in run.steps():
        expect_config_error(run, lambda run: run.register("late", Model()), "'late'", "run.steps()")
        with step:
            for batch in step.micro_batches():
                step.backward(model(batch["x"]).mean())
            step.optimize()
    expect_config_error(run, lambda run: run.register("later", Model()), "'later'", "run.steps()")


class UnsavableState:
    def state_dict(self) -> dict[str, Any]:
        return {"ids": {1, 2}}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_state_that_cannot_be_saved_is_refused_before_the_first_step(new_run: NewRun) -> None:
    run = new_run()
    prepared(run)
    run.register("seen", UnsavableState())
    with pytest.raises(CheckpointError, match=r"user.*seen.*ids.*set"):
        next(iter(run.steps()))
    assert client_of(run).joins == []


def test_a_loop_without_a_model_and_an_optimizer_is_refused(new_run: NewRun) -> None:
    run = new_run()
    expect_config_error(run, lambda run: next(iter(run.steps())), "run.steps()", "run.prepare")
    run.prepare(Model())
    expect_config_error(run, lambda run: next(iter(run.steps())), "run.steps()", "run.prepare")


def test_evaluating_before_the_loop_and_training_without_it_are_refused(new_run: NewRun) -> None:
    run = new_run()
    expect_config_error(
        run, lambda run: run.evaluate(lambda model, batch: model(batch), "data"), "run.evaluate", "run.steps()"
    )
    expect_config_error(run, lambda run: run._loop.finish(), "nothing was trained", "run.steps()")
    assert (run.rank, run.world_size, run.total_steps) == (0, 0, 6)


# Wrong uses of a step. Each function is the body of `with step`.


def twice(step: Step, model: PreparedModel) -> None:
    for batch in step.micro_batches():
        loss = model(batch["x"]).mean()
        step.backward(loss)
        step.backward(loss)


def before_the_first(step: Step, model: PreparedModel) -> None:
    step.backward(model(torch.ones(2, 3)).mean())


def after_the_last(step: Step, model: PreparedModel) -> None:
    for batch in step.micro_batches():
        step.backward(model(batch["x"]).mean())
    step.backward(model(torch.ones(2, 3)).mean())


def of_every_row(step: Step, model: PreparedModel) -> None:
    for batch in step.micro_batches():
        step.backward(model(batch["x"]))


def left_out(step: Step, model: PreparedModel) -> None:
    for place, batch in enumerate(step.micro_batches()):
        if place != 1:
            step.backward(model(batch["x"]).mean())


def optimized_early(step: Step, model: PreparedModel) -> None:
    for place, batch in enumerate(step.micro_batches()):
        step.backward(model(batch["x"]).mean())
        if place == 1:
            break
    step.optimize()


def optimized_at_once(step: Step, model: PreparedModel) -> None:
    step.optimize()


def optimized_twice(step: Step, model: PreparedModel) -> None:
    after_all(step, model)
    step.optimize()


def never_optimized(step: Step, model: PreparedModel) -> None:
    for batch in step.micro_batches():
        step.backward(model(batch["x"]).mean())


def after_all(step: Step, model: PreparedModel) -> None:
    never_optimized(step, model)
    step.optimize()


FIRST_LOOP = "step.micro_batches()"


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (twice, ["step.backward", "once"]),
        (before_the_first, ["step.backward", "once"]),
        (after_the_last, ["step.backward", "once"]),
        (of_every_row, ["step.backward", "(2, 1)", "mean"]),
        (left_out, ["step 0", "micro-batch 1", "step.backward(loss)"]),
        (optimized_early, ["step 0", "[2, 3]", FIRST_LOOP]),
        (optimized_at_once, ["step 0", "[0, 1, 2, 3]", FIRST_LOOP]),
        (optimized_twice, ["step.optimize", "twice in step 0"]),
        (never_optimized, ["step 0", "step.optimize()"]),
    ],
)
def test_an_error_about_a_wrongly_used_step_names_the_fix(
    new_run: NewRun, body: Callable[[Step, PreparedModel], None], names: list[str]
) -> None:
    def training(run: Run) -> None:
        model = prepared(run)
        for step in run.steps():
            with step:
                body(step, model)

    expect_config_error(new_run(), training, *names)


def test_a_skipped_step_is_refused(new_run: NewRun) -> None:
    def training(run: Run) -> None:
        prepared(run)
        for _ in run.steps():
            continue

    expect_config_error(new_run(), training, "step 0", "`with step`")


def test_errors_of_the_user_pass_through_a_step(new_run: NewRun) -> None:
    def broken(step: Step) -> None:
        raise ZeroDivisionError("the user's own")

    with pytest.raises(ZeroDivisionError, match="the user's own"):
        train(new_run(), broken)


# A run.


def test_a_run_makes_all_its_steps_and_commits_the_last(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run(num_rows=42, global_batch_size=16, micro_batch_size=4)  # the third step of an epoch is short
    indices: list[int] = []
    result = train(run, lambda step: indices.append(step.index))
    assert indices == [0, 1, 2, 3, 4, 5]
    assert (result["steps"], result["samples"], result["epochs"]) == (6, 84, 2.0)
    assert run.position.samples_sha256 == result["samples_sha256"]
    assert client_of(run).steps_of("commit") == [6]
    commit = CheckpointStore(Storage(tmp_path / "run").at(COMMITS), keep=1).latest()
    assert commit is not None
    assert commit.step == 6
    assert commit.record["samples"] == 84


def test_leaving_the_loop_over_micro_batches_after_the_last_with_rows_changes_nothing(new_run: NewRun) -> None:
    shape = EpochShape(18, 4, 4)
    with_rows = [int(np.count_nonzero(shape.rows(step))) for step in range(6)]
    assert with_rows == [4, 2, 4, 2, 4, 2]  # the second step of an epoch has rows in two of its micro-batches

    def trained(hasty: bool) -> dict[str, Any]:
        run = new_run(num_rows=18, global_batch_size=16, micro_batch_size=4, folder=f"hasty-{hasty}")
        model = run.prepare(torch.nn.Linear(3, 1))  # a BatchNorm would refuse a single row
        run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in run.steps():
            with step:
                for place, batch in enumerate(step.micro_batches(), start=1):
                    step.backward(model(batch["x"]).square().mean())
                    if hasty and place == with_rows[step.index]:
                        break
                step.optimize()
        return run._loop.finish()

    patient, hasty = trained(False), trained(True)
    assert hasty["samples_sha256"] == patient["samples_sha256"]
    assert hasty == patient


def test_a_run_is_the_same_when_it_is_interrupted_and_resumed(new_run: NewRun) -> None:
    calm = train(new_run(folder="calm"))
    interrupted = new_run(checkpoint={"every_steps": 2})

    def power_cut(step: Step) -> None:
        interrupted._loop.checkpointer.close(60)  # of the step before
        if step.index == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(interrupted, power_cut)
    assert client_of(interrupted).steps_of("commit") == [2, 4]
    resumed = new_run()
    indices: list[int] = []
    assert train(resumed, lambda step: indices.append(step.index)) == calm
    assert indices == [4, 5]
    assert client_of(resumed).steps_of("resumed") == [4]


def test_a_stop_commits_the_step_at_hand_and_ends_the_function(new_run: NewRun) -> None:
    run = new_run()

    def ask(step: Step) -> None:
        client_of(run).stop_requested = step.index == 1

    with pytest.raises(RunStopped):
        train(run, ask)
    assert run._loop.progress()["steps"] == 2
    assert client_of(run).steps_of("commit") == [2]


def test_optimizers_and_schedulers_step_once_a_step_and_gradients_are_cleared(new_run: NewRun) -> None:
    run = new_run(steps=3)
    net = Model()
    model = run.prepare(net)
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    run.prepare(StepLR(optimizer, 1, 0.5))
    weight = net[0].weight
    moved = []
    for step in run.steps():
        before = weight.detach().clone()
        with step:
            for batch in step.micro_batches():
                step.backward(model(batch["x"]).square().mean())
            assert weight.grad is not None
            change = 0.1 * 0.5**step.index * weight.grad
            step.optimize()
        moved.append(bool(change.any()) and torch.allclose(before - weight, change, atol=1e-6))
        assert all(parameter.grad is None for parameter in model.parameters())
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5 ** (step.index + 1))
    assert moved == [True, True, True]


def test_parameters_that_change_inside_the_loop_are_refused_by_name(new_run: NewRun) -> None:
    def unfreeze(model: torch.nn.Module) -> None:
        next(model.parameters()).requires_grad_(True)

    def add(model: torch.nn.Module) -> None:
        model.register_parameter("added", torch.nn.Parameter(torch.zeros(1)))

    for change, name in ((unfreeze, next(iter(dict(Model().named_parameters())))), (add, "added")):
        run = new_run(steps=3)
        module = Model()
        next(module.parameters()).requires_grad_(change is not unfreeze)
        model: Any = run.prepare(module)
        run.prepare(torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=0.1))
        with pytest.raises(ConfigError, match=rf"parameters {name} were added.*give them a param_group.*lr=0"):
            for step in run.steps():
                if step.index == 1:
                    change(model.module)
                with step:
                    for batch in step.micro_batches():
                        step.backward(model(batch["x"]).square().mean())
                    step.optimize()


def test_what_would_train_something_else_is_refused(new_run: NewRun) -> None:
    def twice(run: Run) -> None:
        model: Any = run.prepare(Model())
        optimizer = run.prepare(torch.optim.AdamW(model.parameters()))
        run.prepare(optimizer)

    def closure(run: Run) -> None:
        model: Any = run.prepare(Model())
        run.prepare(torch.optim.LBFGS(model.parameters()))

    def without_a_block(run: Run) -> None:
        model = prepared(run)
        for step in run.steps():
            for batch in step.micro_batches():
                step.backward(model(batch["x"]).square().mean())

    def logs(value: Any) -> Callable[[Run], None]:
        def body(run: Run) -> None:
            prepared(run)
            for step in run.steps():
                with step:
                    step.log(accuracy=value)

        return body

    expect_config_error(new_run(), twice, "same AdamW twice")
    expect_config_error(new_run(), closure, "LBFGS", "closure")
    expect_config_error(new_run(), without_a_block, "step 0", "`with step:`")
    expect_config_error(new_run(), logs(torch.zeros(3)), "accuracy", "(3,)")
    expect_config_error(new_run(), logs("high"), "accuracy='high'")


def test_a_loop_that_ends_early_has_its_last_step_in_the_record(new_run: NewRun) -> None:
    run = new_run(steps=6, log_every_steps=1)
    model = prepared(run)
    for step in run.steps():
        with step:
            for batch in step.micro_batches():
                step.backward(model(batch["x"]).square().mean())
            step.optimize()
        if step.index == 3:
            break
    outcome = run._loop.finish()
    assert outcome["steps"] == 4
    assert client_of(run).steps_of("steps") == [1, 2, 3, 4]
    assert client_of(run).steps_of("commit")[-1] == 4


def test_losses_and_logged_values_are_means_over_the_rows_of_the_global_batch(new_run: NewRun) -> None:
    run = new_run(num_rows=26, steps=2, global_batch_size=16, micro_batch_size=4, log_every_steps=1)
    model = prepared(run)
    losses = []
    for step in run.steps():
        expected = weight = 0.0
        with step:
            for batch in step.micro_batches():
                rows = len(batch["x"])
                loss = model(batch["x"]).square().mean()
                step.log(loss_again=loss, rows=float(rows))
                expected, weight = expected + loss.item() * rows, weight + rows
                step.backward(loss)
            step.optimize()
            step.log(learning_rate=0.5)
        losses.append(step.loss)
        assert step.loss == pytest.approx(expected / weight, rel=1e-6)
    said = [each for each in client_of(run).events if each["event"] == "steps"]
    assert [each["loss"] for each in said] == losses
    assert [each["metrics"]["loss_again"] for each in said] == pytest.approx(losses, rel=1e-6)
    assert [each["metrics"]["learning_rate"] for each in said] == [0.5, 0.5]
    assert [each["metrics"]["rows"] for each in said] == [4.0, (3 * 3 + 3 * 3 + 2 * 2 + 2 * 2) / 10]
    assert [each["samples"] for each in said] == [16, 26]


# The model as it comes back.


class Scripted(torch.nn.Module):
    """Returns what it is told to."""

    def __init__(self, output: Callable[[torch.Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(1))
        self.output = output
        self.vocabulary = ["a", "b"]

    def forward(self, x: torch.Tensor) -> Any:
        return self.output(self.layer(x))

    def generate(self) -> str:
        return "text"


class FakeReplica:
    """What forward goes through while a generation lasts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


def test_attributes_and_methods_are_those_of_the_users_model() -> None:
    model = PreparedModel(Scripted(), device=CPU, bf16=False)
    assert model.vocabulary == ["a", "b"]
    assert model.generate() == "text"
    assert model.layer is model.module.layer
    with pytest.raises(AttributeError, match="'Scripted' object has no attribute 'nothing'"):
        _ = model.nothing


def test_names_in_the_state_are_the_users() -> None:
    model = PreparedModel(Scripted(), device=CPU, bf16=False)
    assert list(model.state_dict()) == ["count", "layer.weight", "layer.bias"]
    plain = Scripted()
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})


def test_without_gradients_forward_does_not_go_through_ddp() -> None:
    model, replica = PreparedModel(Scripted(), device=CPU, bf16=False), FakeReplica()
    fake: Any = replica
    model.use_replica(fake)
    model(torch.ones(1, 2))
    assert replica.calls == 1
    with torch.no_grad():
        model(torch.ones(1, 2))
    with torch.inference_mode():
        model(torch.ones(1, 2))
    assert replica.calls == 1
    model.use_replica(None)
    model(torch.ones(1, 2))
    assert replica.calls == 1
    assert list(model.state_dict()) == list(Scripted().state_dict())  # the replica is no part of the model


def test_bf16_outputs_come_back_as_fp32_however_they_are_nested() -> None:
    numbers = torch.tensor([1, 2])

    def nested(y: torch.Tensor) -> Any:
        assert y.dtype == torch.bfloat16
        return OrderedDict(
            logits=y, parts=[y, (y, {"deep": y})], numbers=numbers, double=y.double(), text="x", none=None
        )

    model = PreparedModel(Scripted(nested), device=CPU, bf16=True)
    output = model(torch.ones(1, 2))
    assert type(output) is OrderedDict
    assert type(output["parts"]) is list
    assert type(output["parts"][1]) is tuple
    floats = [output["logits"], output["parts"][0], output["parts"][1][0], output["parts"][1][1]["deep"]]
    assert {each.dtype for each in floats} == {torch.float32}
    assert output["numbers"] is numbers
    assert output["double"].dtype == torch.float64
    assert (output["text"], output["none"]) == ("x", None)
    assert model.module.layer.weight.dtype == torch.float32


def test_without_bf16_outputs_come_back_as_they_are() -> None:
    model = PreparedModel(Scripted(lambda y: y.bfloat16()), device=CPU, bf16=False)
    assert model(torch.ones(1, 2)).dtype == torch.bfloat16


# All state as one tree.


def state_of(model: torch.nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, optimizers: int = 1) -> Any:
    state = TrainState(model=PreparedModel(model, device=CPU, bf16=False))
    for _ in range(optimizers):
        state.add_optimizer(kind(state.module.parameters(), lr=0.1))
    return state


def load_error(state: TrainState, saved: TrainState) -> str:
    with pytest.raises(CheckpointError, match="use another name") as caught:
        state.load_state_dict(saved.state_dict())
    return str(caught.value)


def test_state_of_other_objects_is_refused() -> None:
    registered, scheduled = state_of(Model()), state_of(Model())
    registered.registered["sampler"] = Model()
    scheduled.add_scheduler(StepLR(scheduled.optimizers[0], 1))
    for state, saved, names in [
        (state_of(Model(), optimizers=2), state_of(Model()), ["optimizer state for ['0']", "['0', '1']"]),
        (state_of(Model()), registered, ["user state for ['sampler']", "has []"]),
        (scheduled, state_of(Model()), ["scheduler state for []", "has ['0']"]),
    ]:
        error = load_error(state, saved)
        assert all(name in error for name in names), error


@pytest.mark.parametrize(
    "other", [torch.nn.Linear(3, 4), Model().append(torch.nn.Linear(1, 1)), torch.nn.Sequential(torch.nn.Linear(3, 5))]
)
def test_state_of_another_model_is_refused(other: torch.nn.Module) -> None:
    assert "does not fit the model or optimizer" in load_error(state_of(other), state_of(Model()))


def test_state_of_an_optimizer_with_other_param_groups_is_refused() -> None:
    other = TrainState(model=PreparedModel(Model(), device=CPU, bf16=False))
    other.add_optimizer(torch.optim.AdamW([{"params": [parameter]} for parameter in other.module.parameters()]))
    assert "different number of parameter groups" in load_error(other, state_of(Model()))


def test_state_that_is_loaded_is_the_state_that_was_saved() -> None:
    saved, loaded = state_of(Model()), state_of(Model())
    saved.module(torch.ones(2, 3)).sum().backward()
    saved.optimizers[0].step()
    saved.position = saved.position.after(8, [b"digest"])
    loaded.load_state_dict(saved.state_dict())
    assert loaded.weights_sha256() == saved.weights_sha256()
    assert loaded.position == saved.position
    moments = [state.optimizers[0].state_dict()["state"][0]["exp_avg"] for state in (saved, loaded)]
    assert torch.equal(*moments)


def fingerprint(**tensors: torch.Tensor) -> str:
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return state_of(torch.nn.ModuleDict({"part": module}), optimizers=0).weights_sha256()


def test_the_fingerprint_of_weights_changes_with_name_type_shape_value_and_order() -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3])
    same = fingerprint(a=a, b=b)
    assert fingerprint(a=a.clone(), b=b.clone()) == same
    others = [
        fingerprint(a=a, c=b),
        fingerprint(a=a.view(torch.int32), b=b),
        fingerprint(a=a.view(2, 1), b=b),
        fingerprint(a=torch.nextafter(a, a + 1), b=b),
        fingerprint(b=b, a=a),
        fingerprint(a=a),
    ]
    assert len({same, *others}) == 1 + len(others)


def test_the_fingerprint_covers_parameters_and_buffers() -> None:
    state = state_of(Model())
    before = state.weights_sha256()
    state.module[1].running_mean[0] += 1
    after = state.weights_sha256()
    with torch.no_grad():
        state.module[0].bias[0] += 1
    assert len({before, after, state.weights_sha256()}) == 3
