"""The rendezvous' decisions and records, without Ray, threads or asyncio: generations, signals, and what is due."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elastic_ddp.distributed.assignment import Assignment
from elastic_ddp.errors import ElasticDDPError, StorageError
from elastic_ddp.rendezvous.event_log import EventLog
from elastic_ddp.rendezvous.hang import STANDBY, ActivityReport, HangDetector, find_mismatch
from elastic_ddp.rendezvous.member_requests import MemberRequests
from elastic_ddp.rendezvous.members import DrainNotice, JoinRequest, Member
from elastic_ddp.rendezvous.membership import LEFT, Membership
from elastic_ddp.rendezvous.messages import (
    DriverUpdate,
    Ended,
    PlannedAssignment,
    RendezvousOptions,
    Signals,
    WorkerDirectives,
)
from elastic_ddp.rendezvous.snapshot import Snapshot, State
from elastic_ddp.telemetry import events
from elastic_ddp.telemetry.event import Event, TrainingEvent

PREPARE_S = 5.0
"""How long, at most, training continues while members read the first rows of their parts in the next generation."""
START_TIMEOUT_S = 120.0
"""Minimum time in which a worker must get ready to train; `hang_timeout_s` if that is longer."""
STACKS_WITHIN_S = 2.0
"""How long hanging workers have to record their stacks."""


class Coordinator:
    """The state machine of a rendezvous, for one thread.

    Args:
        options: of the run.
        store: the address of the generations' store.
        notify_members, notify_driver: called when calls that wait for a change have something new to return.
        about: further facts about the run, for `status`.
    """

    def __init__(
        self,
        options: RendezvousOptions,
        *,
        store: tuple[str, int],
        notify_members: Callable[[], None],
        notify_driver: Callable[[], None],
        about: dict[str, Any],
    ) -> None:
        self._options = options
        self._store = store
        self._about = about
        self._notify_members = notify_members
        self._notify_driver = notify_driver
        self._snapshot = Snapshot(options.snapshot_folder)
        state = self._snapshot.load()
        self.is_restarted = state is not None
        self.state = state or State(
            Membership(
                min_workers=options.min_workers,
                max_workers=options.max_workers,
                evenly_divided=options.evenly_divided,
                shard_size=options.shard_size,
            )
        )
        self.membership = self.state.membership
        self.event_log = EventLog(self._snapshot)
        self._hangs = HangDetector(options.hang_timeout_s)
        self.member_requests = MemberRequests(self.state, self._apply_request)
        self._standbys: set[str] = set()
        """Ids of workers that wait to replace another one."""
        self._waiting_for: str | None = None
        self._formed: dict[str, Assignment] = {}
        self._planned: dict[str, tuple[int, int]] = {}
        self._change_wanted = False
        self._account: dict[str, float] = {}
        """The longest account among members that came from the current generation."""
        self._not_joined: dict[str, float] = {}
        """Workers that were started and have not joined, and since when."""
        self._stacks_requested_at: float | None = None
        """When all members of a hang were asked for their stacks, by `_stacks_request`."""
        self._stacks_request = 0
        self._saver = ""
        """The member that is writing a checkpoint."""

    def take_over(self) -> list[str]:
        """Resumes from the state of the previous process. Returns the ids of the members."""
        members = [member.id for member in self.membership.known()]
        self.record(events.RendezvousRestarted(generation=self.membership.generation, pid=os.getpid()))
        self._hangs.begin(members, time.monotonic())
        return members

    @property
    def is_over(self) -> bool:
        """Whether the run has ended or is stopping."""
        return self.event_log.ended is not None or self.state.stop

    # Members.

    def worker_starts(self, member: Member) -> None:
        """Takes note of a worker that connects."""
        if not self.membership.has_joined(member.id):
            self.state.attempts.starting[member.id] = member

    def join(
        self,
        request: JoinRequest,
        *,
        after: int,
        failure: str | None,
        account: dict[str, float] | None,
        activity: ActivityReport | None,
    ) -> Assignment | Ended | None:
        """Takes a join request, and returns what `place_of` does.

        `after` is the member's last generation, 0 for none; `failure`, `account` and `activity` are of that generation.
        """
        member = request.member.id
        place = self.place_of(member, after)
        if isinstance(place, Assignment) or self.event_log.ended is not None:
            return place  # also while the run stops: the other members wait for it
        if self.state.stop and after == 0:
            self.retire(request.member)
            return Ended("stopped")
        request = replace(request, at_s=time.monotonic())
        if activity is not None:
            self._hangs.update(member, activity, request.at_s)
        was_healthy = self.membership.failure is None
        self.state.attempts.starting.pop(member, None)
        if account and after == self.membership.generation and self._is_in_good_standing(member):
            self._account = max(self._account, account, key=lambda phases: sum(phases.values()))
        if self.membership.join(request, failure=failure) is not None:
            self._record_dismissals()
        else:
            if was_healthy and self.membership.failure is not None:
                self._record_failure(self.membership.failure, reported_by=member)
            self._check_sections()
            self.form()
        return self.place_of(member, after)

    def _is_in_good_standing(self, member: str) -> bool:
        """Whether a member has not failed; it may have left."""
        return self.membership.why_gone(member) in (None, LEFT)

    def place_of(self, member: str, after: int) -> Assignment | Ended | None:
        """Returns a member's place in a generation later than `after`, or why it gets none; None if that is open."""
        if self.event_log.ended is not None:
            return Ended(self.event_log.ended)
        assignment = self._formed.get(member)
        if assignment is not None and assignment.generation > after:
            return assignment
        gone = self.membership.why_gone(member)
        return None if gone is None else Ended(gone)

    def planned_place_of(self, member: str) -> PlannedAssignment | None:
        """Returns the place that a member may get in the next generation."""
        return self._as_planned(self._planned.get(member))

    def plan_join(self, member: Member) -> PlannedAssignment | None:
        """Returns the place that a worker would get if it joined now: the last one if another must leave for it."""
        places = self.membership.plan(time.monotonic(), joining=member)
        return self._as_planned(places.get(member.id) or max(places.values(), default=None))

    def _as_planned(self, place: tuple[int, int] | None) -> PlannedAssignment | None:
        return None if place is None else PlannedAssignment(*place, step=self.event_log.progress.get("step", 0))

    def mark_failed(self, member: str, how: str, *, is_hang: bool = False) -> None:
        """Records that a member has failed, and ends its generation."""
        membership = self.membership
        starting = self.state.attempts.starting.get(member)
        if membership.why_gone(member) is None:
            self.state.attempts.record(membership, member, how, time.monotonic(), is_hang=is_hang)
            membership.mark_failed(member, how)
            if membership.is_current(member):
                self._record_failure(how, member=member)
            elif self.event_log.ended is None and (starting is None or starting.node_id not in membership.draining):
                failed = events.NewcomerFailed(generation=membership.generation, member=member, error=how)
                standby = starting.process if starting is not None and starting.is_standby else None
                self.record(replace(failed, standby=standby))
        self._standbys.discard(member)
        self._planned = {}
        self.form()
        self._notify_members()

    def _record_failure(self, error: str, *, member: str | None = None, reported_by: str | None = None) -> None:
        generation = self.membership.generation
        self.state.shortfall.failed(len(self._formed), time.monotonic())
        self.record(events.WorkerFailed(generation=generation, member=member, reported_by=reported_by, error=error))
        self._notify_members()

    def retire(self, member: Member) -> None:
        """Removes a member that is done. It has failed if its generation continues."""
        is_alive = self.membership.is_current(member.id) and self.membership.why_gone(member.id) is None
        if is_alive and self.event_log.ended is None:
            self.mark_failed(member.id, "it left its generation without being asked to")
        self.membership.retire(member.id)
        self.form()

    def update(self, member: Member, progress: dict[str, Any] | None, activity: ActivityReport) -> None:
        """Takes the regular reports of a member."""
        if self.membership.why_gone(member.id) is None:
            self.event_log.update_progress(progress)
        self._hangs.update(member.id, activity, time.monotonic())
        if activity.place == STANDBY:
            self._standbys.add(member.id)
        else:
            self._standbys.discard(member.id)

    def signals(self, member: Member, generation: int, received: int) -> Signals:
        """Returns the signals for a member of a generation.

        `received` is the number of the newest `MemberRequest` that the member has received.
        """
        membership = self.membership
        now_s = time.monotonic()
        is_current = generation == membership.generation
        reconfigure = is_current and self._change_wanted and membership.wants_change(now_s)
        return Signals(
            stop=self.state.stop,
            ended=self.event_log.ended or membership.why_gone(member.id),
            failed_generation=generation if is_current and membership.failure is not None else None,
            reconfigure=reconfigure,
            planned=self.planned_place_of(member.id) if reconfigure and membership.has_time(now_s, PREPARE_S) else None,
            commit=self.state.commit_requests.open,
            verify=self.state.verify_requests.open if is_current else 0,
            requests=self.member_requests.of(member.id, received),
        )

    def why_not_commit(self, member: Member, generation: int) -> str | None:
        """Returns why a member may not commit what it wrote in a generation; None if it may."""
        if not self.membership.has_joined(member.id) or not self._is_in_good_standing(member.id):
            reason = self.membership.why_gone(member.id) or "the rendezvous does not know it"
            return f"this worker counts as failed: {reason}"
        if generation < self.state.restored:
            return f"generation {self.state.restored} has started from a commit since generation {generation}"
        return None

    def _check_started(self, started: list[str]) -> None:
        """Marks running workers as failed that have not joined within the start timeout."""
        now_s = time.monotonic()
        timeout_s = max(self._options.hang_timeout_s, START_TIMEOUT_S)
        not_joined = [worker for worker in started if not self.membership.has_joined(worker)]
        self._not_joined = {worker: self._not_joined.get(worker, now_s) for worker in not_joined}
        for worker, since_s in self._not_joined.items():
            if now_s - since_s >= timeout_s:
                self.mark_failed(
                    worker,
                    f"not ready to train {timeout_s:g} s after its start (hang_timeout_s): it hangs in an import or "
                    "while it builds the model. Raise hang_timeout_s if that may take longer.",
                )

    # Generations.

    def form(self) -> None:
        """Forms the next generation if possible."""
        requests = self.state.commit_requests
        if requests.open and self.membership.all_wait() and self.membership.has_committed():
            self._fulfill_requests(requests.newest)  # too few workers train, and their state is committed
        self.membership.commit_wanted = bool(requests.open)
        formed = self.membership.form(time.monotonic())
        self._record_dismissals()
        if formed is None:
            return
        if formed.source is None:
            self.state.restored = formed.number
        reported = self.event_log.progress.get("step", 0)
        speed = self.event_log.steps_per_s or 0.0
        self.state.attempts.generation_formed(formed, reported, speed)
        recovered_s = self.state.shortfall.formed(formed, self.membership.limit, time.monotonic())
        self._snapshot.save(self.state)
        self._hangs.begin([member.id for member in formed.members], time.monotonic())
        self._stacks_requested_at = None
        self._planned = {}
        self._formed = formed.assignments(*self._store)
        if self._account:
            self.record(events.GenerationAccount(generation=formed.number - 1, account=self._account))
            self._account = {}
        standing_by = len(self.membership.known()) - len(formed.members) if self.membership.may_stand_by else 0
        self.record(replace(formed.event(), standing_by=standing_by, recovered_s=recovered_s))
        self._notify_members()

    def _record_dismissals(self) -> None:
        dismissed = list(self.membership.dismissed.items())[self.state.recorded_dismissals :]
        for member, kind in dismissed:
            self.record(events.WorkerLeft(generation=self.membership.generation, member=member, kind=kind))
        if dismissed:
            self.state.recorded_dismissals += len(dismissed)
            self._notify_members()
            self._snapshot.save(self.state)

    # What is due by the clock.

    def tick(self) -> None:
        """Forms a generation that is due, interrupts overdue steps, and ends hangs."""
        now_s = time.monotonic()
        self.form()
        self._plan(now_s)
        if self.membership.interrupt_if_overdue(now_s):
            self.record(events.DrainOverdue(generation=self.membership.generation))
            self._notify_members()
        self._check_sections()
        self._check_for_hang(now_s)
        step = self.event_log.progress.get("step", 0)
        timeout_s = self._options.heartbeat_timeout_s
        error = self.state.attempts.verdict(step, self.membership, now_s, timeout_s)
        if error is not None:
            self._fail_with_commit(error)
        self._snapshot.save(self.state)

    def _fail_with_commit(self, error: ElasticDDPError) -> None:
        """Ends the run, once members that wait for others have committed their state."""
        membership = self.membership
        if membership.all_wait() and not membership.has_committed():
            if not self.state.commit_requests.open:
                self.state.commit_requests.newest += 1
            self._apply_request()
        current = membership.current
        if not (membership.is_training() and current is not None and current.handover_only):
            self._fail(error)

    def _plan(self, now_s: float) -> None:
        """Updates whether membership should change and the places that members get then, both at once."""
        before = (self._change_wanted, self._planned)
        self._change_wanted = self.membership.wants_change(now_s)
        self._planned = self.membership.plan(now_s)
        if before != (self._change_wanted, self._planned):
            self._notify_members()

    def _check_for_hang(self, now_s: float) -> None:
        """On a hang, first asks all members for their stacks, then decides."""
        for member in self._hangs.places():
            if self.membership.why_gone(member) is not None:
                self._hangs.remove(member)
        if self.membership.all_wait():  # waiting for workers is not a hang
            self._hangs.begin(self._hangs.places(), now_s)
        if self.event_log.ended is not None or not self._hangs.is_hung(now_s):
            self._stacks_requested_at = None
        elif self._stacks_requested_at is None:
            self._stacks_requested_at = now_s
            self._stacks_request = self.member_requests.request_stacks()
        elif now_s - self._stacks_requested_at >= STACKS_WITHIN_S:
            self._stacks_requested_at = None
            for each in self.member_requests.answers(self._stacks_request) or []:
                if each["rank"] is not None and "stacks" in (each["answer"] or {}):
                    self.record(events.StacksRecorded(member=each["id"], **each["answer"]))
            self._end_hang(now_s)

    def _check_sections(self) -> None:
        """Ends the run if ranks of the current generation wait for each other at different places of the program."""
        membership = self.membership
        ids = [member.id for member in membership.current.members] if membership.current is not None else []
        if membership.failure is not None and (any(map(membership.why_gone, ids)) or not membership.all_wait()):
            return  # a failed member has broken it, or not all have come
        error = find_mismatch(self._hangs.idle(ids), len(ids), self._options.num_micro_batches)
        if error is not None:
            self._fail(error)

    def _end_hang(self, now_s: float) -> None:
        places = self._hangs.places()
        consequence = self._hangs.decide(is_broken=self.membership.failure is not None)
        facts: Any = {"places": places, "culprits": [*consequence.culprits], "seconds": self._hangs.timeout_s}
        self.record(events.HangDetected(generation=self.membership.generation, **facts))
        self._hangs.begin(places, now_s)  # the other members get another timeout
        for member, how in consequence.culprits.items():
            self.mark_failed(member, how, is_hang=True)
        if consequence.failure is not None:
            self.membership.failure = consequence.failure
            self._record_failure(consequence.failure)
        if consequence.end is not None:
            self._fail(consequence.end)
        self.form()

    # Requests of users, nodes and members.

    def _apply_request(self) -> None:
        """Saves a request and does what follows from it."""
        self._snapshot.save(self.state)
        self.form()
        self._plan(time.monotonic())
        self._notify_members()

    def leave(self, member: Member, within_s: float, why: str) -> None:
        """Asks a member to leave at a step boundary, within a number of seconds."""
        if self.membership.why_gone(member.id) is None:
            self.record(events.DrainNoticed(member=member.id, node=member.node, within_s=within_s, by=why))
            self.membership.ask_to_leave([member.id], DrainNotice(time.monotonic(), within_s))
            self._apply_request()

    def drain(self, node: str, within_s: float) -> list[str]:
        """Asks the workers of a node, given by its address or Ray's id, to leave within a number of seconds. Returns
        Ray's ids of the node; none if it has no worker of the run."""
        members = self.membership.known()
        node_ids = sorted({member.node_id for member in members if node in (member.node, member.node_id)})
        for node_id in node_ids:
            self._drain(node_id, within_s, "a person")
        return node_ids

    def _drain(self, node_id: str, within_s: float, by: str) -> None:
        """Drains a node, unless an earlier notice covers it."""
        if self.membership.drain(node_id, DrainNotice(time.monotonic(), within_s)):
            if any(member.node_id == node_id for member in self.membership.known()):
                self.record(events.DrainNoticed(node_id=node_id, within_s=within_s, by=by))
            self._apply_request()

    def undrain(self, node_id: str) -> None:
        """Admits workers on a node again that was drained, given by Ray's id."""
        if node_id in self.membership.draining:
            self.membership.undrain(node_id)
            self.record(events.DrainCancelled(node_id=node_id))
            self._apply_request()

    def resize(self, num_workers: int) -> None:
        """Sets the maximum number of workers."""
        self.record(events.ResizeRequested(num_workers=num_workers))
        self.membership.wanted = num_workers
        self._apply_request()

    def exclude(self, member: Member, within_s: float) -> None:
        """Keeps the run off the device of a member that computes wrong values.

        Its node is drained. If all members are on this node, the run goes on with one worker fewer instead, unless it
        needs all: a replacement would get the same device.
        """
        staying = [other for other in self.membership.known() if other.id != member.id]
        if any(other.node_id != member.node_id for other in staying):
            self._drain(member.node_id, within_s, "verify")
        elif len(staying) >= self.membership.min_workers:
            self.leave(member, within_s, "verify")
            self.resize(len(staying))
        self.mark_failed(member.id, "it computes wrong values")

    def stop(self) -> None:
        """Asks the workers to commit and stop at the next step boundary."""
        self.state.stop = True
        self.membership.any_may_commit = True
        self._apply_request()
        self._notify_driver()

    def checkpoint(self) -> int:
        """Asks for a commit at the next step boundary. Returns the number of the request, for `committed`."""
        self.state.commit_requests.newest += 1
        self._apply_request()
        return self.state.commit_requests.newest

    def committed(self, request: int) -> int | None:
        """Returns the steps done in the commit that fulfilled a request; None without one.

        A failed run fulfills no request: its workers may have held a newer state.
        """
        if not self.membership.known() and self._last_commit is not None and self.event_log.ended != "failed":
            self._fulfill_requests(request)  # no member holds a newer state
        return None if self.state.commit_requests.fulfilled < request else self._last_commit

    def _fulfill_requests(self, newest: int) -> None:
        """Marks all commit requests up to this one as fulfilled."""
        if newest > self.state.commit_requests.fulfilled:
            self.state.commit_requests.fulfilled = newest
            self._snapshot.save(self.state)
            self._notify_members()

    def verify(self) -> int | str:
        """Asks for a verified step. Returns the number of the request, for `verified`, or why there is none."""
        current = self.membership.current
        if not self._options.can_verify:
            return 'only strategy = "ddp" with reduction = "canonical" has bits to compare'
        if current is None or len(current.members) < 2:
            return "fewer than two workers train now, and one alone has nothing to compare. Ask again when more do"
        self.state.verify_requests.newest += 1
        self._apply_request()
        return self.state.verify_requests.newest

    def verified(self, request: int) -> str | None:
        """Returns what the requested step found, "" if all bits were equal; None if it has not been done."""
        return None if self.state.verify_requests.fulfilled < request else self.state.verified

    # The controller and the driver.

    def supervise(
        self, started: list[str], starting: int, draining: dict[str, float], died: dict[str, str]
    ) -> WorkerDirectives | None:
        """Returns what the controller does about its workers; None if the run is over and all members have left.

        Args:
            started: ids of the running workers.
            starting: number of workers that are starting.
            draining: seconds until Ray removes a node, by Ray's node id.
            died: what Ray reports about the end of processes, by worker.
        """
        membership = self.membership
        self.state.attempts.explain(died)
        self._check_started(started)
        membership.num_starting = starting + sum(not membership.has_joined(worker) for worker in started)
        for node_id, seconds in draining.items():
            self._drain(node_id, seconds, "Ray")
        if self.is_over and not membership.known():
            return None
        self._record_dismissals()
        membership.prune(started)  # details of members that do not run any more
        self.state.recorded_dismissals = len(membership.dismissed)
        failed = membership.failed()
        newcomers = [worker for worker in started if membership.is_newcomer(worker)]
        first = self.event_log.last(events.FirstStep)
        has_stepped = first is not None and first.generation == membership.generation
        return WorkerDirectives(
            failed={worker: failed[worker] for worker in started if worker in failed},
            newcomers=newcomers,
            dismissed=[worker for worker in started if worker in membership.dismissed],
            leaving=membership.leaving,
            avoid=list(membership.draining),
            limit=membership.limit,
            is_over=self.is_over,
            is_steady=not (newcomers or self.is_over) and membership.is_training() and has_stepped,
        )

    def driver_update(self, after: int) -> DriverUpdate:
        """Returns the events after the first `after`, and the run's state."""
        return DriverUpdate(
            events=self.event_log.after(after),
            progress=self.event_log.progress,
            outcome=self.event_log.outcome,
            num_alive=len(self.membership.known()),
            stopping=self.state.stop,
            is_saving=bool(self._saver) and self.membership.why_gone(self._saver) is None,
            draining=tuple(self.membership.draining),
        )

    def set_waiting_for(self, reason: str | None) -> None:
        """Takes from the driver what the run waits for, for `status`."""
        self._waiting_for = reason

    @property
    def _last_commit(self) -> int | None:
        """Steps done in the newest commit."""
        newest = self.event_log.last(events.CommitSucceeded) or self.event_log.last(events.Resumed)
        return self._options.last_commit if newest is None else newest.step

    def status(self) -> dict[str, Any]:
        """Returns the state of the run in plain values, for `elastic-ddp status`."""
        membership = self.membership
        progress = self.event_log.status()
        starting = self.state.attempts.starting
        if self.is_over:
            state = self.event_log.ended or "stopping"
        elif progress["generation"] is None:
            state = "starting"
        else:
            state = "training" if membership.is_training() else "waiting"
        return {
            **self._about,
            "min_workers": self._options.min_workers,
            "max_workers": self._options.max_workers,
            "driver": self._options.driver,
            "pid": os.getpid(),
            "waiting_for": self._waiting_for,
            "state": state,
            "wanted": membership.wanted,
            "members": [{"rank": rank, **_described(member)} for rank, member in membership.ranks()],
            "standbys": [_described(member) for member in starting.values() if member.id in self._standbys],
            "draining": list(membership.draining),
            **progress,
            "world_size": 0 if state == "waiting" else progress["world_size"],
            "last_commit": self._last_commit,
        }

    # The ledger, and the end.

    def report(
        self, event: Event, progress: dict[str, Any] | None, sender: str = "", number: int = 0, sent_at: float = 0.0
    ) -> None:
        """Takes an event for the ledger and a progress report, and does what follows from them.

        `sender` and `number` as in `EventLog.add`; `sent_at` as in `EventLog.by_own_clock`.
        """
        event = self.event_log.by_own_clock(event, sender, sent_at)
        has_failed = not self._is_in_good_standing(sender)
        if not has_failed:
            self.event_log.update_progress(progress)
        elif isinstance(event, TrainingEvent) and event.generation < self.membership.generation:
            event = events.ReportIgnored(generation=event.generation, what=event.event, at=event.at)
        elif isinstance(event, events.GenerationEnded):
            event = replace(event, account=None)
        if not self.event_log.add(event, sender, number):
            return
        self._notify_driver()
        match event:
            case events.FirstStep():
                self.membership.mark_trained(event.generation)
            case events.CommitStarted():
                self._saver = sender
            case events.CommitSucceeded():
                self._saver = ""
                self.state.failed_saves = 0
                self._fulfill_requests(event.request or 0)
            case events.StepVerified(request=request) | events.CorruptionFound(request=request) if (
                request and request > self.state.verify_requests.fulfilled
            ):
                text = event.text if isinstance(event, events.CorruptionFound) else ""
                self.state.verify_requests.fulfilled = request
                self.state.verified = text
            case events.CommitFailed():
                self._saver = ""
                if event.counts and not has_failed:
                    self._count_failed_save(event)

    def _count_failed_save(self, failed: events.CommitFailed) -> None:
        """Ends the run after too many consecutive failures."""
        self.state.failed_saves += 1
        if self.state.failed_saves > self._options.max_failed_saves:
            newest = "no commit" if self._last_commit is None else f"step {self._last_commit}"
            self._fail(
                StorageError(
                    f"{self.state.failed_saves} saves in a row failed (checkpoint.max_failed_saves="
                    f"{self._options.max_failed_saves}). Last error: {failed.error}. Newest commit: {newest}. Repair "
                    f"{'the storage' if failed.of_storage else 'the cause'} and run the same command again."
                )
            )
        self._snapshot.save(self.state)

    def record(self, event: Event) -> None:
        """Records an event of the rendezvous itself, with the current time as `at`."""
        self.report(replace(event, at=time.time()), None)

    def end(self, member: Member, progress: dict[str, Any] | None, outcome: dict[str, Any]) -> bool:
        """Takes how the run ended; see `RunFinished.status`. The first outcome counts, and none of failed members.
        Returns False if the run continues: the member failed before it ever trained, and others train."""
        if self.membership.why_gone(member.id) is None:
            if outcome["status"] == "failed" and self.membership.is_newcomer(member.id):
                self.mark_failed(member.id, str(outcome["error"]))
                return False
            self.event_log.update_progress(progress)
            self._end(outcome)
        return True

    def _fail(self, error: ElasticDDPError) -> None:
        self._end({"status": "failed", "kind": type(error).__name__, "error": str(error)})

    def _end(self, outcome: dict[str, Any]) -> None:
        if self.event_log.end(outcome):
            self._notify_members()
            self._notify_driver()


def _described(member: Member) -> dict[str, Any]:
    return {"node": member.node, "node_id": member.node_id, "pid": member.pid, "id": member.id}
