"""Workers as the rendezvous knows them: their identity, their join requests, their drain notices."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TypeAlias

from elastic_ddp.distributed.assignment import Assignment, Formation, Shards
from elastic_ddp.rendezvous.hang import ActivityReport
from elastic_ddp.telemetry.events import GenerationFormed

DRAIN, RESIZE = "drain", "resize"
"""Why a member leaves: its node or process is going to stop, or the run needs fewer workers."""
OVERDUE = "the drain deadline of a member was near"
"""Why a generation ended inside a step although no member failed."""

Progress: TypeAlias = tuple[int, int]
"""How new a state is: the steps done, and the updates done of the next step."""


@dataclass(frozen=True)
class DrainNotice:
    """A request that a member leaves at a step boundary."""

    given_s: float = 0.0
    """Monotonic time of the notice, in seconds."""
    within_s: float = 0.0
    """Seconds until the deadline; 0 for no deadline."""

    @property
    def ends_s(self) -> float:
        return self.given_s + self.within_s

    def is_urgent(self, now_s: float) -> bool:
        """Whether half of the time has passed. In the first half, a replacement may start."""
        return now_s - self.given_s >= self.within_s / 2

    def is_overdue(self, now_s: float) -> bool:
        """Whether three quarters of the time have passed; from then on, the member does not finish its step."""
        return self.within_s > 0 and now_s - self.given_s >= 0.75 * self.within_s


@dataclass(frozen=True, kw_only=True)
class Member:
    """One worker process, the node that it is on, and its rank in the group of workers that started together."""

    id: str
    group_size: int
    rank_in_group: int
    node: str
    """Address of its node."""
    node_id: str = ""
    """Ray's id of its node."""
    pid: int
    is_standby: bool = False
    """Whether the worker is a standby: it has no resources until it replaces another worker."""

    @property
    def process(self) -> str:
        """Its node and process id, as messages show them."""
        return f"{self.node} (pid {self.pid})"


@dataclass(frozen=True, kw_only=True)
class JoinRequest:
    """A member's request for a place in the next generation."""

    member: Member
    step: int | None
    """Steps done in the state that it holds; None if it holds none."""
    updates: int = 0
    """Updates done of the next step, if that step has several."""
    between_steps: bool
    """Whether new members can join it; False inside a collective task (an evaluation), which only the members
    that started it can finish."""
    resumable: bool = True
    """Whether another member can continue from its state; False inside a step's block and after the loop."""
    shards: Shards | None = None
    """The shards of the state that it holds; None if it holds the whole state, or none."""
    can_finish: bool = False
    """Whether it can finish the next step by itself: the ranks voted on it, and the outcome did not arrive."""
    fewest_workers: int = 1
    """The smallest generation in which its share of the state fits its memory."""
    committed: int | None = None
    """Steps done in the newest commit that it wrote itself."""
    after: int = 0
    """Its last generation, 0 for none."""
    failure: str | None = None
    """How its last generation failed, if it did."""
    account: dict[str, float] | None = None
    """The seconds of each phase in its last generation."""
    activity: ActivityReport | None = None
    """Its last place in that generation."""
    at_s: float = 0.0
    """Monotonic time of the request, by the rendezvous' clock."""

    @property
    def progress(self) -> Progress | None:
        return None if self.step is None else (self.step, self.updates)


@dataclass(frozen=True, kw_only=True)
class FormedGeneration(Formation):
    """The members of a generation, and the state that it starts from."""

    number: int
    members: tuple[Member, ...]
    """In rank order."""
    waited_s: float = 0.0
    """Seconds for which there had been too few workers."""

    @cached_property
    def ids(self) -> frozenset[str]:
        """Ids of the members."""
        return frozenset(member.id for member in self.members)

    def assignments(self, store_host: str, store_port: int) -> dict[str, Assignment]:
        """Returns the place of each member, by its id."""
        of_rank_0 = Assignment(
            **{each.name: getattr(self, each.name) for each in fields(Formation)},
            generation=self.number,
            rank=0,
            world_size=len(self.members),
            store_host=store_host,
            store_port=store_port,
            num_nodes=len({member.node_id for member in self.members}),
            largest_node=max(Counter(member.node for member in self.members).values()),
        )
        return {member.id: replace(of_rank_0, rank=rank) for rank, member in enumerate(self.members)}

    def event(self) -> GenerationFormed:
        """Returns the ledger's event of the generation."""
        members = [
            {"rank": rank, "node": member.node, "pid": member.pid, "id": member.id}
            | ({"standby": True} if member.is_standby else {})
            for rank, member in enumerate(self.members)
        ]
        return GenerationFormed(
            generation=self.number,
            world_size=len(members),
            reason=self.reason,
            first_step=self.first_step,
            waited_s=self.waited_s,
            members=members,
        )
