"""A sharded state between two generations: this rank's part, and its transfer to other ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from elastic_ddp.distributed.assignment import Shards
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.distributed.shard_moves import Spec, move_rows
from elastic_ddp.distributed.state_transfer import transfer_tensors
from elastic_ddp.tensors.dtensor import is_dtensor, shard_of
from elastic_ddp.tensors.state_tree import Layout, dtype_name, dtype_of, flatten, local_part, unflatten
from elastic_ddp.worker.mirror import Mirror


@dataclass(frozen=True)
class HeldShards:
    """A rank's part of a state, which the next generation takes over from memory."""

    step: int
    """Steps done in the state."""
    shards: Shards
    """Which shards this rank holds, its own first; none if it has handed its rows over."""
    skeleton: Any
    """The tree of the state without tensors, as `flatten` returns it."""
    plain: dict[str, torch.Tensor]
    """The tensors that every rank holds, by name."""
    rows: dict[int, dict[str, torch.Tensor]]
    """For each held shard, its rows of the sharded tensors."""
    specs: dict[str, Spec]
    """The sharded tensors as wholes."""

    @classmethod
    def of(
        cls,
        step: int,
        state: dict[str, Any],
        shards: Shards,
        layout: Layout | None,
        mirror: Mirror | None = None,
    ) -> HeldShards:
        """Returns this rank's shards of a generation's state, and the shards that it mirrors. The tensors are not
        copied."""
        skeleton, tensors = flatten(state)
        sharded = {name: tensor for name, tensor in tensors.items() if is_dtensor(tensor)}
        rows = {shards.held[0]: {name: local_part(tensor) for name, tensor in sharded.items()}}
        if mirror is not None:
            assert layout is not None
            rows[mirror.shard] = mirror.rows(sharded, layout)
        return cls(
            step=step,
            shards=shards,
            skeleton=skeleton,
            plain={name: tensor for name, tensor in tensors.items() if name not in sharded},
            rows=rows,
            specs={name: Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in sharded.items()},
        )

    def fewest_ranks(self, free_bytes: int) -> int:
        """Returns the smallest number of ranks at which a rank has memory for its shard and the shard's gradient."""
        available = free_bytes + sum(tensor.nbytes for rows in self.rows.values() for tensor in rows.values())
        return max(1, -(-_with_gradient(self.specs) // max(available, 1)))

    def tensors(self, shard: int) -> dict[str, torch.Tensor]:
        """Returns the rows of a held shard: parameters by their names in the model, and state of the optimizers."""
        rows = self.rows[shard]
        return {name if _is_of_optimizer(name) else name.partition(".")[2]: each for name, each in rows.items()}

    @property
    def is_whole(self) -> bool:
        """Whether no row has moved to another rank."""
        return all(rows.keys() == self.specs.keys() for rows in self.rows.values())

    def restored(self, layout: Layout | None) -> dict[str, Any]:
        """Returns the state of this rank's own shard, sharded as its model is now."""
        assert layout is not None
        own = self.rows[self.shards.held[0]]
        sharded = {name: shard_of(rows, layout(name)) for name, rows in own.items()}  # type: ignore[arg-type]
        state: dict[str, Any] = unflatten(self.skeleton, {**self.plain, **sharded})
        return state


def _is_of_optimizer(name: str) -> bool:
    return name.startswith("optimizer.")


def _with_gradient(specs: dict[str, Spec]) -> int:
    """Returns the bytes of a whole state and of its gradients."""
    return sum(spec.num_bytes * (1 if _is_of_optimizer(name) else 2) for name, spec in specs.items())


NOTHING = HeldShards(0, Shards(0, ()), None, {}, {}, {})
"""The shards of a rank without a state: none."""


def share_plain(
    held: HeldShards,
    group: ProcessGroup,
    tick: Callable[[], None],
    step: int,
    source: int,
    receivers: Sequence[int],
) -> HeldShards:
    """Returns the replicated part of the state (no shards) of rank `source` after `step` steps.

    Collective. The receivers get the tensors; the other ranks have them already.
    """
    header = None
    if group.rank == source:
        described = {name: [dtype_name(spec.dtype), list(spec.shape)] for name, spec in held.specs.items()}
        header = json.dumps({"skeleton": held.skeleton, "specs": described}).encode()
    received = json.loads(group.broadcast_bytes(header, source))
    plain = transfer_tensors(held.plain, group, source=source, receivers=receivers, tick=tick)
    specs = {name: Spec(tuple(shape), dtype_of(dtype)) for name, (dtype, shape) in received["specs"].items()}
    return HeldShards(step, NOTHING.shards, received["skeleton"], held.plain if plain is None else plain, {}, specs)


def move_shards(
    held: HeldShards,
    shared: HeldShards,
    group: ProcessGroup,
    device: torch.device,
    has_room: Callable[[int], bool],
    tick: Callable[[], None],
) -> HeldShards:
    """Returns what this rank holds in the new generation. Collective; rows are freed as they move.

    Args:
        held: what this rank holds now.
        shared: what `share_plain` returned.
        group: the ranks.
        device: where this rank keeps its shards.
        has_room: decides whether shards are mirrored, from how many bytes this rank then has more than now. Collective.
        tick: called now and then.
    """
    resharding = group.assignment.resharding
    specs = shared.specs
    assert resharding is not None
    num = resharding.num_kept
    own = sum(tensor.nbytes for rows in held.rows.values() for tensor in rows.values())
    offset = group.assignment.mirror_offset if has_room(2 * _with_gradient(specs) // num - own) else None
    rows = move_rows(specs, held.rows, resharding, group, device, offset, tick)
    if group.rank not in resharding.keepers:
        return NOTHING
    return replace(shared, shards=Shards(num, tuple(rows)), rows=rows)
