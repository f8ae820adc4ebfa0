"""The state of a run in plain values, for `elastic-ddp status`."""

from __future__ import annotations

from typing import Any

from elastic_ddp.rendezvous.event_log import EventLog
from elastic_ddp.rendezvous.membership import Membership


def status_of(membership: Membership, event_log: EventLog, *, is_over: bool) -> dict[str, Any]:
    """Returns what a run does, its members, and its progress. `is_over`: it has ended or is stopping."""
    progress = event_log.status()
    if is_over:
        state = event_log.ended or "stopping"
    elif progress["generation"] is None:
        state = "starting"
    else:
        state = "training" if membership.is_training() else "waiting"
    return {
        "state": state,
        "wanted": membership.wanted,
        "members": [
            {"rank": rank, "node": member.node, "node_id": member.node_id, "pid": member.pid, "id": member.id}
            for rank, member in enumerate(membership.current.members if membership.current is not None else ())
            if membership.why_gone(member.id) is None
        ],
        "draining": list(membership.draining),
        **progress,
        "world_size": 0 if state == "waiting" else progress["world_size"],
    }
