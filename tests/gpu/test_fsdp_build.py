"""While a sharded model is built, a GPU holds one unit more than the shard: torch's own peak, on two ranks."""

from __future__ import annotations

import functools

import pytest
import torch

from elastic_ddp.distributed.first_weights import FirstWeights
from elastic_ddp.distributed.fsdp import FSDPStrategy
from elastic_ddp.distributed.prepared_model import PreparedModel
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.tensors.state_tree import local_part
from tests.ranks import run_ranks
from tests.unit.distributed.test_first_weights import on_meta
from tests.unit.distributed.test_fsdp import config_of

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

DEVICE = torch.device("cuda:0")
WIDTH, NUM_BLOCKS = 1024, 10
BLOCK_BYTES = WIDTH * WIDTH * 4


def _is_block(module: torch.nn.Module) -> bool:
    return type(module) is torch.nn.Sequential


class Wide(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(NUM_BLOCKS)))


def _peak(group: ProcessGroup, where: str) -> tuple[int, int]:
    """Returns the most bytes that torch had on the GPU beyond those before, and those of the shard."""
    module = on_meta(Wide) if where == "meta" else Wide()
    model = PreparedModel(module, device=DEVICE, bf16=False, is_unit=_is_block, first_weights=FirstWeights(0))
    strategy = FSDPStrategy(model, config_of("fsdp"), group)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    strategy.shard([], begins=True)
    shard = sum(local_part(parameter).nbytes for parameter in module.parameters())
    return torch.cuda.max_memory_allocated() - before, shard


@pytest.mark.parametrize("where", ["meta", "host"])
def test_while_it_is_built_a_gpu_has_one_unit_more_than_its_shard(where: str) -> None:
    for peak, shard in run_ranks(2, functools.partial(_peak, where=where), device=DEVICE):
        assert shard < peak <= shard + 1.1 * BLOCK_BYTES
