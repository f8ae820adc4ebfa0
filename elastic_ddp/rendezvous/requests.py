"""Requests of users, nodes and members to a run, and its status."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from elastic_ddp.rendezvous.coordinator import Coordinator
from elastic_ddp.rendezvous.members import DrainNotice, Member
from elastic_ddp.rendezvous.messages import MemberRequest, ProfileRequest
from elastic_ddp.telemetry import events

MAX_OPEN = 32
"""Number of requests that are kept for their callers."""


@dataclass
class _Open:
    """A request to members, and their answers so far, by member."""

    request: MemberRequest
    members: list[tuple[int | None, Member]]
    """The members, with their ranks."""
    answers: dict[str, Mapping[str, Any]] = field(default_factory=dict)


class Requests:
    """Takes requests, and applies them to the state of the run.

    Args:
        coordinator: of the run.
        about: further facts about the run, for `status`.
    """

    def __init__(self, coordinator: Coordinator, about: dict[str, Any]) -> None:
        self._coordinator = coordinator
        self._membership = coordinator.membership
        self._wanted = coordinator.membership.wanted
        self._about = about
        self._waiting_for: str | None = None
        self._open: dict[int, _Open] = {}
        """The newest requests that members answer."""

    def leave(self, member: Member, within_s: float, why: str) -> None:
        """Asks a member to leave at a step boundary, within a number of seconds."""
        if self._membership.why_gone(member.id) is None:
            self._coordinator.record(events.DrainNoticed(member=member.id, node=member.node, within_s=within_s, by=why))
            self._membership.ask_to_leave([member.id], DrainNotice(time.monotonic(), within_s))
            self._coordinator.apply_request()

    def drain(self, node: str, within_s: float) -> list[str]:
        """Asks the workers of a node, given by its address or Ray's id, to leave within a number of seconds. Returns
        Ray's ids of the node; none if it has no worker of the run."""
        members = self._membership.known()
        node_ids = sorted({member.node_id for member in members if node in (member.node, member.node_id)})
        for node_id in node_ids:
            self.drain_node(node_id, within_s, "a person")
        return node_ids

    def drain_node(self, node_id: str, within_s: float, by: str) -> None:
        """Drains a node, unless an earlier notice covers it."""
        if self._membership.avoid(node_id, DrainNotice(time.monotonic(), within_s)):
            if any(member.node_id == node_id for member in self._membership.known()):
                self._coordinator.record(events.DrainNoticed(node_id=node_id, within_s=within_s, by=by))
            self._coordinator.apply_request()

    def undrain(self, node_id: str) -> None:
        """Admits workers on a node again that was drained, given by Ray's id."""
        if node_id in self._membership.draining:
            self._membership.admit(node_id)
            self._coordinator.record(events.DrainCancelled(node_id=node_id))
            self._coordinator.apply_request()

    def exclude(self, member: Member, within_s: float) -> None:
        """Keeps the run off the device of a member that computes wrong values.

        Drains its node. If all members are on this node, the run continues with one worker fewer instead, unless it
        needs all: a replacement would get the same device.
        """
        staying = [other for other in self._membership.known() if other.id != member.id]
        if any(other.node_id != member.node_id for other in staying):
            self.drain_node(member.node_id, within_s, "verify")
        elif len(staying) >= self._coordinator.options.min_workers:
            self.leave(member, within_s, "verify")
            self.resize(len(staying))
        self._coordinator.mark_failed(member.id, "it computes wrong values")

    def resize(self, num_workers: int) -> None:
        """Sets the maximum number of workers."""
        self._coordinator.record(events.ResizeRequested(num_workers=num_workers))
        self._wanted.num_workers = num_workers
        self._coordinator.apply_request()

    def stop(self) -> None:
        """Asks the workers to commit and stop at the next step boundary."""
        self._wanted.stop = True
        self._coordinator.apply_request()
        self._coordinator.notify_driver()

    def checkpoint(self) -> int:
        """Asks for a commit at the next step boundary. Returns the number of the request, for `committed`."""
        self._wanted.commits.newest += 1
        self._coordinator.apply_request()
        return self._wanted.commits.newest

    def committed(self, request: int) -> int | None:
        """Returns the steps done in the commit that fulfilled a request; None without one.

        A failed run fulfills no request: its workers may have held a newer state.
        """
        last_commit = self._coordinator.last_commit
        if not self._membership.known() and last_commit is not None and self._coordinator.event_log.ended != "failed":
            self._coordinator.fulfill_commits(request)  # no member holds a newer state
        return None if self._wanted.commits.fulfilled < request else last_commit

    def verify(self) -> int | str:
        """Asks for a verified step. Returns the number of the request, for `verified`, or why there is none."""
        current = self._membership.current
        if not self._coordinator.options.can_verify:
            return 'only strategy = "ddp" with reduction = "canonical" has bits to compare'
        if current is None or len(current.members) < 2:
            return "fewer than two workers train now, and one alone has nothing to compare. Ask again when more do"
        self._wanted.verified_steps.newest += 1
        self._coordinator.apply_request()
        return self._wanted.verified_steps.newest

    def verified(self, request: int) -> str | None:
        """Returns what the requested step found, "" if all bits were equal; None if it has not been done."""
        return None if self._wanted.verified_steps.fulfilled < request else self._wanted.finding

    # Requests for stacks or profiles, which members answer. A restarted rendezvous process loses them.

    def request_stacks(self) -> int:
        """Asks all workers for the stacks of their threads. Returns the number of the request, for `answers`."""
        ranks = {member.id: rank for rank, member in self._membership.ranks()}
        starting = self._coordinator.state.attempts.starting.values()
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
        state = self._coordinator.state
        state.member_requests += 1
        number = state.member_requests
        self._open[number] = _Open(MemberRequest(number=number, profile=profile), members)
        self._coordinator.apply_request()
        return number

    def _answer(self, each: _Open, member: str) -> Mapping[str, Any] | None:
        """Returns a member's answer, which is an `error` if it is gone; None while that is open."""
        gone = self._membership.why_gone(member)
        return each.answers.get(member) or (None if gone is None else {"error": gone.partition("\n")[0]})

    def for_member(self, member: str, after: int) -> tuple[MemberRequest, ...]:
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

    # Status.

    def set_waiting_for(self, reason: str | None) -> None:
        """Takes from the driver what the run waits for, for `status`."""
        self._waiting_for = reason

    def status(self) -> dict[str, Any]:
        """Returns the state of the run in plain values, for `elastic-ddp status`."""
        coordinator, membership = self._coordinator, self._membership
        progress = coordinator.event_log.status()
        starting = coordinator.state.attempts.starting
        if coordinator.is_over:
            state = coordinator.event_log.ended or "stopping"
        elif progress["generation"] is None:
            state = "starting"
        else:
            state = "training" if membership.is_training() else "waiting"
        return {
            **self._about,
            "min_workers": coordinator.options.min_workers,
            "max_workers": coordinator.options.max_workers,
            "driver": coordinator.options.driver,
            "pid": os.getpid(),
            "waiting_for": self._waiting_for,
            "state": state,
            "wanted": self._wanted.num_workers,
            "members": [{"rank": rank, **_described(member)} for rank, member in membership.ranks()],
            "standbys": [_described(member) for member in starting.values() if member.id in coordinator.standbys],
            "draining": list(membership.draining),
            **progress,
            "world_size": 0 if state == "waiting" else progress["world_size"],
            "last_commit": coordinator.last_commit,
        }


def _described(member: Member) -> dict[str, Any]:
    return {"node": member.node, "node_id": member.node_id, "pid": member.pid, "id": member.id}
