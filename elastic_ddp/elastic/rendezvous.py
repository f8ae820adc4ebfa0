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
from typing import Any

import ray

from elastic_ddp.elastic.hang import AT_THE_START, WAITING, HangWatch, Whereabouts
from elastic_ddp.elastic.journal import Journal
from elastic_ddp.elastic.membership import DRAIN, Arrival, Member, Membership, Notice
from elastic_ddp.elastic.memory import Memory, State
from elastic_ddp.elastic.messages import NOTHING, Ended, News, Orders, Prospect, RendezvousOptions, Signals
from elastic_ddp.elastic.pulse import PulseServer
from elastic_ddp.errors import ConfigError, TrainFunctionError
from elastic_ddp.parallel.process_group import Assignment

TICK_S = 0.2
"""How often it looks at what is due by the clock."""
STACKS_S = 2.0
"""How long workers that hang may take to say where."""
POLL_S = 1.0
"""How long a member's or the driver's call is held while there is nothing to say."""

RendezvousHandle = Any
"""The actor's handle. Ray's own type for it loses what the methods return."""

NAMESPACE = "elastic_ddp"
RENDEZVOUS_PREFIX = "rendezvous-"
"""Rendezvous actors are named after their runs, in this namespace."""


class Rendezvous:
    """Runs as an asyncio actor, one for each run, on the driver's node. All methods return at once or within a poll."""

    def __init__(self, run_name: str, total_steps: int, options: RendezvousOptions) -> None:
        import torch.distributed as dist

        self._run_name, self._total_steps, self._options = run_name, total_steps, options
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
        self._memory = Memory(options.memory)
        state = self._memory.load()
        self._is_second = state is not None
        self._state = state or State(Membership(min_workers=options.min_workers, max_workers=options.max_workers))
        self._membership = self._state.membership
        self._pulses = PulseServer(options.heartbeat_timeout_s, self._on_lost)
        self._ticker: asyncio.Task[None] | None = None
        self._formed: dict[str, Assignment] = {}
        self._prospects: dict[str, tuple[int, int]] = {}
        self._journal = Journal(self._memory)
        self._account: dict[str, float] = {}
        """The longest that those who come from the current generation gave."""
        self._watch = HangWatch(options.hang_timeout_s)
        self._stacks_request = 0
        self._stacks_wanted_at: float | None = None
        lock = asyncio.Lock()
        self._changed = asyncio.Condition(lock)
        """Something changed for members."""
        self._news = asyncio.Condition(lock)
        """There is something new for the driver."""

    async def pulse_address(self) -> tuple[str, int]:
        """Where members connect their pulses."""
        async with self._changed:
            self._begin()
            return await self._pulses.start(self._host)

    def _begin(self) -> None:
        """What needs a running loop."""
        if self._ticker is None:
            self._ticker = asyncio.create_task(self._tick())
            if self._is_second:
                members = [member.id for member in self._membership.known()]
                self._record("rendezvous_restarted", generation=self._membership.generation, pid=os.getpid())
                self._watch.begin(members, time.monotonic())
                self._return = asyncio.create_task(self._look_who_came_back(members))

    async def _look_who_came_back(self, members: list[str]) -> None:
        """Members connect their pulses again. Who does not died meanwhile."""
        await asyncio.sleep(self._options.heartbeat_timeout_s)
        for member in members:
            if member not in self._pulses.connected:
                await self._on_lost(member, "it did not come back after the rendezvous was restarted")

    async def join(
        self,
        member: Member,
        after: int,
        step: int | None,
        between_steps: bool,
        lost: str | None,
        committed: int | None = None,
        account: dict[str, float] | None = None,
    ) -> Assignment | Ended | Prospect | None:
        """A member's place in the next generation. When that is not formed yet, its place in prospect, or None: ask
        again.

        Args:
            member: who asks.
            after: the generation it comes from, 0 for none.
            step: steps done in the state it holds; None if it holds none.
            between_steps: whether newcomers may be in the generation.
            lost: what broke, if it comes because that generation did.
            committed: steps done in the newest commit that it wrote itself.
            account: where its time in the last generation went.
        """
        async with self._changed:
            if self._journal.ended or (self._state.stop and after == 0):
                return Ended(self._journal.ended or "stopped")
            if (place := self._place(member, after)) is not None:
                return place
            healthy = self._membership.loss is None
            if account and after == self._membership.generation:
                self._account = max(self._account, account, key=lambda each: sum(each.values()))
            arrival = Arrival(
                member=member, step=step, between_steps=between_steps, committed=committed, at_s=time.monotonic()
            )
            if (gone := self._membership.arrive(arrival, lost=lost)) is not None:
                self._record_dismissals()
                return Ended(gone)
            if healthy and self._membership.loss is not None:
                number = self._membership.generation
                self._record("worker_lost", generation=number, reported_by=member.id, error=self._membership.loss)
                self._changed.notify_all()
            self._form()
            place = self._place(member, after)
            if place is None and self._membership.is_gone(member.id) is None:
                await _poll(self._changed)
                place = self._place(member, after)
            if place is None and (gone := self._membership.is_gone(member.id)) is not None:
                return Ended(gone)
            return place or self._prospect(member.id)

    async def prospect(self, member: Member) -> Prospect | None:
        """The place of somebody who is about to join."""
        async with self._changed:
            if member.id not in self._prospects:
                self._prospects |= self._membership.prospects(time.monotonic(), also=member)
            return self._prospect(member.id)

    def _prospect(self, member: str) -> Prospect | None:
        place = self._prospects.get(member)
        return None if place is None else Prospect(*place, self._journal.progress.get("step", 0))

    def _look_ahead(self, now_s: float) -> None:
        """Who would be where, while the members of a generation get ready for another."""
        before, self._prospects = self._prospects, self._membership.prospects(now_s)
        if before != self._prospects and self._membership.wants_change(now_s):
            self._changed.notify_all()

    def _place(self, member: Member, after: int) -> Assignment | None:
        assignment = self._formed.get(member.id)
        return assignment if assignment is not None and assignment.generation > after else None

    def _form(self) -> None:
        formed = self._membership.form(time.monotonic())
        self._record_dismissals()
        if formed is None:
            return
        self._memory.save(self._state)
        self._watch.begin([member.id for member in formed.members], time.monotonic())
        self._stacks_wanted_at = None
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
                first_step=formed.first_step,
                brief=formed.brief,
            )
            for rank, member in enumerate(formed.members)
        }
        if self._account:
            self._record("generation_account", generation=formed.number - 1, account=self._account)
            self._account = {}
        members = [{"rank": rank, "node": member.node, "pid": member.pid} for rank, member in enumerate(formed.members)]
        self._record(
            "rendezvous",
            generation=formed.number,
            world_size=len(members),
            reason=formed.reason,
            first_step=formed.first_step,
            waited_s=formed.waited_s,
            members=members,
        )
        self._changed.notify_all()

    async def _on_lost(self, member: str, how: str) -> None:
        async with self._changed:
            known = self._membership.is_gone(member) is not None
            generation, current = self._membership.generation, self._membership.current
            was_in_it = not known and current is not None and member in current.ids
            if self._membership.lose(member, how) or was_in_it:
                self._record("worker_lost", generation=generation, member=member, reported_by=None, error=how)
            elif not known and self._journal.ended is None:
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
                self._look_ahead(time.monotonic())
                if wanted != (wanted := self._membership.wants_change(time.monotonic())):
                    self._changed.notify_all()
                if self._membership.break_if_overdue(time.monotonic()):
                    self._record("overdue", generation=self._membership.generation)
                    self._changed.notify_all()
                self._look_for_a_hang(time.monotonic())
                self._memory.save(self._state)

    def _look_for_a_hang(self, now_s: float) -> None:
        """First everybody says where its threads are, then those whom others wait for are given up."""
        for member in self._watch.places():
            if self._membership.is_gone(member) is not None:
                self._watch.forget(member)
        if self._journal.ended is not None or not self._watch.is_hung(now_s):
            self._stacks_wanted_at = None
        elif self._stacks_wanted_at is None:
            self._stacks_request += 1
            self._stacks_wanted_at = now_s
            self._changed.notify_all()
        elif now_s - self._stacks_wanted_at >= STACKS_S:
            self._stacks_wanted_at = None
            self._end_hang(now_s)

    def _end_hang(self, now_s: float) -> None:
        generation, places = self._membership.generation, self._watch.places()
        culprits = self._watch.culprits(is_broken=self._membership.loss is not None)
        silent_s = self._watch.timeout_s
        self._record("hang", generation=generation, places=places, culprits=culprits, seconds=silent_s)
        for member in culprits:
            how = f"it hung in '{places[member]}' for {silent_s:g} s (hang_timeout_s) while others waited for it"
            self._membership.lose(member, how)
            self._record("worker_lost", generation=generation, member=member, reported_by=None, error=how)
        if not culprits and all(place in WAITING for place in places.values()):
            self._membership.loss = f"no collective was completed for {silent_s:g} s (hang_timeout_s)"
            self._record("worker_lost", generation=generation, reported_by=None, error=self._membership.loss)
        elif not culprits:
            where = ", ".join(sorted(set(places.values())))
            self._end(
                {
                    "status": "failed",
                    "kind": TrainFunctionError.__name__,
                    "error": f"all workers have been in '{where}' for {silent_s:g} s (hang_timeout_s) and got nowhere; "
                    "where exactly is in the ledger's 'stacks' events. Raise hang_timeout_s if that may take longer",
                }
            )
        self._watch.begin(places, now_s)  # one more timeout for those who are left
        self._form()
        self._changed.notify_all()

    async def take(
        self, messages: list[dict[str, Any]], progress: dict[str, Any] | None, sender: str = "", first: int = 0
    ) -> None:
        """Takes a member's messages for the record, and its progress. See `Journal.take`."""
        async with self._changed:
            self._take(messages, progress, sender, first)

    async def listen(
        self,
        member: Member,
        generation: int,
        progress: dict[str, Any] | None,
        whereabouts: Whereabouts = AT_THE_START,
    ) -> Signals:
        """Tells a member of a generation what it should know, held for a poll if there is nothing; takes its progress,
        and where it is."""
        async with self._changed:
            self._take([], progress)
            self._watch.hear(member.id, whereabouts, time.monotonic())
            signals = self._signals(member, generation)
            if signals == NOTHING:
                await _poll(self._changed)
                signals = self._signals(member, generation)
            return signals

    def _signals(self, member: Member, generation: int) -> Signals:
        membership = self._membership
        is_current = generation == membership.generation
        reconfigure = is_current and membership.wants_change(time.monotonic())
        return Signals(
            stop=self._state.stop,
            ended=self._journal.ended or membership.is_gone(member.id),
            broken=generation if is_current and membership.loss is not None else None,
            reconfigure=reconfigure,
            prospect=self._prospect(member.id) if reconfigure else None,
            commit=self._state.open_request,
            show_stacks=self._stacks_request if is_current else 0,
        )

    def _record_dismissals(self) -> None:
        for member, kind in list(self._membership.dismissed.items())[self._state.recorded_dismissals :]:
            self._record("worker_left", generation=self._membership.generation, member=member, kind=kind)
            self._changed.notify_all()
        if self._state.recorded_dismissals < len(self._membership.dismissed):
            self._state.recorded_dismissals = len(self._membership.dismissed)
            self._memory.save(self._state)

    def _request_commit(self) -> None:
        if not self._state.open_request:
            self._state.requests += 1
            self._state.open_request = self._state.requests
            self._memory.save(self._state)
            self._changed.notify_all()

    async def supervise(self, started: list[str], starting: int, draining: dict[str, float]) -> Orders | None:
        """The controller's word, and its answer; None when the run is over and nobody is left in it.

        Args:
            started: ids of the workers there are.
            starting: workers on their way to be.
            draining: seconds that are left to nodes which Ray is about to take away.
        """
        async with self._changed:
            self._begin()
            membership = self._membership
            membership.on_their_way = starting + sum(not membership.has_seen(each) for each in started)
            for node_id, seconds in draining.items():
                self._drain(node_id, seconds, "Ray")
            if (self._state.stop or self._journal.ended is not None) and not membership.num_alive:
                return None
            return Orders(
                lost=membership.lost(),
                dismissed=list(membership.dismissed),
                leaving=membership.leaving,
                avoid=membership.draining,
                limit=membership.limit,
            )

    async def retire(self, member: Member) -> None:
        """A member is through."""
        async with self._changed:
            self._membership.retire(member.id)
            self._form()

    async def end(self, progress: dict[str, Any] | None, outcome: dict[str, Any]) -> None:
        """The run is over: finished, stopped or failed, with what is to be known of it. The first word counts."""
        async with self._changed:
            self._take([], progress)
            self._end(outcome)

    def _end(self, outcome: dict[str, Any]) -> None:
        if self._journal.end(outcome):
            self._changed.notify_all()
            self._news.notify_all()

    async def stop(self) -> None:
        """Asks the workers to commit and stop at the next step boundary."""
        async with self._changed:
            self._state.stop = True
            self._membership.min_workers = 1  # whoever holds the state can commit it
            self._act_on_notice()
            self._news.notify_all()

    async def is_member_of(self, member: Member, generation: int) -> bool:
        """Whether a member is one of the current generation, and not presumed dead: only then may it commit."""
        async with self._changed:
            current = self._membership.current
            is_current = current is not None and current.number == generation and member.id in current.ids
            return is_current and self._membership.is_gone(member.id) is None

    async def leave(self, member: Member, within_s: float, why: str) -> None:
        """A member has been told to go, and says so."""
        async with self._changed:
            if self._membership.is_gone(member.id) is None:
                self._record("notice", member=member.id, node=member.node, within_s=within_s, by=why)
                self._membership.ask_to_leave([member.id], Notice(DRAIN, time.monotonic(), within_s))
                self._act_on_notice()

    async def drain(self, node: str, within_s: float) -> list[str]:
        """A person wants the run's workers off a node, named by its address or by Ray. Returns the node's names by Ray;
        none if the run has no worker there."""
        async with self._changed:
            node_ids = {each.node_id for each in self._membership.known() if node in (each.node, each.node_id)}
            for node_id in node_ids:
                self._drain(node_id, within_s, "a person")
            return sorted(node_ids)

    def _drain(self, node_id: str, within_s: float, by: str) -> None:
        if self._membership.drain(node_id, Notice(DRAIN, time.monotonic(), within_s)):
            self._record("notice", node_id=node_id, within_s=within_s, by=by)
            self._act_on_notice()

    def _act_on_notice(self) -> None:
        self._memory.save(self._state)
        self._form()
        self._look_ahead(time.monotonic())
        self._changed.notify_all()

    async def resize(self, num_workers: int) -> None:
        """A person wants so many workers, at most."""
        async with self._changed:
            self._record("resize", num_workers=num_workers)
            self._membership.wanted = num_workers
            self._act_on_notice()

    async def checkpoint(self) -> int:
        """Asks for a commit at the next step boundary. Returns the request's number, for `committed`."""
        async with self._changed:
            self._request_commit()
            return self._state.open_request

    async def committed(self, request: int) -> int | None:
        """Steps done in the commit that answered a request; None while there is none (ask again), held for a poll."""
        async with self._changed:
            if not self._membership.num_alive and self._journal.last("commit"):
                self._state.open_request = 0  # nobody holds anything newer
            if self._state.open_request == request and self._journal.outcome is None:
                await _poll(self._changed)
            return None if self._state.open_request == request else self._journal.last("commit").get("step")

    async def follow(self, after: int) -> News:
        """The driver's ear, held for a poll if there is nothing after event number `after`."""
        async with self._changed:
            journal = self._journal
            if len(journal.events) <= after and journal.outcome is None:
                await _poll(self._news)
            num_alive = self._membership.num_alive
            return News(journal.events[after:], journal.progress, journal.outcome, num_alive, self._state.stop)

    async def status(self) -> dict[str, Any]:
        """The newest facts, for `elastic-ddp status`."""
        membership = self._membership
        return {
            "name": self._run_name,
            "state": self._doing(),
            "total_steps": self._total_steps,
            "min_workers": self._options.min_workers,
            "max_workers": self._options.max_workers,
            "wanted": membership.wanted,
            "in_place": self._options.in_place,
            "members": [
                {"rank": rank, "node": each.node, "node_id": each.node_id, "pid": each.pid, "id": each.id}
                for rank, each in enumerate(membership.current.members if membership.current is not None else ())
                if membership.is_gone(each.id) is None
            ],
            "draining": membership.draining,
            "driver": self._options.driver,
            "pid": os.getpid(),
            **self._journal.facts(),
        }

    def _doing(self) -> str:
        if self._journal.ended or self._state.stop:
            return self._journal.ended or "stopping"
        if not self._journal.last("generation"):
            return "starting"
        return "training" if self._membership.is_training() else "waiting"

    def _take(
        self, messages: list[dict[str, Any]], progress: dict[str, Any] | None = None, sender: str = "", first: int = 0
    ) -> None:
        messages = self._journal.take(messages, progress, sender, first)
        if messages:
            self._news.notify_all()
        if any(each["event"] == "commit" and each.get("request") == self._state.open_request for each in messages):
            self._state.open_request = 0
            self._changed.notify_all()

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
        max_restarts=-1,  # its process may die: another one goes on from its memory
        max_task_retries=-1,
        scheduling_strategy=here,
    )
    try:
        return actor.remote(run_name, total_steps, options)
    except ValueError as error:  # the name of a live actor
        raise ConfigError(
            f"run {run_name!r} is live on this cluster already (see elastic-ddp status); stop it first, or use another "
            "name"
        ) from error
