"""The rendezvous actor of a run: it hosts the generations' store, and connects workers, controller and driver.

It replaces torchrun's rendezvous. `Membership` decides, `Coordinator` applies its decisions, and this module blocks
calls until there is an answer.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray

from elastic_ddp.distributed.assignment import Assignment
from elastic_ddp.distributed.hosted_store import HostedStore
from elastic_ddp.errors import ConfigError
from elastic_ddp.rendezvous.coordinator import Coordinator
from elastic_ddp.rendezvous.hang import AT_THE_START, ActivityReport
from elastic_ddp.rendezvous.heartbeat import HeartbeatServer
from elastic_ddp.rendezvous.members import JoinRequest, Member
from elastic_ddp.rendezvous.messages import (
    NO_SIGNALS,
    DriverUpdate,
    Ended,
    PlannedAssignment,
    RendezvousOptions,
    Signals,
    WorkerDirectives,
)
from elastic_ddp.rendezvous.requests import Requests
from elastic_ddp.rendezvous.supervisor import Supervisor

_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

TICK_S = 0.2
"""Seconds between checks for what is due."""
LONG_POLL_S = 1.0
"""How long a call waits for a change before it returns without one."""
POLLS_WITHOUT_PLAN = 5
"""Number of long polls that a member without a planned assignment waits: there may be a thousand of them."""

SAVES_KEPT = 20
"""Number of generations for which the store keeps the keys of saves, which may outlive their generation."""
RECONNECT_S = 10.0
"""How long members have, at least, to reconnect after a restart: each asks Ray for the new process first."""
_OF_GENERATION = re.compile(r"(generation|saves)(\d+)/")

OLD_ACTOR_TIMEOUT_S = 120.0
"""How long Ray may take to end the rendezvous of a driver that has exited."""
STATUS_TIMEOUT_S = 5.0
"""How long the rendezvous of another driver may take to return its status. Its process may be dead."""

RendezvousHandle = Any
"""Handle of the actor. Ray's own type loses the return types of methods."""

NAMESPACE = "elastic_ddp"
RENDEZVOUS_PREFIX = "rendezvous-"
"""A rendezvous actor has this prefix and the name of its run, in this namespace."""


def _method_of(
    method: Callable[Concatenate[Any, P], T], owner: str = "_coordinator", *, polled: bool = False
) -> Callable[Concatenate[Rendezvous, P], Coroutine[Any, Any, T]]:
    """Makes a method of the coordinator, or of another part of the actor, one of the actor.

    If it is `polled`, it returns None while it has no answer; a call then waits for a change, or for a long poll.
    """

    async def call(self: Rendezvous, /, *arguments: P.args, **options: P.kwargs) -> T:
        part = attrgetter(owner)(self)
        log = self._coordinator.event_log
        answer = method(part, *arguments, **options)
        if polled and answer is None and log.outcome is None:
            await self._for_members.wait()
            answer = method(part, *arguments, **options)
        return answer

    return functools.update_wrapper(call, method)


class _Changes:
    """Wakes the calls that wait for a change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event.clear()

    async def wait(self, polls: int = 1) -> None:
        """Waits for a change, or for some long polls: a caller that asks again survives a lost reply."""
        with suppress(TimeoutError):
            async with asyncio.timeout(polls * LONG_POLL_S):
                await self._event.wait()


class Rendezvous:
    """An asyncio actor on the driver's node, one for each run. Every method returns within a few long polls.

    Calls of the coordinator need no lock: they never await.
    """

    def __init__(self, run_name: str, total_steps: int, options: RendezvousOptions) -> None:
        self._options = options
        self._host = ray.util.get_node_ip_address()
        self._store = HostedStore(self._host)
        self._for_members = _Changes()
        self._for_driver = _Changes()
        self._coordinator = Coordinator(
            options,
            store=(self._host, self._store.port),
            notify_members=self._for_members.notify,
            notify_driver=self._for_driver.notify,
        )
        self._requests = Requests(self._coordinator, {"name": run_name, "total_steps": total_steps})
        self._supervisor = Supervisor(self._coordinator, self._requests)
        self._heartbeats = HeartbeatServer(
            options.heartbeat_timeout_s, self.mark_failed, self._coordinator.membership.has_joined
        )
        self._ticker: asyncio.Task[None] | None = None
        self._cleaned = 0
        """The generation up to which the store's keys are deleted."""

    # Workers.

    async def heartbeat_address(self, member: Member | None = None) -> tuple[str, int]:
        """Returns the address to which workers send heartbeats."""
        self._start_tasks()
        if member is not None:
            self._coordinator.worker_starts(member)
        return await self._heartbeats.start(self._host)

    async def store_address(self) -> tuple[str, int]:
        """Returns the address of the generations' store."""
        return self._host, self._store.port

    async def join(self, request: JoinRequest) -> Assignment | Ended | PlannedAssignment | None:
        """Returns a member's place in the next generation. While none is formed, it returns the planned one or None,
        and the member calls again."""
        coordinator = self._coordinator
        member = request.member.id
        answer = coordinator.join(request)
        if answer is None:
            # A member with a planned assignment reads data ahead for it, so it gets quick updates.
            has_plan = coordinator.planned_place_of(member) is not None
            await self._for_members.wait(1 if has_plan else POLLS_WITHOUT_PLAN)
            answer = coordinator.place_of(member, request.after)
        return answer or coordinator.planned_place_of(member)

    async def poll_signals(
        self,
        member: Member,
        generation: int,
        progress: dict[str, Any] | None,
        activity: ActivityReport = AT_THE_START,
        received: int = 0,
    ) -> Signals:
        """Takes a member's reports. Returns the signals for it, after a long poll if there are none. `received` is the
        number of the newest `MemberRequest` that the member has received."""
        self._coordinator.update(member, progress, activity)
        signals = self._signals(member, generation, received)
        if signals == NO_SIGNALS:
            await self._for_members.wait()
            signals = self._signals(member, generation, received)
        return signals

    def _signals(self, member: Member, generation: int, received: int) -> Signals:
        return self._coordinator.signals(member, generation, self._requests.for_member(member.id, received))

    plan_join = _method_of(Coordinator.plan_join)
    answer = _method_of(Requests.answer, "_requests")
    report = _method_of(Coordinator.report)
    why_not_commit = _method_of(Coordinator.why_not_commit)
    leave = _method_of(Requests.leave, "_requests")
    exclude = _method_of(Requests.exclude, "_requests")
    retire = _method_of(Coordinator.retire)
    end = _method_of(Coordinator.end)
    mark_failed = _method_of(Coordinator.mark_failed)

    # The controller and the driver.

    async def supervise(
        self, started: list[str], starting: int, draining: dict[str, float], died: dict[str, str] | None = None
    ) -> WorkerDirectives | None:
        """See `Supervisor.supervise`."""
        self._start_tasks()
        return self._supervisor.supervise(started, starting, draining, died or {})

    async def wait_for_update(self, after: int) -> DriverUpdate:
        """Returns the events after the first `after`, and the run's state. Waits for a long poll if nothing is new."""
        log = self._coordinator.event_log
        if log.num_events <= after and log.outcome is None:
            await self._for_driver.wait()
        return self._coordinator.driver_update(after)

    set_waiting_for = _method_of(Requests.set_waiting_for, "_requests")

    # `RunHandle` and the CLI.

    status = _method_of(Requests.status, "_requests")
    stop = _method_of(Requests.stop, "_requests")
    drain = _method_of(Requests.drain, "_requests")
    undrain = _method_of(Requests.undrain, "_requests")
    resize = _method_of(Requests.resize, "_requests")
    checkpoint = _method_of(Requests.checkpoint, "_requests")
    committed = _method_of(Requests.committed, "_requests", polled=True)
    verify = _method_of(Requests.verify, "_requests")
    verified = _method_of(Requests.verified, "_requests", polled=True)
    request_stacks = _method_of(Requests.request_stacks, "_requests")
    request_profile = _method_of(Requests.request_profile, "_requests")
    answers = _method_of(Requests.answers, "_requests")

    # Background tasks.

    def _start_tasks(self) -> None:
        """Starts the background tasks, which need a running event loop."""
        if self._ticker is None:
            self._ticker = asyncio.create_task(self._tick())
            if self._coordinator.is_restarted:
                self._reconnects = asyncio.create_task(self._check_reconnects(self._coordinator.take_over()))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._supervisor.tick()
                self._clean_store(self._coordinator.membership.generation)
            except Exception:  # a full disk, for example, may be temporary
                _log.exception("a periodic check of the rendezvous failed")

    def _clean_store(self, generation: int) -> None:
        """Deletes the store's keys of earlier generations."""
        if generation != self._cleaned:
            for key in self._store.list_keys():
                number = _OF_GENERATION.match(key)
                if number is not None and int(number[2]) < generation - (SAVES_KEPT if number[1] == "saves" else 0):
                    self._store.delete_key(key)
            self._cleaned = generation

    async def _check_reconnects(self, members: list[str]) -> None:
        """After a restart, members that do not reconnect their heartbeats have failed."""
        await asyncio.sleep(max(self._options.heartbeat_timeout_s, RECONNECT_S))
        for member in members:
            if not self._heartbeats.is_connected(member):
                self._coordinator.mark_failed(member, "it did not reconnect after a restart of the rendezvous")


def start_rendezvous(run_name: str, total_steps: int, options: RendezvousOptions) -> RendezvousHandle:
    """Starts the rendezvous of a run on this node. Raises ConfigError if the name belongs to a run in another storage.

    The driver holds the run's lease. An existing rendezvous for the same storage therefore belongs to a driver that
    has exited, and Ray is about to end it.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # It needs no CPUs, so without this Ray could place it on a node that fails.
    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(Rendezvous).options(
        name=RENDEZVOUS_PREFIX + run_name,
        namespace=NAMESPACE,
        num_cpus=0,
        max_concurrency=10_000,
        max_restarts=-1,  # a new process resumes from the snapshot
        max_task_retries=-1,
        scheduling_strategy=this_node,
    )
    end = time.monotonic() + OLD_ACTOR_TIMEOUT_S
    while True:
        try:
            return actor.remote(run_name, total_steps, options)
        except ValueError as error:  # a live actor has the name
            driver = _driver_of(run_name)
            is_same_run = driver is None or driver.get("uri") == options.driver.get("uri")
            if is_same_run and time.monotonic() < end:
                time.sleep(LONG_POLL_S)
                continue
            where = f", in {driver.get('uri')}, by pid {driver.get('pid')} on {driver.get('host')}" if driver else ""
            raise ConfigError(
                f"a run named {run_name!r} is live on this cluster{where}. Stop it first (`elastic-ddp stop "
                f"{run_name}`), or use another name."
            ) from error


def _driver_of(run_name: str) -> dict[str, Any] | None:
    """Returns where the driver of a run's existing rendezvous runs; None if the rendezvous does not answer."""
    try:
        rendezvous: Any = ray.get_actor(RENDEZVOUS_PREFIX + run_name, namespace=NAMESPACE)
        return dict(ray.get(rendezvous.status.remote(), timeout=STATUS_TIMEOUT_S)["driver"])
    except (ValueError, ray.exceptions.RayError):
        return None
