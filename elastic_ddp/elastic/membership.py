"""Who forms the next generation: a plain state machine, without Ray, clocks or threads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from elastic_ddp.telemetry.summary import WORKER_LOST

LEFT = "it left"
SUPERSEDED = "its worker group was started again"
GATHER_S = 10.0
"""How long the first generation waits for workers that were started with those that have come."""
SETTLE_S = 0.5
"""How long a newcomer that is ready waits for others, before training is asked to let it in."""
PATIENCE_S = 5.0
"""The same where others are known to be on their way. Training goes on meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One worker process, as it presents itself."""

    id: str
    """Unique for the process."""
    group: str
    """What is restarted as a whole: a worker group that is not resized in place has another after a restart."""
    group_size: int
    """Workers that were started together with it."""
    rank_in_group: int
    node: str
    """Where it runs; ranks of a node are neighbours."""
    pid: int


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A member that waits for a generation."""

    member: Member
    step: int | None
    """Steps done in the state that it holds; None if it holds none."""
    between_steps: bool
    """Whether it may be joined by others; not in the midst of an evaluation, which only those who began it can do."""
    at_s: float


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


@dataclass
class Membership:
    """Decides when a generation is over and who is in the next one.

    A generation ends when a member is lost, or when its members were asked to let others in or go. The next one forms
    once every member of the last one waits for it or is known to be dead, of those and of all newcomers that wait. Who
    was presumed dead takes no part any more, however late it notices.

    Args:
        min_workers, max_workers: bounds of a generation's size.
    """

    min_workers: int = 1
    max_workers: int = 1
    generation: int = 0
    current: FormedGeneration | None = None
    loss: str | None = None
    """How the current generation broke, if it did."""
    on_their_way: int = 0
    """Workers that were started, or are about to be, and have not come yet."""
    _waiting: dict[str, Arrival] = field(default_factory=dict)
    _gone: dict[str, str] = field(default_factory=dict)
    _leaving: set[str] = field(default_factory=set)
    _groups: list[str] = field(default_factory=list)

    # What happens.

    def arrive(self, arrival: Arrival, *, lost: str | None = None) -> str | None:
        """A member wants a generation. Returns why it gets none any more, if so.

        Args:
            arrival: who, and with what.
            lost: how it lost its last generation, if it did.
        """
        member = arrival.member
        if member.group not in self._groups:
            self._groups.append(member.group)
            # A group that was started again as a whole: what is left of the one before is of no use.
            for older in [*self._members(), *(each.member for each in self._waiting.values())]:
                if older.group != member.group:
                    self.lose(older.id, SUPERSEDED)
        if member.group != self._groups[-1]:
            return SUPERSEDED
        if member.id in self._gone:
            return self._gone[member.id]
        if lost is not None and self._is_current(member.id):
            self.loss = self.loss or lost
        before = self._waiting.get(member.id)  # who asks again has waited since the first time
        self._waiting[member.id] = replace(arrival, at_s=before.at_s) if before is not None else arrival
        return None

    def lose(self, member: str, how: str) -> bool:
        """A member is dead, or presumed so. Returns whether the current generation breaks by it just now."""
        if member in self._gone:
            return False
        self._gone[member] = how
        self._waiting.pop(member, None)
        breaks = self._is_current(member) and self.loss is None
        if breaks:
            self.loss = how
        return breaks

    def retire(self, member: str) -> None:
        """A member is through with the run, or left it when nothing was waiting for it any more."""
        self._gone.setdefault(member, LEFT)
        self._waiting.pop(member, None)

    def ask_to_leave(self, members: Iterable[str]) -> None:
        """Members are to go at the next step boundary."""
        self._leaving.update(members)

    # What follows.

    def is_gone(self, member: str) -> str | None:
        """Why a member takes no part any more, if so."""
        return self._gone.get(member)

    @property
    def num_alive(self) -> int:
        """Members that train or wait to."""
        return len({each.id for each in self._members()} - self._gone.keys() | self._waiting.keys())

    def has_seen(self, member: str) -> bool:
        """Whether a worker has ever come."""
        return member in self._gone or member in self._waiting or self._is_current(member)

    def lost(self) -> dict[str, str]:
        """Members that are dead or presumed so, and why."""
        return {member: how for member, how in self._gone.items() if how != LEFT}

    def wants_change(self, now_s: float) -> bool:
        """Whether the members of a healthy generation should end it at their next step boundary."""
        if self.current is None or self.loss is not None:
            return False
        staying = [each for each in self._members() if each.id not in self._leaving]
        if len(staying) < len(self._members()):
            return True
        waiting = [each for each in self._waiting.values() if each.member.id not in self._leaving]
        newcomers = [each for each in waiting if not self._is_current(each.member.id)]
        room = self.max_workers - len(staying)
        patience = PATIENCE_S if self.on_their_way else SETTLE_S
        settled = any(now_s - each.at_s >= patience for each in newcomers)
        return room > 0 and (settled or len(newcomers) >= room)

    def form(self, now_s: float) -> FormedGeneration | None:
        """The next generation, if it can be formed now."""
        survivors = [each.id for each in self._members() if each.id not in self._gone]
        if any(each not in self._waiting for each in survivors):
            return None
        arrivals, least = list(self._waiting.values()), max(1, self.min_workers)
        if not all(self._waiting[each].between_steps for each in survivors):
            arrivals, least = [self._waiting[each] for each in survivors], 1
        elif not survivors and not self._gathered(arrivals, now_s):
            return None
        chosen = self._choose(arrivals, survivors)
        if len(chosen) < least:
            return None
        return self._formed(_by_node(chosen))

    def _gathered(self, arrivals: list[Arrival], now_s: float) -> bool:
        """Without a generation to go on from, workers that were started together begin together."""
        if not arrivals:
            return False
        together = max(each.member.group_size for each in arrivals)
        return len(arrivals) >= together or now_s - min(each.at_s for each in arrivals) >= GATHER_S

    def _choose(self, arrivals: list[Arrival], survivors: list[str]) -> list[Arrival]:
        """Seniors first, and of those who should leave only one, if nobody else holds the newest state."""
        rank = {member: place for place, member in enumerate(survivors)}

        def seniority(each: Arrival) -> tuple[float, ...]:
            if not survivors:  # they begin together, whoever was ready first
                return (each.member.rank_in_group, each.at_s)
            return (rank.get(each.member.id, len(rank)), each.at_s, each.member.rank_in_group)

        arrivals = sorted(arrivals, key=seniority)
        newest = max((each.step for each in arrivals if each.step is not None), default=None)
        staying = [each for each in arrivals if each.member.id not in self._leaving]
        if newest is not None and not any(each.step == newest for each in staying):
            holder = next(each for each in arrivals if each.step == newest)
            return [holder, *staying[: self.max_workers - 1]]
        return staying[: self.max_workers]

    def _formed(self, chosen: list[Arrival]) -> FormedGeneration:
        newest = max((each.step for each in chosen if each.step is not None), default=None)
        source = next((rank for rank, each in enumerate(chosen) if newest is not None and each.step == newest), None)
        receivers = tuple(rank for rank, each in enumerate(chosen) if each.step is None or each.step != newest)
        self.generation += 1
        formed = FormedGeneration(
            number=self.generation,
            members=tuple(each.member for each in chosen),
            source=source,
            receivers=receivers,
            first_step=newest,
            reason=self._reason(chosen),
        )
        for each in formed.members:
            del self._waiting[each.id]
        self.current, self.loss = formed, None
        return formed

    def _reason(self, chosen: list[Arrival]) -> str:
        if self.current is None:
            return "start"
        if self.loss is not None:
            return WORKER_LOST
        before = {each.id for each in self.current.members}
        after = {each.member.id for each in chosen}
        changes = [word for word, moved in (("joined", after - before), ("left", before - after)) if moved]
        return f"workers {' and '.join(changes)}" if changes else "formed again"

    def _members(self) -> list[Member]:
        return list(self.current.members) if self.current is not None else []

    def _is_current(self, member: str) -> bool:
        return any(each.id == member for each in self._members())


def _by_node(arrivals: list[Arrival]) -> list[Arrival]:
    """Members of a node get neighbouring ranks, nodes in the order of their senior member. The sort is stable."""
    first: dict[str, int] = {}
    for place, each in enumerate(arrivals):
        first.setdefault(each.member.node, place)
    return sorted(arrivals, key=lambda each: first[each.member.node])
