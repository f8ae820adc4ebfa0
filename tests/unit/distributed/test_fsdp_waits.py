"""Waits of FSDP's collectives end when the process group is aborted."""

from __future__ import annotations

import time
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from elastic_ddp.distributed.process_group import ProcessGroup, is_peer_failure
from elastic_ddp.errors import ConfigError
from tests.ranks import abort_when, run_ranks, set_key
from tests.unit.distributed.test_fsdp import SIZE, M, data, sharded

ABORT, NOTICED = "rank 1 failed", "rank 0 has noticed"


def _begin_step(group: ProcessGroup, reduction: str = "canonical") -> tuple[Any, torch.nn.Module, int]:
    """Returns a strategy before the forward of this rank's first micro-batch, the model, and that micro-batch."""
    strategy, state = sharded(group, reduction=reduction)
    strategy.begin_step(np.full(M, SIZE))
    m = strategy.to_compute[0]
    strategy.prepare_forward(m)
    return strategy, state.module, m


def _waits_for_a_peer(group: ProcessGroup, reduction: str, part: str) -> tuple[bool, float]:
    """Rank 1 leaves out a part of a step. Returns whether this rank noticed a failure, and when it did, or aborted."""
    strategy, module, m = _begin_step(group, reduction)
    if group.rank == 0:
        abort_when(group, ABORT)
    failed = False
    try:
        if group.rank == 1 and part == "forward":
            raise ConfigError("left out")
        loss = module(data(0, m)).square().mean()
        if group.rank == 1 and part == "backward":
            raise ConfigError("left out")
        strategy.backward(loss, m)
        if group.rank == 1:
            raise ConfigError("left out")
        strategy.gradient_norm()
    except ConfigError:
        at = time.monotonic()
        set_key(group, ABORT)
        place = group.assignment
        store = dist.TCPStore(place.store_host, place.store_port, is_master=False)
        with suppress(dist.DistStoreError):  # its connections stay open: only the abort can end the wait of rank 0
            store.wait([NOTICED], timedelta(seconds=30))
    except Exception as error:
        at, failed = time.monotonic(), is_peer_failure(error)
        set_key(group, NOTICED)
    group.close(intact=False)
    return failed, at


@pytest.mark.parametrize(
    ("reduction", "part"), [("canonical", "forward"), ("canonical", "backward"), ("native", "backward")]
)
def test_an_abort_ends_a_wait_for_a_peer(reduction: str, part: str) -> None:
    (failed, noticed_at), (_, aborted_at) = run_ranks(2, _waits_for_a_peer, reduction, part)
    assert failed and noticed_at - aborted_at < 20.0


def _trains_and_closes(group: ProcessGroup) -> bool:
    strategy, module, m = _begin_step(group)
    strategy.backward(module(data(0, m)).square().mean(), m)
    held = weakref.ref(dist.group.WORLD)
    strategy.close()
    group.close(intact=False)
    return held() is None


def test_a_sharded_model_does_not_keep_a_closed_group() -> None:
    """Dropping the last reference waits for gloo's threads, which never end if gloo lost a message in an abort."""
    assert run_ranks(2, _trains_and_closes) == [True, True]


def _exchanges_twice(group: ProcessGroup) -> str:
    strategy, module, m = _begin_step(group)
    loss = module(data(0, m)).square().mean()
    first = next(iter(strategy._reductions.values()))
    shape = torch.zeros(2 * group.world_size)

    def exchange_before(gradient: torch.Tensor) -> None:
        first(torch.zeros(2), shape, None, None)

    loss.register_hook(exchange_before)
    try:
        strategy.backward(loss, m)
    except ConfigError as error:
        return str(error)
    return ""


def test_gradients_that_are_exchanged_in_parts_are_refused() -> None:
    for error in run_ranks(2, _exchanges_twice):
        assert "gradients of the FSDP unit blocks.1 2 times instead of once" in error
