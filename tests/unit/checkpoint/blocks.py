"""Helpers that write tensors as blocks, on any number of ranks, and read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import strategies as st

from elastic_ddp.checkpoint import Commit
from elastic_ddp.checkpoint.manifest import Skeleton
from elastic_ddp.checkpoint.parts import Part, TensorKind, assemble
from elastic_ddp.checkpoint.pieces import pieces_of
from elastic_ddp.checkpoint.planning import plan_blocks, share_of
from elastic_ddp.checkpoint.reader import allocate_state, read_pieces
from elastic_ddp.checkpoint.writer import BlockWriter
from elastic_ddp.storage.storage import Storage
from elastic_ddp.tensors import host_memory

ATTEMPT = "0" * 32
PREFIX = f"step=7/attempt={ATTEMPT}"
SHAPES = st.lists(st.integers(0, 9), max_size=4).map(torch.Size)


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(37, 5, generator=generator)
    return {
        "weight": weight,
        "bf16": weight.to(torch.bfloat16),
        "fp16": weight.to(torch.float16),
        "float8": weight.to(torch.float8_e4m3fn),
        "int64": torch.arange(1000),
        "bool": weight > 0,
        "complex": torch.complex(weight, weight),
        "scalar": torch.tensor(3.25, dtype=torch.float64),
        "one": torch.ones(1, 1, 7),
        "nothing": torch.empty(0, 4),
        "transposed": weight.t(),
        "strided": torch.arange(30)[::3],
    }


def write(
    storage: Storage,
    tensors: dict[str, torch.Tensor],
    world_size: int = 1,
    *,
    block_bytes: int = 64,
    object_bytes: int = 200,
) -> list[Part]:
    """Returns the parts that ranks write which all hold all tensors."""
    plan = plan_blocks(tensors, block_bytes)
    parts = []
    for rank in range(world_size):
        share = share_of(plan, rank=rank, world_size=world_size)
        writer = BlockWriter(object_bytes=object_bytes)
        writer.stage(share, tensors)
        parts.append(writer.write(storage, PREFIX, str(rank)))
    return parts


def kinds_in(parts: Iterable[Part]) -> dict[str, TensorKind]:
    """Returns dtype and shape of the tensors that ranks have written, by name."""
    return {name: (tensor.dtype, tensor.shape) for part in parts for name, tensor in part.tensors.items()}


def commit_of(parts: list[Part], names: Any) -> Commit:
    kinds = kinds_in(parts)
    assert kinds.keys() == set(names)
    objects, tensors = assemble(parts, kinds)
    state = Skeleton(key=f"{PREFIX}/state.json", size=0, crc32=0)
    return Commit(step=7, attempt=ATTEMPT, state=state, objects=objects, tensors=tensors, record={})


def read(storage: Storage, commit: Commit) -> dict[str, torch.Tensor]:
    restored, targets = allocate_state(commit)
    for _ in read_pieces(storage, pieces_of(commit, restored), targets):
        pass
    return restored


@contextmanager
def in_slabs_from(small_bytes: int) -> Iterator[None]:
    """Tensors of so many bytes lie together, others have memory of their own and a gap, whatever their size."""
    with (
        patch.object(host_memory, "LARGE_BYTES", 1),
        patch.object(host_memory, "SMALL_BYTES", small_bytes),
        patch.object(host_memory, "MAX_GAP_SHARE", 1),
    ):
        yield


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors are equal bit for bit, with dtype and shape."""
    raw = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*raw)
