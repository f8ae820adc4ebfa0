"""Plans a generation: its members, in which order, and how their state changes hands. Values in, values out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from elastic_ddp.distributed.assignment import Resharding
from elastic_ddp.rendezvous.members import OVERDUE, DrainNotice, FormedGeneration, JoinRequest, Progress
from elastic_ddp.rendezvous.messages import RendezvousOptions, Wanted
from elastic_ddp.telemetry.event import STARTED, WORKER_FAILED

GROUP_WAIT_S = 10.0
"""How long the first generation waits for all workers that started together."""


class Plan(NamedTuple):
    """The next generation."""

    chosen: Sequence[JoinRequest] = ()
    """The requests of its members; empty if it cannot form yet."""
    handover_only: bool = False
    """Whether it only transfers the state."""
    dismissed: Sequence[str] = ()
    """Members that are neither in it nor needed later."""


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Plans the next generation, as of the time `now_s`."""

    options: RendezvousOptions
    wanted: Wanted
    """The requests of users."""
    max_size: int
    """Maximum size of a generation that trains."""
    min_size_by_memory: int
    """The smallest generation that has memory for the state."""
    leaving: Mapping[str, DrainNotice]
    """Members that must leave."""
    before: FormedGeneration | None
    """The last generation."""
    now_s: float
    waited_s: float
    """Seconds for which there have been too few workers."""

    @property
    def min_size(self) -> int:
        """Minimum size of a generation that trains."""
        if self.wanted.stop:
            return 1  # a generation of any size may form to commit the state
        return max(1, self.options.min_workers, self.min_size_by_memory)

    def staying(self, requests: list[JoinRequest]) -> list[JoinRequest]:
        """Returns the requests of members that need not leave."""
        return [request for request in requests if request.member.id not in self.leaving]

    def is_overdue(self, member: str) -> bool:
        return member in self.leaving and self.leaving[member].is_overdue(self.now_s)

    def choose(self, requests: list[JoinRequest]) -> tuple[list[JoinRequest], bool]:
        """Returns the members of the next generation, and whether it only transfers the state.

        `requests` and the result have senior members first. Returns no members if there are too few.
        """
        staying = self.staying(requests)
        notices = [self.leaving[request.member.id] for request in requests if request.member.id in self.leaving]
        if len(staying) < self.min_size and notices and not any(notice.is_urgent(self.now_s) for notice in notices):
            staying = requests  # leaving members are needed, and have the time
        most = largest_size(staying, self.max_size, self.options)
        if has_shards(requests) and not keeps_state(staying[:most], requests):
            staying = replicas_last(staying)
            if not keeps_state(staying[:most], requests):
                # All members that hold a shard hand over the rows that others keep.
                holding = holders_of_newest(requests)
                others = [request for request in staying if request not in holding]
                return [*holding, *others[: max(0, self.options.max_workers - len(holding))]], True
        if not keeps_state(staying, requests):
            # Only leaving members hold the newest state. One of them transfers it, or commits it if no member can
            # receive it. The state matters more than min_workers.
            return [*select_with_newest(requests, 1), *staying[: self.max_size - 1]], True
        chosen = select_with_newest(staying, most)
        if len(chosen) >= self.min_size:
            return chosen, False
        if self.wanted.commits.open and not is_committed(requests):
            return holders_of_newest(requests) if has_shards(requests) else select_with_newest(requests, 1), True
        return [], False

    def plan(self, requests: list[JoinRequest], survivors: Collection[str]) -> Plan:
        """Plans a generation from all requests, senior members first. `survivors` are left of the last generation."""
        chosen, handover_only = self.choose(requests)
        ids = {request.member.id for request in chosen}
        left_out = [request.member.id for request in requests if request.member.id not in ids]
        if not chosen:
            kept = keeps_state(self.staying(requests), requests)
            going = [member for member in left_out if member in self.leaving]
            return Plan(dismissed=[member for member in going if kept and self.leaving[member].is_urgent(self.now_s)])
        dismissed = []
        room = self.max_size - len(self.staying(chosen))
        for member in left_out:
            stands_by = self.options.may_stand_by and room > 0
            room -= stands_by or member not in survivors
            is_surplus = member in survivors and not handover_only and not stands_by
            if member in self.leaving or is_surplus or (self.wanted.num_workers is not None and room < 0):
                dismissed.append(member)  # all others wait for the place of a member that leaves
        return Plan(chosen, handover_only, dismissed)

    def plan_task(self, requests: list[JoinRequest], newcomers: list[JoinRequest]) -> Plan:
        """Plans a generation for a collective task that members of the last one are in: only they can finish it.

        Chooses no members if there is no task, or if it is given up because all of its members are overdue. Overdue
        members leave once the newest state is held by others or committed. Before that, one of them transfers or
        commits it. Members that lag behind wait while others are inside a step's block, which has no state to send.

        Args:
            requests: of the survivors of the last generation.
            newcomers: requests of other members, senior ones first.
        """
        if all(request.between_steps for request in requests):
            return Plan()
        newest = newest_of(requests)
        dismissed = []
        if not all(request.resumable for request in requests):
            lagging = [request.member.id for request in requests if request.progress != newest]
            dismissed = [member for member in lagging if member in self.leaving]
            requests = [request for request in requests if request.progress == newest]
            newest = newest_of(requests)
        going = [request for request in requests if self.is_overdue(request.member.id)]
        staying = [request for request in requests if request not in going]
        if not staying or not keeps_state(staying, requests):
            sources = [request for request in going if request.resumable and request.progress == newest]
            if not sources:  # no other member can finish the task
                return Plan(requests, dismissed=dismissed)
            if not is_committed(requests):
                sending = holders_of_newest(requests) if has_shards(requests) else sources[:1]
                others = staying or newcomers[: max(0, self.max_size - len(sending))]
                chosen = [*sending, *(request for request in others if request not in sending)]
                dismissed += [request.member.id for request in going if request not in sending]
                return Plan(chosen, True, dismissed)
        in_task = any(not request.between_steps for request in staying)
        return Plan(staying if in_task else [], dismissed=[*dismissed, *(request.member.id for request in going)])

    def generation(self, plan: Plan, survivors: list[str], failure: str | None) -> FormedGeneration:
        """Returns the planned generation, with its ranks. The last generation has ended with `failure`, and `survivors`
        are left of it."""
        chosen, handover_only = by_node(plan.chosen), plan.handover_only
        newest = newest_of(chosen)
        ids, shard_size = {request.member.id for request in chosen}, self.options.shard_size
        return FormedGeneration(
            number=1 if self.before is None else self.before.number + 1,
            members=tuple(request.member for request in chosen),
            source=None if newest is None else [request.progress for request in chosen].index(newest),
            receivers=tuple(
                rank for rank, request in enumerate(chosen) if newest is None or request.progress != newest
            ),
            first_step=None if newest is None else newest[0],
            reason=reason_for(self.before, failure, ids, handover_only=handover_only),
            handover_only=handover_only,
            resharding=resharding(chosen, self._keepers(chosen, survivors) if handover_only else ids, shard_size),
            shard_size=shared_by(chosen, shard_size),
            same_members=self.before is not None and self.before.ids == ids,
            in_collective_task=not handover_only and any(not request.between_steps for request in chosen),
            waited_s=self.waited_s,
        )

    def _keepers(self, chosen: list[JoinRequest], survivors: list[str]) -> set[str]:
        """Returns the members that have shards after a generation that transfers the state.

        If no member stays, or the members that stay lack the memory, all members keep shards in order to commit them.
        """
        staying = by_seniority(self.staying(chosen), survivors)
        most = largest_size(staying, self.max_size, self.options)
        keeping = staying[: most if most >= self.min_size_by_memory else 0] or chosen
        return {request.member.id for request in keeping}


def reason_for(before: FormedGeneration | None, failure: str | None, after: Set[str], *, handover_only: bool) -> str:
    """Returns why a generation with the members `after` follows `before`, which has ended with `failure`."""
    if before is None:
        return STARTED
    if failure not in (None, OVERDUE):
        return WORKER_FAILED
    if handover_only:
        return "workers leave"
    moved = {"joined": after - before.ids, "left": before.ids - after}
    changes = [change for change, members in moved.items() if members]
    return f"workers {' and '.join(changes)}" if changes else "formed again"


def newest_of(requests: list[JoinRequest]) -> Progress | None:
    """Returns how new the newest state among the requests is, or None if there is no state.

    A state in shards exists if the requests together hold all of them.
    """
    existing = [request.progress for request in requests if _exists(request, requests)]
    return max((progress for progress in existing if progress is not None), default=None)


def _exists(request: JoinRequest, requests: list[JoinRequest]) -> bool:
    """Whether the state of a request exists as a whole."""
    if request.shards is None:
        return True
    num = request.shards.num
    return len({shard for each in requests for shard in held_of(each, request.progress, num)}) == num


def holds(request: JoinRequest, progress: Progress | None) -> bool:
    """Whether a member holds this state, or its shards of it, once it has finished its step."""
    if request.step is None:
        return False
    return progress == request.progress or (request.can_finish and progress == (request.step + 1, 0))


def holders_of_newest(requests: list[JoinRequest]) -> list[JoinRequest]:
    """Returns the requests of members that hold the newest state among them, or shards of it."""
    newest = newest_of(requests)
    return [request for request in requests if holds(request, newest)]


def held_of(request: JoinRequest, progress: Progress | None, num: int) -> tuple[int, ...]:
    """Returns the shards that a member holds of a state in `num` shards."""
    shards = request.shards
    return shards.held if holds(request, progress) and shards is not None and shards.num == num else ()


def is_committed(requests: list[JoinRequest]) -> bool:
    """Whether a member has committed the newest state. Between updates of a step, the state before the step counts."""
    newest = newest_of(requests)
    return newest is None or any(request.committed == newest[0] for request in requests)


def keeps_state(remaining: list[JoinRequest], requests: list[JoinRequest]) -> bool:
    """Whether the newest state survives if only `remaining` of all `requests` stay: held by one, or committed."""
    return newest_of(remaining) == newest_of(requests) or is_committed(requests)


def select_with_newest(requests: list[JoinRequest], most: int) -> list[JoinRequest]:
    """Returns the `most` senior requests. The last one makes room for a holder of the newest state if needed."""
    chosen, newest = requests[:most], newest_of(requests)
    if newest is None or newest_of(chosen) == newest or has_shards(requests):
        return chosen
    return [*chosen[:-1], next(request for request in requests if request.progress == newest)]


def replicas_last(requests: list[JoinRequest]) -> list[JoinRequest]:
    """Moves requests to the end if requests before them hold all their shards of the newest state."""
    newest = newest_of(requests)
    held = set[int]()
    needed = list[JoinRequest]()
    for request in requests:
        own = set() if request.shards is None else {*held_of(request, newest, request.shards.num)}
        if own - held:
            needed.append(request)
            held |= own
    return [*needed, *(request for request in requests if request not in needed)]


def has_shards(requests: list[JoinRequest]) -> bool:
    """Whether the newest state among the requests is in shards."""
    newest = newest_of(requests)
    return newest is not None and any(request.progress == newest and request.shards is not None for request in requests)


def resharding(
    requests: list[JoinRequest], keepers: Collection[str], shard_size: int | None = None
) -> Resharding | None:
    """Returns how the shards of the newest state change hands; None if it is not in shards.

    Args:
        requests: of the members of the generation, in rank order.
        keepers: ids of the members that hold one shard each afterwards.
        shard_size: how many workers share a state; see `RendezvousOptions.shard_size`.
    """
    newest = newest_of(requests)
    num = next((each.shards.num for each in requests if each.progress == newest and each.shards is not None), None)
    if newest is None or num is None:
        return None
    kept = tuple(rank for rank, request in enumerate(requests) if request.member.id in keepers)
    num_after = shared_by([requests[rank] for rank in kept], shard_size)
    return Resharding(num, tuple(held_of(request, newest, num) for request in requests), kept, num_after)


def largest_size(requests: list[JoinRequest], most: int, options: RendezvousOptions) -> int:
    """Returns how many of these requests, senior ones first, can form a generation, at most `most`."""
    shard_size = options.shard_size
    for size in range(min(most, len(requests)), 0, -1):
        is_even = not options.even_micro_batches or options.num_micro_batches % size == 0
        if is_even and (shard_size is None or size % _group_size(requests[:size], shard_size) == 0):
            return size
    return 0


def shared_by(requests: list[JoinRequest], shard_size: int | None) -> int | None:
    """Returns how many of these members share a sharded state; None for all, also if each node has a single one."""
    if shard_size is None or not requests:
        return None
    size = _group_size(requests, shard_size)
    return size if 1 < size < len(requests) and len(requests) % size == 0 else None


def _group_size(requests: list[JoinRequest], shard_size: int) -> int:
    return shard_size or max(Counter(request.member.node_id for request in requests).values())


def by_node(requests: Sequence[JoinRequest]) -> list[JoinRequest]:
    """Returns the requests in rank order: nodes by their most senior member, and by seniority within a node."""
    first = {request.member.node: index for index, request in reversed([*enumerate(requests)])}
    return sorted(requests, key=lambda request: first[request.member.node])


def by_seniority(requests: Iterable[JoinRequest], survivors: list[str]) -> list[JoinRequest]:
    """Returns the requests of survivors of the last generation in its order, then all others by time."""
    if not survivors:  # they start together, in their group's order
        return sorted(requests, key=lambda request: (request.member.rank_in_group, request.at_s))
    rank = {member: index for index, member in enumerate(survivors)}
    by_time = sorted(requests, key=lambda request: (request.at_s, request.member.rank_in_group))
    return sorted(by_time, key=lambda request: rank.get(request.member.id, len(rank)))


def has_group_joined(requests: Collection[JoinRequest], now_s: float) -> bool:
    """Whether all workers that started together have joined, or had `GROUP_WAIT_S` to."""
    has_all = len(requests) >= max((request.member.group_size for request in requests), default=1)
    return has_all or any(now_s - request.at_s >= GROUP_WAIT_S for request in requests)
