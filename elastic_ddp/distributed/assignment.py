"""`Assignment`: a member's place in a generation. Without torch, which Ray Train's controller does not import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Shards(NamedTuple):
    """The shards of a state that a member holds; see `fsdp`."""

    num: int
    """Number of shards of the whole state."""
    held: tuple[int, ...]
    """The numbers of the held shards, from 0."""


@dataclass(frozen=True)
class Resharding:
    """The move of the shards of a state between ranks as a generation begins."""

    num: int
    """Number of shards before."""
    held: tuple[tuple[int, ...], ...]
    """For each rank, the shards that it holds before: its own first, then the mirrored shard."""
    keepers: tuple[int, ...]
    """The ranks that have a shard afterwards: `keepers[i]` has shard `i` modulo the number of shards."""
    num_after: int | None = None
    """Number of shards afterwards; None for the number of keepers. With fewer, several keepers have the same shard."""

    @property
    def num_kept(self) -> int:
        """Number of shards afterwards."""
        return self.num_after or len(self.keepers)

    def source(self, shard: int, rank: int) -> int:
        """Returns the rank from which a rank gets rows of a shard: itself, or else the owner, or else the mirror."""
        if shard in self.held[rank]:
            return rank
        owners = [rank for rank, held in enumerate(self.held) if held[:1] == (shard,)]
        return owners[0] if owners else next(rank for rank, held in enumerate(self.held) if shard in held)


@dataclass(frozen=True, kw_only=True)
class Formation:
    """Facts about the formation of a generation, for all of its members."""

    reason: str
    """Why it was formed, for the ledger."""
    source: int | None = None
    """The rank that sends its state to the receivers. None if no rank has a state: the newest commit is restored."""
    receivers: tuple[int, ...] = ()
    """The ranks that receive the state of `source`."""
    first_step: int | None = None
    """The number of steps done in the state of `source`."""
    handover_only: bool = False
    """The generation makes no step. Its members transfer the state or commit it, and rejoin."""
    resharding: Resharding | None = None
    """How the shards of the state change hands; None if the state is not sharded."""
    same_members: bool = False
    """The generation has the same members as the previous generation."""
    in_collective_task: bool = False
    """Some members are in a collective task outside of a step, which others may have finished."""
    shard_size: int | None = None
    """How many neighbouring ranks share the state if it is sharded; None for all."""


@dataclass(frozen=True, kw_only=True)
class Assignment(Formation):
    """A member's place in a generation, assigned by the rendezvous."""

    generation: int
    rank: int
    world_size: int
    store_host: str
    store_port: int
    num_nodes: int = 1
    """The number of nodes of the generation's workers."""
    largest_node: int = 1
    """The number of the generation's workers on the node with the most workers. The ranks of a node are consecutive."""

    @property
    def num_shards(self) -> int:
        """The number of shards of a state that is sharded."""
        return self.shard_size or self.world_size

    @property
    def mirror_offset(self) -> int:
        """The distance, in ranks, from the owner of a shard to the rank that mirrors it."""
        return max(1, min(self.largest_node, self.world_size - self.largest_node))

    @property
    def mirrors_outlive_nodes(self) -> bool:
        """Whether every shard and its mirror are on different nodes."""
        return 2 * self.largest_node <= self.world_size

    @property
    def ends_after_transfer(self) -> bool:
        """Whether the generation ends once its receivers or keepers have the state, without a step or a commit."""
        keeps_all = self.resharding is None or len(self.resharding.keepers) == self.world_size
        return self.handover_only and bool(self.receivers or not keeps_all)
