"""Requests of users, nodes and members to a run: leave, drain, resize, commit, verify, stop; and its status."""

from __future__ import annotations

import os
import time
from typing import Any

from elastic_ddp.rendezvous.coordinator import Coordinator
from elastic_ddp.rendezvous.members import DrainNotice, Member
from elastic_ddp.telemetry import events


class Requests:
    """Applies requests through the coordinator. Answers are numbers of requests, or plain values.

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

    def leave(self, member: Member, within_s: float, why: str) -> None:
        """Asks a member to leave at a step boundary, within a number of seconds."""
        if self._membership.why_gone(member.id) is None:
            event = events.DrainNoticed(member=member.id, node=member.node, within_s=within_s, by=why)
            self._coordinator.record(event)
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
