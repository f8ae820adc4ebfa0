"""Passes that a rank makes because others need them: their batches are copies, and they add nothing to a gradient."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from elastic_ddp.data.feed_cache import FeedCache
from elastic_ddp.data.order import EpochShape
from elastic_ddp.distributed.buffer_sync import StepBuffers
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.rendezvous.hang import Activity
from elastic_ddp.tensors.state_tree import gather_full
from elastic_ddp.worker.evaluation import evaluate
from elastic_ddp.worker.generation import Generation, strategy_of
from elastic_ddp.worker.step import Step
from tests.ranks import run_ranks
from tests.unit.single_worker import FakeFeed, FakeIndex, fake_feed
from tests.unit.test_fsdp import CPU, SIZE, M, config_of, data, prepared

Batch = dict[str, torch.Tensor]


class Net(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def _leaves_as_it_is(model: Any, batch: Batch) -> torch.Tensor:
    return model(batch["x"] * 2 + 1).square().mean()


def _changes_in_place(model: Any, batch: Batch) -> torch.Tensor:
    return model(batch["x"].mul_(2).add_(1)).square().mean()


def _takes_out(model: Any, batch: Batch) -> torch.Tensor:
    return model(batch.pop("x") * 2 + 1).square().mean()


LOSSES = (_leaves_as_it_is, _changes_in_place, _takes_out)


def _after_a_step(group: ProcessGroup) -> list[tuple[list[float], float]]:
    """With each loss: what the weights are, and the mean over a held-out set."""
    found = []
    for loss_fn in LOSSES:
        torch.manual_seed(0)
        config, state = prepared("fsdp", "SGD", model=Net())
        assert state.model is not None
        strategy = strategy_of(config)(state.model, config, group)
        strategy.shard(state.optimizers)
        feed = fake_feed(EpochShape(M * SIZE, M, SIZE), strategy.micro_batches)
        feeds = FeedCache(lambda owned, step, after: feed)  # noqa: B023
        buffers = StepBuffers(state.module)
        generation = Generation(group, state, strategy, buffers, feed, feeds, 0, None, activity=Activity())
        votes = dict.fromkeys(("commit", "saving", "stop", "reconfigure"), False)
        with Step(generation, np.full(M, SIZE), 0, lambda: votes) as step:  # noqa: B023
            for batch in step.micro_batches():
                step.backward(loss_fn(state.model, batch))
            step.optimize()
        weights = [each for p in state.module.parameters() for each in gather_full(p).flatten().tolist()]
        found.append((weights, _evaluated(generation, loss_fn)))
    return found


def _evaluated(generation: Generation, loss_fn: Any) -> float:
    """Over a set whose last step is short: one rank has a row and padding, and another nothing but padding."""
    job: Any = SimpleNamespace(config=config_of("fsdp"), storage="")
    index = SimpleNamespace(from_bytes=lambda data: FakeIndex(num_rows=M * SIZE + 2), to_bytes=lambda: b"")
    with (
        mock.patch("elastic_ddp.worker.evaluation.MicroBatchFeed", FakeFeed),
        mock.patch("elastic_ddp.worker.evaluation.DatasetIndex", index),
        mock.patch("elastic_ddp.worker.evaluation.open_index", lambda *of, **options: index),
    ):
        return evaluate(generation, job, loss_fn, "data", None, CPU)


def test_a_loop_may_change_its_batches() -> None:
    """Of three ranks two have one micro-batch fewer than the first, and make a pass for it."""
    [alone] = run_ranks(1, _after_a_step)
    for found in run_ranks(3, _after_a_step):
        for (weights, mean), (expected_weights, expected_mean) in zip(found, alone, strict=True):
            assert weights == found[0][0] and mean == found[0][1]
            assert weights == pytest.approx(expected_weights, rel=1e-5)
            assert mean == pytest.approx(expected_mean, rel=1e-5)


def _of_padding(y: torch.Tensor) -> torch.Tensor:
    """As a distance between rows may be, which are all the same there: zero, and its derivative is infinite."""
    return (y - y.detach()).square().sum().sqrt()


def _gradients(group: ProcessGroup, strategy: str, precision: str, rows: list[int]) -> dict[str, np.ndarray]:
    """Of a short step, of which one of two ranks has more rows."""
    config, state = prepared(strategy, "SGD", precision=precision)
    state.module.eval()
    assert state.model is not None
    spread = strategy_of(config)(state.model, config, group)
    spread.shard(state.optimizers)
    spread.begin_step(np.array(rows))
    for m in spread.to_compute[:1] * max(0, spread.min_forwards(np.array(rows)) - len(spread.to_compute)):
        spread.prepare_forward(m)
        spread.dummy_backward(_of_padding(state.model(data(0, m))))
    for m in spread.to_compute:
        spread.prepare_forward(m)
        y = state.model(data(0, m))
        spread.backward(y.square().mean() if rows[m] else _of_padding(y), m)
    return {
        name: gather_full(each.grad).numpy() for name, each in state.module.named_parameters() if each.grad is not None
    }


@pytest.mark.parametrize(
    ("precision", "rows"),
    [("fp32", [SIZE, SIZE, 0, 0]), ("bf16", [SIZE, SIZE, SIZE, 0])],
    ids=["nothing-but-padding", "an-idle-pass-before-rows"],
)
def test_what_a_model_makes_of_rows_that_do_not_count_is_in_no_gradient(precision: str, rows: list[int]) -> None:
    [expected] = run_ranks(1, _gradients, "ddp", precision, rows)
    for found in run_ranks(2, _gradients, "fsdp", precision, rows):
        assert found.keys() == expected.keys()
        for name in expected:
            tolerance = {"rtol": 1e-4, "atol": 1e-6} if precision == "fp32" else {"rtol": 0.1, "atol": 0.05}
            np.testing.assert_allclose(found[name], expected[name], **tolerance, err_msg=name)
