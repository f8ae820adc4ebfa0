"""With FSDP, a loss that does not depend on all trained parameters raises an error."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from elastic_ddp.distributed.process_group import ProcessGroup, is_peer_failure
from elastic_ddp.errors import ConfigError
from tests.ranks import run_ranks
from tests.unit.distributed.test_fsdp import Block, data, sharded


class Branches(torch.nn.Module):
    """Two blocks, each an FSDP unit. The output depends on the wanted ones."""

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


class CalledTwice(Branches):
    def forward(self, x: torch.Tensor, wanted: str) -> torch.Tensor:
        return super().forward(super().forward(x, wanted), wanted)


def _error_of(group: ProcessGroup, model: torch.nn.Module, wanted: list[str]) -> str:
    """Returns the error of a step whose micro-batches use these blocks, or an empty text."""
    strategy, state = sharded(group, "SGD", model)
    strategy.begin_step(np.array([3, 3, 3, 3]))
    try:
        for m in strategy.to_compute:
            strategy.prepare_forward(m)
            strategy.backward(state.module(data(0, m), wanted[m]).square().mean(), m)
    except ConfigError as error:
        return str(error)
    return ""


def _errors_on_all_ranks(group: ProcessGroup) -> list[str]:
    return [
        _error_of(group, Branches(), ["ab", "ab", "ab", "ab"]),
        _error_of(group, Branches(), ["a", "b", "a", "b"]),
        _error_of(group, Branches(), ["a", "a", "a", "a"]),
        _error_of(group, Branches(), ["ab", "ab", "a", "a"]),
        _error_of(group, Branches(is_reentrant=True), ["ab", "ab", "ab", "ab"]),
        _error_of(group, Branches(is_reentrant=True), ["a", "a", "a", "a"]),
    ]


def test_a_loss_that_does_not_depend_on_all_trained_parameters_raises() -> None:
    names_in_b = [f"b.{name}" for name in ("scale", "up.weight", "up.bias", "down.weight", "down.bias")]
    a, b = (
        f"the loss does not depend on 5 of the trained parameters: {', '.join(names)}."
        for names in ([name.replace("b.", "a.", 1) for name in names_in_b], names_in_b)
    )
    first_rank, second_rank = run_ranks(2, _errors_on_all_ranks)
    for errors, differs in ((first_rank, b), (second_rank, a)):
        for error, expected in zip(errors, ["", differs, b, b, "", b], strict=True):
            assert error.startswith(expected) if expected else not error, (error, expected)


def _error_of_reentrant_checkpoints(group: ProcessGroup) -> str:
    return _error_of(group, CalledTwice(is_reentrant=True), ["ab"] * 4)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_that_a_reentrant_checkpoint_leaves_behind_raise_in_the_first_backward(world_size: int) -> None:
    for error in run_ranks(world_size, _error_of_reentrant_checkpoints):
        assert error.startswith("a backward left gradients of a.scale") and "use_reentrant=False" in error, error


def _error_on_one_rank(group: ProcessGroup) -> str:
    try:
        outcome = _error_of(group, Branches(), ["ab", "ab", "ab", "b"])
    except Exception as error:
        assert is_peer_failure(error), error
        outcome = "peer failure"
    group.close(intact=False)
    return outcome


def test_the_rank_raises_before_its_peers_reduce_its_gradients() -> None:
    outcomes = run_ranks(2, _error_on_one_rank)
    assert outcomes[0] == "peer failure"
    assert outcomes[1].startswith("the loss does not depend on 5 of the trained parameters: a.scale")
