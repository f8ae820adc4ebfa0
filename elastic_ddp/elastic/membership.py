"""Who forms the next generation: a plain state machine, without Ray, clocks or threads."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic_ddp.telemetry.summary import WORKER_LOST


@dataclass(frozen=True, kw_only=True)
class Member:
    """One worker process, as it presents itself."""

    id: str
    """Unique for the process."""
    group: str
    """The worker group that it was started in; a restarted group has another."""
    rank_in_group: int
    group_size: int
    node: str
    pid: int


@dataclass(frozen=True)
class FormedGeneration:
    number: int
    members: tuple[Member, ...]
    """In rank order."""
    reason: str


@dataclass
class Membership:
    """Forms a generation when every worker of the newest worker group waits for one.

    Today Ray Train starts and restarts workers as a group, so a generation is one whole group. When a connection breaks
    and no process dies, the group comes back whole and forms another. A member of an older group is superseded: it
    takes no part any more, however late it notices.
    """

    generation: int = 0
    current: FormedGeneration | None = None
    loss_reported: str | None = None
    """What a survivor of the current generation said when a peer was lost."""
    _groups: list[str] = field(default_factory=list)
    _waiting: dict[str, Member] = field(default_factory=dict)

    def arrive(self, member: Member, *, lost: str | None = None) -> bool:
        """A member wants a generation. False if it is superseded.

        Args:
            member: who.
            lost: how it lost its last generation, if it did.
        """
        if member.group not in self._groups:
            self._groups.append(member.group)
            self._waiting.clear()
        if member.group != self._groups[-1]:
            return False
        if lost is not None:
            self.loss_reported = self.loss_reported or lost
        self._waiting[member.id] = member
        return True

    def form(self) -> FormedGeneration | None:
        """The next generation, if everyone who belongs to it is waiting."""
        members = sorted(self._waiting.values(), key=lambda member: member.rank_in_group)
        if not members or len(members) < members[0].group_size:
            return None
        previous = self.current
        if previous is None:
            reason = "start"
        elif self.loss_reported is None and len(previous.members) != len(members):
            reason = "resize"
        else:
            reason = WORKER_LOST
        self.generation += 1
        self.current = FormedGeneration(self.generation, tuple(members), reason)
        self.loss_reported = None
        self._waiting.clear()
        return self.current

    def is_superseded(self, member: Member) -> bool:
        """Whether a newer group than the member's has arrived. One that has not arrived itself yet is newer still."""
        return member.group in self._groups[:-1]
