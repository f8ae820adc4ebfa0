"""`run.evaluate`: means over a held-out data set, at any world size."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.data.order import EpochShape, FeedPlan
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import ConfigError
from elastic_ddp.worker import evaluation
from elastic_ddp.worker.evaluated_values import Unmeasured
from elastic_ddp.worker.step import Step
from tests.inside_run import checkpointer_of
from tests.ranks import run_ranks
from tests.unit.rank_steps import config_of, run_steps
from tests.unit.single_worker import FakeFeed, FakeIndex, Model, NewRun, client_of, evaluate_with, fake_feed, take_steps

CONFIG = config_of(steps=1, data={"num_cpus_per_task": 1.0})
NUM_ROWS = 26
"""The last step has micro-batches of two rows, and of none."""


class EvaluationFeed(FakeFeed):
    """A feed that reserves no CPUs: the data tasks of the training, which wait meanwhile, may have reserved all."""

    def __init__(self, index: FakeIndex, plan: FeedPlan, **options: Any) -> None:
        assert plan.options.num_cpus_per_task == 0.0
        super().__init__(index, plan, **options)


def on_a_rank(group: ProcessGroup, config: RunConfig, calls: list[tuple[Callable[..., Any], Any]]) -> list[Any]:
    """Returns the results of evaluations with each loss function and `compute_metrics`, in a step."""
    torch.manual_seed(7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "MicroBatchFeed", EvaluationFeed)
        patch.setattr(evaluation, "_share_index", lambda generation, job, data, is_converted: FakeIndex(NUM_ROWS))

        def body(step: Step, model: Any) -> list[Any]:
            for batch in step.micro_batches():
                step.backward(model(batch["x"]).square().mean())
            step.optimize()
            job: Any = type("Job", (), {"config": config, "debugged": None})
            return [
                evaluation.evaluate(step.generation, job, loss_fn, "held-out", None, None, compute)
                for loss_fn, compute in calls
            ]

        [results] = run_steps(group, config, Model(), body)["returned"]
        return results


def held_out() -> tuple[torch.Tensor, torch.Tensor]:
    """The held-out rows in order of micro-batches, and in stored order."""
    feed = fake_feed(EpochShape(NUM_ROWS, 6, 2), range(6))
    batches = [batch for step in range(3) for batch in feed.step(step)]
    x = torch.cat([batch.rows["x"] for batch in batches if batch.num_rows])
    return x, x[np.concatenate([batch.row_ids for batch in batches]).argsort()]


def mean_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return batch["x"].mean()


def positive_mean(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    """The mean of the positive numbers, which is NaN in a batch without one, and how many they are."""
    positive = batch["x"][batch["x"] > 0]
    return positive.mean(), len(positive)


def several(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"mean": mean_loss(model, batch), "positive": positive_mean(model, batch)}


def of_rows(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"x": batch["x"], "sum": batch["x"].sum(1)}


def first_column(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return batch["x"][:, 0]


def order_and_median(values: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Depends on the order of the rows."""
    assert torch.allclose(values["x"].sum(1), values["sum"])
    return {"order": (values["x"][:, 0] * torch.arange(len(values["x"]))).sum(), "median": values["sum"].median()}


def last(values: torch.Tensor) -> float:
    assert values.shape == (NUM_ROWS,)
    return float(values[-1])


CALLS: list[tuple[Callable[..., Any], Any]] = [
    (mean_loss, None),
    (positive_mean, None),
    (several, None),
    (of_rows, order_and_median),
    (first_column, last),
]


def test_evaluations_are_the_same_at_every_world_size_and_count_each_row_once() -> None:
    [(mean, positive, means, of_all, last_row)] = run_ranks(1, on_a_rank, CONFIG, CALLS)
    x, stored = held_out()
    assert (mean, positive) == pytest.approx((x.mean().item(), x[x > 0].mean().item()), rel=1e-6)
    assert means == {"mean": mean, "positive": positive}
    assert of_all == order_and_median({"x": stored, "sum": stored.sum(1)})
    assert last_row == stored[-1, 0]
    for world_size in (2, 3):
        found = run_ranks(world_size, on_a_rank, CONFIG, CALLS)
        assert found == [[mean, positive, means, of_all, last_row]] * world_size


def no_weight(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    return torch.tensor(1.0), 0


def other_names(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    return {"a" if batch["x"][0, 0] > 0 else "b": torch.tensor(1.0)}


def too_few(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    return batch["x"].mean()


def text(values: Any) -> str:
    return "0.9"


REFUSED: list[tuple[Any, Any, str]] = [
    (no_weight, None, "the weights of all micro-batches are 0"),
    (other_names, None, "Return the same names for every batch"),
    (first_column, None, "returned a Tensor of shape (2,). Return one number"),
    (too_few, last, "for a batch of 2 rows. With compute_metrics, return a tensor whose first dimension is the rows"),
    (first_column, text, "compute_metrics of run.evaluate returned a str. Return one number, or a dict"),
]


def refused(group: ProcessGroup, config: RunConfig) -> list[str]:
    messages = []
    for loss_fn, compute, _ in REFUSED:
        with pytest.raises(ConfigError) as caught:
            on_a_rank(group, config, [(loss_fn, compute)])
        messages.append(str(caught.value))
    return messages


def test_other_results_of_an_evaluation_are_refused_with_what_to_return() -> None:
    [messages] = run_ranks(1, refused, CONFIG)
    for message, (_, _, expected) in zip(messages, REFUSED, strict=True):
        assert expected in message


def test_the_result_of_an_evaluation_that_did_not_run_is_nan_as_a_number_and_as_a_dict() -> None:
    result: Any = Unmeasured(math.nan)
    assert math.isnan(result) and math.isnan(result["accuracy"]) and math.isnan(result.get("accuracy"))
    assert dict(result.items()) == {**result} == {} and list(result) == list(result.values()) == []
    assert len(result) == 0 and "accuracy" not in result and math.isnan(copy.deepcopy(result))


@pytest.mark.parametrize(("name", "prefix"), [(None, "validation"), ("test", "test")])
def test_metrics_of_a_dict_are_recorded_under_names_with_a_prefix(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, name: str | None, prefix: str
) -> None:
    values: Any = {"loss": 0.5, "accuracy": 0.75}
    evaluate_with(monkeypatch, lambda generation: values)
    run = new_run(steps=1)
    take_steps(run)
    assert run.evaluate(lambda *_: torch.zeros(()), "held-out", name=name) == values
    events = {event["name"]: event["value"] for event in client_of(run).events_of("evaluation_finished")}
    assert events == {f"{prefix}_loss": 0.5, f"{prefix}_accuracy": 0.75}
    assert checkpointer_of(run).metrics.to_record()["metrics"].keys() >= events.keys()
