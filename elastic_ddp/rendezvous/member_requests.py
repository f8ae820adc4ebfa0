"""Requests that each member answers for itself: for its stacks, or to profile steps. A restart forgets them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from elastic_ddp.rendezvous.members import Member
from elastic_ddp.rendezvous.membership import Membership
from elastic_ddp.rendezvous.status import ranks_of

PROFILES = "profiles"
"""The folder of all traces, in the run's storage."""
ABANDONED_AFTER_S = 20.0
"""A request whose answers no caller has asked for in this time is forgotten: callers ask several times a second."""


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """A request to profile steps of a generation."""

    generation: int
    ranks: tuple[int, ...]
    """The ranks that profile. They start at the same step."""
    num_steps: int
    memory: bool
    """Whether to record memory, too."""
    folder: str
    """Folder for the traces, in the run's storage."""


@dataclass(frozen=True, kw_only=True)
class MemberRequest:
    """A request to members."""

    number: int
    profile: ProfileRequest | None = None
    """None for a request for stacks."""


@dataclass
class _Open:
    members: Sequence[tuple[int | None, Member]]
    ids: frozenset[str]
    request: MemberRequest
    asked_at: float
    """When a caller last asked for the answers."""
    answers: dict[str, Mapping[str, Any]] = field(default_factory=dict)


class MemberRequests:
    """The requests whose callers wait for answers, and these answers.

    Args:
        why_gone: returns why a member is not in the run any more; None if it is.
        clock: returns seconds.
    """

    def __init__(self, why_gone: Callable[[str], str | None], clock: Callable[[], float] = time.monotonic) -> None:
        self._why_gone, self._clock = why_gone, clock
        self._open: dict[int, _Open] = {}

    def add(
        self,
        number: int,
        members: Sequence[tuple[int | None, Member]],
        profile: ProfileRequest | None = None,
    ) -> None:
        """Adds a request to members, each with its rank. Numbers increase."""
        ids = frozenset(member.id for _, member in members)
        now = self._clock()
        for old, each in list(self._open.items()):
            if now - each.asked_at >= ABANDONED_AFTER_S and not self._is_profiling(each):
                del self._open[old]
        self._open[number] = _Open(members, ids, MemberRequest(number=number, profile=profile), asked_at=now)

    def is_profiling(self, generation: int) -> bool:
        """Returns whether ranks of a generation have not answered a request to profile them yet."""
        return any(self._is_profiling(each, generation) for each in self._open.values())

    def _is_profiling(self, each: _Open, generation: int | None = None) -> bool:
        profile = each.request.profile
        if profile is None or generation not in (None, profile.generation):
            return False
        return any(self._answer(each, member) is None for member in each.ids)

    def _answer(self, each: _Open, member: str) -> Mapping[str, Any] | None:
        """Returns a member's answer, which is an `error` if it is gone; None while that is open."""
        gone = self._why_gone(member)
        return each.answers.get(member) or (None if gone is None else {"error": gone.partition("\n")[0]})

    def of(self, member: str, after: int) -> tuple[MemberRequest, ...]:
        """Returns the requests to a member that it has not received: those with numbers above `after`."""
        return tuple(each.request for number, each in self._open.items() if number > after and member in each.ids)

    def answer(self, number: int, member: str, answer: Mapping[str, Any]) -> None:
        """Takes a member's answer: its facts, or an `error`. The first one counts."""
        if (each := self._open.get(number)) is not None and member in each.ids:
            each.answers.setdefault(member, answer)

    def answers(self, number: int) -> list[dict[str, Any]] | None:
        """Returns a dict for each member: its `rank`, `node`, `pid`, `id`, and its `answer`, None while that is open.

        A member that failed or left has an `error` as answer. Returns None if the request is not known.
        """
        if (each := self._open.get(number)) is None:
            return None
        each.asked_at = self._clock()
        return [
            {"rank": rank, "node": who.node, "pid": who.pid, "id": who.id, "answer": self._answer(each, who.id)}
            for rank, who in each.members
        ]


def plan_profile(
    membership: Membership, ranks: Sequence[int] | None, *, num_steps: int, memory: bool
) -> tuple[list[tuple[int, Member]], ProfileRequest] | str:
    """Returns the members with these ranks, by default all, and a request to them; or why they cannot be asked."""
    members = dict(ranks_of(membership))
    chosen = list(members) if ranks is None else ranks
    if not membership.is_training():
        return "it does not train at the moment"
    if missing := [rank for rank in chosen if rank not in members]:
        return f"rank {missing[0]} has just left"
    request = ProfileRequest(
        generation=membership.generation,
        ranks=tuple(chosen),
        num_steps=num_steps,
        memory=memory,
        folder=f"{PROFILES}/{datetime.now(UTC):%Y%m%dT%H%M%SZ}",
    )
    return [(rank, members[rank]) for rank in chosen], request
