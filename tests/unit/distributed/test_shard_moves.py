"""Shards move from the ranks of one generation to those of another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic_ddp.distributed import shard_moves
from elastic_ddp.distributed.assignment import Resharding
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.distributed.shard_moves import Spec, move_rows, rotate_rows, rows_of
from tests.ranks import run_ranks

WHOLE = {
    "matrix": torch.arange(7 * 3, dtype=torch.float32).view(7, 3),
    "half": torch.arange(5, dtype=torch.bfloat16),
    "one": torch.tensor([True]),
    "cube": torch.arange(11 * 2 * 2, dtype=torch.int64).view(11, 2, 2),
    "empty": torch.empty(0, 4),
}
SPECS = {name: Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in WHOLE.items()}


def test_shards_are_those_of_torch_chunk() -> None:
    for num_rows in range(1, 20):
        for num in range(1, 8):
            chunks = [len(chunk) for chunk in torch.arange(num_rows).chunk(num)]
            found = [len(rows_of(num_rows, shard, num)) for shard in range(num)]
            assert found == chunks + [0] * (num - len(chunks))


def shards_of(shard: int, num: int) -> dict[str, torch.Tensor]:
    return {
        name: tensor[rows.start : rows.stop]
        for name, tensor in WHOLE.items()
        for rows in [rows_of(len(tensor), shard, num)]
    }


def moved(group: ProcessGroup, plans: list[Resharding], batch_bytes: int) -> list[dict[str, Any]]:
    shard_moves.BATCH_BYTES = batch_bytes
    results = []
    for plan in plans:
        held = {shard: shards_of(shard, plan.num) for shard in plan.held[group.rank]}
        offset = 1 if len(plan.keepers) > 1 else None
        moved = move_rows(SPECS, held, plan, group, group.device, offset)
        results.append({shard: {name: each.tolist() for name, each in rows.items()} for shard, rows in moved.items()})
        assert not any(held.values()), "what has moved is freed"
    return results


@pytest.mark.parametrize("batch_bytes", [40, 1 << 20])
def test_each_keeper_gets_the_rows_of_its_shard(batch_bytes: int) -> None:
    plans = [
        Resharding(3, ((0, 2), (1, 0), (2, 1)), (0, 1, 2)),  # nothing moves
        Resharding(3, ((1,), (2,), (0,)), (0, 1, 2)),  # ranks change
        Resharding(2, ((0, 1), (1, 0), ()), (0, 1, 2)),  # one joins
        Resharding(1, ((), (0,), ()), (0, 1, 2)),
        Resharding(3, ((0,), (1,), (2,)), (2,)),  # two leave
        Resharding(3, ((0,), (1,), (2,)), (2, 1)),
        Resharding(2, ((1,), (), (0,)), (1,)),
        Resharding(4, ((0, 3), (2, 1), ()), (0, 1, 2)),  # two have died, whose shards the others mirror
    ]
    for rank, results in enumerate(run_ranks(3, moved, plans, batch_bytes)):
        for plan, found in zip(plans, results, strict=True):
            num = len(plan.keepers)
            own = [plan.keepers.index(rank)] if rank in plan.keepers else []
            mirrored = [(shard - 1) % num for shard in own] if num > 1 else []
            expected = {
                shard: {name: rows.tolist() for name, rows in shards_of(shard, num).items()}
                for shard in [*own, *mirrored]
            }
            assert found == expected, (rank, plan)


def rotated(group: ProcessGroup, cases: list[tuple[int, int]]) -> list[dict[str, Any]]:
    results = []
    for offset, batch_bytes in cases:
        shard_moves.BATCH_BYTES = batch_bytes
        rows = rotate_rows(SPECS, shards_of(group.rank, group.world_size), offset, group)
        results.append({name: each.tolist() for name, each in rows.items()})
    return results


def test_each_rank_gets_the_shard_of_another_one() -> None:
    cases = [(1, 40), (2, 40), (1, 1 << 20)]
    for rank, results in enumerate(run_ranks(3, rotated, cases)):
        for (offset, _), found in zip(cases, results, strict=True):
            expected = shards_of((rank - offset) % 3, 3)
            assert found == {name: rows.tolist() for name, rows in expected.items()}
