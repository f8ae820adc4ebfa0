"""`Run`: preparing, registering, and running from the first step to the last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from elastic_ddp.errors import CheckpointError
from elastic_ddp.rendezvous.client import RunStopped
from elastic_ddp.worker.run import Run
from elastic_ddp.worker.step import Step
from tests.inside_run import finish
from tests.unit.single_worker import (
    Model,
    NewRun,
    PeerFailures,
    StepCounter,
    client_of,
    expect_config_error,
    prepared,
    take_steps,
    train,
)
from tests.unit.worker.commit_helpers import newest_record, wait_for_saves

# Preparing.


def with_optimizer(run: Run, kind: Any = torch.optim.SGD) -> Any:
    return run.prepare(kind(run.prepare(Model()).parameters()))


def prepare_twice(run: Run, make: Callable[[Run], Any]) -> None:
    made = make(run)
    run.prepare(made)
    run.prepare(made)


def optimizer_of_other_parameters(run: Run) -> None:
    model = run.prepare(Model())
    run.prepare(torch.optim.SGD([*model.parameters(), *Model().parameters()]))


def wrapped_model(run: Run) -> None:
    kind = torch.nn.parallel.DistributedDataParallel
    run.prepare(kind.__new__(kind))  # the constructor needs a process group


def scheduler_of_another_optimizer(run: Run) -> None:
    run.prepare(StepLR(torch.optim.SGD(run.prepare(Model()).parameters()), 1))


REFUSED: list[tuple[Callable[[Run], Any], list[str]]] = [
    (lambda run: run.prepare(torch.optim.SGD(Model().parameters())), ["run.prepare", "optimizer before the model"]),
    (optimizer_of_other_parameters, ["6 parameters", "SGD", "model.parameters()"]),
    (lambda run: [run.prepare(Model()) for _ in range(2)], ["run.prepare", "second model", "forward"]),
    (wrapped_model, ["DistributedDataParallel", "plain model"]),
    (lambda run: run.prepare(torch.nn.Tanh()), ["run.prepare", "requires a gradient"]),
    (lambda run: run.prepare(Model().requires_grad_(False)), ["run.prepare", "requires a gradient"]),
    (lambda run: run.prepare(ReduceLROnPlateau(with_optimizer(run))), ["ReduceLROnPlateau", "run.register"]),
    (scheduler_of_another_optimizer, ["StepLR", "optimizer"]),
    (lambda run: run.prepare({"lr": 1}), ["got a dict", "run.register(name, thing)"]),
    (lambda run: [run.register("other", Model()) for _ in range(2)], ["'other' twice"]),
    (lambda run: run.register("number", 3), ["'number'", "int", "load_state_dict"]),  # type: ignore[arg-type]
    (lambda run: run.prepare(with_optimizer(run)), ["same SGD twice"]),
    (lambda run: prepare_twice(run, lambda run: StepLR(with_optimizer(run), 1)), ["same StepLR twice"]),
    (lambda run: with_optimizer(run, torch.optim.LBFGS), ["LBFGS", "closure"]),
    (lambda run: next(iter(run.steps())), ["run.steps()", "run.prepare"]),
    (lambda run: [run.prepare(Model()), next(iter(run.steps()))], ["run.steps()", "run.prepare"]),
    (lambda run: run.evaluate(lambda model, batch: model(batch), "data"), ["run.evaluate", "run.steps()"]),
    (finish, ["nothing was trained", "run.steps()"]),
    (lambda run: run.prepare(torch.nn.EmbeddingBag(3, 3, sparse=True)), ["EmbeddingBag(sparse=True)", "sparse=False"]),
    (lambda run: run.prepare(torch.nn.Linear(3, 3, dtype=torch.complex64)), ["weight, bias", "torch.view_as_complex"]),
]


@pytest.mark.parametrize(("body", "names"), REFUSED, ids=[names[0] for _, names in REFUSED])
def test_an_error_says_what_cannot_be_prepared_or_called(
    new_run: NewRun, body: Callable[[Run], Any], names: list[str]
) -> None:
    run = new_run()
    assert (run.rank, run.world_size, run.total_steps) == (0, 0, 6)
    expect_config_error(run, body, *names)


@pytest.mark.parametrize("layer", [torch.nn.LazyLinear(2), torch.nn.LazyBatchNorm1d(affine=False)])
def test_a_model_with_lazy_layers_is_refused(new_run: NewRun, layer: torch.nn.Module) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), layer)
    name = next(iter(dict([*layer.named_parameters(), *layer.named_buffers()])))
    expect_config_error(new_run(), lambda run: run.prepare(model), f"1.{name}", "model once")
    model(torch.zeros(2, 3))
    assert new_run().prepare(model) is model


def test_preparing_and_registering_inside_or_after_the_loop_is_refused(new_run: NewRun) -> None:
    run = new_run(steps=2)

    def register_and_prepare(step: Step) -> None:
        expect_config_error(run, lambda run: run.prepare(Model()), "run.prepare", "run.steps()")
        expect_config_error(run, lambda run: run.register("late", Model()), "'late'", "run.steps()")

    take_steps(run, register_and_prepare)
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


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"reduction": "canonical"}, ["Use BatchNorm", 'reduction = "native"']),
        ({"resources_per_worker": {"CPU": 1}}, ["does not work with CPUs", "Use BatchNorm"]),
        ({"strategy": "fsdp"}, ['strategy = "fsdp"', "Use BatchNorm"]),
        ({"even_micro_batches": False}, ["even_micro_batches = true"]),
        ({"data": {"drop_last": False}}, ["data.drop_last = true"]),
        ({}, None),
    ],
)
def test_sync_batch_norm_is_refused_where_ranks_would_differ(
    new_run: NewRun, changes: dict[str, Any], names: list[str] | None
) -> None:
    settings = {
        "reduction": "native",
        "resources_per_worker": {"GPU": 1},
        "max_workers": 2,
        "even_micro_batches": True,
        "data": {"drop_last": True},
    }
    run = new_run(num_rows=81, **{**settings, **changes})
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.SyncBatchNorm(3))
    if names is None:
        assert run.prepare(model) is model
    else:
        expect_config_error(run, lambda run: run.prepare(model), "got a SyncBatchNorm", *names)


# A whole run.


def test_a_run_does_all_steps_and_commits_the_last(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run(num_rows=42, global_batch_size=16, micro_batch_size=4)  # the third step of an epoch is short
    indices: list[int] = []
    result = train(run, lambda step: indices.append(step.index))
    assert indices == [0, 1, 2, 3, 4, 5]
    assert (result["steps"], result["samples"], result["epochs"]) == (6, 84, 2.0)
    assert run.position.samples_sha256 == result["samples_sha256"]
    assert client_of(run).steps_of("commit_succeeded") == [6]
    assert newest_record(tmp_path)["samples"] == 84


def test_epochs_end_at_their_last_full_step_with_drop_last(new_run: NewRun) -> None:
    run = new_run(num_rows=47, steps=None, epochs=2, data={"drop_last": True})
    epochs: list[int] = []
    result = train(run, lambda step: epochs.append(step.epoch))
    assert epochs == [0] * 5 + [1] * 5
    assert (result["steps"], result["samples"], result["epochs"]) == (10, 80, 2.0)


@pytest.mark.parametrize(
    ("num_rows", "drop_last", "warns"),
    [(44, False, True), (44, True, False), (48, False, False), (800, False, False)],
)
def test_a_note_before_the_first_step_says_that_batch_norm_will_refuse_one_row(
    new_run: NewRun, num_rows: int, drop_last: bool, warns: bool
) -> None:
    """The run of six steps ends before an epoch of 800 rows does."""
    run = new_run(num_rows=num_rows, data={"drop_last": drop_last})
    texts: list[str] = []

    def stop(step: Step) -> None:
        texts.extend(event["text"] for event in client_of(run).events_of("warned"))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(run, stop)
    assert len(texts) == warns
    if warns:
        assert texts[0].startswith("step 5, the last of an epoch, has micro-batches of one row. BatchNorm (1) raises")
        assert "data.drop_last = true" in texts[0]


def test_an_interrupted_and_resumed_run_has_the_same_result(new_run: NewRun) -> None:
    undisturbed = train(new_run(folder="undisturbed"))
    interrupted = new_run(checkpoint={"every_steps": 2})

    def interrupt(step: Step) -> None:
        if step.index == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(interrupted, wait_for_saves(interrupted, interrupt))
    assert client_of(interrupted).steps_of("commit_succeeded") == [2, 4]
    resumed = new_run()
    indices: list[int] = []
    assert train(resumed, lambda step: indices.append(step.index)) == undisturbed
    assert indices == [4, 5]
    assert client_of(resumed).steps_of("resumed") == [4]


def test_a_stop_commits_the_current_step_and_ends_the_function(new_run: NewRun) -> None:
    run = new_run()

    def request_stop(step: Step) -> None:
        client_of(run).stop_requested = step.index == 1

    with pytest.raises(RunStopped):
        train(run, request_stop)
    assert run.position.step == 2
    assert client_of(run).steps_of("commit_succeeded") == [2]


def test_a_loop_that_ends_early_records_and_commits_its_last_step(new_run: NewRun) -> None:
    run = new_run(steps=6, log_every_steps=1)
    assert train(run, last=3)["steps"] == 4
    assert client_of(run).steps_of("steps_completed") == [1, 2, 3, 4]
    assert client_of(run).steps_of("commit_succeeded")[-1] == 4


def test_the_last_step_is_committed_although_a_peer_fails_right_after_it(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, fail = new_run(), PeerFailures(6)
    monkeypatch.setattr(client_of(run), "progress", lambda **newest: fail(newest["step"]))
    assert train(run)["steps"] == 6
    assert client_of(run).joins == [(None, True), (6, True)]
    assert client_of(run).steps_of("commit_succeeded") == [6]


class Holder(StepCounter):
    """Registered state that holds a scheduler."""

    def __init__(self, scheduler: StepLR) -> None:
        super().__init__()
        self.scheduler = scheduler


SAVES: dict[str, tuple[Callable[[Run, StepLR], object], bool]] = {
    "not": (lambda run, scheduler: None, True),
    "prepared": (lambda run, scheduler: run.prepare(scheduler), False),
    "registered": (lambda run, scheduler: run.register("scheduler", scheduler), False),
    "held": (lambda run, scheduler: run.register("holder", Holder(scheduler)), False),
}


@pytest.mark.parametrize(("save", "warns"), SAVES.values(), ids=SAVES)
def test_a_note_says_that_a_scheduler_which_is_not_prepared_starts_anew(
    new_run: NewRun, save: Callable[[Run, StepLR], object], warns: bool
) -> None:
    run = new_run(steps=1)
    model: Any = run.prepare(torch.nn.Linear(3, 1))
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    save(run, StepLR(optimizer, 2))
    take_steps(run, model=model)
    texts = [event["text"] for event in client_of(run).events_of("warned")]
    assert len(texts) == warns
    if warns:
        assert "the SGD has a scheduler that is not prepared" in texts[0] and "run.prepare(scheduler)" in texts[0]
