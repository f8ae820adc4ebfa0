"""Code in a step that would lose gradients is an error, at every world size and with every reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import ConfigError
from elastic_ddp.worker.step import Step
from tests.ranks import run_ranks
from tests.unit.rank_steps import config_of, run_steps
from tests.unit.single_worker import NewRun, compute_gradients

Habit = Callable[[Any, torch.optim.Optimizer], object]
"""What a training function does to the gradients of the model, which the optimizer trains."""
PLACES = ("before the loop", "before the forward", "before the backward", "in the loop", "after the loop", "at the end")


class Net(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


class SelfClearing(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step()
        self.zero_grad()


def train_another_model(model: Any, optimizer: Any) -> None:
    other = torch.nn.Linear(3, 1)
    own = torch.optim.SGD(other.parameters(), lr=0.1)
    own.zero_grad()
    other(torch.ones(1, 3)).sum().backward()
    own.step()
    other.zero_grad()


def clear(parameters: Any) -> None:
    for parameter in parameters:
        parameter.grad = None


ZERO_GRAD: dict[str, Habit] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "to zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "a part": lambda model, optimizer: model[0].zero_grad(),
    "around it": lambda model, optimizer: torch.nn.ModuleDict({"inner": model}).zero_grad(),
}
EDITS: dict[str, Habit] = {
    "clip": lambda model, optimizer: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "one to None": lambda model, optimizer: clear([model[2].bias]),
    "all to None": lambda model, optimizer: clear(model.parameters()),
}
REFUSED = [
    *(("optimizer", place, "was called between the first batch") for place in PLACES[1:5]),
    *((habit, "before the backward", "was called between the first batch") for habit in list(ZERO_GRAD)[1:]),
    *((habit, "in the loop", "To clip, set clip_grad_norm") for habit in EDITS),
    ("all to None", "after the loop", "all gradients are None in step.optimize()"),
]
"""Habits, where in a step they are, and the error."""
HARMLESS = [
    ("another model", "in the loop"),
    *((habit, place) for habit in ("optimizer", "model") for place in ("before the loop", "at the end")),
    *((habit, "before the backward") for habit in EDITS),
]
ALL: dict[str, Habit] = {**ZERO_GRAD, **EDITS, "another model": train_another_model}
REDUCTIONS: dict[str, dict[str, Any]] = {
    "canonical": {},
    "native": {"reduction": "native"},
    "native, unused": {"reduction": "native", "ddp": {"find_unused_parameters": True}},
    "fsdp": {"strategy": "fsdp"},
}


def habitual_step(step: Step, model: Any, habit: Habit, place: str) -> None:
    [optimizer] = step.generation.state.optimizers

    def at(here: str) -> None:
        if here == place:
            habit(model, optimizer)

    at("before the loop")
    for batch in step.micro_batches():
        at("before the forward")
        loss = model(batch["x"]).square().mean()
        at("before the backward")
        step.backward(loss, weight=len(batch["x"]))
        at("in the loop")
    at("after the loop")
    step.optimize()
    at("at the end")


def outcomes(group: ProcessGroup, config: RunConfig, habits: list[tuple[str, str]]) -> list[str]:
    """Returns the hash of the weights that each habit leaves, or its error."""
    found = []
    for habit, place in habits:
        torch.manual_seed(7)

        def body(step: Step, model: Any, habit: str = habit, place: str = place) -> None:
            habitual_step(step, model, ALL[habit], place)

        try:
            found.append(run_steps(group, config, Net(), body)["weights"])
        except ConfigError as error:
            found.append(str(error))
    return found


# The micro-batches of a rank are six, two or one. With FSDP on 4 ranks, two run a dummy before their only one.
@pytest.mark.parametrize(
    ("reduction", "world_size"), [("canonical", 1), ("canonical", 3), ("native", 6), ("native, unused", 3), ("fsdp", 4)]
)
def test_code_that_would_lose_gradients_is_an_error_that_says_what_to_remove(reduction: str, world_size: int) -> None:
    config = config_of(steps=2, **REDUCTIONS[reduction])
    habits = [(habit, place) for habit, place, _ in REFUSED]
    for found in run_ranks(world_size, outcomes, config, [*habits, ("another model", "never"), *HARMLESS]):
        for (habit, place, message), outcome in zip(REFUSED, found[: len(habits)], strict=True):
            assert message in outcome, (habit, place, outcome)
        plain, *others = found[len(habits) :]
        assert len(plain) == 64, plain
        assert dict(zip(HARMLESS, others, strict=True)) == dict.fromkeys(HARMLESS, plain)


@pytest.mark.parametrize("options", [{}, {"reduction": "native"}])
def test_gradients_may_be_edited_after_the_loop(new_run: NewRun, options: dict[str, Any]) -> None:
    run = new_run(steps=3, **options)
    model: Any = run.prepare(Net())
    run.prepare(SelfClearing(model.parameters(), lr=0.1))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for step in run.steps():
        with step:
            compute_gradients(step, model)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            clear([model[2].bias])  # not trained in this step
            step.optimize()
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {"0.weight", "0.bias", "2.weight"}


def test_a_parameter_that_no_loss_of_a_step_needs_is_no_error(new_run: NewRun) -> None:
    class MayLeaveOut(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.zeros_like(x)) if not leaves_out else self[0](x)

    for reduction in ("canonical", "native"):
        run = new_run(steps=3, folder=reduction, reduction=reduction, ddp={"find_unused_parameters": True})
        model: Any = run.prepare(MayLeaveOut())
        run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in run.steps():
            leaves_out = step.index == 1
            with step:
                compute_gradients(step, model)
                step.optimize()


def test_zero_grad_is_allowed_again_after_a_step_that_failed(new_run: NewRun) -> None:
    run = new_run()
    model: Any = run.prepare(Net())
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(KeyError), next(run.steps()) as step:
        for batch in step.micro_batches():
            step.backward(model(batch["z"]).mean())
    optimizer.zero_grad()
