"""Optimizer state belongs to parameters by name, whatever the order in which the optimizer got them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from elastic_ddp.distributed.prepared_model import PreparedModel
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import CheckpointError, ConfigError
from elastic_ddp.worker.optimizer_state import load_named_state, named_state
from elastic_ddp.worker.run import Run
from elastic_ddp.worker.train_state import TrainState
from tests.inside_run import finish, leave
from tests.ranks import run_ranks
from tests.unit.checkpoint.test_fsdp_commits import ROWS, save
from tests.unit.distributed.test_fsdp import OPTIMIZERS, train_on
from tests.unit.single_worker import Model, NewRun, compute_gradients
from tests.unit.worker.test_fsdp_resume import begin_generation

Groups = Callable[[Any], list[dict[str, Any]]]


def in_order(model: torch.nn.Module) -> list[dict[str, Any]]:
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    rest = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [{"params": weights, "weight_decay": 0.1}, {"params": rest, "lr": 0.01}]


def reversed_parameters(model: torch.nn.Module) -> list[dict[str, Any]]:
    return [{**group, "params": group["params"][::-1]} for group in in_order(model)]


def reversed_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    return in_order(model)[::-1]


def one_moved(model: torch.nn.Module) -> list[dict[str, Any]]:
    first, second = in_order(model)
    return [first, {**second, "params": [*second["params"], first["params"].pop()]}]


class OwnFormat(torch.optim.AdamW):
    """An optimizer whose state_dict has an entry that refers to its parameters by number."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": [p.detach() for group in self.param_groups for p in group["params"]]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})


def state_of(groups: Groups, kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> TrainState:
    torch.manual_seed(0)
    state = TrainState(PreparedModel(Model(), device=torch.device("cpu"), bf16=False))
    state.add_optimizer(kind(groups(state.module), lr=0.1))
    return state


def take_steps(state: TrainState, steps: range) -> str:
    """Returns the hash of the weights."""
    for step in steps:
        for number, parameter in enumerate(state.module.parameters()):
            parameter.grad = torch.full_like(parameter, step + number)
        state.step_optimizers(lambda: None)
    return state.weights_sha256()


def weights_of(run: Run, groups: Groups) -> str:
    """Trains, and returns the hash of the weights."""
    torch.manual_seed(0)
    model: Any = run.prepare(Model())
    run.prepare(StepLR(run.prepare(torch.optim.AdamW(groups(model), lr=0.1)), 2, 0.5))
    for step in run.steps():
        with step:
            compute_gradients(step, model)
            step.optimize()
    outcome = finish(run)
    leave(run)
    return str(outcome["weights_sha256"])


def test_a_run_resumes_with_its_parameters_in_another_order(new_run: NewRun) -> None:
    calm = weights_of(new_run(folder="calm", steps=8), in_order)
    weights_of(new_run(folder="again", steps=4), in_order)
    assert weights_of(new_run(folder="again", steps=8), reversed_parameters) == calm


@pytest.mark.parametrize(
    ("groups", "kind", "message"),
    [
        (one_moved, torch.optim.AdamW, "it has in other param_groups 3.weight. Give it"),
        (lambda model: in_order(model)[:1], torch.optim.AdamW, "it lacks 0.bias, 1.weight, 1.bias, 3.bias"),
        (lambda model: [{"params": model.parameters()}], torch.optim.AdamW, "1 param_groups, and 2 were saved"),
        (reversed_groups, torch.optim.AdamW, "2 were saved: it has in other param_groups 0.bias, 1.weight"),
        (reversed_parameters, OwnFormat, "in this order: 0.weight, 3.weight, 0.bias, 1.weight, 1.bias, 3.bias"),
    ],
)
def test_param_groups_that_do_not_match_are_an_error_that_names_the_parameters(
    groups: Groups, kind: type[torch.optim.Optimizer], message: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        state_of(groups, kind).load_state_dict(state_of(in_order, kind).state_dict())
    assert message in str(caught.value)


def test_an_optimizer_with_a_format_of_its_own_resumes_in_its_order() -> None:
    first, second = state_of(in_order, OwnFormat), state_of(in_order, OwnFormat)
    take_steps(first, range(4))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert take_steps(second, range(4, 8)) == take_steps(first, range(4, 8))


def test_a_registered_optimizer_keeps_its_moments_by_name_too() -> None:
    first, second = state_of(in_order), state_of(reversed_parameters)
    for state in (first, second):
        state.registered["own"] = state.optimizers.pop()
    for parameter in first.module.parameters():
        parameter.grad = torch.rand_like(parameter)
    first.registered["own"].step()  # type: ignore[attr-defined]
    second.load_state_dict(first.state_dict())
    moments = [state.state_dict()["user"]["own"]["state"]["3.weight"]["exp_avg"] for state in (first, second)]
    assert torch.equal(*moments) and moments[0].any()


def _turned(model: Any) -> torch.optim.Optimizer:
    optimizer = OPTIMIZERS["AdamW"](model)
    for group in optimizer.param_groups:
        group["params"].reverse()
    return optimizer


def _resumed_in_another_order(group: ProcessGroup, folder: Path) -> tuple[str, str]:
    first, strategy = begin_generation(group, "AdamW")
    train_on(strategy, group, first, ROWS, range(2))
    save(group, folder, first.state_dict())
    train_on(strategy, group, first, ROWS, range(2, 4))
    second, strategy = begin_generation(group, _turned, folder=folder)
    train_on(strategy, group, second, ROWS, range(2, 4))
    return first.weights_sha256(), second.weights_sha256()


def test_shards_resume_with_their_parameters_in_another_order(tmp_path: Path) -> None:
    for calm, resumed in run_ranks(2, _resumed_in_another_order, tmp_path):
        assert calm == resumed


def test_names_that_the_optimizer_got_are_those_of_this_process() -> None:
    named = [partial(torch.optim.SGD, lr=0.1, momentum=0.9)([*Model().named_parameters()]) for _ in range(2)]
    names = [["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]]
    saved = named_state(named[0], names)
    assert "param_names" not in saved["param_groups"][0]
    load_named_state(named[1], names, copy.deepcopy(saved))
    assert named[1].param_groups[0]["param_names"] == names[0]


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda optimizer, model: optimizer.add_param_group({"params": [*model[3].parameters()]}), "block"),
        (lambda optimizer, model: optimizer.param_groups.pop(), "between"),
        (lambda optimizer, model: optimizer.param_groups[0]["params"].pop(), "block"),
    ],
)
def test_param_groups_that_change_in_the_loop_are_an_error_there(new_run: NewRun, change: Any, place: str) -> None:
    run = new_run(steps=6)
    model: Any = run.prepare(Model())
    optimizer = run.prepare(torch.optim.AdamW([{"params": [*model[0].parameters()]}], lr=0.1))
    with pytest.raises(ConfigError, match=r"param_groups of a prepared optimizer changed.*LambdaLR"):
        for step in run.steps():
            with step:
                compute_gradients(step, model)
                step.optimize()
                if step.index == 2 and place == "block":
                    change(optimizer, model)
            if step.index == 2 and place == "between":
                change(optimizer, model)
    assert run.position.step == 3, "before the next step, and before a commit"
