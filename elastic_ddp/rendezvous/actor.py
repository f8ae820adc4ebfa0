"""The rendezvous actor of a run: it forms generations, hosts their store, and connects workers, controller and driver.

It replaces torchrun's rendezvous. `Coordinator` decides; this module receives calls and blocks them until there is an
answer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import ray

from elastic_ddp.distributed.assignment import Assignment
from elastic_ddp.distributed.hosted_store import HostedStore
from elastic_ddp.rendezvous.coordinator import Coordinator
from elastic_ddp.rendezvous.event_log import SenderClocks
from elastic_ddp.rendezvous.hang import AT_THE_START, STANDBY, ActivityReport
from elastic_ddp.rendezvous.heartbeat import HeartbeatServer
from elastic_ddp.rendezvous.member_requests import MemberRequests, plan_profile
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
from elastic_ddp.rendezvous.status import all_workers
from elastic_ddp.telemetry.event import Event

_log = logging.getLogger(__name__)

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

RendezvousHandle = Any
"""Handle of the actor. Ray's own type loses the return types of methods."""

NAMESPACE = "elastic_ddp"
RENDEZVOUS_PREFIX = "rendezvous-"
"""A rendezvous actor has this prefix and the name of its run, in this namespace."""


class Rendezvous:
    """An asyncio actor on the driver's node, one for each run. Every method returns within a few long polls."""

    def __init__(self, run_name: str, total_steps: int, options: RendezvousOptions) -> None:
        self._run_name, self._total_steps, self._options = run_name, total_steps, options
        self._host = ray.util.get_node_ip_address()
        self._store = HostedStore(self._host)
        self._coordinator = Coordinator(options, (self._host, self._store.port))
        self._heartbeats = HeartbeatServer(
            options.heartbeat_timeout_s, self._on_failure, self._coordinator.membership.has_joined
        )
        self._requests = MemberRequests(self._coordinator.membership.why_gone)
        self._standbys: set[str] = set()
        """Ids of workers that wait to replace another one."""
        self._clocks = SenderClocks()
        self._waiting_for: str | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._cleaned = 0
        """The generation up to which the store's keys are deleted."""
        self._lock = asyncio.Lock()
        self._for_members = asyncio.Condition(self._lock)
        self._for_driver = asyncio.Condition(self._lock)

    @asynccontextmanager
    async def _locked(self) -> AsyncIterator[Coordinator]:
        """Gives one call at a time access to the coordinator, and wakes the calls that wait for its changes."""
        async with self._lock:
            try:
                yield self._coordinator
            finally:
                self._notify()

    def _notify(self) -> None:
        if self._coordinator.notify_members:
            self._for_members.notify_all()
        if self._coordinator.notify_driver:
            self._for_driver.notify_all()
        self._coordinator.notify_members = self._coordinator.notify_driver = False

    async def _wait(self, condition: asyncio.Condition, polls: int = 1) -> None:
        """Waits for a change, or for some long polls: a caller that asks again survives a lost reply."""
        self._notify()
        with suppress(TimeoutError):
            async with asyncio.timeout(polls * LONG_POLL_S):
                await condition.wait()

    # Workers.

    async def heartbeat_address(self, member: Member | None = None) -> tuple[str, int]:
        """Returns the address to which workers send heartbeats."""
        async with self._locked() as coordinator:
            self._start_tasks()
            if member is not None and not coordinator.membership.has_joined(member.id):
                coordinator.state.attempts.starting[member.id] = member
            return await self._heartbeats.start(self._host)

    async def store_address(self) -> tuple[str, int]:
        """Returns the address of the generations' store."""
        return self._host, self._store.port

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
                async with self._locked() as coordinator:
                    coordinator.tick()
                    self._clean_store(coordinator.membership.generation)
            except Exception:  # such as a full disk, which may be temporary
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
                await self._on_failure(member, "it did not reconnect after a restart of the rendezvous")

    async def _on_failure(self, member: str, how: str) -> None:
        async with self._locked() as coordinator:
            coordinator.mark_failed(member, how)
        self._standbys.discard(member)

    async def join(
        self,
        request: JoinRequest,
        after: int,
        failure: str | None,
        account: dict[str, float] | None = None,
        activity: ActivityReport | None = None,
    ) -> Assignment | Ended | PlannedAssignment | None:
        """Returns a member's place in the next generation. While none is formed, it returns the planned one or None,
        and the member calls again.

        `after` is the member's last generation, 0 for none; `failure`, `account` and `activity` are of that generation.
        """
        member = request.member
        async with self._locked() as coordinator:
            if coordinator.event_log.ended:
                return Ended(coordinator.event_log.ended)
            if isinstance(place := coordinator.place_of(member.id, after), Assignment):
                return place  # also while the run stops: the other members wait for it
            if coordinator.state.stop and after == 0:
                coordinator.retire(member.id)
                return Ended("stopped")
            request = replace(request, at_s=time.monotonic())
            if activity is not None:
                coordinator.hangs.update(member.id, activity, request.at_s)
            coordinator.join(request, after=after, failure=failure, account=account)
            if (answer := coordinator.place_of(member.id, after)) is None:
                # A member with a planned assignment reads data ahead for it, so it gets quick updates.
                has_plan = coordinator.planned_place_of(member.id) is not None
                await self._wait(self._for_members, 1 if has_plan else POLLS_WITHOUT_PLAN)
                answer = coordinator.place_of(member.id, after)
            return answer or coordinator.planned_place_of(member.id)

    async def plan_join(self, member: Member) -> PlannedAssignment | None:
        """Returns the place that a worker would get if it joined now; None if that is not known."""
        async with self._locked() as coordinator:
            return coordinator.plan_join(member)

    async def poll_signals(
        self,
        member: Member,
        generation: int,
        progress: dict[str, Any] | None,
        activity: ActivityReport = AT_THE_START,
        received: int = 0,
    ) -> Signals:
        """Returns the signals for a member of a generation, after a long poll if there are none.

        `received` is the number of the newest `MemberRequest` that the member has received.
        """

        def signals_now() -> Signals:
            signals = self._coordinator.signals(member, generation)
            return replace(signals, requests=self._requests.of(member.id, received))

        async with self._locked() as coordinator:
            if coordinator.membership.why_gone(member.id) is None:
                coordinator.event_log.update_progress(progress)
            coordinator.hangs.update(member.id, activity, time.monotonic())
            (self._standbys.add if activity.place == STANDBY else self._standbys.discard)(member.id)
            if (signals := signals_now()) == NO_SIGNALS:
                await self._wait(self._for_members)
                signals = signals_now()
            return signals

    async def answer(self, member: Member, number: int, answer: dict[str, Any]) -> None:
        """Takes a member's answer to a `MemberRequest`."""
        async with self._locked():
            self._requests.answer(number, member.id, answer)

    async def report(
        self, event: Event, progress: dict[str, Any] | None, sender: str = "", number: int = 0, sent_at: float = 0.0
    ) -> None:
        """Takes an event for the ledger and a progress report. See `EventLog.add` and `SenderClocks`."""
        event = self._clocks.convert(event, sender, sent_at)
        async with self._locked() as coordinator:
            coordinator.report(event, progress, sender, number)

    async def why_not_commit(self, member: Member, generation: int) -> str | None:
        """Returns why a member may not commit what it wrote in a generation; None if it may."""
        async with self._locked() as coordinator:
            return coordinator.why_not_commit(member, generation)

    async def leave(self, member: Member, within_s: float, why: str) -> None:
        """Asks that a member may leave at a step boundary, within a number of seconds."""
        async with self._locked() as coordinator:
            coordinator.ask_to_leave(member, within_s, why)

    async def retire(self, member: Member) -> None:
        """Removes a member that is done."""
        async with self._locked() as coordinator:
            coordinator.retire(member.id)

    async def end(self, member: Member, progress: dict[str, Any] | None, outcome: dict[str, Any]) -> bool:
        """Takes how the run ended; see `RunFinished.status`. The first outcome counts, and none of failed members.
        Returns False if the run continues: the member failed before it ever trained, and others train."""
        async with self._locked() as coordinator:
            if coordinator.membership.why_gone(member.id) is None:
                if outcome["status"] == "failed" and coordinator.membership.is_newcomer(member.id):
                    coordinator.mark_failed(member.id, str(outcome["error"]))
                    return False
                coordinator.event_log.update_progress(progress)
                coordinator.end(outcome)
            return True

    # The controller and the driver.

    async def supervise(
        self, started: list[str], starting: int, draining: dict[str, float], died: dict[str, str] | None = None
    ) -> WorkerDirectives | None:
        """Returns what the controller does about its workers; None if the run is over and all members have left.

        Args:
            started: ids of the running workers.
            starting: number of workers that are starting.
            draining: seconds until Ray removes a node, by Ray's node id.
            died: what Ray reports about the end of processes, by worker.
        """
        async with self._locked() as coordinator:
            self._start_tasks()
            coordinator.state.attempts.explain(died or {})
            membership = coordinator.membership
            coordinator.check_started(started)
            membership.num_starting = starting + sum(not membership.has_joined(worker) for worker in started)
            for node_id, seconds in draining.items():
                coordinator.drain(node_id, seconds, "Ray")
            have_all_left = coordinator.is_over and not membership.known()
            return None if have_all_left else coordinator.directives(started)

    async def wait_for_update(self, after: int) -> DriverUpdate:
        """Returns the events after the first `after`, and the run's state. Waits for a long poll if nothing is new."""
        async with self._locked() as coordinator:
            log = coordinator.event_log
            if log.num_events <= after and log.outcome is None:
                await self._wait(self._for_driver)
            return DriverUpdate(
                events=log.after(after),
                progress=log.progress,
                outcome=log.outcome,
                num_alive=len(coordinator.membership.known()),
                stopping=coordinator.state.stop,
                is_saving=coordinator.is_saving,
                draining=tuple(coordinator.membership.draining),
            )

    async def set_waiting_for(self, reason: str | None) -> None:
        """Takes from the driver what the run waits for, for `status`."""
        self._waiting_for = reason

    # `RunHandle` and the CLI.

    async def stop(self) -> None:
        """Asks the workers to commit and stop at the next step boundary."""
        async with self._locked() as coordinator:
            coordinator.state.stop = True
            coordinator.membership.any_may_commit = True
            coordinator.apply_request()
            coordinator.notify_driver = True

    async def drain(self, node: str, within_s: float, by: str = "a person") -> list[str]:
        """Asks the workers of a node, given by its address or Ray's id, to leave within a number of seconds. Returns
        Ray's ids of the node; none if it has no worker of the run."""
        async with self._locked() as coordinator:
            members = coordinator.membership.known()
            node_ids = sorted({member.node_id for member in members if node in (member.node, member.node_id)})
            for node_id in node_ids:
                coordinator.drain(node_id, within_s, by)
            return node_ids

    async def exclude(self, member: Member, within_s: float) -> None:
        """Keeps the run off the device of a member; see `Coordinator.exclude`."""
        async with self._locked() as coordinator:
            coordinator.exclude(member, within_s)

    async def undrain(self, node_id: str) -> None:
        """Admits workers on a node again that was drained, given by Ray's id."""
        async with self._locked() as coordinator:
            coordinator.undrain(node_id)

    async def resize(self, num_workers: int) -> None:
        """Sets the maximum number of workers."""
        async with self._locked() as coordinator:
            coordinator.resize(num_workers)

    async def checkpoint(self) -> int:
        """Asks for a commit at the next step boundary. Returns the number of the request, for `committed`."""
        async with self._locked() as coordinator:
            coordinator.state.requests += 1
            coordinator.apply_request()
            return coordinator.state.requests

    async def committed(self, request: int) -> int | None:
        """Returns the steps done in the commit that fulfilled a request; None after a long poll without one.

        A failed run fulfills no request: its workers may have held a newer state.
        """
        async with self._locked() as coordinator:
            state, log, has_workers = coordinator.state, coordinator.event_log, coordinator.membership.known()
            if not has_workers and coordinator.last_commit is not None and log.ended != "failed":
                coordinator.fulfill_requests(request)  # no member holds a newer state
            if state.fulfilled_requests < request and log.outcome is None:
                await self._wait(self._for_members)
            return None if state.fulfilled_requests < request else coordinator.last_commit

    async def verify(self) -> int | str:
        """Asks for a verified step. Returns the number of the request, for `verified`, or why there is none."""
        async with self._locked() as coordinator:
            current = coordinator.membership.current
            if not self._options.can_verify:
                return 'only strategy = "ddp" with reduction = "canonical" has bits to compare'
            if current is None or len(current.members) < 2:
                return "fewer than two workers train now, and one alone has nothing to compare. Ask again when more do"
            coordinator.state.verify_requests += 1
            coordinator.apply_request()
            return coordinator.state.verify_requests

    async def verified(self, request: int) -> str | None:
        """Returns what the requested step found, "" if all bits were equal; None after a long poll without one."""
        async with self._locked() as coordinator:
            state = coordinator.state
            if state.verified_requests < request and coordinator.event_log.outcome is None:
                await self._wait(self._for_members)
            return None if state.verified_requests < request else state.verified

    async def request_stacks(self) -> int:
        """Asks all workers for the stacks of their threads. Returns the number of the request, for `answers`."""
        async with self._locked() as coordinator:
            starting = coordinator.state.attempts.starting.values()
            return self._add_request(coordinator, all_workers(coordinator.membership, starting))

    async def request_profile(self, ranks: list[int] | None, num_steps: int, memory: bool) -> int | str:
        """Asks ranks, by default all, for traces of the next steps. Returns the request's number, or why that fails."""
        async with self._locked() as coordinator:
            if self._requests.is_profiling(coordinator.membership.generation):
                return "another profile is not complete yet"  # ranks start together, and would wait for each other
            plan = plan_profile(coordinator.membership, ranks, num_steps=num_steps, memory=memory)
            return plan if isinstance(plan, str) else self._add_request(coordinator, *plan)

    def _add_request(self, coordinator: Coordinator, *arguments: Any) -> int:
        coordinator.state.member_requests += 1
        self._requests.add(coordinator.state.member_requests, *arguments)
        coordinator.apply_request()
        return coordinator.state.member_requests

    async def answers(self, number: int) -> list[dict[str, Any]] | None:
        """Returns the answers to a request so far; see `MemberRequests.answers`."""
        async with self._locked():
            return self._requests.answers(number)

    async def status(self) -> dict[str, Any]:
        """Returns the state of the run, for `elastic-ddp status`."""
        return {
            "name": self._run_name,
            "total_steps": self._total_steps,
            "min_workers": self._options.min_workers,
            "max_workers": self._options.max_workers,
            "driver": self._options.driver,
            "pid": os.getpid(),
            "waiting_for": self._waiting_for,
            **self._coordinator.status(self._standbys),
        }
