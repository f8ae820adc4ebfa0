"""The hyperparameters of a run that resumes with other ones in its code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as schedulers
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

from elastic_ddp.distributed.prepared_model import PreparedModel
from elastic_ddp.driver.display import describe_event
from elastic_ddp.errors import CheckpointError, ConfigError
from elastic_ddp.telemetry.event import parse
from elastic_ddp.tensors.state_tree import flatten, unflatten
from elastic_ddp.worker.state_sharing import share_state
from elastic_ddp.worker.train_state import TrainState
from tests.ranks import single_rank_group
from tests.unit.single_worker import CPU, Model, NewRun, client_of, train

Schedule = Callable[[Optimizer], LRScheduler]
NewOptimizer = Callable[..., Optimizer]
Settings = list[dict[str, Any]]
DEFAULT: NewOptimizer = partial(SGD, lr=0.1)


def prepared(optimizer: NewOptimizer = DEFAULT, *schedules: Schedule) -> TrainState:
    """The state of a session before its first step."""
    torch.manual_seed(0)
    state = TrainState(PreparedModel(Model(), device=CPU, bf16=False))
    state.add_optimizer(optimizer(state.module.parameters()))
    for schedule in schedules:
        state.add_scheduler(schedule(state.optimizers[0]))
    state.record_prepared()
    return state


def take_steps(state: TrainState, count: int = 6) -> Settings:
    """Returns the settings of the optimizer in each step."""
    settings = []
    for _ in range(count):
        for parameter in state.module.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        settings.append({key: value for key, value in state.optimizers[0].param_groups[0].items() if key != "params"})
        state.step_optimizers(lambda: None)
        state.step_schedulers(is_skipped=False)
        state.position = state.position.after(8, [b"rows"])
    return settings


def resume(before: TrainState, after: TrainState, used: str = "code") -> list[Any]:
    """Loads the commit of a session in the next one. Returns the events for the ledger."""
    events: list[Any] = []
    settings = SimpleNamespace(checkpoint=SimpleNamespace(hyperparameters=used))
    inputs: Any = SimpleNamespace(
        state=after,
        restore=lambda *_: unflatten(*flatten(copy.deepcopy(before.state_dict()))),
        record=events.append,
        job=SimpleNamespace(config=settings),
    )
    replicated: Any = SimpleNamespace(replicates_state=True)
    share_state(inputs, single_rank_group(), replicated)
    return events


def changes_in(events: list[Any]) -> dict[str, tuple[Any, Any]]:
    return {change["name"]: (change["saved"], change["now"]) for event in events for change in event.changes}


def chained(optimizer: Optimizer, steps: int) -> LRScheduler:
    parts = [schedulers.LinearLR(optimizer, 0.1, total_iters=2), schedulers.CosineAnnealingLR(optimizer, T_max=steps)]
    return schedulers.ChainedScheduler(parts)


def warmed_up(then: LRScheduler) -> LRScheduler:
    warmup = schedulers.LinearLR(then.optimizer, 0.1, total_iters=2)
    return schedulers.SequentialLR(then.optimizer, [warmup, then], milestones=[2])


def multiplied(optimizer: Optimizer, steps: int) -> LRScheduler:
    return schedulers.MultiplicativeLR(optimizer, lambda _: 0.9)


SCHEDULES: dict[str, Schedule] = {
    "cosine": lambda optimizer, steps: schedulers.CosineAnnealingLR(optimizer, T_max=steps),
    "one cycle": lambda optimizer, steps: schedulers.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps),
    "lambda": lambda optimizer, steps: schedulers.LambdaLR(optimizer, lambda step: 1 - step / steps),
    "polynomial": lambda optimizer, steps: schedulers.PolynomialLR(optimizer, steps, 2.0),
    "steps": lambda optimizer, steps: schedulers.StepLR(optimizer, steps // 2, 0.5),
    "milestones": lambda optimizer, steps: schedulers.MultiStepLR(optimizer, [steps // 4, steps // 2], 0.5),
    "linear": lambda optimizer, steps: schedulers.LinearLR(optimizer, total_iters=steps),
    "exponential": lambda optimizer, steps: schedulers.ExponentialLR(optimizer, 0.01 ** (1 / steps)),
    "restarts": lambda optimizer, steps: schedulers.CosineAnnealingWarmRestarts(optimizer, steps // 2),
    "cyclic": lambda optimizer, steps: schedulers.CyclicLR(optimizer, 0.01, 0.1, steps // 2, cycle_momentum=False),
    "sequential": lambda optimizer, steps: warmed_up(schedulers.CosineAnnealingLR(optimizer, T_max=steps - 2)),
    "sequential lambda": lambda optimizer, steps: warmed_up(
        schedulers.LambdaLR(optimizer, lambda step: 1 - step / steps)
    ),
}
FUNCTIONS = ("lambda", "sequential lambda")


def scheduled(kind: str, steps: int) -> TrainState:
    return prepared(DEFAULT, lambda optimizer: SCHEDULES[kind](optimizer, steps))


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_resume_keeps_the_saved_schedule_and_lists_the_edits(kind: str) -> None:
    before, after, calm = scheduled(kind, 12), scheduled(kind, 24), scheduled(kind, 12)
    take_steps(before)
    changes = changes_in(resume(before, after, "saved"))
    expected = take_steps(calm, 8)[6:]
    if kind in FUNCTIONS:  # code, which is neither saved nor compared
        assert take_steps(after, 1) == expected[:1] and not changes
    else:
        assert take_steps(after, 2) == expected and changes


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_over_more_steps_continues_at_its_own_point_with_the_code(kind: str) -> None:
    before, after, fresh = scheduled(kind, 6), scheduled(kind, 12), scheduled(kind, 12)
    take_steps(before)
    changes = changes_in(resume(before, after))
    rates = [[each["lr"] for each in settings] for settings in (take_steps(after), take_steps(fresh, 12)[6:])]
    since = 1 if kind in FUNCTIONS else 0  # a function takes effect in the next step
    assert rates[0][since:] == pytest.approx(rates[1][since:])
    assert bool(changes) == (kind not in FUNCTIONS)


def refusal_of(before: TrainState, after: TrainState) -> str:
    weights = after.weights_sha256()
    with pytest.raises(CheckpointError, match="use another name") as caught:
        resume(before, after, "saved")
    assert after.weights_sha256() == weights
    return str(caught.value)


def test_an_optimizer_or_scheduler_of_another_class_is_an_error() -> None:
    error = refusal_of(prepared(partial(AdamW, lr=0.1)), prepared())
    assert error.startswith("optimizer 0 is AdamW in the commit, and SGD in the code.")
    error = refusal_of(scheduled("exponential", 6), scheduled("steps", 6))
    assert error.startswith("scheduler 0 is ExponentialLR with every='step' in the commit, and StepLR with every=")
    error = refusal_of(scheduled("sequential", 6), scheduled("sequential lambda", 6))
    assert "is SequentialLR(LinearLR, CosineAnnealingLR) with" in error and "SequentialLR(LinearLR, LambdaLR)" in error
    error = refusal_of(scheduled("steps", 6), prepared())
    assert error.startswith("scheduler 0 is StepLR with every='step' in the commit, and missing in the code.")
    before, after = prepared(), prepared()
    before.registered["own"] = Model()
    after.registered["own"] = schedulers.StepLR(after.optimizers[0], 2)
    after.record_prepared()
    assert "scheduler user.own is missing in the commit, and StepLR" in refusal_of(before, after)


@pytest.mark.parametrize(
    ("schedules", "reason"),
    [
        ([chained], "takes 1 positional argument"),
        (
            [lambda optimizer, steps: schedulers.MultiplicativeLR(optimizer, lambda _: 0.9)],
            "follows from the steps before",
        ),
        ([lambda optimizer, steps: SWALR(optimizer, 0.05, anneal_epochs=steps)], "follows from the steps before"),
        ([SCHEDULES["linear"], SCHEDULES["exponential"]], "the optimizer has 2 schedulers"),
        ([SCHEDULES["one cycle"]], "Tried to step 6 times"),
    ],
    ids=["chained", "multiplicative", "SWALR", "two", "one cycle"],
)
def test_a_changed_schedule_that_cannot_be_moved_is_an_error(schedules: list[Any], reason: str) -> None:
    def session(rate: float, steps: int) -> TrainState:
        return prepared(partial(SGD, lr=rate), *(partial(schedule, steps=steps) for schedule in schedules))

    before = session(0.1, 8)
    take_steps(before)
    kind = type(before.schedulers[0]).__name__
    with pytest.raises(ConfigError, match=rf"{kind} has changed since .* moved to step 6, .*{reason}.* LambdaLR"):
        resume(before, session(0.2, 4))


def test_saved_hyperparameters_are_kept_and_each_difference_is_listed_in_each_session(new_run: NewRun) -> None:
    train(new_run())
    for steps in (8, 10):
        run = new_run(steps=steps)
        model: Any = run.prepare(Model())
        optimizer = run.prepare(AdamW(model.parameters(), lr=0.1 + 0.2, weight_decay=0.1))
        run.prepare(schedulers.StepLR(optimizer, 3, 0.5))
        assert next(iter(run.steps())).index == 6
        assert optimizer.param_groups[0]["weight_decay"] == 0.01
        [event] = client_of(run).events_of("hyperparameters_differ")
        assert describe_event(parse(event)) == (
            "[step 6] hyperparameters differ between the commit and the code; the saved values are used; "
            'to use the values in the code, set checkpoint.hyperparameters = "code":'
            "\n  AdamW.weight_decay: 0.01 -> 0.1\n  AdamW.lr: 0.1 -> 0.3\n  StepLR.step_size: 2 -> 3"
        )


def test_the_next_resume_with_the_code_compares_with_the_code_of_the_last() -> None:
    before, listed = prepared(), []
    for rate in (0.05, 0.05, 0.1):
        take_steps(before, 2)
        after = prepared(partial(SGD, lr=rate))
        listed.append(resume(before, after))
        assert take_steps(after, 1)[0]["lr"] == rate
        before = after
    assert [changes_in(events) for events in listed] == [{"SGD.lr": (0.1, 0.05)}, {}, {"SGD.lr": (0.05, 0.1)}]
    assert describe_event(listed[0][0]) == (
        "[step 2] hyperparameters differ between the commit and the code; the values in the code are used from here on:"
        "\n  SGD.lr: 0.1 -> 0.05"
    )


def test_an_edited_learning_rate_keeps_the_place_in_the_schedule() -> None:
    before = scheduled("cosine", 6)
    after = prepared(partial(SGD, lr=0.2), lambda optimizer: SCHEDULES["cosine"](optimizer, 12))
    take_steps(before)
    assert changes_in(resume(before, after)) == {"SGD.lr": (0.1, 0.2), "CosineAnnealingLR.T_max": (6, 12)}
    assert take_steps(after, 1)[0]["lr"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        (
            partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
            partial(SGD, lr=0.05, momentum=0.8, weight_decay=0.0),
            {"SGD.lr": (0.1, 0.05), "SGD.momentum": (0.9, 0.8), "SGD.weight_decay": (0.1, 0.0)},
        ),
        (
            partial(AdamW, lr=0.1, eps=1e-8),
            partial(AdamW, lr=0.1, betas=(0.8, 0.99), eps=1e-6, amsgrad=False, foreach=True),
            {"AdamW.betas": ([0.9, 0.999], [0.8, 0.99]), "AdamW.eps": (1e-8, 1e-6), "AdamW.foreach": (None, True)},
        ),
        (
            partial(AdamW, lr=torch.tensor(0.5), foreach=False),
            partial(AdamW, lr=torch.tensor(0.25), foreach=False),
            {"AdamW.lr": (0.5, 0.25)},
        ),
    ],
    ids=["SGD", "AdamW", "a tensor"],
)
def test_an_edited_setting_of_the_optimizer_counts_and_is_listed(
    before: NewOptimizer, after: NewOptimizer, names: dict[str, Any]
) -> None:
    first, second = prepared(before), prepared(after)
    [saved] = take_steps(first, 1)
    assert changes_in(resume(first, second)) == names
    new = after([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]
    moments = [flatten(state.state_dict()["optimizer"]["0"]["state"])[1] for state in (first, second)]
    assert all(torch.equal(moments[1][name], moment) for name, moment in moments[0].items()), "they are kept"
    [settings] = take_steps(second, 1)
    assert {key: settings[key] for key in saved} == {key: new[key] for key in saved}


def test_an_edited_weight_decay_does_not_touch_the_schedule() -> None:
    before, calm = scheduled("exponential", 8), scheduled("exponential", 8)
    edited = partial(SGD, lr=0.1, weight_decay=0.1)
    after = prepared(edited, lambda optimizer: SCHEDULES["exponential"](optimizer, 8))
    take_steps(before)
    assert changes_in(resume(before, after)) == {"SGD.weight_decay": (0, 0.1)}
    assert [each["lr"] for each in take_steps(after, 2)] == [each["lr"] for each in take_steps(calm, 8)[6:]]


def one_cycle(optimizer: Optimizer, cycle_momentum: bool = True) -> LRScheduler:
    return schedulers.OneCycleLR(optimizer, 0.1, total_steps=8, cycle_momentum=cycle_momentum)


MOMENTUM = partial(SGD, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            (partial(AdamW, lr=0.1, betas=(0.9, 0.999)), one_cycle),
            (partial(AdamW, lr=0.1, betas=(0.9, 0.99)), one_cycle),
        ),
        ((MOMENTUM, partial(one_cycle, cycle_momentum=False)), (MOMENTUM, one_cycle)),
    ],
    ids=["edited betas", "a schedule of momentum"],
)
def test_edited_betas_and_an_added_schedule_of_momentum_get_their_place(before: Any, after: Any) -> None:
    first, second, fresh = prepared(*before), prepared(*after), prepared(*after)
    take_steps(first)
    resume(first, second)
    assert take_steps(second, 2) == take_steps(fresh, 8)[6:]


def test_an_edit_of_one_param_group_is_listed_with_its_number() -> None:
    def groups(decay: float) -> NewOptimizer:
        def build(parameters: Any) -> Optimizer:
            first, *others = parameters
            return SGD([{"params": [first], "weight_decay": decay}, {"params": others}], lr=0.1)

        return build

    changes = changes_in(resume(prepared(groups(0.1)), prepared(groups(0.2)), "saved"))
    assert changes == {"SGD.param_groups[0].weight_decay": (0.1, 0.2)}


@pytest.mark.parametrize("used", ["saved", "code"])
def test_the_same_code_continues_with_the_same_bits_and_lists_nothing(used: str) -> None:
    """Also if the training function changes the learning rate beside the schedule."""
    calm, after = (prepared(partial(AdamW, lr=0.1), partial(SCHEDULES["linear"], steps=3)) for _ in range(2))
    take_steps(calm, 2)
    calm.optimizers[0].param_groups[0]["lr"] *= 0.5
    take_steps(calm, 2)
    assert not resume(calm, after, used)
    assert take_steps(after, 4) == take_steps(calm, 4)
    assert after.weights_sha256() == calm.weights_sha256()


class Warmup:
    """A user's function with state."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / self.steps)


def test_the_attributes_of_a_lambda_with_state_are_compared_by_name() -> None:
    def session(steps: int) -> TrainState:
        return prepared(DEFAULT, lambda optimizer: schedulers.LambdaLR(optimizer, Warmup(steps)))

    before, after, fresh = session(10), session(20), session(20)
    take_steps(before)
    assert changes_in(resume(before, after))["LambdaLR.lr_lambdas[0].steps"] == (10, 20)
    assert take_steps(after, 2) == take_steps(fresh, 8)[6:]


def test_the_patience_of_a_registered_plateau_scheduler_can_be_edited() -> None:
    def session(patience: int) -> tuple[TrainState, schedulers.ReduceLROnPlateau]:
        state = prepared()
        plateau = schedulers.ReduceLROnPlateau(state.optimizers[0], factor=0.5, patience=patience)
        state.registered["plateau"] = plateau
        state.record_prepared()
        return state, plateau

    def rates_of(state: TrainState, plateau: schedulers.ReduceLROnPlateau) -> list[float]:
        rates = []
        for _ in range(4):
            plateau.step(1.0)  # a metric that never improves
            rates.append(state.optimizers[0].param_groups[0]["lr"])
        return rates

    first, second = session(1), session(2)
    assert rates_of(*first) == [0.1, 0.1, 0.05, 0.05]
    assert changes_in(resume(first[0], second[0])) == {"ReduceLROnPlateau.patience": (1, 2)}
    assert rates_of(*second) == [0.05, 0.025, 0.025, 0.025]  # the count of bad steps goes on
