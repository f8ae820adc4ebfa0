"""Every rank reduces the gradients of the same parameters, or the step is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from elastic_ddp.distributed.process_group import ProcessGroup, is_peer_failure
from elastic_ddp.errors import ConfigError
from elastic_ddp.worker.generation import strategy_of
from tests.ranks import run_ranks
from tests.unit.test_fsdp import Block, data, prepared


class Branches(torch.nn.Module):
    """Two blocks, each gathered by itself, of which a micro-batch goes through those that it is told to."""

    def __init__(self, *, is_reentrant: bool = False) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 5)
        self.a, self.b = Block(), Block()
        self.is_reentrant = is_reentrant

    def forward(self, x: torch.Tensor, wanted: str) -> torch.Tensor:
        x = self.first(x)
        for name, block in (("a", self.a), ("b", self.b)):
            y = checkpoint(block, x, use_reentrant=True) if self.is_reentrant else block(x)
            if name in wanted:
                x = y
        return x


class Partly(torch.autograd.Function):
    """Says that it depends on a weight, and has no gradient for it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * weight.detach().mean()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


class Hidden(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5, bias=False)

    def forward(self, x: torch.Tensor, wanted: str) -> torch.Tensor:
        return Partly.apply(self.first(x), self.last.weight)  # type: ignore[no-any-return]


def _said(group: ProcessGroup, model: torch.nn.Module, wanted: list[str]) -> str:
    """In a step whose micro-batches go through these blocks."""
    config, state = prepared("fsdp", "SGD", model=model)
    assert state.model is not None
    strategy = strategy_of(config)(state.model, config, group)
    strategy.shard(state.optimizers)
    strategy.begin_step(np.array([3, 3, 3, 3]))
    try:
        for m in strategy.to_compute:
            strategy.prepare_forward(m)
            strategy.backward(state.model(data(0, m), wanted[m]).square().mean(), m)
    except ConfigError as error:
        return str(error)
    return "not refused"


def _on_all_ranks(group: ProcessGroup) -> list[str]:
    return [
        _said(group, Branches(), ["ab", "ab", "ab", "ab"]),
        _said(group, Branches(), ["a", "a", "b", "b"]),
        _said(group, Branches(), ["a", "a", "a", "a"]),
        _said(group, Branches(), ["ab", "a", "ab", "a"]),
        _said(group, Branches(is_reentrant=True), ["ab", "ab", "ab", "ab"]),
        _said(group, Branches(is_reentrant=True), ["a", "a", "a", "a"]),
        _said(group, Hidden(), [""] * 4),
    ]


def test_a_loss_that_leaves_out_what_is_trained_is_refused() -> None:
    nothing = "not refused"
    left = [f"b.{name}" for name in ("scale", "up.weight", "up.bias", "down.weight", "down.bias")]
    a, b = (
        f"the loss does not depend on 5 parameters: {', '.join(names)}; with FSDP every rank"
        for names in ([each.replace("b.", "a.", 1) for each in left], left)
    )
    last = "the loss does not depend on 1 parameters: last.weight; with FSDP"
    first_rank, second_rank = run_ranks(2, _on_all_ranks)
    for found, by_rank in ((first_rank, b), (second_rank, a)):
        for said, expected in zip(found, [nothing, by_rank, b, b, nothing, b, last], strict=True):
            assert said.startswith(expected), (said, expected)


def _on_one_rank(group: ProcessGroup) -> str:
    try:
        said = _said(group, Branches(), ["ab", "ab", "ab", "b"])
    except Exception as error:
        assert is_peer_failure(error), error
        said = "the others left"
    group.close(intact=False)
    return said


def test_it_is_refused_before_others_get_its_gradients() -> None:
    found = run_ranks(2, _on_one_rank)
    assert found[0] == "the others left" and found[1].startswith("the loss does not depend on 5 parameters: a.scale")
