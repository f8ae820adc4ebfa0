"""The rendezvous: the actor that forms generations, hosts their store, and is the ear and the mouth of a run.

It replaces torchrun's rendezvous. It knows members and nothing of training: what workers tell it (progress, commits,
the end) it hands to the driver in order, and what the driver asks (to stop) it hands to the workers.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray

from elastic_ddp.elastic.membership import FormedGeneration, Member, Membership
from elastic_ddp.errors import ConfigError
from elastic_ddp.parallel.process_group import Assignment

POLL_S = 1.0
"""How long a member's or the driver's call is held while there is nothing to say."""

RendezvousHandle = Any
"""The actor's handle. Ray's own type for it loses what the methods return."""

NAMESPACE = "elastic_ddp"
RENDEZVOUS_PREFIX = "rendezvous-"
"""Rendezvous actors are named after their runs, in this namespace."""


@dataclass(frozen=True)
class Ended:
    """What a member gets instead of a generation when there is none to come."""

    reason: str


@dataclass(frozen=True)
class Signals:
    """What a member should know, whenever it asks."""

    stop: bool
    """Commit and stop at the next step boundary."""
    ended: str | None
    """The run is over for this member, wherever it is, and why."""


class Rendezvous:
    """Runs as an asyncio actor, one for each run, on the driver's node. All methods return at once or within a poll."""

    def __init__(self, run_name: str, total_steps: int) -> None:
        import torch.distributed as dist

        self._run_name, self._total_steps = run_name, total_steps
        self._host = ray.util.get_node_ip_address()
        listener = socket.create_server((self._host, 0))
        # The store listens on the node's own address only, and takes the socket over.
        self._store_port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            self._host,
            self._store_port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._membership = Membership()
        self._formed: dict[str, Assignment] = {}
        self._events: list[dict[str, Any]] = []
        self._progress: dict[str, Any] = {}
        self._stop = False
        self._ended: str | None = None
        self._outcome: dict[str, Any] | None = None
        lock = asyncio.Lock()
        self._changed = asyncio.Condition(lock)
        """Something changed for members."""
        self._news = asyncio.Condition(lock)
        """There is something new for the driver."""

    async def join(self, member: Member, after: int, lost: str | None) -> Assignment | Ended | None:
        """A member's place in the next generation; None when it is not formed yet (ask again).

        Args:
            member: who asks.
            after: the generation it comes from, 0 for none.
            lost: what broke, if it comes because that generation did.
        """
        async with self._changed:
            if self._ended or self._stop:
                return Ended(self._ended or "stopped")
            if (place := self._place(member, after)) is not None:
                return place
            first_word = self._membership.loss_reported is None
            if not self._membership.arrive(member, lost=lost):
                return Ended("superseded by a newer worker group")
            if lost is not None and first_word:
                self._record("worker_lost", generation=after, reported_by=member.id, error=lost)
            formed = self._membership.form()
            if formed is not None:
                self._announce(formed)
            else:
                await _poll(self._changed)
            if self._membership.is_superseded(member):
                return Ended("superseded by a newer worker group")
            return self._place(member, after)

    def _place(self, member: Member, after: int) -> Assignment | None:
        assignment = self._formed.get(member.id)
        return assignment if assignment is not None and assignment.generation > after else None

    def _announce(self, formed: FormedGeneration) -> None:
        self._formed = {
            member.id: Assignment(
                generation=formed.number,
                rank=rank,
                world_size=len(formed.members),
                store_host=self._host,
                store_port=self._store_port,
                reason=formed.reason,
            )
            for rank, member in enumerate(formed.members)
        }
        members = [{"rank": rank, "node": member.node, "pid": member.pid} for rank, member in enumerate(formed.members)]
        self._record(
            "rendezvous", generation=formed.number, world_size=len(members), reason=formed.reason, members=members
        )
        self._changed.notify_all()

    async def take(self, messages: list[dict[str, Any]], progress: dict[str, Any] | None) -> None:
        """Takes a member's messages for the record, and its progress."""
        async with self._changed:
            self._take(messages, progress)

    async def listen(self, member: Member, progress: dict[str, Any] | None) -> Signals:
        """Tells a member what it should know, held for a poll if there is nothing new; takes its progress."""
        async with self._changed:
            self._take([], progress)
            if not (self._stop or self._over_for(member)):
                await _poll(self._changed)
            return Signals(stop=self._stop, ended=self._over_for(member))

    def _over_for(self, member: Member) -> str | None:
        if self._membership.is_superseded(member):
            return "superseded by a newer worker group"
        return self._ended

    async def end(self, progress: dict[str, Any] | None, outcome: dict[str, Any]) -> None:
        """The run is over: finished, stopped or failed, with what is to be known of it. The first word counts."""
        async with self._changed:
            self._take([], progress)
            if self._outcome is None:
                self._outcome = outcome
                self._ended = str(outcome["status"])
                self._changed.notify_all()
                self._news.notify_all()

    async def stop(self) -> None:
        """Asks the workers to commit and stop at the next step boundary."""
        async with self._changed:
            self._stop = True
            self._changed.notify_all()

    async def follow(self, after: int) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any] | None]:
        """The driver's ear: events from number `after` on, held for a poll if there are none; the newest progress; and
        the outcome, once there is one."""
        async with self._changed:
            if len(self._events) <= after and self._outcome is None:
                await _poll(self._news)
            return self._events[after:], self._progress, self._outcome

    async def status(self) -> dict[str, Any]:
        """The newest facts, for `elastic-ddp status`."""
        newest = {event["event"]: event for event in self._events}
        generation = newest.get("generation", {})
        return {
            "name": self._run_name,
            "state": self._ended or ("stopping" if self._stop else "training" if generation else "starting"),
            "generation": generation.get("generation"),
            "world_size": generation.get("world_size"),
            "step": self._progress.get("step"),
            "total_steps": self._total_steps,
            "loss": self._progress.get("loss"),
            "last_commit": newest.get("commit", {}).get("step"),
            "pid": os.getpid(),
        }

    def _take(self, messages: list[dict[str, Any]], progress: dict[str, Any] | None = None) -> None:
        self._progress = progress or self._progress
        if messages:
            self._events.extend(messages)
            self._news.notify_all()

    def _record(self, event: str, **fields: Any) -> None:
        self._take([{"event": event, "time": time.time(), **fields}])


async def _poll(condition: asyncio.Condition) -> None:
    """Until something changes, or for a poll. A call that asks again is what survives a lost reply."""
    with suppress(TimeoutError):
        await asyncio.wait_for(condition.wait(), POLL_S)


def start_rendezvous(run_name: str, total_steps: int) -> RendezvousHandle:
    """Starts the rendezvous of a run on this node: with no CPUs of its own it could land, and die, on any other.

    Raises:
        ConfigError: the cluster has one for a run of this name.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(Rendezvous).options(
        name=RENDEZVOUS_PREFIX + run_name,
        namespace=NAMESPACE,
        num_cpus=0,
        max_concurrency=10_000,
        scheduling_strategy=here,
    )
    try:
        return actor.remote(run_name, total_steps)
    except ValueError as error:  # the name of a live actor
        raise ConfigError(
            f"run {run_name!r} is live on this cluster already (see elastic-ddp status); stop it first, or use another "
            "name"
        ) from error
