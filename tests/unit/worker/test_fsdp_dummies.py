"""Dummy forwards under FSDP: their batches are copies, and they add nothing to a gradient."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from elastic_ddp.data.order import EpochShape
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.tensors.state_tree import gather_full
from elastic_ddp.worker.evaluation import evaluate
from elastic_ddp.worker.generation import Generation, strategy_of
from elastic_ddp.worker.step import Step
from elastic_ddp.worker.step_plan import StepPlan
from tests.ranks import run_ranks
from tests.unit.distributed.test_fsdp import SIZE, M, config_of, data, prepared
from tests.unit.rank_steps import open_generation
from tests.unit.single_worker import FakeFeed, FakeIndex

Batch = dict[str, torch.Tensor]


class Net(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def _unchanged(model: Any, batch: Batch) -> torch.Tensor:
    return model(batch["x"] * 2 + 1).square().mean()


def _changed_in_place(model: Any, batch: Batch) -> torch.Tensor:
    return model(batch["x"].mul_(2).add_(1)).square().mean()


def _removed(model: Any, batch: Batch) -> torch.Tensor:
    return model(batch.pop("x") * 2 + 1).square().mean()


LOSSES = (_unchanged, _changed_in_place, _removed)


def _after_a_step(group: ProcessGroup) -> list[tuple[list[float], float]]:
    """Returns for each loss the weights after a step, and the mean over a held-out set."""
    results = []
    for loss_fn in LOSSES:
        torch.manual_seed(0)
        config, state = prepared("fsdp", "SGD", model=Net())
        generation = open_generation(group, config, state, EpochShape(M * SIZE, M, SIZE))
        with Step(StepPlan(generation, np.full(M, SIZE)), 0) as step:
            for batch in step.micro_batches():
                step.backward(loss_fn(state.module, batch))
            step.optimize()
        weights = [
            value for parameter in state.module.parameters() for value in gather_full(parameter).flatten().tolist()
        ]
        results.append((weights, _evaluated(generation, loss_fn)))
    return results


def _evaluated(generation: Generation, loss_fn: Any) -> float:
    """Evaluates a set whose last step is short: one rank has rows and padding, another only padding."""
    job: Any = SimpleNamespace(config=config_of("fsdp"), storage="", debugged=None)
    index = SimpleNamespace(from_bytes=lambda data: FakeIndex(num_rows=M * SIZE + 2), to_bytes=lambda: b"")
    with (
        mock.patch("elastic_ddp.worker.evaluation.MicroBatchFeed", FakeFeed),
        mock.patch("elastic_ddp.worker.evaluation.DatasetIndex", index),
        mock.patch("elastic_ddp.worker.evaluation.open_index", lambda *of, **options: index),
    ):
        return evaluate(generation, job, loss_fn, "data", None, None, None)


def test_a_loop_may_change_its_batches() -> None:
    """Two of three ranks have one micro-batch fewer than the first, and run a dummy forward."""
    [expected] = run_ranks(1, _after_a_step)
    for results in run_ranks(3, _after_a_step):
        for (weights, mean), (expected_weights, expected_mean) in zip(results, expected, strict=True):
            assert weights == results[0][0] and mean == results[0][1]
            assert weights == pytest.approx(expected_weights, rel=1e-5)
            assert mean == pytest.approx(expected_mean, rel=1e-5)


def _loss_on_padding(y: torch.Tensor) -> torch.Tensor:
    """A loss of zero with an infinite derivative, as a distance between equal rows may have."""
    return (y - y.detach()).square().sum().sqrt()


def _gradients(group: ProcessGroup, strategy_name: str, precision: str, rows: list[int]) -> dict[str, np.ndarray]:
    """Returns the gradients of a short step, in which one of two ranks has more rows."""
    config, state = prepared(strategy_name, "SGD", precision=precision)
    state.module.eval()
    assert state.model is not None
    strategy = strategy_of(config)(state.model, config, group)
    strategy.shard(state.optimizers)
    strategy.begin_step(np.array(rows))
    for m in strategy.to_compute:
        strategy.prepare_forward(m)
        y = state.module(data(0, m))
        strategy.backward(y.square().mean() if rows[m] else _loss_on_padding(y), m)
    num_dummies = max(0, strategy.min_forwards(np.array(rows)) - len(strategy.to_compute))
    for m in strategy.to_compute[-1:] * num_dummies:
        strategy.prepare_forward(m)
        strategy.dummy_backward(_loss_on_padding(state.module(data(0, m))))
    return {
        name: gather_full(parameter.grad).numpy()
        for name, parameter in state.module.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize(
    ("precision", "rows"),
    [("fp32", [SIZE, SIZE, 0, 0]), ("bf16", [SIZE, SIZE, SIZE, 0])],
    ids=["only padding", "a dummy after rows"],
)
def test_padding_and_dummies_add_nothing_to_gradients(precision: str, rows: list[int]) -> None:
    [expected] = run_ranks(1, _gradients, "ddp", precision, rows)
    for gradients in run_ranks(2, _gradients, "fsdp", precision, rows):
        assert gradients.keys() == expected.keys()
        for name in expected:
            tolerance = {"rtol": 1e-4, "atol": 1e-6} if precision == "fp32" else {"rtol": 0.1, "atol": 0.05}
            np.testing.assert_allclose(gradients[name], expected[name], **tolerance, err_msg=name)
