"""The doctor lists a GPU, and forms a group of NCCL."""

from __future__ import annotations

import pytest
import torch

from elastic_ddp.distributed import nccl
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.doctor.facts import Reduced
from elastic_ddp.doctor.probe import Probe, gather
from tests.ranks import run_ranks

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)


def test_the_gpu_and_its_driver_are_found() -> None:
    facts = gather("127.0.0.1")
    assert facts.gpu_error is None and facts.gpus and facts.driver and facts.cuda == torch.version.cuda
    assert facts.driver_cuda is not None and facts.driver_cuda // 1000 >= int(str(facts.cuda).split(".")[0])


def all_reduce(group: ProcessGroup) -> Reduced:
    group.barrier()
    group.close(intact=True)
    node = Probe("127.0.0.1")
    node.connect(group.assignment.store_host, group.assignment.store_port)
    return node.all_reduce(GPU, group.rank, group.world_size, generation=2)


def test_an_all_reduce_over_nccl_has_the_expected_value() -> None:
    num_ranks = 2 if nccl.why_not_share_gpus() is None else 1
    expected = num_ranks * (num_ranks + 1) / 2
    results = run_ranks(num_ranks, all_reduce, device=GPU)
    assert results == [Reduced(smallest=expected, largest=expected)] * num_ranks
