"""Workers as the rendezvous knows them: their identity, their join requests, their drain notices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TypeAlias

from elastic_ddp.distributed.assignment import Assignment, Formation, Resharding, Shards
from elastic_ddp.telemetry.event import STARTED, WORKER_FAILED
from elastic_ddp.telemetry.events import GenerationFormed

DRAIN, RESIZE = "drain", "resize"
"""Why a member leaves: its node or process is going to stop, or the run needs fewer workers."""
OVERDUE = "the drain deadline of a member was near"
"""Why a generation ended inside a step although no member failed."""

GROUP_WAIT_S = 10.0
"""How long the first generation waits for all workers that started together."""


Progress: TypeAlias = tuple[int, int]
"""How new a state is: the steps done, and the updates done of the step after these."""


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
        """Whether the first half has passed, in which a replacement may start."""
        return now_s - self.given_s >= self.within_s / 2

    def is_overdue(self, now_s: float) -> bool:
        """Whether three quarters have passed; from then on the member does not finish its step."""
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
    """Whether it has no place until it takes that of another worker."""

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
    """Updates done of the step after these, if it has several."""
    between_steps: bool
    """Whether new members can join it; False inside a collective task such as an evaluation, which only the members
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
    """Whether one of the requesting members has committed the newest state among them, or that before its step."""
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
    """Returns requests with those last whose shards of the newest state others hold, too; otherwise in their order."""
    newest, held, needed = newest_of(requests), set[int](), list[JoinRequest]()
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


def largest_size(
    requests: list[JoinRequest], most: int, *, micro_batches: int | None = None, shard_size: int | None = None
) -> int:
    """Returns how many of these requests, senior ones first, can form a generation, at most `most`.

    Args:
        requests: the candidates.
        most: the largest size.
        micro_batches: the number of micro-batches that the size must divide; None for any size.
        shard_size: see `RendezvousOptions.shard_size`.
    """
    for size in range(min(most, len(requests)), 0, -1):
        is_even = micro_batches is None or micro_batches % size == 0
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


def by_node(requests: list[JoinRequest]) -> list[JoinRequest]:
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
