"""`Assignment`: a member's place in a generation. Without torch, which Ray Train's controller does not import."""

from __future__ import annotations

from dataclasses import dataclass


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
    same_members: bool = False
    """The generation has the members of the one before it."""
    in_collective_task: bool = False
    """Some members are in a collective task outside of a step, which others may have finished."""
    num_nodes: int = 1
    """The number of nodes of the generation's workers."""
    reason: str
    """Why the generation was formed, for the ledger."""
