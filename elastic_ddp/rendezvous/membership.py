"""Who forms the next generation: a plain state machine, without Ray, clocks or threads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from elastic_ddp.rendezvous.members import (
    AT_ONCE,
    DRAIN,
    RESIZE,
    DrainNotice,
    FormedGeneration,
    JoinRequest,
    Member,
    by_node,
    earlier,
    is_committed,
    is_held,
    newest_step,
    with_the_newest,
)
from elastic_ddp.telemetry.summary import WORKER_FAILED

LEFT = "it left"
LONG_GONE = "it is gone, and so is its process"
OVERDUE = "the time of a member that is to go was nearly up"
GATHER_S = 10.0
"""How long the first generation waits for workers that were started with those that have come."""
SETTLE_S = 0.5
"""How long a newcomer that is ready waits for others, before training is asked to let it in."""
PATIENCE_S = 5.0
"""The same where others are known to be on their way. Training goes on meanwhile."""
_SHORTER_BY_S = 1.0
"""By how much less a notice has to leave than one before it, to be another."""


@dataclass
class Membership:
    """Decides when a generation is over and who is in the next one.

    A generation ends when a member is lost, or when its members were asked to let others in or go. The next one forms
    when every member of the last one waits or is known to be dead, of all who wait, newcomers included. Who was
    presumed dead takes no part any more, however late it notices.

    Args:
        min_workers, max_workers: bounds of a generation's size.
    """

    min_workers: int = 1
    max_workers: int = 1
    wanted: int | None = None
    """Of those, how many somebody asked for; None for as many as there are."""
    generation: int = 0
    current: FormedGeneration | None = None
    failure: str | None = None
    """How the current generation broke, if it did."""
    commit_wanted: bool = False
    """Somebody waits for a commit, also where there are too few to train."""
    on_their_way: int = 0
    """Workers that were started, or are about to be, and have not come yet."""
    dismissed: dict[str, str] = field(default_factory=dict)
    """Members that were let go, and why: `DRAIN` or `RESIZE`."""
    _waiting: dict[str, JoinRequest] = field(default_factory=dict)
    _trained: set[str] = field(default_factory=set)
    """Members that have ever made a step, or hold the state after one."""
    _listed: set[str] = field(default_factory=set)
    """Workers that the controller has ever counted."""
    _gone: dict[str, str] = field(default_factory=dict)
    _leaving: dict[str, DrainNotice] = field(default_factory=dict)
    _draining: dict[str, DrainNotice] = field(default_factory=dict)
    """Nodes that are to go, by Ray's name."""
    _broken_for: set[str] = field(default_factory=set)
    """Members for whose notices a step was broken off: once is enough."""
    _short_since: float | None = None
    """Since when all survivors wait and are too few."""

    # What happens.

    def arrive(self, arrival: JoinRequest, *, failure: str | None = None) -> str | None:
        """A member wants a generation. Returns why it gets none any more, if so.

        Args:
            arrival: who, and with what.
            lost: how it lost its last generation, if it did.
        """
        member = arrival.member
        if member.node_id in self._draining:
            self.ask_to_leave([member.id], self._draining[member.node_id])
        if member.id in self._leaving and not self._is_current(member.id):
            self._dismiss(member.id)
        if member.id in self._gone:
            return self._gone[member.id]
        if failure is not None and self._is_current(member.id):
            self.failure = self.failure or failure
        if arrival.step is not None:
            self._trained.add(member.id)
        before = self._waiting.get(member.id)  # who asks again has waited since the first time
        self._waiting[member.id] = replace(arrival, at_s=before.at_s) if before is not None else arrival
        return None

    def lose(self, member: str, how: str) -> bool:
        """A member is dead, or presumed so. Returns whether the current generation breaks by it just now."""
        if member in self._gone:
            return False
        self._gone[member] = how
        self._waiting.pop(member, None)
        breaks = self._is_current(member) and self.failure is None
        if breaks:
            self.failure = how
        return breaks

    def retire(self, member: str) -> None:
        """A member is through with the run, or left it when nothing was waiting for it any more."""
        self._gone.setdefault(member, LEFT)
        self._waiting.pop(member, None)

    def forget(self, workers: Iterable[str]) -> None:
        """Keeps of members whose processes are gone nothing but that they are.

        Args:
            workers: those that the controller counts. A new one comes here before it is among them.
        """
        there = {*workers, *(each.id for each in self.known())}
        self._listed |= set(workers)
        gone = self._listed - there
        self._trained -= gone
        self._broken_for -= gone
        self._leaving = {each: notice for each, notice in self._leaving.items() if each not in gone}
        self.dismissed = {each: kind for each, kind in self.dismissed.items() if each not in gone}
        self._gone = {each: LONG_GONE if each in gone else how for each, how in self._gone.items()}
        self._listed -= gone

    def ask_to_leave(self, members: Iterable[str], notice: DrainNotice = AT_ONCE) -> None:
        """Members are to go at a step boundary: at the next one if the others are enough, or can wait, without them."""
        for member in members:
            self._leaving[member] = earlier(self._leaving.get(member), notice)
            if member in self._waiting and not self._is_current(member):
                self._dismiss(member)

    def drain(self, node_id: str, notice: DrainNotice) -> bool:
        """A node is to go: its members leave, and who comes from it is not let in. Returns whether that is news; a
        shorter notice is."""
        before = self._draining.get(node_id)
        if before is not None and notice.ends_s >= before.ends_s - _SHORTER_BY_S:
            return False
        self._draining[node_id] = notice
        self.ask_to_leave([each.id for each in self.known() if each.node_id == node_id], notice)
        return True

    def _dismiss(self, member: str) -> None:
        """Lets a member go in peace."""
        if member not in self._gone:
            self.dismissed[member] = DRAIN if member in self._leaving else RESIZE
            self._gone[member] = LEFT
            self._waiting.pop(member, None)

    # What follows.

    def why_gone(self, member: str) -> str | None:
        """Why a member takes no part any more, if so."""
        return self._gone.get(member)

    @property
    def num_alive(self) -> int:
        return len(self.known())

    def is_training(self) -> bool:
        """Whether there is a healthy generation, none of whose members waits for another."""
        return self._is_healthy() and not any(each.id in self._waiting for each in self._members())

    def _is_healthy(self) -> bool:
        """Whether there is a generation that has lost nobody, and has not been left by all."""
        return self.current is not None and self.failure is None and not self.current.ids <= self._gone.keys()

    def made_a_step(self, generation: int) -> None:
        """All members of a generation did, if it is the current one."""
        if self.current is not None and self.current.number == generation:
            self._trained |= self.current.ids - self._gone.keys()

    def is_newcomer(self, member: str) -> bool:
        """Whether a worker has never trained, and others that are there have, or are to without it."""
        if member in self._trained:
            return False
        others = {each.id for each in self.known()} - {member}
        return bool(others & self._trained) or (not self._is_current(member) and any(map(self._is_current, others)))

    def all_wait(self) -> bool:
        """Whether everybody there is waits for a generation, and there are too few for one."""
        return bool(self._waiting) and all(each.id in self._waiting for each in self.known())

    def has_committed(self) -> bool:
        """Whether nobody who waits holds anything that is not committed."""
        return is_committed(list(self._waiting.values()))

    def has_seen(self, member: str) -> bool:
        """Whether a worker has ever come."""
        return member in self._gone or member in self._waiting or self._is_current(member)

    def failed(self) -> dict[str, str]:
        """Members that are dead or presumed so, and why."""
        return {member: how for member, how in self._gone.items() if how not in (LEFT, LONG_GONE)}

    @property
    def leaving(self) -> list[str]:
        """Members that are to go and have not gone."""
        return [each for each in self._leaving if each not in self._gone]

    @property
    def draining(self) -> list[str]:
        """Nodes that are to go, by Ray's name."""
        return list(self._draining)

    @property
    def limit(self) -> int:
        """Members that a generation may have."""
        return self.max_workers if self.wanted is None else min(self.wanted, self.max_workers)

    def wants_change(self, now_s: float) -> bool:
        """Whether the members of a healthy generation should end it at their next step boundary."""
        if not self._is_healthy():
            return False
        return self._is_due(now_s) and self._would_change(now_s)

    def _would_change(self, now_s: float) -> bool:
        """Whether the next generation would not just be this one again."""
        assert self.current is not None
        chosen, brief = self._choose(self._in_prospect(now_s), now_s)
        return brief or {each.member.id for each in chosen} != self.current.ids - self._gone.keys()

    def _is_due(self, now_s: float) -> bool:
        staying, leaving = self._split()
        newcomers = self._newcomers()
        if leaving and len(staying) + len(newcomers) >= max(1, self.min_workers):
            return True
        if len(staying) + len(leaving) < self.min_workers:  # others were lost where nobody could join
            return True
        if any(self._leaving[each].is_urgent(now_s) for each in leaving) or len(staying) > self.limit:
            return True
        room = self.limit - len(staying)
        patience = PATIENCE_S if self.on_their_way else SETTLE_S
        settled = any(now_s - each.at_s >= patience for each in newcomers)
        return room > 0 and (settled or 0 < room <= len(newcomers))

    def break_if_overdue(self, now_s: float) -> bool:
        """Ends a generation in the midst of a step, if three quarters of the time of a member that is to go are over.
        Returns whether it does just now."""
        if self.current is None or self.failure is not None or self.current.brief:
            return False
        leaving = {each for each in self._split()[1] if each not in self._waiting}
        overdue = {each for each in leaving if self._leaving[each].is_overdue(now_s)} - self._broken_for
        if overdue:
            self._broken_for |= overdue
            self.failure = OVERDUE
        return bool(overdue)

    def has_time(self, now_s: float, needed_s: float) -> bool:
        """Whether members that are to go can stay for so long."""
        notices = [self._leaving[each] for each in self._split()[1]]
        return not any(each.within_s and each.is_overdue(now_s + needed_s) for each in notices)

    def _split(self) -> tuple[list[str], list[str]]:
        """Members of the current generation who stay, and who are to go."""
        alive = [each.id for each in self._members() if each.id not in self._gone]
        return [each for each in alive if each not in self._leaving], [each for each in alive if each in self._leaving]

    def _newcomers(self) -> list[JoinRequest]:
        """Those who wait and were not in the last generation, seniors first."""
        newcomers = [each for each in self._waiting.values() if not self._is_current(each.member.id)]
        return sorted(newcomers, key=lambda each: (each.at_s, each.member.rank_in_group))

    def form(self, now_s: float) -> FormedGeneration | None:
        """The next generation, if it can be formed now. Who is not in it and not needed for another is dismissed."""
        if any(each.id not in self._waiting and each.id not in self._gone for each in self._members()):
            self._dismiss_surplus()
            return None
        if (amid := self._form_amid(now_s)) is not None:
            return amid
        survivors = [each.id for each in self._members() if each.id not in self._gone]
        if not survivors and not self._gathered(now_s):
            return None
        arrivals = self._by_seniority(survivors)
        chosen, brief = self._choose(arrivals, now_s)
        taken = {each.member.id for each in chosen}
        left_out = [each.member.id for each in arrivals if each.member.id not in taken]
        if not chosen:
            self._short_since = now_s if self._short_since is None else self._short_since
            if is_held([each for each in arrivals if each.member.id not in self._leaving], arrivals):
                for member in left_out:
                    if member in self._leaving and self._leaving[member].is_urgent(now_s):
                        self._dismiss(member)
            return None
        formed = self._formed(by_node(chosen), now_s, brief=brief)
        room = self.limit - sum(each.member.id not in self._leaving for each in chosen)
        for member in left_out:
            room -= member not in survivors
            is_too_many = (member in survivors and not brief) or (self.wanted is not None and room < 0)
            if member in self._leaving or is_too_many:
                self._dismiss(member)  # others wait, for the place of one that goes
        return formed

    def _dismiss_surplus(self) -> None:
        """Lets newcomers go for which there is no room any more since somebody asked for fewer workers."""
        if self.wanted is not None:
            room = max(0, self.limit - len(self._split()[0]))
            for each in self._newcomers()[room:]:
                if each.step is None:
                    self._dismiss(each.member.id)

    def _form_amid(self, now_s: float) -> FormedGeneration | None:
        """The next generation where members of the last one are amid something outside of steps, with which they go on
        and in which nobody can join them; None where nobody is, or is any more.

        Whose time is nearly up goes once the newest state is not lost with it. Before that one of them hands it over,
        to others of the last generation if there are any, or commits it. So what they are amid is given up where all of
        them have to go: it was not over in the last quarter of a notice, and would begin anew in what is left of it.

        Who is behind those in the midst of a step's block waits until that is through: what they would hand over by
        then is the state of no step.
        """
        arrivals = [self._waiting[each.id] for each in self._members() if each.id not in self._gone]
        if all(each.between_steps for each in arrivals):
            return None
        if not all(each.resumable for each in arrivals):
            newest = newest_step(arrivals)
            for each in arrivals:
                if each.step != newest and each.member.id in self._leaving:
                    self._dismiss(each.member.id)
            arrivals = [each for each in arrivals if each.step == newest]
        going = [each for each in arrivals if self._is_overdue(each.member.id, now_s)]
        staying = [each for each in arrivals if each not in going]
        if not staying or not is_held(staying, arrivals):
            newest = newest_step(arrivals)
            sources = [each for each in going if each.resumable and each.step == newest]
            if not sources:  # nobody else can do the rest of what they are amid
                return self._formed(by_node(arrivals), now_s)
            if not is_committed(arrivals):
                chosen = [sources[0], *(staying or self._newcomers()[: self.limit - 1])]
                formed = self._formed(by_node(chosen), now_s, brief=True)
                for each in going:
                    if each is not sources[0]:
                        self._dismiss(each.member.id)
                return formed
        for each in going:
            self._dismiss(each.member.id)
        are_amid = any(not each.between_steps for each in staying)
        return self._formed(by_node(staying), now_s) if are_amid else None

    def prospects(self, now_s: float, also: Member | None = None) -> dict[str, tuple[int, int]]:
        """Ranks in the next generation, and its size, as things stand; of nobody, if that cannot be said.

        Args:
            also: somebody who has not come yet.
        """
        if not self._is_healthy():
            return {}
        chosen, brief = self._choose(self._in_prospect(now_s, also), now_s)
        if brief:
            return {}
        return {each.member.id: (rank, len(chosen)) for rank, each in enumerate(by_node(chosen))}

    def _in_prospect(self, now_s: float, also: Member | None = None) -> list[JoinRequest]:
        """Those who would wait if the members of the current generation ended it, seniors first."""
        there = [JoinRequest(member=each, step=0, between_steps=True, at_s=now_s) for each in self._members()]
        newcomers = self._newcomers()
        if also is not None and all(each.member.id != also.id for each in newcomers):
            newcomers.append(JoinRequest(member=also, step=None, between_steps=True, at_s=now_s))
        return [*(each for each in there if each.member.id not in self._gone), *newcomers]

    def _is_overdue(self, member: str, now_s: float) -> bool:
        return member in self._leaving and self._leaving[member].is_overdue(now_s)

    def _gathered(self, now_s: float) -> bool:
        """Without a generation to go on from, workers that were started together begin together."""
        arrivals = self._waiting.values()
        if not arrivals:
            return False
        together = max(each.member.group_size for each in arrivals)
        return len(arrivals) >= together or now_s - min(each.at_s for each in arrivals) >= GATHER_S

    def _by_seniority(self, survivors: list[str]) -> list[JoinRequest]:
        """Those who wait: members of the last generation first, in its order."""
        rank = {member: place for place, member in enumerate(survivors)}

        def seniority(each: JoinRequest) -> tuple[float, ...]:
            if not survivors:  # they begin together, whoever was ready first
                return (each.member.rank_in_group, each.at_s)
            return (rank.get(each.member.id, len(rank)), each.at_s, each.member.rank_in_group)

        return sorted(self._waiting.values(), key=seniority)

    def _choose(self, arrivals: list[JoinRequest], now_s: float) -> tuple[list[JoinRequest], bool]:
        """Who is in the next generation, seniors first, and whether it is a brief one; nobody, if there are not
        enough."""
        least, most = max(1, self.min_workers), self.limit
        staying = [each for each in arrivals if each.member.id not in self._leaving]
        notices = [self._leaving[each.member.id] for each in arrivals if each.member.id in self._leaving]
        if len(staying) < least and notices and not any(notice.is_urgent(now_s) for notice in notices):
            staying, notices = arrivals, []  # they are needed, and have the time
        if is_held(staying, arrivals):
            chosen = with_the_newest(staying, most)
            if len(chosen) >= least:
                return chosen, False
            if self.commit_wanted and not is_committed(arrivals):
                return with_the_newest(arrivals, 1), True
            return [], False
        # Those who go alone hold the newest state. It counts more than min_workers: one of them hands it over, if there
        # is somebody to take it, or commits it.
        takers = staying[: most - 1]
        return [*with_the_newest(arrivals, 1), *takers], True

    def _formed(self, chosen: list[JoinRequest], now_s: float, *, brief: bool = False) -> FormedGeneration:
        newest = newest_step(chosen)
        source = next((rank for rank, each in enumerate(chosen) if newest is not None and each.step == newest), None)
        receivers = tuple(rank for rank, each in enumerate(chosen) if each.step is None or each.step != newest)
        self.generation += 1
        formed = FormedGeneration(
            number=self.generation,
            members=tuple(each.member for each in chosen),
            source=source,
            receivers=receivers,
            first_step=newest,
            reason=self._reason(chosen, brief=brief),
            brief=brief,
            amid=not brief and any(not each.between_steps for each in chosen),
            again=self.current is not None and self.current.ids == {each.member.id for each in chosen},
            waited_s=0.0 if self._short_since is None else now_s - self._short_since,
        )
        self._short_since = None
        for each in formed.members:
            del self._waiting[each.id]
        self.current, self.failure = formed, None
        return formed

    def _reason(self, chosen: list[JoinRequest], *, brief: bool) -> str:
        if self.current is None:
            return "start"
        if self.failure not in (None, OVERDUE):
            return WORKER_FAILED
        if brief:
            return "workers leave"
        before = {each.id for each in self.current.members}
        after = {each.member.id for each in chosen}
        changes = [word for word, moved in (("joined", after - before), ("left", before - after)) if moved]
        return f"workers {' and '.join(changes)}" if changes else "formed again"

    def known(self) -> list[Member]:
        """Members that train or wait to."""
        everyone = {each.id: each for each in [*self._members(), *(each.member for each in self._waiting.values())]}
        return [each for each in everyone.values() if each.id not in self._gone]

    def _members(self) -> list[Member]:
        return list(self.current.members) if self.current is not None else []

    def _is_current(self, member: str) -> bool:
        return self.current is not None and member in self.current.ids
