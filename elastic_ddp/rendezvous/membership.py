"""The state machine of a rendezvous: the members of a run, and when its generations end. No Ray, clock or thread."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from elastic_ddp.rendezvous.members import (
    DRAIN,
    OVERDUE,
    RESIZE,
    DrainNotice,
    FormedGeneration,
    JoinRequest,
    Member,
)
from elastic_ddp.rendezvous.messages import RendezvousOptions, Wanted
from elastic_ddp.rendezvous.planner import (
    Plan,
    Planner,
    by_node,
    by_seniority,
    has_group_joined,
    is_committed,
    newest_of,
)

LEFT = "it left"
PROCESS_GONE = "its process is gone"
BATCH_S = 0.5
"""How long a newcomer waits for others before it asks training to let it join."""
STARTING_WAIT_S = 5.0
"""How long a newcomer waits while other workers are starting. Training continues meanwhile."""
_SHORTER_BY_S = 1.0
"""By how much a drain deadline must move forward to count as a new one."""


@dataclass
class Membership:
    """Decides when a generation ends and which members are in the next one.

    A generation ends when a member fails, or when its members were asked to let others join or to leave. The next
    generation forms when every surviving member of the last generation waits. `Planner` chooses its members from all
    that wait, newcomers included. A member that counts as failed never joins again, even if its process still runs.
    """

    options: RendezvousOptions
    wanted: Wanted = field(default_factory=Wanted)
    """The requests of users, which `Requests` adds."""
    generation: int = 0
    current: FormedGeneration | None = None
    failure: str | None = None
    """How the current generation has failed; None while it is healthy."""
    dismissed: dict[str, str] = field(default_factory=dict)
    """Members that left because they were asked to, and why: `DRAIN` or `RESIZE`."""
    draining: dict[str, DrainNotice] = field(default_factory=dict)
    """Draining nodes, by Ray's id."""
    _waiting: dict[str, JoinRequest] = field(default_factory=dict)
    _trained: set[str] = field(default_factory=set)
    """Members that have completed a step, or hold a state with steps."""
    _supervised: set[str] = field(default_factory=set)
    """Workers that the controller has listed as running."""
    _num_starting: int = 0
    """Number of workers that have been or will be started and have not joined yet."""
    _gone: dict[str, str] = field(default_factory=dict)
    """Members that failed or left, and why."""
    _leaving: dict[str, DrainNotice] = field(default_factory=dict)
    _interrupted_for: set[str] = field(default_factory=set)
    """Members for whose deadline a step was interrupted, which happens once."""
    _min_size_by_memory: int = 1
    """The smallest generation that has memory for the state."""
    _too_few_since: float | None = None
    """Since when all survivors wait and are too few for a generation; None otherwise."""

    def join(self, request: JoinRequest) -> str | None:
        """Takes a join request. Returns why it is refused, or None."""
        member = request.member
        if member.node_id in self.draining:
            self.ask_to_leave([member.id], self.draining[member.node_id])
        if member.id in self._leaving and not self.is_current(member.id):
            self._dismiss(member.id)
        if member.id in self._gone:
            return self._gone[member.id]
        if request.failure is not None and self.is_current(member.id):
            self.failure = self.failure or request.failure
        if request.step is not None:
            self._trained.add(member.id)
        before = self._waiting.get(member.id)  # a repeated request keeps the time of the first one
        self._waiting[member.id] = replace(request, at_s=before.at_s) if before is not None else request
        return None

    def break_generation(self, why: str) -> None:
        """Ends the current generation inside a step, although no member is known to have failed."""
        self.failure = why

    def mark_failed(self, member: str, how: str) -> None:
        """Records that a member has failed, and its generation with it."""
        if member not in self._gone:
            self._gone[member] = how
            self._waiting.pop(member, None)
            if self.is_current(member):
                self.failure = self.failure or how

    def remove(self, member: str) -> None:
        """Removes a member that is done with the run."""
        self._gone.setdefault(member, LEFT)
        self._waiting.pop(member, None)

    def update_workers(self, running: Collection[str], num_starting: int) -> None:
        """Takes the running workers, and the number of workers without a process. Deletes details of ended workers."""
        self._num_starting = num_starting + sum(not self.has_joined(worker) for worker in running)
        self._supervised |= set(running)
        gone = self._supervised - {*running, *(member.id for member in self.known())}
        self._supervised -= gone
        self._trained -= gone
        self._interrupted_for -= gone
        self._leaving = {member: notice for member, notice in self._leaving.items() if member not in gone}
        self.dismissed = {member: kind for member, kind in self.dismissed.items() if member not in gone}
        self._gone = {member: PROCESS_GONE if member in gone else how for member, how in self._gone.items()}

    def ask_to_leave(self, members: Iterable[str], notice: DrainNotice) -> None:
        """Makes members leave at a step boundary: the next one if the others can train, or wait, without them."""
        for member in members:
            before = self._leaving.get(member)
            if before is None or not before.within_s or (notice.within_s and notice.ends_s < before.ends_s):
                self._leaving[member] = notice
            if member in self._waiting and not self.is_current(member):
                self._dismiss(member)

    def avoid(self, node_id: str, notice: DrainNotice) -> bool:
        """Makes all members on a node leave, and admits none from it. Returns False if an earlier notice covers it."""
        before = self.draining.get(node_id)
        if before is not None and notice.ends_s >= before.ends_s - _SHORTER_BY_S:
            return False
        self.draining[node_id] = notice
        self.ask_to_leave([member.id for member in self.known() if member.node_id == node_id], notice)
        return True

    def admit(self, node_id: str) -> None:
        """Ends the drain of a node: it may have workers again, and its members that have not left need not leave."""
        notice = self.draining.pop(node_id, None)
        for member in self.known():
            if member.node_id == node_id and self._leaving.get(member.id) == notice:
                self._leaving.pop(member.id, None)

    def mark_trained(self, generation: int) -> None:
        """Records that the members of a generation have completed a step, if it is the current one."""
        if self.current is not None and self.current.number == generation:
            self._trained |= self.current.ids - self._gone.keys()

    def interrupt_if_overdue(self, now_s: float) -> bool:
        """Ends the current generation inside a step if a leaving member is overdue. Returns whether it does now."""
        if self.current is None or self.failure is not None or self.current.handover_only:
            return False
        running = {*self._split()[1]} - self._waiting.keys() - self._interrupted_for
        overdue = set(filter(self._planner(now_s).is_overdue, running))
        self._interrupted_for |= overdue
        self.failure = OVERDUE if overdue else None
        return bool(overdue)

    def _dismiss(self, member: str) -> None:
        if member not in self._gone:
            self.dismissed[member] = DRAIN if member in self._leaving else RESIZE
            self.remove(member)

    def why_gone(self, member: str) -> str | None:
        """Returns why a member failed or left, or None."""
        return self._gone.get(member)

    def known(self) -> list[Member]:
        """Returns all members that train or wait."""
        waiting = (request.member for request in self._waiting.values())
        return list({member.id: member for member in (*self._alive(), *waiting)}.values())

    def is_current(self, member: str) -> bool:
        """Whether a member is in the current generation, or was when it failed or left."""
        return self.current is not None and member in self.current.ids

    def is_training(self) -> bool:
        """Whether the current generation is healthy and none of its members waits for another."""
        return self._is_healthy() and not any(member.id in self._waiting for member in self._alive())

    def _is_healthy(self) -> bool:
        """Whether there is a generation without a failure, and members in it."""
        return self.failure is None and bool(self._alive())

    def is_newcomer(self, member: str) -> bool:
        """Whether a worker has never trained, while other workers have, or will without it."""
        if member in self._trained:
            return False
        others = {other.id for other in self.known()} - {member}
        return bool(others & self._trained) or (not self.is_current(member) and any(map(self.is_current, others)))

    def all_wait(self) -> bool:
        """Whether all members wait because they are too few for a generation."""
        return bool(self._waiting) and all(member.id in self._waiting for member in self._alive())

    @property
    def waiting_step(self) -> int | None:
        """Steps done in the newest state among the members while all wait; None if they do not, or have no state."""
        newest = newest_of([*self._waiting.values()]) if self.all_wait() else None
        return None if newest is None else newest[0]

    def has_committed(self) -> bool:
        """Whether the newest state among waiting members is committed."""
        return is_committed([*self._waiting.values()])

    def has_joined(self, member: str) -> bool:
        """Whether a worker has sent a join request or has failed."""
        return member in self._gone or member in self._waiting or self.is_current(member)

    def failed(self) -> dict[str, str]:
        """Returns the failed members, and how they failed."""
        return {member: how for member, how in self._gone.items() if how not in (LEFT, PROCESS_GONE)}

    @property
    def leaving(self) -> list[str]:
        """Members that must leave and have not left."""
        return [member for member in self._leaving if member not in self._gone]

    @property
    def limit(self) -> int:
        """Maximum size of a generation."""
        wanted, most = self.wanted.num_workers, self.options.max_workers
        return most if wanted is None else min(wanted, most)

    def wants_change(self, now_s: float) -> bool:
        """Whether the members of a healthy generation should end it at their next step boundary."""
        if not self._is_healthy() or not self._is_change_due(now_s):
            return False
        chosen, handover_only = self._planner(now_s).choose(self._expected_requests(now_s))
        return handover_only or {request.member.id for request in chosen} != {member.id for member in self._alive()}

    def _is_change_due(self, now_s: float) -> bool:
        staying, leaving = self._split()
        newcomers = self._newcomers()
        min_size = self._planner(now_s).min_size
        if leaving and len(staying) + len(newcomers) >= min_size:
            return True
        if len(staying) + len(leaving) < min_size:  # members failed while none could join
            return True
        if any(self._leaving[member].is_urgent(now_s) for member in leaving) or len(staying) > self.limit:
            return True
        wait_s = STARTING_WAIT_S if self._num_starting else BATCH_S
        has_waited = any(now_s - request.at_s >= wait_s for request in newcomers)
        room = self.limit - len(staying)
        return room > 0 and (has_waited or room <= len(newcomers))

    def has_time(self, now_s: float, needed_s: float) -> bool:
        """Whether no leaving member becomes overdue within `needed_s`."""
        return not any(map(self._planner(now_s + needed_s).is_overdue, self._split()[1]))

    def plan(self, now_s: float, joining: Member | None = None) -> dict[str, tuple[int, int]]:
        """Returns the rank of each member in the next generation and its size; empty if that is not known. A worker
        that has not joined yet can be included."""
        if not self._is_healthy():
            return {}
        chosen, handover_only = self._planner(now_s).choose(self._expected_requests(now_s, joining))
        requests = [] if handover_only else by_node(chosen)
        return {request.member.id: (rank, len(requests)) for rank, request in enumerate(requests)}

    # The next generation.

    def form(self, now_s: float) -> FormedGeneration | None:
        """Forms the next generation if possible. Dismisses members that are neither in it nor needed later."""
        alive = [member.id for member in self._alive()]
        newcomers = self._newcomers()
        if any(member not in self._waiting for member in alive):
            if self.wanted.num_workers is not None:  # a resize may leave no room for newcomers
                for request in newcomers[max(0, self.limit - len(self._split()[0])) :]:
                    if request.step is None:
                        self._dismiss(request.member.id)
            return None
        self._min_size_by_memory = max((request.fewest_workers for request in self._waiting.values()), default=1)
        planner = self._planner(now_s)
        task = planner.plan_task([self._waiting[member] for member in alive], newcomers)
        formed = self._apply(task, planner)
        if formed is not None:
            return formed
        survivors = [member for member in alive if member in self._waiting]
        if not survivors and not has_group_joined(self._waiting.values(), now_s):
            return None
        plan = planner.plan(by_seniority(self._waiting.values(), survivors), survivors)
        if not plan.chosen and self._too_few_since is None:
            self._too_few_since = now_s
        return self._apply(plan, planner)

    def _apply(self, plan: Plan, planner: Planner) -> FormedGeneration | None:
        """Makes the chosen members the current generation, if there are any, and dismisses others."""
        formed = None
        if plan.chosen:
            survivors = [member.id for member in self._alive()]
            formed = planner.generation(plan, survivors, self.failure)
            for member in formed.ids:
                del self._waiting[member]
            self.generation, self.current, self.failure, self._too_few_since = formed.number, formed, None, None
        for member in plan.dismissed:
            self._dismiss(member)
        return formed

    def _planner(self, now_s: float) -> Planner:
        return Planner(
            options=self.options,
            wanted=self.wanted,
            max_size=self.limit,
            min_size_by_memory=self._min_size_by_memory,
            leaving=self._leaving,
            before=self.current,
            now_s=now_s,
            waited_s=0.0 if self._too_few_since is None else now_s - self._too_few_since,
        )

    def ranks(self) -> list[tuple[int, Member]]:
        """Returns the members of the current generation that have not failed or left, with their ranks."""
        members = self.current.members if self.current is not None else ()
        return [(rank, member) for rank, member in enumerate(members) if member.id not in self._gone]

    def _alive(self) -> list[Member]:
        return [member for _, member in self.ranks()]

    def _split(self) -> tuple[list[str], list[str]]:
        """Returns the ids of current members that stay, and of members that must leave."""
        alive = [member.id for member in self._alive()]
        return [id for id in alive if id not in self._leaving], [id for id in alive if id in self._leaving]

    def _newcomers(self) -> list[JoinRequest]:
        """Waiting members that were not in the last generation, senior ones first."""
        newcomers = [request for request in self._waiting.values() if not self.is_current(request.member.id)]
        return sorted(newcomers, key=lambda request: (request.at_s, request.member.rank_in_group))

    def _expected_requests(self, now_s: float, joining: Member | None = None) -> list[JoinRequest]:
        """The requests that would wait if the current generation ended now, senior ones first."""
        requests = [JoinRequest(member=member, step=0, between_steps=True, at_s=now_s) for member in self._alive()]
        requests += self._newcomers()
        if joining is not None and all(request.member.id != joining.id for request in requests):
            requests.append(JoinRequest(member=joining, step=None, between_steps=True, at_s=now_s))
        return requests
