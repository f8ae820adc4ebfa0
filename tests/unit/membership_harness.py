"""A membership under test, and those who come to it, by name."""

from __future__ import annotations

from collections.abc import Iterable

from elastic_ddp.rendezvous.members import DrainNotice, FormedGeneration, JoinRequest, Member
from elastic_ddp.rendezvous.membership import Membership

DEAD = "its process exited"
AT_ONCE = DrainNotice()
BROKEN = "connection closed by peer"


def member(name: str, node: str = "n", size: int = 2, rank: int = 0) -> Member:
    return Member(id=name, group_size=size, rank_in_group=rank, node=node, node_id=f"id of {node}", pid=100 + rank)


class MembershipHarness:
    """A membership whose clock stands still, and those who come to it, by name."""

    def __init__(self, max_workers: int = 8, min_workers: int = 1, size: int = 2) -> None:
        self.membership = Membership(min_workers=min_workers, max_workers=max_workers)
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
    ) -> str | None:
        rank = len(self.members) if rank is None else rank
        known = self.members.setdefault(name, member(name, node, self.size, rank))
        arrival = JoinRequest(
            member=known,
            step=step,
            between_steps=between_steps,
            resumable=resumable,
            committed=committed,
            at_s=self.now,
        )
        return self.membership.join(arrival, failure=failure)

    def all_join(self, names: Iterable[str], step: int | None = None) -> None:
        for name in names:
            assert self.join(name, step) is None

    def form(self) -> FormedGeneration | None:
        return self.membership.form(self.now)

    def formed(self) -> FormedGeneration:
        generation = self.form()
        assert generation is not None
        return generation

    def names(self) -> list[str]:
        """Who is in the generation that can be formed now, in rank order."""
        return [each.id for each in self.formed().members]

    @property
    def wants_change(self) -> bool:
        return self.membership.wants_change(self.now)


def harness_of(
    names: str, max_workers: int = 8, min_workers: int = 1, nodes: dict[str, str] | None = None
) -> MembershipHarness:
    """A harness with a healthy first generation."""
    harness = MembershipHarness(max_workers, min_workers, size=len(names))
    for name in names:
        assert harness.join(name, node=(nodes or {}).get(name, "n")) is None
    assert sorted(harness.names()) == sorted(names)
    return harness
