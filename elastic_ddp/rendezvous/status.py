"""The state of a run in plain values, for `elastic-ddp status`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from elastic_ddp.rendezvous.event_log import EventLog
from elastic_ddp.rendezvous.members import Member
from elastic_ddp.rendezvous.membership import Membership
from elastic_ddp.rendezvous.snapshot import State
from elastic_ddp.telemetry.events import FirstStep


def status_of(run: State, event_log: EventLog, standbys: Collection[str], *, is_over: bool) -> dict[str, Any]:
    """Returns what a run does, its members, its standbys, and its progress. `is_over`: it has ended or is stopping."""
    membership, progress = run.membership, event_log.status()
    if is_over:
        state = event_log.ended or "stopping"
    elif progress["generation"] is None:
        state = "starting"
    else:
        state = "training" if membership.is_training() else "waiting"
    return {
        "state": state,
        "wanted": membership.wanted,
        "members": [{"rank": rank, **_described(member)} for rank, member in ranks_of(membership)],
        "standbys": [_described(member) for member in run.attempts.starting.values() if member.id in standbys],
        "draining": list(membership.draining),
        **progress,
        "world_size": 0 if state == "waiting" else progress["world_size"],
    }


def _described(member: Member) -> dict[str, Any]:
    return {"node": member.node, "node_id": member.node_id, "pid": member.pid, "id": member.id}


def is_steady(membership: Membership, event_log: EventLog) -> bool:
    """Whether the current generation trains and has completed a step."""
    first = event_log.last(FirstStep)
    return membership.is_training() and first is not None and first.generation == membership.generation


def ranks_of(membership: Membership) -> list[tuple[int, Member]]:
    """Returns the members of the current generation that have not failed or left, with their ranks."""
    members = membership.current.members if membership.current is not None else ()
    return [(rank, member) for rank, member in enumerate(members) if membership.why_gone(member.id) is None]


def all_workers(membership: Membership, starting: Iterable[Member]) -> list[tuple[int | None, Member]]:
    """Returns all workers that are connected, first those with a rank; `starting` have not joined yet."""
    ranked = ranks_of(membership)
    others = {member.id: member for member in (*membership.known(), *starting)}
    for _, member in ranked:
        others.pop(member.id, None)
    return [*ranked, *((None, member) for member in others.values() if membership.why_gone(member.id) is None)]
