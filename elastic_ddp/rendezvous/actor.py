"""The rendezvous: the actor that forms generations, hosts their store, and is the ear and the mouth of a run.

It replaces torchrun's rendezvous. It knows members and nothing of training: what workers tell it (progress, commits,
the end) it hands to the driver in order, and what the driver asks (to stop) it hands to the workers. What it decides is
in `assembly`; here is who calls, and who waits.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import ray

from elastic_ddp.distributed.process_group import Assignment
from elastic_ddp.errors import ConfigError
from elastic_ddp.rendezvous.coordinator import Coordinator
from elastic_ddp.rendezvous.hang import AT_THE_START, ActivityReport
from elastic_ddp.rendezvous.heartbeat import HeartbeatServer
from elastic_ddp.rendezvous.members import JoinRequest, Member
from elastic_ddp.rendezvous.messages import (
    NOTHING,
    DriverUpdate,
    Ended,
    PlannedAssignment,
    RendezvousOptions,
    Signals,
    WorkerDirectives,
)
from elastic_ddp.telemetry.events import Event, ResizeRequested

_log = logging.getLogger(__name__)

TICK_S = 0.2
"""How often it looks at what is due by the clock."""
POLL_S = 1.0
"""How long a member's or the driver's call is held while there is nothing to say, or a multiple of that."""

SAVES_KEPT = 20
"""Generations for which the store keeps what ranks of a save told each other."""
_OF_GENERATION = re.compile(r"(generation|saves)(\d+)/")

GONE_WITHIN_S = 120.0
"""How long Ray may take to end the rendezvous of a driver that is gone, with its machine perhaps."""
ANSWERS_WITHIN_S = 5.0
"""What somebody who may be gone is given to answer."""

RendezvousHandle = Any
"""The actor's handle. Ray's own type for it loses what the methods return."""

NAMESPACE = "elastic_ddp"
RENDEZVOUS_PREFIX = "rendezvous-"
"""Rendezvous actors are named after their runs, in this namespace."""


class Rendezvous:
    """Runs as an asyncio actor, one for each run, on the driver's node. Methods return at once, or in some polls."""

    def __init__(self, run_name: str, total_steps: int, options: RendezvousOptions) -> None:
        import torch.distributed as dist

        self._run_name, self._total_steps, self._options = run_name, total_steps, options
        self._host = ray.util.get_node_ip_address()
        listener = socket.create_server((self._host, 0))
        port = listener.getsockname()[1]
        # The store listens on the node's own address only, and takes the socket over.
        self._store = dist.TCPStore(
            self._host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._assembly = Coordinator(options, (self._host, port))
        self._pulses = HeartbeatServer(options.heartbeat_timeout_s, self._on_lost, self._is_awaited)
        self._ticker: asyncio.Task[None] | None = None
        self._swept = 0
        """The generation before which nothing is left in the store."""
        self._lock = asyncio.Lock()
        self._changed = asyncio.Condition(self._lock)
        """Something changed for members."""
        self._news = asyncio.Condition(self._lock)
        """There is something new for the driver."""

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[Coordinator]:
        """One call at a time decides. Whoever waits hears what came of it."""
        async with self._lock:
            try:
                yield self._assembly
            finally:
                self._tell()

    def _tell(self) -> None:
        if self._assembly.changed:
            self._changed.notify_all()
        if self._assembly.has_news:
            self._news.notify_all()
        self._assembly.changed = self._assembly.has_news = False

    async def _poll(self, condition: asyncio.Condition, polls: int = 1) -> None:
        """Until something changes, or for a poll, or some. A call that asks again is what survives a lost reply."""
        self._tell()
        with suppress(TimeoutError):
            async with asyncio.timeout(polls * POLL_S):
                await condition.wait()

    # Members.

    async def pulse_address(self) -> tuple[str, int]:
        """Where members connect their pulses."""
        async with self._turn():
            self._begin()
            return await self._pulses.start(self._host)

    async def store_address(self) -> tuple[str, int]:
        """Where the store of the generations is."""
        return self._host, self._store.port

    def _begin(self) -> None:
        """What needs a running loop."""
        if self._ticker is None:
            self._ticker = asyncio.create_task(self._tick())
            if self._assembly.is_second:
                self._return = asyncio.create_task(self._look_who_came_back(self._assembly.go_on()))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                async with self._turn() as assembly:
                    assembly.tick()
                    self._sweep(assembly.membership.generation)
            except Exception:  # a full disk, perhaps, and not for good
                _log.exception("the rendezvous could not do what was due")

    def _sweep(self, generation: int) -> None:
        """Removes from the store what members of generations before this one told each other."""
        if generation != self._swept:
            for key in self._store.list_keys():
                number = _OF_GENERATION.match(key)
                # A save may outlive some generations.
                if number is not None and int(number[2]) < generation - (SAVES_KEPT if number[1] == "saves" else 0):
                    self._store.delete_key(key)
            self._swept = generation

    async def _look_who_came_back(self, members: list[str]) -> None:
        """Members connect their pulses again. Who does not died meanwhile."""
        await asyncio.sleep(self._options.heartbeat_timeout_s)
        for member in members:
            if not self._pulses.hears(member):
                await self._on_lost(member, "it did not come back after the rendezvous was restarted")

    def _is_awaited(self, member: str) -> bool:
        """Whether a worker has come: from then on others may be in a generation with it."""
        return self._assembly.membership.has_seen(member)

    async def _on_lost(self, member: str, how: str) -> None:
        async with self._turn() as assembly:
            assembly.lose(member, how)

    async def join(
        self, arrival: JoinRequest, after: int, failure: str | None, account: dict[str, float] | None = None
    ) -> Assignment | Ended | PlannedAssignment | None:
        """A member's place in the next generation. When that is not formed yet, its place in prospect, or None: ask
        again.

        Args:
            arrival: who asks, and what it comes with.
            after: the generation it comes from, 0 for none.
            lost: what broke, if it comes because that generation did.
            account: where its time in the last generation went.
        """
        member = arrival.member
        async with self._turn() as assembly:
            if assembly.journal.ended:
                return Ended(assembly.journal.ended)
            if isinstance(place := assembly.place_of(member.id, after), Assignment):
                return place  # also where the run is to stop: others wait for it there
            if assembly.state.stop and after == 0:
                assembly.retire(member.id)  # nobody is to count on it any more
                return Ended("stopped")
            arrival = replace(arrival, at_s=time.monotonic())
            assembly.arrive(arrival, after=after, failure=failure, account=account)
            if (answer := assembly.place_of(member.id, after)) is None:
                # Whose place is in sight reads ahead for it; others, and there may be a thousand, only wait.
                await self._poll(self._changed, 1 if assembly.prospect_of(member.id) is not None else 5)
                answer = assembly.place_of(member.id, after)
            return answer or assembly.prospect_of(member.id)

    async def prospect(self, member: Member) -> PlannedAssignment | None:
        """The place of somebody who is about to join."""
        async with self._turn() as assembly:
            return assembly.prospect_of_one_to_come(member)

    async def listen(
        self,
        member: Member,
        generation: int,
        progress: dict[str, Any] | None,
        whereabouts: ActivityReport = AT_THE_START,
    ) -> Signals:
        """Tells a member of a generation what it should know, held for a poll if there is nothing; takes its progress,
        and where it is."""
        async with self._turn() as assembly:
            if assembly.membership.why_gone(member.id) is None:
                assembly.take([], progress)
            assembly.hear(member.id, whereabouts)
            if (signals := assembly.signals(member, generation)) == NOTHING:
                await self._poll(self._changed)
                signals = assembly.signals(member, generation)
            return signals

    async def take(
        self, messages: list[Event], progress: dict[str, Any] | None, sender: str = "", first: int = 0
    ) -> None:
        """Takes a member's messages for the record, and its progress. See `EventLog.take`."""
        async with self._turn() as assembly:
            assembly.take(messages, progress, sender, first)

    async def why_not_commit(self, member: Member, generation: int) -> str | None:
        """Why what a member has written in a generation may not be committed; None if it may."""
        async with self._turn() as assembly:
            return assembly.why_not_commit(member, generation)

    async def leave(self, member: Member, within_s: float, why: str) -> None:
        """A member has been told to go, and says so."""
        async with self._turn() as assembly:
            assembly.ask_to_leave(member, within_s, why)

    async def retire(self, member: Member) -> None:
        """A member is through."""
        async with self._turn() as assembly:
            assembly.retire(member.id)

    async def end(self, member: Member, progress: dict[str, Any] | None, outcome: dict[str, Any]) -> bool:
        """The run is over: finished, stopped or failed, with what is to be known of it. The first word counts, and none
        of a member that is presumed dead: the run went on without it. Returns False if the run goes on because the
        member failed before it ever trained, and others train."""
        async with self._turn() as assembly:
            if assembly.membership.why_gone(member.id) is None:
                if outcome["status"] == "failed" and assembly.fail(member, str(outcome["error"])):
                    return False
                assembly.take([], progress)
                assembly.end(outcome)
            return True

    # The controller and the driver.

    async def supervise(self, started: list[str], starting: int, draining: dict[str, float]) -> WorkerDirectives | None:
        """The controller's word, and its answer; None when the run is over and nobody is left in it.

        Args:
            started: ids of the workers there are.
            starting: workers on their way to be.
            draining: seconds that are left to nodes which Ray is about to take away.
        """
        async with self._turn() as assembly:
            self._begin()
            membership = assembly.membership
            assembly.expect(started)
            membership.on_their_way = starting + sum(not membership.has_seen(each) for each in started)
            for node_id, seconds in draining.items():
                assembly.drain(node_id, seconds, "Ray")
            if (assembly.state.stop or assembly.journal.ended is not None) and not membership.num_alive:
                return None
            assembly.forget(started)
            return assembly.orders(started)

    async def wait_for_update(self, after: int) -> DriverUpdate:
        """The driver's ear, held for a poll if there is nothing after event number `after`."""
        async with self._turn() as assembly:
            journal = assembly.journal
            if journal.num_events <= after and journal.outcome is None:
                await self._poll(self._news)
            num_alive, stopping = assembly.membership.num_alive, assembly.state.stop
            events = journal.after(after)
            return DriverUpdate(events, journal.progress, journal.outcome, num_alive, stopping, assembly.is_saving)

    # People.

    async def stop(self) -> None:
        """Asks the workers to commit and stop at the next step boundary."""
        async with self._turn() as assembly:
            assembly.state.stop = True
            assembly.membership.min_workers = 1  # whoever holds the state can commit it
            assembly.act()
            assembly.has_news = True

    async def drain(self, node: str, within_s: float) -> list[str]:
        """A person wants the run's workers off a node, named by its address or by Ray. Returns the node's names by Ray;
        none if the run has no worker there."""
        async with self._turn() as assembly:
            node_ids = {each.node_id for each in assembly.membership.known() if node in (each.node, each.node_id)}
            for node_id in node_ids:
                assembly.drain(node_id, within_s, "a person")
            return sorted(node_ids)

    async def resize(self, num_workers: int) -> None:
        """A person wants so many workers, at most."""
        async with self._turn() as assembly:
            assembly.record(ResizeRequested(num_workers=num_workers))
            assembly.membership.wanted = num_workers
            assembly.act()

    async def checkpoint(self) -> int:
        """Asks for a commit at the next step boundary. Returns the request's number, for `committed`."""
        async with self._turn() as assembly:
            return assembly.request_commit()

    async def committed(self, request: int) -> int | None:
        """Steps done in the commit that answered a request; None while there is none (ask again), held for a poll. A
        run that has failed gives none: its workers may have had more than there is in its newest commit."""
        async with self._turn() as assembly:
            state = assembly.state
            has_failed = assembly.journal.ended == "failed"
            if not assembly.membership.num_alive and assembly.last_commit is not None and not has_failed:
                assembly.meet_requests(request)  # nobody holds anything newer
            if state.requests_met < request and assembly.journal.outcome is None:
                await self._poll(self._changed)
            return None if state.requests_met < request else assembly.last_commit

    async def status(self) -> dict[str, Any]:
        """The newest facts, for `elastic-ddp status`."""
        return {
            "name": self._run_name,
            "total_steps": self._total_steps,
            "min_workers": self._options.min_workers,
            "max_workers": self._options.max_workers,
            "driver": self._options.driver,
            "pid": os.getpid(),
            **self._assembly.facts(),
        }


def start_rendezvous(run_name: str, total_steps: int, options: RendezvousOptions) -> RendezvousHandle:
    """Starts the rendezvous of a run on this node: with no CPUs of its own it could land, and die, on any other.

    The driver holds the lease on the run. So one that is there already, for the same storage, is of a driver that is
    gone, and Ray is about to end it.

    Raises:
        ConfigError: the cluster has one for another run of this name; says where.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(Rendezvous).options(
        name=RENDEZVOUS_PREFIX + run_name,
        namespace=NAMESPACE,
        num_cpus=0,
        max_concurrency=10_000,
        max_restarts=-1,  # its process may die: another one goes on from its memory
        max_task_retries=-1,
        scheduling_strategy=here,
    )
    end = time.monotonic() + GONE_WITHIN_S
    while True:
        try:
            return actor.remote(run_name, total_steps, options)
        except ValueError as error:  # the name of a live actor
            driver = _driver_of(run_name)
            is_ours = driver is None or driver.get("uri") == options.driver.get("uri")
            if is_ours and time.monotonic() < end:
                time.sleep(POLL_S)
                continue
            where = f", in {driver.get('uri')}, by pid {driver.get('pid')} on {driver.get('host')}" if driver else ""
            raise ConfigError(
                f"a run {run_name!r} is live on this cluster already{where}; stop it first (`elastic-ddp stop "
                f"{run_name}`), or use another name"
            ) from error


def _driver_of(run_name: str) -> dict[str, Any] | None:
    """Where the driver of the rendezvous is that the cluster has for a run; None if that does not say."""
    try:
        rendezvous: Any = ray.get_actor(RENDEZVOUS_PREFIX + run_name, namespace=NAMESPACE)
        driver: dict[str, Any] = ray.get(rendezvous.status.remote(), timeout=ANSWERS_WITHIN_S)["driver"]
    except (ValueError, ray.exceptions.RayError):
        return None
    return driver
