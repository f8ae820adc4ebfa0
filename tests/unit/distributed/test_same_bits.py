"""Weights, buffers and loss of a step have the same bits at every world size."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.data.order import EpochShape
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import ConfigError
from elastic_ddp.worker.step import Step
from tests.ranks import run_ranks
from tests.unit.rank_steps import run_steps
from tests.unit.single_worker import fake_feed


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(12, 33),
            torch.nn.BatchNorm1d(33),
            torch.nn.Tanh(),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(33, 7),
            torch.nn.Linear(7, 5),
        )
        self.register_buffer("constant", torch.tensor([0.1, float("-inf"), 3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class ImageModel(torch.nn.Module):
    """With channels-last convolution weights, whose views of DDP's buckets are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.head = torch.nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.convolution(x.view(-1, 3, 2, 2)).flatten(1))


class SometimesModel(torch.nn.Module):
    """Some micro-batches use one part, and none uses another, so DDP must look for unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.sometimes = torch.nn.Linear(12, 5), torch.nn.Linear(12, 5)
        self.never = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + (self.sometimes(x) if x[0, 0] > 0.5 else 0)


class ReassigningModel(torch.nn.Module):
    """Replaces its buffers by new tensors, as moving averages often do. One buffer is not persistent."""

    rules: ClassVar = {"average": "mean", "calls": "first"}

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(12, 5)
        self.register_buffer("average", torch.zeros(12))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int16), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.average = 0.9 * self.average + 0.1 * x.mean(0)
            self.calls = self.calls + 1
        return self.layer(x - self.average)


class PartlyTrainedModel(torch.nn.Module):
    """A part that no optimizer steps has gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.untrained = torch.nn.Linear(12, 5), torch.nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + self.untrained(x)

    def trained(self) -> Iterator[torch.nn.Parameter]:
        return self.body.parameters()


class SummedModel(torch.nn.Module):
    """Two parameters share one gradient, because they are only used as their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(12, 5)
        self.left, self.right = torch.nn.Parameter(torch.zeros(12)), torch.nn.Parameter(torch.zeros(12))
        self.summed = torch.nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * (1 + self.left + self.right)) + self.summed.sum()


class UnusedModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.never = torch.nn.Linear(12, 5), torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def config_error(group: ProcessGroup, config: RunConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        train(group, config, 1000, UnusedModel)
    return str(caught.value)


def config_of(**changes: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "name": "test",
        "storage": "memory://test",
        "steps": 3,
        "global_batch_size": 12,
        "micro_batch_size": 2,
        "clip_grad_norm": 0.5,
        "ddp": {"bucket_cap_mb": 0.001},
    }
    return RunConfig(**{**settings, **changes})


def add_noise(model: torch.nn.Module, noise: float) -> None:
    """Adds noise from all random generators to the mean gradient."""
    scale = noise * (random.random() + np.random.random())
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.add_(torch.randn(parameter.shape), alpha=scale)


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Returns the loss of rows of shape (rows, 3), of which the models get each value four times."""
    classes = (100 * x[:, 0].abs()).long() % 5
    return torch.nn.functional.cross_entropy(model(x.repeat(1, 4)), classes)


def train(
    group: ProcessGroup, config: RunConfig, num_rows: int, model_type: type[torch.nn.Module], noise: float = 0.0
) -> dict[str, Any]:
    torch.manual_seed(7)

    def body(step: Step, model: torch.nn.Module) -> list[list[float]]:
        for batch in step.micro_batches():
            step.gather(x=batch["x"])
            step.backward(loss_of(model, batch["x"]))
        if noise:
            add_noise(model, noise)
        step.optimize()
        return step.gathered["x"].tolist()  # type: ignore[no-any-return]

    return run_steps(group, config, model_type(), body, num_rows=num_rows)


def of_size(micro_batches: int, micro_batch_size: int) -> RunConfig:
    return config_of(global_batch_size=micro_batch_size * micro_batches, micro_batch_size=micro_batch_size)


SMALL_BUCKETS = {"bucket_cap_mb": 0.0001}
CASES: dict[str, tuple[RunConfig, int, type[torch.nn.Module], float]] = {
    "six": (of_size(6, 2), 1000, Model, 1e-3),
    "channels-last": (of_size(6, 2), 1000, ImageModel, 1e-3),
    "four": (of_size(4, 2), 1000, Model, 1e-3),
    "reassigned-buffers": (of_size(6, 2), 1000, ReassigningModel, 1e-3),
    "partly-trained": (of_size(6, 2), 1000, PartlyTrainedModel, 1e-3),
    # The last step has micro-batches of two and of three rows; rows in two of its five micro-batches.
    "short-last-batch": (of_size(7, 4), 7 * 6 + 3, Model, 1e-3),
    "empty-micro-batches": (of_size(5, 3), 5 * 3 + 2, ImageModel, 1e-3),
    "bf16": (config_of(precision="bf16"), 1000, Model, 0.0),
    "copied-buckets": (config_of(ddp={"gradient_as_bucket_view": False, "bucket_cap_mb": 0.001}), 1000, Model, 0.0),
    "find-unused": (config_of(ddp={"find_unused_parameters": True}), 1000, Model, 0.0),
    "static-graph": (config_of(ddp={"static_graph": True}), 1000, Model, 0.0),
    "sometimes-used": (config_of(ddp={"find_unused_parameters": True, **SMALL_BUCKETS}), 1000, SometimesModel, 0.0),
    "shared-gradients": (config_of(ddp={"find_unused_parameters": True}), 1000, SummedModel, 0.0),
}
"""The arguments of `train`, by what is special about them."""


Results = dict[int, list[dict[str, dict[str, Any]]]]
"""What each rank returned in each case, by world size."""


def train_each(group: ProcessGroup, names: list[str]) -> dict[str, dict[str, Any]]:
    """Returns the results of these cases."""
    results = {}
    for name in names:
        try:
            results[name] = train(group, *CASES[name])
        except Exception as error:
            raise AssertionError(f"case {name}") from error
    return results


@pytest.fixture(scope="module")
def results() -> Results:
    """One group of each world size trains all cases, so that only four groups form."""
    names = {1: [*CASES], 3: [*CASES], 4: [*CASES], 6: ["sometimes-used", "shared-gradients"]}
    return {world_size: run_ranks(world_size, train_each, cases) for world_size, cases in names.items()}


@pytest.mark.parametrize("case", CASES)
def test_weights_and_losses_have_the_same_bits_at_every_world_size(results: Results, case: str) -> None:
    [expected] = results[1]
    for result in itertools.chain.from_iterable(results.values()):
        assert result.get(case, expected[case]) == expected[case]


def test_parameters_that_only_some_micro_batches_use_are_trained_on_the_mean(results: Results) -> None:
    ours, plain = results[1][0]["sometimes-used"]["losses"], plain_sgd(1000, config_of(), SometimesModel)
    assert ours == pytest.approx(plain, rel=1e-4)


def test_gradients_that_share_memory_are_counted_once(results: Results) -> None:
    expected = run_ranks(1, train, config_of(), 1000, SummedModel)[0]
    assert results[1][0]["shared-gradients"]["weights"] == expected["weights"]


@pytest.mark.parametrize(("reduction", "global_batch_size"), [("canonical", 2), ("canonical", 12), ("native", 12)])
def test_an_unused_parameter_is_refused_in_its_first_step(reduction: str, global_batch_size: int) -> None:
    """DDP raises only in the second step, after it has applied unreduced gradients."""
    config = config_of(reduction=reduction, global_batch_size=global_batch_size)
    for text in run_ranks(global_batch_size // 6 or 1, config_error, config):
        assert "2 of the trained parameters: never.weight, never.bias. Either set ddp.find_unused_parameters" in text


def losses_of(group: ProcessGroup, cases: list[tuple[RunConfig, int]]) -> list[list[float]]:
    return [train(group, config, num_rows, ImageModel)["losses"] for config, num_rows in cases]


def test_the_native_reduction_agrees_up_to_rounding() -> None:
    cases = [(config_of(reduction=reduction), 45) for reduction in ("native", "canonical")]
    native, canonical = run_ranks(3, losses_of, cases)[0]
    assert native == pytest.approx(canonical, rel=1e-4)


def plain_sgd(num_rows: int, config: RunConfig, model_type: type[torch.nn.Module]) -> list[float]:
    """Trains in one process without this package, on the exact mean over the global batch."""
    torch.manual_seed(7)
    model = model_type()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    shape = EpochShape(num_rows, config.num_micro_batches, config.micro_batch_size)
    feed = fake_feed(shape, range(config.num_micro_batches))
    losses = []
    assert config.steps and config.clip_grad_norm
    for index in range(config.steps):
        batches = [batch for batch in feed.step(index) if batch.num_rows]
        loss = sum(batch.num_rows * loss_of(model, batch.rows["x"]) for batch in batches)
        loss /= sum(batch.num_rows for batch in batches)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad_norm)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def test_a_step_is_the_exact_mean_over_the_global_batch() -> None:
    """Of steps that are full, short, and with empty micro-batches."""
    config, numbers_of_rows = config_of(), (1000, 45, 13)
    ours = run_ranks(2, losses_of, [(config, num_rows) for num_rows in numbers_of_rows])[0]
    for losses, num_rows in zip(ours, numbers_of_rows, strict=True):
        assert losses == pytest.approx(plain_sgd(num_rows, config, ImageModel), rel=1e-4)
