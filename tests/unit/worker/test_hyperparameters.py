"""What counts when a run resumes with other hyperparameters in its code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as schedulers
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

from elastic_ddp.driver.display import describe_event
from elastic_ddp.errors import CheckpointError, ConfigError
from elastic_ddp.telemetry.event import parse
from elastic_ddp.worker.run import Run
from tests.loops import loop_of
from tests.unit.single_worker import Model, NewRun, client_of, compute_gradients

Schedule = Callable[[Optimizer, int], LRScheduler]
NewOptimizer = Callable[..., Optimizer]


def trained(run: Run, optimizer: NewOptimizer | None = None, schedule: Schedule | None = None) -> list[dict[str, Any]]:
    """Trains, and returns the settings of the optimizer in each step."""
    model: Any = run.prepare(Model())
    prepared = run.prepare((optimizer or partial(SGD, lr=0.1))(model.parameters()))
    if schedule is not None:
        run.prepare(schedule(prepared, run.total_steps))
    settings = []
    for step in run.steps():
        with step:
            compute_gradients(step, model)
            settings.append({key: value for key, value in prepared.param_groups[0].items() if key != "params"})
            step.optimize()
    loop_of(run).finish()
    loop_of(run).membership.leave(intact=True)
    return settings


def changes_of(run: Run) -> dict[str, tuple[Any, Any]]:
    """The changes in the ledger, by name."""
    events = client_of(run).events_of("hyperparameters_differ")
    return {change["name"]: (change["saved"], change["now"]) for event in events for change in event["changes"]}


def chained(optimizer: Optimizer, steps: int) -> LRScheduler:
    parts = [schedulers.LinearLR(optimizer, 0.1, total_iters=2), schedulers.CosineAnnealingLR(optimizer, T_max=steps)]
    return schedulers.ChainedScheduler(parts)


SCHEDULES: dict[str, Schedule] = {
    "cosine": lambda optimizer, steps: schedulers.CosineAnnealingLR(optimizer, T_max=steps),
    "one cycle": lambda optimizer, steps: schedulers.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps),
    "lambda": lambda optimizer, steps: schedulers.LambdaLR(optimizer, lambda step: 1 - step / steps),
    "partial": lambda optimizer, steps: schedulers.LambdaLR(optimizer, partial(lambda n, step: 1 - step / n, steps)),
    "polynomial": lambda optimizer, steps: schedulers.PolynomialLR(optimizer, steps, 2.0),
    "steps": lambda optimizer, steps: schedulers.StepLR(optimizer, steps // 2, 0.5),
    "milestones": lambda optimizer, steps: schedulers.MultiStepLR(optimizer, [steps // 4, steps // 2], 0.5),
    "linear": lambda optimizer, steps: schedulers.LinearLR(optimizer, total_iters=steps),
    "exponential": lambda optimizer, steps: schedulers.ExponentialLR(optimizer, 0.01 ** (1 / steps)),
    "restarts": lambda optimizer, steps: schedulers.CosineAnnealingWarmRestarts(optimizer, steps // 2),
    "cyclic": lambda optimizer, steps: schedulers.CyclicLR(optimizer, 0.01, 0.1, steps // 2, cycle_momentum=False),
    "sequential": lambda optimizer, steps: schedulers.SequentialLR(
        optimizer,
        [
            schedulers.LinearLR(optimizer, 0.1, total_iters=2),
            schedulers.CosineAnnealingLR(optimizer, T_max=steps - 2),
        ],
        milestones=[2],
    ),
    "sequential lambda": lambda optimizer, steps: schedulers.SequentialLR(
        optimizer,
        [
            schedulers.LinearLR(optimizer, 0.1, total_iters=2),
            schedulers.LambdaLR(optimizer, lambda step: 1 - step / steps),
        ],
        milestones=[2],
    ),
}
FUNCTIONS = ("lambda", "partial", "sequential lambda")
CODE = {"hyperparameters": "code"}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_resume_keeps_the_saved_schedule_and_lists_the_edits(new_run: NewRun, kind: str) -> None:
    def schedule(optimizer: Optimizer, steps: int) -> LRScheduler:
        return SCHEDULES[kind](optimizer, 12 if steps == 6 else 24)

    trained(new_run(steps=6), schedule=schedule)
    resumed = new_run(steps=8)
    expected = trained(new_run(folder="calm", steps=8), schedule=lambda sgd, _: SCHEDULES[kind](sgd, 12))[6:]
    if kind in FUNCTIONS:  # code, which is neither saved nor compared
        assert trained(resumed, schedule=schedule)[0] == expected[0] and not changes_of(resumed)
    else:
        assert trained(resumed, schedule=schedule) == expected and changes_of(resumed)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_over_more_steps_continues_at_its_own_point_with_the_code(new_run: NewRun, kind: str) -> None:
    trained(new_run(steps=6), schedule=SCHEDULES[kind])
    longer = new_run(steps=12, checkpoint=CODE)
    rates = [each["lr"] for each in trained(longer, schedule=SCHEDULES[kind])]
    fresh = [each["lr"] for each in trained(new_run(folder="new", steps=12), schedule=SCHEDULES[kind])[6:]]
    since = 1 if kind in FUNCTIONS else 0  # a function takes effect in the next step
    assert rates[since:] == pytest.approx(fresh[since:])
    assert bool(changes_of(longer)) == (kind not in FUNCTIONS)


@pytest.mark.parametrize("used", ["saved", "code"])
def test_a_scheduler_of_another_class_is_an_error(new_run: NewRun, used: str) -> None:
    trained(new_run(steps=6), schedule=SCHEDULES["exponential"])
    with pytest.raises(CheckpointError, match=r"scheduler 0 is a ExponentialLR .* a StepLR .* run\.load_weights"):
        trained(new_run(steps=12, checkpoint={"hyperparameters": used}), schedule=SCHEDULES["steps"])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("ChainedScheduler", "takes 1 positional argument"),
        ("MultiplicativeLR", "follows from the steps before"),
        ("SWALR", "follows from the steps before"),
        ("LinearLR", "the optimizer has 2 schedulers"),
        ("OneCycleLR", "Tried to step 6 times"),
    ],
)
def test_a_changed_schedule_that_cannot_be_moved_is_an_error(new_run: NewRun, kind: str, reason: str) -> None:
    def train(run: Run, length: int, lr: float) -> None:
        model: Any = run.prepare(Model())
        optimizer = run.prepare(SGD(model.parameters(), lr=lr))
        match kind:
            case "ChainedScheduler":
                run.prepare(chained(optimizer, length))
            case "MultiplicativeLR":
                run.prepare(schedulers.MultiplicativeLR(optimizer, lambda _: 0.9))
            case "SWALR":
                run.prepare(SWALR(optimizer, swa_lr=0.05, anneal_epochs=length))
            case "LinearLR":
                run.prepare(schedulers.LinearLR(optimizer, 0.1, total_iters=length))
                run.prepare(schedulers.ExponentialLR(optimizer, 0.9))
            case _:
                run.prepare(SCHEDULES["one cycle"](optimizer, length))
        for step in run.steps():
            with step:
                compute_gradients(step, model)
                step.optimize()
        loop_of(run).finish()

    train(new_run(), 8, 0.1)
    with pytest.raises(ConfigError, match=rf"{kind} has changed since .* moved to step 6, .*{reason}.* LambdaLR"):
        train(new_run(steps=8, checkpoint=CODE), 4, 0.2)


def test_saved_hyperparameters_are_kept_and_each_difference_is_listed_in_each_session(new_run: NewRun) -> None:
    first = trained(new_run(), schedule=SCHEDULES["cosine"])
    for steps in (8, 10):
        run = new_run(steps=steps)
        settings = trained(run, partial(SGD, lr=0.1 + 0.2, weight_decay=0.1), SCHEDULES["cosine"])
        assert [each["weight_decay"] for each in settings] == [first[0]["weight_decay"]] * 2
        [event] = client_of(run).events_of("hyperparameters_differ")
        assert describe_event(parse(event)) == (
            f"[step {steps - 2}] hyperparameters differ between the commit and the code; the saved values are used; "
            'checkpoint.hyperparameters = "code" uses those in the code:'
            f"\n  SGD.weight_decay: 0 -> 0.1\n  SGD.lr: 0.1 -> 0.3\n  CosineAnnealingLR.T_max: 6 -> {steps}"
        )


def test_the_next_resume_with_the_code_compares_with_the_code_of_the_last(new_run: NewRun) -> None:
    trained(new_run(steps=2))
    runs = []
    for number, rate in enumerate([0.05, 0.05, 0.1], start=2):
        runs.append(new_run(steps=2 * number, checkpoint=CODE))
        assert [each["lr"] for each in trained(runs[-1], partial(SGD, lr=rate))] == [rate] * 2
    assert [changes_of(run) for run in runs] == [{"SGD.lr": (0.1, 0.05)}, {}, {"SGD.lr": (0.05, 0.1)}]
    [event] = client_of(runs[0]).events_of("hyperparameters_differ")
    assert describe_event(parse(event)) == (
        "[step 2] hyperparameters differ between the commit and the code; the values in the code are used from here on:"
        "\n  SGD.lr: 0.1 -> 0.05"
    )


def test_an_edited_learning_rate_keeps_the_place_in_the_schedule(new_run: NewRun) -> None:
    trained(new_run(), schedule=SCHEDULES["cosine"])
    run = new_run(checkpoint=CODE)
    model: Any = run.prepare(Model())
    optimizer = run.prepare(SGD(model.parameters(), lr=0.2))
    run.prepare(schedulers.CosineAnnealingLR(optimizer, T_max=12))
    assert list(run.steps()) == []
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    assert changes_of(run) == {"SGD.lr": (0.1, 0.2), "CosineAnnealingLR.T_max": (6, 12)}


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        (partial(SGD, lr=0.1), partial(SGD, lr=0.05), {"SGD.lr": (0.1, 0.05)}),
        (
            partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
            partial(SGD, lr=0.1, momentum=0.8, weight_decay=0.0),
            {"SGD.momentum": (0.9, 0.8), "SGD.weight_decay": (0.1, 0.0)},
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
    ids=["lr", "momentum and weight_decay", "AdamW", "a tensor"],
)
def test_an_edited_setting_of_the_optimizer_counts_and_is_listed(
    new_run: NewRun, before: NewOptimizer, after: NewOptimizer, names: dict[str, Any]
) -> None:
    [*_, saved] = trained(new_run(), before)
    run = new_run(steps=8, checkpoint=CODE)
    settings = trained(run, after)
    new = after([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]
    for key in saved:
        assert [each[key] for each in settings] == [new[key]] * 2, key
    assert changes_of(run) == names


def test_the_moments_are_kept_when_a_setting_is_edited(new_run: NewRun) -> None:
    moments = []
    for rate in (0.1, 0.05):
        run = new_run(checkpoint=CODE)
        model: Any = run.prepare(Model())
        optimizer = run.prepare(AdamW(model.parameters(), lr=rate))
        if rate == 0.1:
            for step in run.steps():
                with step:
                    compute_gradients(step, model)
                    step.optimize()
            loop_of(run).finish()
        else:
            assert list(run.steps()) == []
        moments.append([state["exp_avg"].clone() for state in optimizer.state.values()])
    assert len(moments[0]) == 6 and all(map(torch.equal, *moments))


def test_an_edited_weight_decay_does_not_touch_the_schedule(new_run: NewRun) -> None:
    calm = trained(new_run(folder="calm", steps=8), schedule=lambda sgd, _: schedulers.ExponentialLR(sgd, 0.9))

    def decayed(optimizer: Optimizer, total_steps: int) -> LRScheduler:
        return schedulers.ExponentialLR(optimizer, 0.9)

    trained(new_run(), schedule=decayed)
    run = new_run(steps=8, checkpoint=CODE)
    settings = trained(run, partial(SGD, lr=0.1, weight_decay=0.1), decayed)
    assert [each["lr"] for each in settings] == [each["lr"] for each in calm[6:]]
    assert changes_of(run) == {"SGD.weight_decay": (0, 0.1)}


def test_betas_edited_under_a_schedule_of_betas_keep_their_place(new_run: NewRun) -> None:
    def adamw(beta: float) -> NewOptimizer:
        return partial(AdamW, lr=0.1, betas=(0.9, beta))

    def schedule(optimizer: Optimizer, _: int) -> LRScheduler:
        return SCHEDULES["one cycle"](optimizer, 8)

    trained(new_run(), adamw(0.999), schedule)
    expected = trained(new_run(folder="new", steps=8), adamw(0.99), schedule)
    assert trained(new_run(steps=8, checkpoint=CODE), adamw(0.99), schedule) == expected[6:]


def test_an_edit_of_one_param_group_is_listed_with_its_number(new_run: NewRun) -> None:
    def groups(decay: float) -> NewOptimizer:
        def build(parameters: Any) -> Optimizer:
            first, *others = parameters
            return SGD([{"params": [first], "weight_decay": decay}, {"params": others}], lr=0.1)

        return build

    trained(new_run(), groups(0.1))
    run = new_run(steps=8)
    trained(run, groups(0.2))
    assert changes_of(run) == {"SGD.param_groups[0].weight_decay": (0.1, 0.2)}


def test_another_number_of_param_groups_is_an_error(new_run: NewRun) -> None:
    trained(new_run())
    with pytest.raises(CheckpointError, match="the SGD has 6 param_groups, and 1 were saved"):
        trained(new_run(), lambda parameters: SGD([{"params": [each]} for each in parameters], lr=0.1))


@pytest.mark.parametrize("used", ["saved", "code"])
def test_the_same_code_continues_with_the_same_bits_and_lists_nothing(new_run: NewRun, used: str) -> None:
    """Also if the training function changes the learning rate beside the schedule."""

    def train(run: Run, until: int) -> tuple[str, float]:
        model: Any = run.prepare(Model())
        optimizer = run.prepare(AdamW(model.parameters(), lr=0.1))
        run.prepare(schedulers.LinearLR(optimizer, 0.1, total_iters=3))
        for step in run.steps():
            with step:
                compute_gradients(step, model)
                step.optimize()
                if step.index == 4:
                    optimizer.param_groups[0]["lr"] *= 0.5
        weights = loop_of(run).finish()["weights_sha256"]
        return weights, optimizer.param_groups[0]["lr"]

    train(new_run(), until=6)
    resumed = new_run(steps=8, checkpoint={"hyperparameters": used})
    assert train(resumed, until=8) == train(new_run(folder="calm", steps=8), until=8)
    assert changes_of(resumed) == {}


def test_a_schedule_of_momentum_can_be_added(new_run: NewRun) -> None:
    def schedule(cycle_momentum: bool) -> Schedule:
        return lambda sgd, _: schedulers.OneCycleLR(sgd, 0.1, total_steps=8, cycle_momentum=cycle_momentum)

    sgd = partial(SGD, lr=0.1, momentum=0.9)
    trained(new_run(), sgd, schedule(False))
    expected = trained(new_run(folder="new", steps=8), sgd, schedule(True))
    assert trained(new_run(steps=8, checkpoint=CODE), sgd, schedule(True)) == expected[6:]


class Warmup:
    """A user's function with state."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / self.steps)


def test_the_attributes_of_a_lambda_with_state_are_compared_by_name(new_run: NewRun) -> None:
    def warmup(steps: int) -> Schedule:
        return lambda optimizer, _: schedulers.LambdaLR(optimizer, Warmup(steps))

    trained(new_run(), schedule=warmup(10))
    run = new_run(steps=8, checkpoint=CODE)
    expected = trained(new_run(folder="new", steps=8), schedule=warmup(20))[6:]
    assert trained(run, schedule=warmup(20)) == expected
    assert changes_of(run)["LambdaLR.lr_lambdas[0].steps"] == (10, 20)


def with_plateau(run: Run, patience: int, rate: float = 0.1) -> list[float]:
    """Trains with a metric that never improves. Returns the learning rate after each step."""
    model: Any = run.prepare(Model())
    optimizer = run.prepare(SGD(model.parameters(), lr=rate))
    plateau = schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=patience)
    run.register("plateau", plateau)
    rates = []
    for step in run.steps():
        with step:
            compute_gradients(step, model)
            step.optimize()
            plateau.step(1.0)
        rates.append(optimizer.param_groups[0]["lr"])
    loop_of(run).finish()
    return rates


def test_the_patience_of_a_registered_plateau_scheduler_can_be_edited(new_run: NewRun) -> None:
    assert with_plateau(new_run(steps=4), patience=1) == [0.1, 0.1, 0.05, 0.05]
    run = new_run(steps=8, checkpoint=CODE)
    assert with_plateau(run, patience=2) == [0.05, 0.025, 0.025, 0.025]  # the count of bad steps goes on
    assert changes_of(run) == {"ReduceLROnPlateau.patience": (1, 2)}
