"""The doctor lists a GPU, and measures it and NCCL."""

from __future__ import annotations

import pytest
import torch

from elastic_ddp.distributed import nccl
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.doctor.facts import Link, Reduced
from elastic_ddp.doctor.gather import gather
from elastic_ddp.doctor.measure import Network, matmul_speeds
from tests.ranks import run_ranks

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)


def test_the_gpu_its_driver_and_its_speed_are_found() -> None:
    facts = gather("127.0.0.1")
    assert facts.gpu_error is None and facts.gpus and facts.driver and facts.cuda == torch.version.cuda
    assert facts.driver_cuda is not None and facts.driver_cuda // 1000 >= int(str(facts.cuda).split(".")[0])
    (speed,) = matmul_speeds(facts.gpus[:1], facts.cpu_model)
    assert (speed.device, speed.model) == ("GPU 0", facts.gpus[0].model) and speed.tflops > 1


def network(group: ProcessGroup) -> tuple[Reduced, list[Link]]:
    group.barrier()
    group.close(intact=True)
    found = Network((group.assignment.store_host, group.assignment.store_port), GPU)
    reduced = found.all_reduce(["a", "b"][: group.world_size], group.rank, generation=2)
    measured = found.links()
    found.close(intact=True)
    return reduced, measured


def test_an_all_reduce_and_links_are_measured_over_nccl() -> None:
    num_ranks = 2 if nccl.why_not_share_gpus() is None else 1
    results = run_ranks(num_ranks, network, device=GPU)
    expected = num_ranks * (num_ranks + 1) / 2
    assert {reduced for reduced, _ in results} == {Reduced(smallest=expected, largest=expected)}
    found = [link for _, links in results for link in links]
    assert [link.backend for link in found] == ["nccl"] * (num_ranks - 1)
    assert all(link.mib_per_s > 1 for link in found)
