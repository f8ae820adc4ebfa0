"""Steps of several updates: GANs, actor and critic, SAM. Real workers without Ray, see `tests.workers`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ddp.data.order import EpochShape
from elastic_ddp.errors import ConfigError
from elastic_ddp.seeding import seed_all
from elastic_ddp.tensors.state_tree import weights_sha256
from tests.fsdp_workers import Fault, hashes
from tests.unit.single_worker import CPU, NewRun, fake_feed
from tests.update_jobs import (
    GAN,
    JOBS,
    PLAIN,
    SAM,
    SETTINGS,
    STEPS,
    BrokenGAN,
    Plan,
    Twins,
    set_up,
    train,
    train_plainly,
)
from tests.workers import Workers, running

AT = 3
"""The step in which workers fail."""


@contextmanager
def workers(folder: Path, plan: Plan) -> Iterator[Workers]:
    """The workers of a run, each on a node of its own. None is started."""
    folder.mkdir(exist_ok=True)
    options: dict[str, Any] = {"nodes": [f"10.0.0.{n}" for n in range(3)], "num_rows": 250}
    options |= {"set_up": partial(set_up, plan)}
    with running(folder, partial(train, plan=plan), CPU, 0, **options, **{**SETTINGS, **plan.changes}) as run:
        yield run


def run_of(folder: Path, size: int, plan: Plan) -> tuple[dict[str, Any], Workers]:
    with workers(folder, plan) as run:
        run.start(size)
        return hashes(run), run


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The hashes of each job on one worker."""
    return {name: run_of(tmp_path_factory.mktemp("calm"), 1, Plan(job))[0] for name, job in JOBS.items()}


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.chaos)])
@pytest.mark.parametrize("name", JOBS)
def test_weights_have_the_same_bits_at_every_world_size(
    tmp_path: Path, calm: dict[str, Any], name: str, size: int
) -> None:
    found, run = run_of(tmp_path, size, Plan(JOBS[name]))
    assert found == calm[name] and run.world_sizes() == [size]


@pytest.mark.parametrize("name", JOBS)
def test_one_worker_trains_as_a_plain_loop_does(tmp_path: Path, name: str) -> None:
    job_class = PLAIN[name]
    seed_all(0, "init")
    job = job_class()
    shape = EpochShape(250, 1, 12)
    feed = fake_feed(shape, [0])
    batches = [next(iter(feed.step(index))).rows["x"] for index in range(STEPS)]
    train_plainly(job, batches)
    plan = Plan(job_class, changes={"micro_batch_size": 12, "max_workers": 1})
    found, _ = run_of(tmp_path, 1, plan)
    assert found["weights_sha256"] == weights_sha256(job.model.named_parameters())


EVERYDAY = [
    ("gan", "in update 0"),
    ("gan", "after critic has stepped"),
    ("gan", "after update 0"),
    ("gan", "after generator has stepped"),
    ("sam", "after update 0"),
    ("sam", "in update 1"),
]
RARE = {
    "gan": ["before critic steps", "in update 1", "before generator steps", "after update 1"],
    "sam": ["in update 0", "before descent steps", "after descent has stepped"],
    "five": [f"in update {number}" for number in range(6)],
    "actor-critic": ["in update 0", "after critic has stepped", "after update 0", "in update 1", "before actor steps"],
}
PLACES = EVERYDAY + [pytest.param(job, at, marks=pytest.mark.chaos) for job, places in RARE.items() for at in places]


@pytest.mark.parametrize(("name", "place"), PLACES)
def test_a_death_in_a_step_changes_no_bits(tmp_path: Path, calm: dict[str, Any], name: str, place: str) -> None:
    found, run = run_of(tmp_path, 3, Plan(JOBS[name], (Fault(1, place, AT),)))
    assert found == calm[name]
    assert run.world_sizes() == [3, 2]


@pytest.mark.parametrize("place", [pytest.param("after update 0", marks=pytest.mark.chaos), "in update 1"])
def test_a_worker_joins_in_the_middle_of_a_step(tmp_path: Path, calm: dict[str, Any], place: str) -> None:
    """It gets the state after the first update. Values of that update are in the metrics of the step, too."""
    metrics = [tmp_path / "calm", tmp_path / "disturbed"]
    run_of(tmp_path / "one", 1, Plan(GAN, metrics=metrics[0]))
    plan = Plan(GAN, (Fault(1, place, AT),), metrics=metrics[1], changes={"max_workers": 2})
    found, run = run_of(tmp_path / "two", 3, plan)
    assert found == calm["gan"] and run.world_sizes() == [2, 2]
    assert [started.first_step for started in run.started()] == [0, AT]
    calm_lines, lines = (path.read_text().splitlines() for path in metrics)
    assert lines == calm_lines and "('critic_loss', " in lines[AT] and "('generator_loss', " in lines[AT]


VARIANTS: dict[str, dict[str, Any]] = {
    "clipping, weights and schedules": {
        "schedules": True,
        "is_weighted": True,
        "changes": {"data": {"drop_last": True}, "clip_grad_norm": 0.1},
    },
    "fp16": {"is_weighted": True, "changes": {"precision": "fp16", "steps": 20}},
    "bf16": {"changes": {"precision": "bf16"}},
    "NaN in the generator": {"nan_in": "generator", "changes": {"on_nonfinite": "skip"}},
    "unused": {"changes": {"ddp": {"find_unused_parameters": True}}},
    "verified": {"changes": {"verify": {"every_steps": 1, "action": "stop"}}},
}


RARE_VARIANTS = ("bf16", "unused")


@pytest.mark.parametrize(
    "variant",
    [pytest.param(each, marks=[pytest.mark.chaos] if each in RARE_VARIANTS else []) for each in VARIANTS],
)
def test_every_kind_of_job_has_the_same_bits(tmp_path: Path, calm: dict[str, Any], variant: str) -> None:
    expected = run_of(tmp_path / "calm", 1, Plan(GAN, metrics=tmp_path / "metrics", **VARIANTS[variant]))[0]
    found, run = run_of(tmp_path / "disturbed", 3, Plan(GAN, (Fault(1, "in update 1", AT),), **VARIANTS[variant]))
    assert found == expected and not list(run.rendezvous.events("corruption_found"))
    assert (expected != calm["gan"]) == (variant not in ("unused", "verified"))
    skipped: list[Any] = list(run.rendezvous.events("step_skipped"))
    if variant == "fp16":  # each optimizer has a scale of its own, which starts too large
        assert len({event.step for event in skipped}) < 15
        assert "critic_loss_scale" in (tmp_path / "metrics").read_text()
    else:
        assert [event.step for event in skipped] == ([3] if variant.startswith("NaN") else [])
    if variant.startswith("clipping"):
        assert "critic_grad_norm" in (tmp_path / "metrics").read_text()


def test_a_wrong_gradient_in_the_second_update_is_found(tmp_path: Path) -> None:
    """The worker at fault leaves before that update is applied. An update of an optimizer before it is not repeated."""
    verify = {"verify": {"every_steps": 1, "action": "drain"}}
    found, run = run_of(tmp_path, 3, Plan(BrokenGAN, changes={**verify, "global_batch_size": 6}))
    expected = run_of(tmp_path / "calm", 1, Plan(GAN, changes={"global_batch_size": 6}))[0]
    corruptions: list[Any] = list(run.rendezvous.events("corruption_found"))
    assert [(corruption.rank, corruption.step) for corruption in corruptions] == [(1, AT)]
    assert found == expected and run.world_sizes()[-1] == 2


def test_a_death_in_an_evaluation_after_the_last_update_costs_nothing(tmp_path: Path, calm: dict[str, Any]) -> None:
    found, run = run_of(tmp_path, 3, Plan(GAN, (Fault(1, "evaluation", AT),), evaluates=True))
    assert found == calm["gan"] and run.world_sizes() == [3, 2]


def test_later_updates_have_the_rows_that_one_before_a_death_has_gathered(tmp_path: Path, calm: dict[str, Any]) -> None:
    assert run_of(tmp_path, 3, Plan(GAN, (Fault(1, "in update 1", AT),), gathers=True))[0] == calm["gan"]


def test_a_death_in_sam_with_fp16_takes_back_the_scale_of_the_ascent(tmp_path: Path) -> None:
    changes = {"precision": "fp16", "on_nonfinite": "skip"}
    expected = run_of(tmp_path / "calm", 1, Plan(SAM, is_weighted=True, changes=changes))[0]
    plan = Plan(SAM, (Fault(1, "in update 1", AT),), is_weighted=True, changes=changes)
    assert run_of(tmp_path / "death", 3, plan)[0] == expected


@pytest.mark.parametrize("nan_in", ["ascent", "descent"])
def test_a_step_of_sam_that_is_left_out_changes_nothing(tmp_path: Path, nan_in: str) -> None:
    changes = {"on_nonfinite": "skip"}
    expected = run_of(tmp_path / "calm", 1, Plan(SAM, nan_in=nan_in, changes=changes))[0]
    found, _ = run_of(
        tmp_path / "disturbed", 2, Plan(SAM, (Fault(1, "in update 1", AT),), nan_in=nan_in, changes=changes)
    )
    assert found == expected


def test_the_native_reduction_takes_several_updates_too(tmp_path: Path) -> None:
    plan = Plan(GAN, changes={"reduction": "native"})
    found, _ = run_of(tmp_path / "one", 2, plan)
    assert found == run_of(tmp_path / "two", 2, plan)[0]


def misuse(run: Any, step: Any, model: Any, optimizers: Any, what: str) -> None:
    first, second = optimizers
    if what == "no backward":
        with step.update(first):
            pass
    if what == "one backward missing":
        with step.update(first):
            for batch in step.micro_batches():
                batch["x"].sum()
    if what == "not prepared":
        with step.update(torch.optim.SGD(model["a"].parameters(), lr=0.1)):
            pass
    if what == "nested":
        with step.update(first), step.update(second):
            pass
    if what in ("optimize after", "optimize before"):
        if what == "optimize before":
            batches = step.micro_batches()
            next(batches)
        with step.update(first):
            for batch in step.micro_batches():
                step.backward(model["a"](batch["x"]).mean())
        step.optimize()
    if what == "outside":
        with step.update(first):
            for batch in step.micro_batches():
                step.backward(model["a"](batch["x"]).mean())
        next(iter(step.micro_batches()))
    if what == "a function at the end":
        with step.update(lambda: None, name="ascent"):
            for batch in step.micro_batches():
                step.backward(model["a"](batch["x"]).mean() + model["b"](batch["x"]).mean())
    if what == "no function":
        with step.update("critic"):
            pass
    if what == "caught":
        try:
            with step.update(first):
                raise ValueError("of the training function")
        except ValueError:
            pass
        with step.update(second):
            pass
    if what == "no gradient":
        with step.update(first):
            for batch in step.micro_batches():
                step.backward(model["b"](batch["x"]).mean())
    if what == "unused":
        with step.update(first):
            for batch in step.micro_batches():
                step.backward(model["b"](batch["x"]).mean() + model["a"].bias.sum())


WRONG = {
    "no backward": r"the end of step 0, update 'optimizer_0' was called before micro-batches \[0, 1, 2",
    "one backward missing": "step 0, update 'optimizer_0': micro-batch 0 was left without step.backward",
    "not prepared": "got a SGD that is not prepared. Give it to run.prepare before the loop",
    "nested": "was called in the block of another update",
    "optimize after": "beside step.update. An update steps its optimizer at the end of its block",
    "optimize before": "step.update of step 0 was called after a loop over step.micro_batches",
    "outside": "step.micro_batches of step 0 was called outside its updates",
    "a function at the end": "step 0 ended with the update 'ascent', whose change is put back",
    "no function": "got 'critic'. Give a prepared optimizer, or a function",
    "caught": r"the training function caught ValueError: of the training function",
    "no gradient": "got a loss that does not depend on a parameter of its optimizer",
    "unused": "a.weight",
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_use_is_an_error(new_run: NewRun, what: str) -> None:
    run = new_run()
    model = run.prepare(torch.nn.ModuleDict({"a": torch.nn.Linear(3, 1), "b": torch.nn.Linear(3, 1)}))
    optimizers = [run.prepare(torch.optim.SGD(model[name].parameters(), lr=0.1)) for name in "ab"]
    with pytest.raises(ConfigError, match=WRONG[what]), next(run.steps()) as step:
        misuse(run, step, model, optimizers, what)


def test_parameters_of_two_optimizers_are_refused(new_run: NewRun) -> None:
    run = new_run()
    model = run.prepare(torch.nn.Linear(3, 1))
    first = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    run.prepare(torch.optim.SGD([model.weight], lr=0.1))
    with pytest.raises(ConfigError, match="shares parameters"), next(run.steps()) as step, step.update(first):
        pass


def test_fsdp_refuses_several_updates(tmp_path: Path) -> None:
    with workers(tmp_path, Plan(SAM, changes={"strategy": "fsdp"})) as run:
        run.start(2)
        outcome = run.finish(60.0, status="failed")
    assert outcome["kind"] == "ConfigError" and 'needs strategy = "ddp"' in outcome["error"]


def test_parameters_of_other_updates_need_no_gradient_and_are_as_before_after_it(new_run: NewRun) -> None:
    run = new_run()
    model = run.prepare(torch.nn.ModuleDict({"a": torch.nn.Linear(3, 1), "b": torch.nn.Linear(3, 1)}))
    model["b"].bias.requires_grad_(False)
    optimizers = {name: run.prepare(torch.optim.SGD(model[name].parameters(), lr=0.1)) for name in "ab"}
    with next(run.steps()) as step:
        for name, optimizer in optimizers.items():
            with step.update(optimizer, name=name) as update:
                for batch in step.micro_batches():
                    trained = [key for key, parameter in model.named_parameters() if parameter.requires_grad]
                    assert trained == ([f"{name}.weight", f"{name}.bias"] if name == "a" else ["b.weight"])
                    step.log(count=len(batch["x"]))
                    step.backward((model["a"](batch["x"]) + model["b"](batch["x"])).mean())
            assert update.loss == step.metrics[f"{name}_loss"] and not update.is_repeated
        assert [parameter.requires_grad for parameter in model.parameters()] == [True, True, True, False]
    assert run.position.step == 1


def test_ranks_that_call_updates_in_another_order_all_get_an_error(tmp_path: Path) -> None:
    with workers(tmp_path, Plan(Twins)) as run:
        run.start(2)
        outcome = run.finish(60.0, status="failed")
    assert outcome["kind"] == "ConfigError" and "is another update on another rank" in outcome["error"]


def test_an_error_that_is_caught_outside_the_block_leaves_the_step_undone(new_run: NewRun) -> None:
    run = new_run()
    model = run.prepare(torch.nn.Linear(3, 1))
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="step 0 was skipped"):
        for step in run.steps():
            with suppress(ValueError), step:
                with step.update(optimizer):
                    for batch in step.micro_batches():
                        step.backward(model(batch["x"]).mean())
                raise ValueError


def test_values_logged_between_updates_are_metrics_of_the_step(new_run: NewRun) -> None:
    run = new_run()
    model = run.prepare(torch.nn.Linear(3, 1))
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with next(run.steps()) as step:
        step.log(before=1.0)
        for number in range(2):
            with step.update(optimizer):
                for batch in step.micro_batches():
                    step.backward(model(batch["x"]).mean())
            step.log(**{f"after_{number}": float(number)})
    assert {name: step.metrics[name] for name in ("before", "after_0", "after_1")} == {
        "before": 1.0,
        "after_0": 0.0,
        "after_1": 1.0,
    }
