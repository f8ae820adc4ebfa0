"""`run.evaluate`: means over a held-out data set, at any world size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import ConfigError
from elastic_ddp.worker import evaluation
from elastic_ddp.worker.step import Step
from tests.ranks import run_ranks
from tests.unit.rank_steps import config_of, run_steps
from tests.unit.single_worker import FakeFeed, FakeIndex, Model

NUM_ROWS = 26
"""The last step has micro-batches of two rows, and of none."""


def on_a_rank(group: ProcessGroup, config: RunConfig, loss_fns: list[Callable[..., Any]]) -> list[Any]:
    """Returns the result of an evaluation with each loss function, in a step."""
    torch.manual_seed(7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "MicroBatchFeed", FakeFeed)
        patch.setattr(evaluation, "_share_index", lambda generation, job, data: FakeIndex(NUM_ROWS))

        def body(step: Step, model: Any) -> list[Any]:
            for batch in step.micro_batches():
                step.backward(model(batch["x"]).square().mean())
            step.optimize()
            job: Any = type("Job", (), {"config": config})
            return [
                evaluation.evaluate(step.generation, job, loss_fn, "held-out", None, None, torch.device("cpu"))
                for loss_fn in loss_fns
            ]

        [results] = run_steps(group, config, Model(), body)["returned"]
        return results


def rows() -> torch.Tensor:
    """The held-out rows, in order of micro-batches."""
    feed = FakeFeed(
        FakeIndex(NUM_ROWS),
        evaluation.FeedPlan(
            rows_per_group=np.zeros(0, np.int64),
            shape=evaluation.EpochShape(NUM_ROWS, 6, 2),
            seed=0,
            options=config_of().data,
            micro_batches=tuple(range(6)),
            first_step=0,
            last_step=3,
        ),
    )
    return torch.cat([batch.rows["x"] for step in range(3) for batch in feed.step(step) if batch.num_rows])


def mean_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return batch["x"].mean()


def positive_mean(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    """The mean of the positive numbers, which is NaN in a batch without one, and how many they are."""
    positive = batch["x"][batch["x"] > 0]
    return positive.mean(), len(positive)


def test_a_weighted_evaluation_is_the_mean_over_what_the_weights_count() -> None:
    x = rows()
    assert len(x) == NUM_ROWS
    expected = run_ranks(1, on_a_rank, config_of(steps=1), [mean_loss, positive_mean])[0]
    assert expected == pytest.approx([x.mean().item(), x[x > 0].mean().item()], rel=1e-6)
    for world_size in (2, 3):
        assert (
            run_ranks(world_size, on_a_rank, config_of(steps=1), [mean_loss, positive_mean]) == [expected] * world_size
        )


def no_weight(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    return torch.tensor(1.0), 0


def refused(group: ProcessGroup, config: RunConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        on_a_rank(group, config, [no_weight])
    return str(caught.value)


def test_an_evaluation_without_any_weight_is_refused() -> None:
    assert "the weights of all micro-batches are 0" in run_ranks(1, refused, config_of(steps=1))[0]
