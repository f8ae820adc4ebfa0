"""Moves the shards of a state from the ranks of one generation to the ranks of the next, from memory to memory.

Shard i of N has the rows of dimension 0 that `torch.chunk` gives it: rows i * c to i * c + c - 1, with c = ceil(n / N).
Each rank computes from this which rows it sends to which rank. Tensors travel in batches of `BATCH_BYTES`. A rank frees
its old rows of a batch after the batch has moved, so its peak is the larger of its old and new shards, plus a few
batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist

from elastic_ddp.distributed.assignment import Resharding
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.tensors.state_tree import ravel

BATCH_BYTES = 16 << 20
"""Bytes of all ranks that one exchange moves, unless one tensor is larger."""


@dataclass(frozen=True)
class Spec:
    """A sharded tensor as a whole."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self.shape[0] * self.row_bytes


def rows_of(num_rows: int, shard: int, num: int) -> range:
    """Returns the rows of a shard."""
    length = -(-num_rows // num)
    return range(min(shard * length, num_rows), min((shard + 1) * length, num_rows))


def move_rows(
    specs: Mapping[str, Spec],
    held: Mapping[int, dict[str, torch.Tensor]],
    resharding: Resharding,
    group: ProcessGroup,
    device: torch.device,
    offset: int | None = None,
    tick: Callable[[], None] = lambda: None,
) -> dict[int, dict[str, torch.Tensor]]:
    """Returns the rows of the shards that this rank has afterwards, by their numbers: its own and the mirrored shard.

    Collective. A rank copies rows that it already holds, without communication. `specs` has all sharded tensors, in the
    same order on all ranks. `held` has the rows of each shard that this rank holds, by its number; they are removed as
    they move. With an `offset`, a shard is mirrored by the rank that comes so many ranks after its owner. `tick` is
    called after each batch.
    """
    keepers = resharding.keepers
    num = resharding.num_kept
    own: list[int | None] = [keepers.index(rank) % num if rank in keepers else None for rank in range(group.world_size)]
    wanted = [own]
    if offset is not None:
        wanted.append([None if shard is None else (shard - offset) % num for shard in own])
    kept: dict[int, dict[str, torch.Tensor]] = {}
    for batch in _batches(specs):
        for shards in wanted:
            moved = _move(batch, held, resharding, shards, group, device)
            shard = shards[group.rank]
            if shard is not None:
                kept.setdefault(shard, {}).update(moved)
        for rows in held.values():
            for name in batch:
                del rows[name]
        tick()
    return kept


def rotate_rows(
    specs: Mapping[str, Spec], rows: Mapping[str, torch.Tensor], offset: int, group: ProcessGroup
) -> dict[str, torch.Tensor]:
    """Sends the rows of this rank's shard to the rank `offset` after it. Returns the rows of the rank `offset` before
    this rank.

    Collective, for groups of two ranks or more in which rank r holds shard r. Arguments as in `move_rows`.
    """
    world_size = group.world_size
    target = (group.rank + offset) % world_size
    source = (group.rank - offset) % world_size
    received: dict[str, torch.Tensor] = {}
    for batch in _batches(specs):
        to_send: list[list[torch.Tensor]] = [[] for _ in range(world_size)]
        to_send[target] = [ravel(rows[name]).view(torch.uint8) for name in batch]
        sizes: list[list[int]] = [[] for _ in range(world_size)]
        sizes[source] = [len(rows_of(spec.shape[0], source, world_size)) * spec.row_bytes for spec in batch.values()]
        for (name, spec), part in zip(batch.items(), _exchange(to_send, sizes, group)[source], strict=True):
            received[name] = _as_rows(part.to(rows[name].device), spec)
    return received


def _batches(specs: Mapping[str, Spec]) -> Iterator[dict[str, Spec]]:
    batch: dict[str, Spec] = {}
    num_bytes = 0
    for name, spec in specs.items():
        size = spec.num_bytes
        if batch and num_bytes + size > BATCH_BYTES:
            yield batch
            batch, num_bytes = {}, 0
        batch[name] = spec
        num_bytes += size
    if batch:
        yield batch


def _overlaps(spec: Spec, resharding: Resharding, new_shard: int | None) -> Iterator[tuple[int, range]]:
    """Yields the rows of a shard as it is afterwards, in order, each with the number of the shard that has them now."""
    if new_shard is None:
        return
    wanted = rows_of(spec.shape[0], new_shard, resharding.num_kept)
    for shard in range(resharding.num):
        rows = rows_of(spec.shape[0], shard, resharding.num)
        both = range(max(rows.start, wanted.start), min(rows.stop, wanted.stop))
        if both:
            yield shard, both


def _move(
    batch: Mapping[str, Spec],
    held: Mapping[int, Mapping[str, torch.Tensor]],
    resharding: Resharding,
    wanted: Sequence[int | None],
    group: ProcessGroup,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Moves some tensors to the ranks that want them. `wanted` has for each rank the shard that it gets."""
    own = group.rank
    ranks = range(group.world_size)
    to_send: list[list[torch.Tensor]] = [[] for _ in ranks]
    sizes: list[list[int]] = [[] for _ in ranks]  # in bytes, of the parts that each rank sends to this one

    def held_part(name: str, shard: int, rows: range) -> torch.Tensor:
        first = rows_of(batch[name].shape[0], shard, resharding.num).start
        return ravel(held[shard][name][rows.start - first : rows.stop - first]).view(torch.uint8)

    for name, spec in batch.items():
        for rank in ranks:
            for shard, rows in _overlaps(spec, resharding, wanted[rank]):
                source = resharding.source(shard, rank)
                if source == own != rank:
                    to_send[rank].append(held_part(name, shard, rows))
                if rank == own != source:
                    sizes[source].append(len(rows) * spec.row_bytes)
    received = [iter(parts) for parts in _exchange(to_send, sizes, group)]
    kept = {}
    for name, spec in batch.items():
        parts = []
        is_received = True
        for shard, rows in _overlaps(spec, resharding, wanted[own]):
            source = resharding.source(shard, own)
            is_received &= source != own
            parts.append(held_part(name, shard, rows) if source == own else next(received[source]).to(device))
        # A part of the held rows is copied, so that their memory can be freed.
        kept[name] = _as_rows(parts[0] if len(parts) == 1 and is_received else _joined(parts, device), spec)
    return kept


def _joined(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.cat(list(parts)) if parts else torch.empty(0, dtype=torch.uint8, device=device)


def _as_rows(content: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Returns bytes as rows of a tensor."""
    if content.storage_offset() % spec.dtype.itemsize:
        content = content.clone()
    return content.view(spec.dtype).view(-1, *spec.shape[1:])


def _exchange(
    to_send: Sequence[list[torch.Tensor]], sizes: Sequence[list[int]], group: ProcessGroup
) -> list[list[torch.Tensor]]:
    """Sends bytes in parts to each rank. Returns the parts of each rank, whose sizes are known."""
    num_bytes = [sum(of_rank) for of_rank in sizes]
    lengths = [sum(map(len, of_rank)) for of_rank in to_send]
    received = torch.empty(sum(num_bytes), dtype=torch.uint8, device=group.transfer_device)
    parts = [part.to(group.transfer_device) for of_rank in to_send for part in of_rank]
    sent = parts[0] if len(parts) == 1 else _joined(parts, group.transfer_device)
    if group.world_size > 1:
        group.wait(dist.all_to_all_single(received, sent, num_bytes, lengths, async_op=True))
    arrived = iter(received.split([size for of_rank in sizes for size in of_rank]))
    return [list(islice(arrived, len(of_rank))) for of_rank in sizes]
