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
from typing import Any, NamedTuple

import ray

from elastic_ddp.elastic.membership import Arrival, Member, Membership
from elastic_ddp.elastic.pulse import PulseServer
from elastic_ddp.errors import ConfigError
from elastic_ddp.parallel.process_group import Assignment

TICK_S = 0.2
"""How often it looks at what is due by the clock."""
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

    stop: bool = False
    """Commit and stop at the next step boundary."""
    ended: str | None = None
    """The run is over for this member, wherever it is, and why."""
    broken: int | None = None
    """The generation that lost a member: who is in it leaves what it does."""
    reconfigure: bool = False
    """End the generation at the next step boundary: others wait to join, or are to go."""


NOTHING = Signals()


class News(NamedTuple):
    """What the driver hears."""

    events: list[dict[str, Any]]
    progress: dict[str, Any]
    """The newest."""
    outcome: dict[str, Any] | None
    """How the run ended, once it has."""
    num_alive: int
    """Members that train or wait to."""


@dataclass(frozen=True, kw_only=True)
class RendezvousOptions:
    """What of a run's configuration concerns its rendezvous."""

    min_workers: int
    max_workers: int
    heartbeat_timeout_s: float


class Rendezvous:
    """Runs as an asyncio actor, one for each run, on the driver's node. All methods return at once or within a poll."""

    def __init__(self, run_name: str, total_steps: int, options: RendezvousOptions) -> None:
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
        self._membership = Membership(min_workers=options.min_workers, max_workers=options.max_workers)
        self._pulses = PulseServer(options.heartbeat_timeout_s, self._on_lost)
        self._ticker: asyncio.Task[None] | None = None
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

    async def pulse_address(self) -> tuple[str, int]:
        """Where members connect their pulses."""
        self._ticker = self._ticker or asyncio.create_task(self._tick())
        return await self._pulses.start(self._host)

    async def join(
        self, member: Member, after: int, step: int | None, between_steps: bool, lost: str | None
    ) -> Assignment | Ended | None:
        """A member's place in the next generation; None when it is not formed yet (ask again).

        Args:
            member: who asks.
            after: the generation it comes from, 0 for none.
            step: steps done in the state it holds; None if it holds none.
            between_steps: whether newcomers may be in the generation.
            lost: what broke, if it comes because that generation did.
        """
        async with self._changed:
            if self._ended or (self._stop and after == 0):
                return Ended(self._ended or "stopped")
            if (place := self._place(member, after)) is not None:
                return place
            healthy = self._membership.loss is None
            arrival = Arrival(member=member, step=step, between_steps=between_steps, at_s=time.monotonic())
            if (gone := self._membership.arrive(arrival, lost=lost)) is not None:
                return Ended(gone)
            if healthy and self._membership.loss is not None:
                number = self._membership.generation
                self._record("worker_lost", generation=number, reported_by=member.id, error=self._membership.loss)
                self._changed.notify_all()
            self._form()
            if (place := self._place(member, after)) is None:
                await _poll(self._changed)
                place = self._place(member, after)
            if place is None and (gone := self._membership.is_gone(member.id)) is not None:
                return Ended(gone)
            return place

    def _place(self, member: Member, after: int) -> Assignment | None:
        assignment = self._formed.get(member.id)
        return assignment if assignment is not None and assignment.generation > after else None

    def _form(self) -> None:
        formed = self._membership.form(time.monotonic())
        if formed is None:
            return
        self._formed = {
            member.id: Assignment(
                generation=formed.number,
                rank=rank,
                world_size=len(formed.members),
                store_host=self._host,
                store_port=self._store_port,
                source=formed.source,
                receivers=formed.receivers,
                reason=formed.reason,
            )
            for rank, member in enumerate(formed.members)
        }
        members = [{"rank": rank, "node": member.node, "pid": member.pid} for rank, member in enumerate(formed.members)]
        self._record(
            "rendezvous",
            generation=formed.number,
            world_size=len(members),
            reason=formed.reason,
            first_step=formed.first_step,
            members=members,
        )
        self._changed.notify_all()

    async def _on_lost(self, member: str, how: str) -> None:
        async with self._changed:
            known = self._membership.is_gone(member) is not None
            generation = self._membership.generation
            if self._membership.lose(member, how):
                self._record("worker_lost", generation=generation, member=member, reported_by=None, error=how)
            elif not known and self._ended is None:
                self._record("newcomer_lost", generation=generation, member=member, error=how)
            self._form()
            self._changed.notify_all()

    async def _tick(self) -> None:
        """What is due by the clock: members who waited long enough for others."""
        wanted = False
        while True:
            await asyncio.sleep(TICK_S)
            async with self._changed:
                self._form()
                if wanted != (wanted := self._membership.wants_change(time.monotonic())):
                    self._changed.notify_all()

    async def take(self, messages: list[dict[str, Any]], progress: dict[str, Any] | None) -> None:
        """Takes a member's messages for the record, and its progress."""
        async with self._changed:
            self._take(messages, progress)

    async def listen(self, member: Member, generation: int, progress: dict[str, Any] | None) -> Signals:
        """Tells a member of a generation what it should know, held for a poll if there is nothing; takes its
        progress."""
        async with self._changed:
            self._take([], progress)
            signals = self._signals(member, generation)
            if signals == NOTHING:
                await _poll(self._changed)
                signals = self._signals(member, generation)
            return signals

    def _signals(self, member: Member, generation: int) -> Signals:
        membership = self._membership
        is_current = generation == membership.generation
        return Signals(
            stop=self._stop,
            ended=self._ended or membership.is_gone(member.id),
            broken=generation if is_current and membership.loss is not None else None,
            reconfigure=is_current and membership.wants_change(time.monotonic()),
        )

    async def supervise(self, started: list[str], starting: int) -> dict[str, str] | None:
        """The controller's word, and its answer: ids of the members that are dead or presumed so, and why; None when
        the run is over and nobody is left in it.

        Args:
            started: ids of the workers there are.
            starting: workers on their way to be.
        """
        async with self._changed:
            self._membership.on_their_way = starting + sum(not self._membership.has_seen(each) for each in started)
            if (self._stop or self._ended is not None) and not self._membership.num_alive:
                return None
            return self._membership.lost()

    async def retire(self, member: Member) -> None:
        """A member is through."""
        async with self._changed:
            self._membership.retire(member.id)
            self._form()

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
            self._membership.min_workers = 1  # whoever holds the state can commit it
            self._form()
            self._changed.notify_all()

    async def follow(self, after: int) -> News:
        """The driver's ear, held for a poll if there is nothing after event number `after`."""
        async with self._changed:
            if len(self._events) <= after and self._outcome is None:
                await _poll(self._news)
            return News(self._events[after:], self._progress, self._outcome, self._membership.num_alive)

    async def status(self) -> dict[str, Any]:
        """The newest facts, for `elastic-ddp status`."""
        newest = {event["event"]: event for event in self._events}
        generation = newest.get("generation", {})
        return {
            "name": self._run_name,
            "state": self._state(begun=bool(generation)),
            "generation": generation.get("generation"),
            "world_size": generation.get("world_size"),
            "step": self._progress.get("step"),
            "total_steps": self._total_steps,
            "loss": self._progress.get("loss"),
            "last_commit": newest.get("commit", {}).get("step"),
            "pid": os.getpid(),
        }

    def _state(self, *, begun: bool) -> str:
        if self._ended or self._stop:
            return self._ended or "stopping"
        if self._membership.loss is not None:
            return "waiting"
        return "training" if begun else "starting"

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


def start_rendezvous(run_name: str, total_steps: int, options: RendezvousOptions) -> RendezvousHandle:
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
        return actor.remote(run_name, total_steps, options)
    except ValueError as error:  # the name of a live actor
        raise ConfigError(
            f"run {run_name!r} is live on this cluster already (see elastic-ddp status); stop it first, or use another "
            "name"
        ) from error
