"""What is known of workers: who they are, what they come with, why they are to go, and which of them hold the state."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

DRAIN, RESIZE = "drain", "resize"
"""Why a member is to go: its node or its process is, or there are to be fewer."""


@dataclass(frozen=True)
class DrainNotice:
    """That a member is to go, at a step boundary."""

    given_s: float = 0.0
    within_s: float = 0.0
    """How long it may stay; 0 for not at all."""

    @property
    def ends_s(self) -> float:
        return self.given_s + self.within_s

    def is_urgent(self, now_s: float) -> bool:
        """The first half of a notice is for a replacement to come in, the second to leave in."""
        return now_s - self.given_s >= self.within_s / 2

    def is_overdue(self, now_s: float) -> bool:
        """When three quarters are over a step is not waited for any more."""
        return self.within_s > 0 and now_s - self.given_s >= 0.75 * self.within_s


AT_ONCE = DrainNotice()


@dataclass(frozen=True, kw_only=True)
class Member:
    """One worker process, as it presents itself."""

    id: str
    """Unique for the process."""
    group_size: int
    """Workers that were started together with it."""
    rank_in_group: int
    node: str
    """The address of where it runs; ranks of a node are neighbours."""
    node_id: str = ""
    """Ray's name for the same."""
    pid: int


@dataclass(frozen=True, kw_only=True)
class JoinRequest:
    """A member that waits for a generation."""

    member: Member
    step: int | None
    """Steps done in the state that it holds; None if it holds none."""
    between_steps: bool
    """Whether it may be joined by others; not in the midst of an evaluation, which only those who began it can do."""
    resumable: bool = True
    """Whether training can go on from that state elsewhere; not in the midst of a step's block, nor after the loop."""
    committed: int | None = None
    """Steps done in the newest commit that it wrote itself."""
    at_s: float = 0.0
    """When it came, by the rendezvous' clock."""


@dataclass(frozen=True, kw_only=True)
class FormedGeneration:
    number: int
    members: tuple[Member, ...]
    """In rank order."""
    source: int | None
    """The rank of the most advanced, whose state all begin with; None if nobody has any: the newest commit counts."""
    receivers: tuple[int, ...]
    """The ranks that are to get it; the others have it already."""
    first_step: int | None
    """Steps done in that state."""
    reason: str
    brief: bool = False
    """It makes no step: those who leave hand over the state, or commit it, and all come back."""
    again: bool = False
    """It has the members of the one before it."""
    amid: bool = False
    """Some of its members do something together outside of steps, and others may have done it already."""
    waited_s: float = 0.0
    """How long there had been too few for it."""

    @cached_property
    def ids(self) -> frozenset[str]:
        """Of its members."""
        return frozenset(each.id for each in self.members)


def earlier(one: DrainNotice | None, other: DrainNotice) -> DrainNotice:
    """Of two notices, the one that leaves less time. Without a deadline there is none to keep."""
    if one is None or not one.within_s:
        return other
    return other if other.within_s and other.ends_s < one.ends_s else one


def newest_step(arrivals: list[JoinRequest]) -> int | None:
    return max((each.step for each in arrivals if each.step is not None), default=None)


def is_committed(arrivals: list[JoinRequest]) -> bool:
    """Whether the newest state that there is was committed by one of those who hold it."""
    newest = newest_step(arrivals)
    return newest is None or any(each.committed == newest for each in arrivals)


def is_held(some: list[JoinRequest], everyone: list[JoinRequest]) -> bool:
    """Whether the newest state that there is is not lost with those who are not among `some`."""
    return newest_step(some) == newest_step(everyone) or is_committed(everyone)


def with_the_newest(arrivals: list[JoinRequest], most: int) -> list[JoinRequest]:
    """The most senior, and among them one who holds the newest state that any of them has."""
    chosen, newest = arrivals[:most], newest_step(arrivals)
    if newest is None or newest_step(chosen) == newest:
        return chosen
    return [*chosen[:-1], next(each for each in arrivals if each.step == newest)]


def by_node(arrivals: list[JoinRequest]) -> list[JoinRequest]:
    """Members of a node get neighbouring ranks, nodes in the order of their senior member. The sort is stable."""
    first: dict[str, int] = {}
    for place, each in enumerate(arrivals):
        first.setdefault(each.member.node, place)
    return sorted(arrivals, key=lambda each: first[each.member.node])
