"""With FSDP, weights, buffers and losses have the same bits at every world size, and in fp32 those of DDP."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from elastic_ddp.distributed.process_group import ProcessGroup
from tests.ranks import run_ranks
from tests.unit.distributed.test_same_bits import Model, ReassigningModel, config_of, train


class Block(torch.nn.Module):
    """Has a dimension that no number of ranks divides, and a parameter with one element."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(12, 19), torch.nn.Linear(19, 12)
        self.dropout = torch.nn.Dropout(0.2)
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(self.dropout(torch.tanh(self.up(x))))


class BlocksModel(torch.nn.Module):
    """Has units with activation checkpointing, dropout, tied weights, and frozen parameters."""

    def __init__(self, num_calls: int = 1) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Linear(12, 12), torch.nn.Linear(12, 12)
        self.head.weight = self.embed.weight
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.blocks[0].up.bias.requires_grad_(False)  # type: ignore[union-attr]
        self.num_calls = num_calls

    @staticmethod
    def is_unit(module: torch.nn.Module) -> bool:
        return isinstance(module, Block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            for _ in range(self.num_calls):
                x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class RepeatedModel(BlocksModel):
    """Calls each unit twice in a forward."""

    def __init__(self) -> None:
        super().__init__(num_calls=2)


CASES: dict[str, tuple[dict[str, Any], int, type[torch.nn.Module]]] = {
    "blocks": ({}, 1000, BlocksModel),
    "not-clipped": ({"clip_grad_norm": None}, 1000, BlocksModel),
    "batch-norm": ({}, 1000, Model),
    "reassigned-buffers": ({}, 1000, ReassigningModel),
    "repeated-units": ({}, 1000, RepeatedModel),
    "bf16": ({"precision": "bf16"}, 1000, BlocksModel),
    "grad_op": ({"fsdp": {"sharding": "grad_op"}}, 1000, BlocksModel),
    "offload": ({"fsdp": {"cpu_offload": True}}, 1000, BlocksModel),
    # The last step has micro-batches of two and of three rows; rows in two of its five micro-batches.
    "short-last-batch": ({"global_batch_size": 28, "micro_batch_size": 4}, 7 * 6 + 3, BlocksModel),
    "empty-micro-batches": ({"global_batch_size": 15, "micro_batch_size": 3}, 5 * 3 + 2, BlocksModel),
}


def train_each(group: ProcessGroup) -> dict[str, Any]:
    return {
        name: train(group, config_of(strategy="fsdp", steps=3, **changes), num_rows, model_type)
        for name, (changes, num_rows, model_type) in CASES.items()
    }


def train_in_full_precision(group: ProcessGroup) -> dict[str, Any]:
    return train(group, config_of(clip_grad_norm=None, steps=3), 1000, BlocksModel)


def test_weights_and_losses_have_the_same_bits_at_every_world_size() -> None:
    results = {world_size: run_ranks(world_size, train_each) for world_size in (1, 2, 3)}
    [expected] = results[1]
    for result in itertools.chain.from_iterable(results.values()):
        assert result == expected
    assert expected["blocks"] == expected["grad_op"] == expected["offload"]
    [replicated] = run_ranks(1, train_in_full_precision)
    assert expected["not-clipped"] == replicated, "the norm of FSDP is another one, and nothing else"
    assert expected["blocks"]["weights"] != replicated["weights"], "clipping matters here"
