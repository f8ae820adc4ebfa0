"""Process groups with the NCCL backend: abort and formation."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from elastic_ddp.distributed.assignment import Assignment
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.distributed.torch_store import StoreConnection
from elastic_ddp.errors import PeerFailedError
from tests.ranks import empty_store

pytestmark = pytest.mark.gpu

CYCLES = 4_000_000_000
"""A few seconds on a GPU."""


def form(generation: int) -> ProcessGroup:
    port = empty_store().port
    assignment = Assignment(
        generation=generation, rank=0, world_size=1, store_host="127.0.0.1", store_port=port, reason="start"
    )
    store = StoreConnection()
    store.connect_with_retry(lambda: ("127.0.0.1", port))
    return ProcessGroup.form(assignment, store=store, device=torch.device("cuda", 0), timeout_s=60)


def test_a_group_can_be_aborted_during_a_collective_and_another_one_formed() -> None:
    for generation in range(1, 4):
        group = form(generation)
        value = torch.full((1 << 20,), float(generation), device="cuda")
        dist.all_reduce(value)
        torch.cuda._sleep(CYCLES)
        work = dist.all_reduce(value, async_op=True)
        abort = threading.Timer(0.2, group.abort)
        abort.start()
        with pytest.raises(PeerFailedError, match="before the device had reduced"):
            group.synchronize()
        abort.join()
        assert group.aborted
        del work
        group.close(intact=False)
        assert not dist.is_initialized()
        assert float(value.sum()) == generation * (1 << 20)


def test_groups_formed_one_after_the_other_leak_no_device_memory() -> None:
    free_bytes = []
    for generation in range(1, 6):
        group = form(generation)
        value = torch.ones(1 << 10, device="cuda")
        dist.all_reduce(value)
        group.synchronize()
        group.barrier()
        group.close(intact=True)
        torch.cuda.synchronize()
        free_bytes.append(torch.cuda.mem_get_info()[0])
    assert free_bytes[-1] >= free_bytes[1] - (64 << 20), "communicators are not freed"
