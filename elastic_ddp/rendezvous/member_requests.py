"""Requests to members for their stacks or for profiles. A restarted rendezvous process loses these requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from elastic_ddp.rendezvous.members import Member
from elastic_ddp.rendezvous.messages import MemberRequest, ProfileRequest
from elastic_ddp.rendezvous.snapshot import State

MAX_OPEN = 32
"""Number of requests that are kept for their callers."""


@dataclass
class _Open:
    request: MemberRequest
    members: list[tuple[int | None, Member]]
    """The members, with their ranks."""
    answers: dict[str, Mapping[str, Any]] = field(default_factory=dict)


class MemberRequests:
    """The newest requests, and the members' answers. `apply` saves each new request's number and sends the request."""

    def __init__(self, state: State, apply: Callable[[], None]) -> None:
        self._state = state
        self._membership = state.membership
        self._apply = apply
        self._open: dict[int, _Open] = {}

    def request_stacks(self) -> int:
        """Asks all workers for the stacks of their threads. Returns the number of the request, for `answers`."""
        ranks = {member.id: rank for rank, member in self._membership.ranks()}
        starting = self._state.attempts.starting.values()
        members = {member.id: member for member in (*self._membership.known(), *starting)}
        alive = [member for member in members.values() if self._membership.why_gone(member.id) is None]
        return self._add([(ranks.get(member.id), member) for member in alive])

    def request_profile(self, ranks: list[int] | None, num_steps: int, memory: bool) -> int | str:
        """Asks ranks, by default all, for traces of the next steps. Returns the request's number, or why that fails."""
        members = dict(self._membership.ranks())
        generation = self._membership.generation
        chosen = list(members) if ranks is None else ranks
        for each in self._open.values():
            profile = each.request.profile
            is_open = any(self._answer(each, who.id) is None for _, who in each.members)
            if profile is not None and profile.generation == generation and is_open:
                return "another profile is not complete yet"  # ranks start together, and would wait for each other
        if not self._membership.is_training():
            return "it does not train at the moment"
        missing = [rank for rank in chosen if rank not in members]
        if missing:
            return f"rank {missing[0]} has just left"
        profile = ProfileRequest(
            generation=generation,
            ranks=tuple(chosen),
            num_steps=num_steps,
            memory=memory,
            folder=f"profiles/{datetime.now(UTC):%Y%m%dT%H%M%SZ}",
        )
        return self._add([(rank, members[rank]) for rank in chosen], profile)

    def _add(self, members: list[tuple[int | None, Member]], profile: ProfileRequest | None = None) -> int:
        if len(self._open) == MAX_OPEN:
            del self._open[min(self._open)]
        self._state.member_requests += 1
        number = self._state.member_requests
        self._open[number] = _Open(MemberRequest(number=number, profile=profile), members)
        self._apply()
        return number

    def _answer(self, each: _Open, member: str) -> Mapping[str, Any] | None:
        """Returns a member's answer, which is an `error` if it is gone; None while that is open."""
        gone = self._membership.why_gone(member)
        return each.answers.get(member) or (None if gone is None else {"error": gone.partition("\n")[0]})

    def of(self, member: str, after: int) -> tuple[MemberRequest, ...]:
        """Returns the requests to a member that it has not received, with numbers above `after`."""
        new = [each for number, each in self._open.items() if number > after]
        return tuple(each.request for each in new if any(who.id == member for _, who in each.members))

    def answer(self, member: Member, number: int, answer: Mapping[str, Any]) -> None:
        """Takes a member's answer to a request: its facts, or an `error`. The first one counts."""
        each = self._open.get(number)
        if each is not None:
            each.answers.setdefault(member.id, answer)

    def answers(self, number: int) -> list[dict[str, Any]] | None:
        """Returns a dict for each member: its `rank`, `node`, `pid`, `id`, and its `answer`, None while that is open.

        A member that failed or left has an `error` as answer. Returns None if the request is not known.
        """
        each = self._open.get(number)
        if each is None:
            return None
        return [
            {"rank": rank, "node": who.node, "pid": who.pid, "id": who.id, "answer": self._answer(each, who.id)}
            for rank, who in each.members
        ]
