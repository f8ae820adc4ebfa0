"""A membership under test, with members by name."""

from __future__ import annotations

from collections.abc import Iterable

from elastic_ddp.distributed.assignment import Shards
from elastic_ddp.rendezvous.members import DrainNotice, FormedGeneration, JoinRequest, Member
from elastic_ddp.rendezvous.membership import Membership
from elastic_ddp.rendezvous.messages import RendezvousOptions

FAILED = "its process exited"
AT_ONCE = DrainNotice()
BROKEN = "connection closed by peer"


def member(name: str, node: str = "n", size: int = 2, rank: int = 0) -> Member:
    return Member(id=name, group_size=size, rank_in_group=rank, node=node, node_id=f"id of {node}", pid=100 + rank)


def options_of(min_workers: int, max_workers: int) -> RendezvousOptions:
    return RendezvousOptions(min_workers=min_workers, max_workers=max_workers, heartbeat_timeout_s=30.0)


def ids_of(generation: FormedGeneration) -> list[str]:
    return [member.id for member in generation.members]


class MembershipHarness:
    """A membership with a manual clock. Members are created when they join, by name."""

    def __init__(self, max_workers: int = 8, min_workers: int = 1, size: int = 2) -> None:
        self.membership = Membership(options_of(min_workers, max_workers))
        self.size = size
        self.now = 100.0
        self.members: dict[str, Member] = {}

    def join(
        self,
        name: str,
        step: int | None = None,
        *,
        node: str = "n",
        between_steps: bool = True,
        resumable: bool = True,
        failure: str | None = None,
        rank: int | None = None,
        committed: int | None = None,
        shards: Shards | None = None,
        can_finish: bool = False,
        fewest_workers: int = 1,
    ) -> str | None:
        rank = len(self.members) if rank is None else rank
        known = self.members.setdefault(name, member(name, node, self.size, rank))
        request = JoinRequest(
            member=known,
            step=step,
            between_steps=between_steps,
            resumable=resumable,
            shards=shards,
            can_finish=can_finish,
            fewest_workers=fewest_workers,
            committed=committed,
            failure=failure,
            at_s=self.now,
        )
        return self.membership.join(request)

    def all_join(self, names: Iterable[str], step: int | None = None) -> None:
        for name in names:
            assert self.join(name, step) is None

    def all_hold(self, names: str, step: int) -> None:
        """Members join that each hold one shard of a state."""
        for number, name in enumerate(names):
            assert self.join(name, step, shards=Shards(len(names), (number,))) is None

    def form(self) -> FormedGeneration | None:
        return self.membership.form(self.now)

    def formed(self) -> FormedGeneration:
        generation = self.form()
        assert generation is not None
        return generation

    def names(self) -> list[str]:
        """Forms a generation and returns the names of its members in rank order."""
        return ids_of(self.formed())

    @property
    def wants_change(self) -> bool:
        return self.membership.wants_change(self.now)


def harness_of(
    names: str, max_workers: int = 8, min_workers: int = 1, nodes: dict[str, str] | None = None
) -> MembershipHarness:
    """Returns a membership with a healthy first generation of the named members."""
    harness = MembershipHarness(max_workers, min_workers, size=len(names))
    for name in names:
        assert harness.join(name, node=(nodes or {}).get(name, "n")) is None
    assert sorted(harness.names()) == sorted(names)
    return harness
