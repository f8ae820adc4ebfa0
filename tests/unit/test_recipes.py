"""The training functions of the recipe pages train, on one worker, and resume with the same bits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ddp.data.micro_batches import MicroBatch
from tests.inside_run import finish
from tests.unit.single_worker import FakeFeed, NewRun, evaluate_with

PAGES = sorted((Path(__file__).parents[2] / "docs/guides").glob("recipes*.md"))
TEXT = "\n".join(page.read_text() for page in PAGES)
RECIPES = dict(re.findall(r'^```python title="(\w+)\.py"\n(.*?)^```$', TEXT, re.MULTILINE | re.DOTALL))


class Net(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(32, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


def loss_fn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])


class ClassesFeed(FakeFeed):
    """Yields rows with `x` of shape (rows, 32) and a class `y`, from the fake feed's row ids."""

    def _all_from(self, first_step: int) -> Any:
        for batch in super()._all_from(first_step):
            rows = len(batch.rows["x"])
            x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(int(batch.row_ids.sum())))
            yield MicroBatch(batch.index, {"x": x, "y": x.argmax(1) % 4}, batch.row_ids)


@pytest.fixture
def recipe_run(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> NewRun:
    """Makes runs on one worker whose rows are classified; ten steps are an epoch."""
    monkeypatch.setattr("elastic_ddp.worker.generation.MicroBatchFeed", ClassesFeed)
    compile_model = torch.nn.Module.compile  # without the minute that a C++ compiler takes
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compile_model(self, backend="eager"))
    evaluate_with(monkeypatch, lambda generation: 1.0)
    return new_run


def train_with(recipe: str, run: Any) -> dict[str, Any]:
    """Runs the training function of a recipe. Returns the outcome of the run."""
    names = {"torch": torch, "Net": Net, "GPT": Net, "Block": torch.nn.Linear, "loss_fn": loss_fn}
    exec(compile(RECIPES[recipe], f"{recipe}.py", "exec"), names)
    names["train"](run)
    return finish(run)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_and_resumes_with_the_same_bits(recipe: str, recipe_run: NewRun) -> None:
    calm = train_with(recipe, recipe_run(folder="calm", steps=4))
    initial = train_with(recipe, recipe_run(folder="resumed", steps=2))
    resumed = train_with(recipe, recipe_run(folder="resumed", steps=4))
    assert calm["steps"] == resumed["steps"] == 4
    assert initial["weights_sha256"] != calm["weights_sha256"] == resumed["weights_sha256"]


def test_early_stopping_ends_the_run_at_the_same_step_after_a_resume(recipe_run: NewRun) -> None:
    # The loss never improves after the first of its evaluations, at the end of every tenth step.
    for steps in (35, 100, 100):
        outcome = train_with("early_stopping", recipe_run(folder="run", steps=steps))
        assert outcome["steps"] == min(steps, 40)


def test_a_run_that_its_time_budget_ended_goes_on_with_the_same_bits(
    recipe_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = train_with("time_budget", recipe_run(folder="calm", steps=4))
    monkeypatch.setitem(RECIPES, "over", RECIPES["time_budget"].replace("+ 3600.0", "- 1.0"))
    left = train_with("over", recipe_run(folder="run", steps=4))
    rest = train_with("time_budget", recipe_run(folder="run", steps=4))
    assert (left["steps"], left["total_steps"]) == (1, 4)
    assert rest == calm
