"""`Assignment`: a member's place in a generation. Without torch, which Ray Train's controller does not import."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Shards(NamedTuple):
    """The shards of a state that a member holds; see `fsdp`."""

    num: int
    """Number of shards of the whole state."""
    held: tuple[int, ...]
    """The numbers of those that it holds, from 0."""


def mirror_offset(nodes: Sequence[str]) -> int:
    """Returns how many ranks after a shard's owner the rank comes that mirrors it.

    Owner and mirror are on different nodes if no node has more than half of the ranks. `nodes` has the node of each
    rank. The ranks of a node follow each other.
    """
    largest = max(Counter(nodes).values())
    return max(1, min(largest, len(nodes) - largest))


@dataclass(frozen=True)
class Resharding:
    """How the shards of a state change hands as a generation begins."""

    num: int
    """Number of shards before."""
    holders: tuple[int, ...]
    """For each shard, the rank that holds it."""
    keepers: tuple[int, ...]
    """The ranks that hold one shard each afterwards, in the order of the shards."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A member's place in a generation, assigned by the rendezvous."""

    generation: int
    rank: int
    world_size: int
    store_host: str
    store_port: int
    source: int | None = None
    """The rank that sends its state to the receivers. None if no rank has a state: the newest commit is restored."""
    receivers: tuple[int, ...] = ()
    """The ranks that receive that state."""
    first_step: int | None = None
    """The number of steps done in that state."""
    handover_only: bool = False
    """The generation makes no step. Its members hand over or commit the state, and rejoin."""
    resharding: Resharding | None = None
    """Set if the state is in shards."""
    same_members: bool = False
    """The generation has the members of the one before it."""
    in_collective_task: bool = False
    """Some members are in a collective task outside of a step, which others may have finished."""
    num_nodes: int = 1
    """The number of nodes of the generation's workers."""
    mirror_offset: int = 1
    """With FSDP, each rank mirrors the shard of the rank this many before it; see `mirror_offset`."""
    reason: str
    """Why the generation was formed, for the ledger."""

    @property
    def only_hands_over(self) -> bool:
        """Whether members only send what others keep. Otherwise they train, or commit the state that all keep."""
        keeps_all = self.resharding is None or len(self.resharding.keepers) == self.world_size
        return self.handover_only and bool(self.receivers or not keeps_all)
