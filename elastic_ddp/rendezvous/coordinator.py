"""The rendezvous' decisions and records, without Ray, threads or asyncio: generations, signals, and what is due."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

from elastic_ddp.distributed.assignment import Assignment
from elastic_ddp.errors import ElasticDDPError, StorageError
from elastic_ddp.rendezvous.event_log import EventLog
from elastic_ddp.rendezvous.hang import HangDetector
from elastic_ddp.rendezvous.members import DrainNotice, JoinRequest, Member
from elastic_ddp.rendezvous.membership import LEFT, Membership
from elastic_ddp.rendezvous.messages import Ended, PlannedAssignment, RendezvousOptions, Signals, WorkerDirectives
from elastic_ddp.rendezvous.sections import find_mismatch
from elastic_ddp.rendezvous.snapshot import Snapshot, State
from elastic_ddp.rendezvous.status import is_steady, status_of
from elastic_ddp.telemetry import events
from elastic_ddp.telemetry.event import Event, TrainingEvent

PREPARE_S = 5.0
"""How long, at most, training continues while members read the first rows of their parts in the next generation."""
START_TIMEOUT_S = 120.0
"""Minimum time in which a worker must get ready to train; `hang_timeout_s` if that is longer."""
STACKS_WITHIN_S = 2.0
"""How long hanging workers have to record their stacks."""


class Coordinator:
    """Holds the state of a rendezvous, and the address of the generations' store. Calls are made under one lock."""

    def __init__(self, options: RendezvousOptions, store: tuple[str, int]) -> None:
        self._options, self._store = options, store
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
        self.hangs = HangDetector(options.hang_timeout_s)
        self.notify_members = self.notify_driver = False
        """Whether calls that wait for a change have something new to return."""
        self._formed: dict[str, Assignment] = {}
        self._planned: dict[str, tuple[int, int]] = {}
        self._change_wanted = False
        self._account: dict[str, float] = {}
        """The longest account among members that came from the current generation."""
        self._not_joined: dict[str, float] = {}
        """Workers that were started and have not joined, and since when."""
        self._stacks_requested_at: float | None = None
        self._saver = ""
        """The member that is writing a checkpoint."""

    def take_over(self) -> list[str]:
        """Resumes from the state of the previous process. Returns the ids of the members."""
        members = [member.id for member in self.membership.known()]
        self.record(events.RendezvousRestarted(generation=self.membership.generation, pid=os.getpid()))
        self.hangs.begin(members, time.monotonic())
        return members

    @property
    def is_over(self) -> bool:
        """Whether the run has ended or is stopping."""
        return self.event_log.ended is not None or self.state.stop

    # Members.

    def join(self, request: JoinRequest, *, after: int, failure: str | None, account: dict[str, float] | None) -> None:
        """Takes the join request of a member that comes from generation `after`, 0 for none."""
        was_healthy = self.membership.failure is None
        self.state.attempts.starting.pop(request.member.id, None)
        if account and after == self.membership.generation and self._is_in_good_standing(request.member.id):
            self._account = max(self._account, account, key=lambda phases: sum(phases.values()))
        if self.membership.join(request, failure=failure) is not None:
            self._record_dismissals()
            return
        if was_healthy and self.membership.failure is not None:
            self._record_failure(self.membership.failure, reported_by=request.member.id)
        self._check_sections()
        self.form()

    def _is_in_good_standing(self, member: str) -> bool:
        """Whether a member has not failed; it may have left."""
        return self.membership.why_gone(member) in (None, LEFT)

    def place_of(self, member: str, after: int) -> Assignment | Ended | None:
        """Returns a member's place in a generation later than `after`, or why it gets none; None if that is open."""
        if (assignment := self._formed.get(member)) is not None and assignment.generation > after:
            return assignment
        return None if (gone := self.membership.why_gone(member)) is None else Ended(gone)

    def planned_place_of(self, member: str) -> PlannedAssignment | None:
        """Returns the place that a member may get in the next generation."""
        return self._as_planned(self._planned.get(member))

    def plan_join(self, member: Member) -> PlannedAssignment | None:
        """Returns the place that a worker would get if it joined now: the last one if another must leave for it."""
        places = self.membership.plan(time.monotonic(), joining=member)
        return self._as_planned(places.get(member.id) or max(places.values(), default=None))

    def _as_planned(self, place: tuple[int, int] | None) -> PlannedAssignment | None:
        return None if place is None else PlannedAssignment(*place, step=self.event_log.progress.get("step", 0))

    def mark_failed(self, member: str, how: str) -> None:
        """Records that a member has failed, and ends its generation."""
        membership, starting = self.membership, self.state.attempts.starting.get(member)
        if membership.why_gone(member) is None:
            self.state.attempts.record(membership, member, how, time.monotonic())
            membership.mark_failed(member, how)
            if membership.is_current(member):
                self._record_failure(how, member=member)
            elif self.event_log.ended is None and (starting is None or starting.node_id not in membership.draining):
                failed = events.NewcomerFailed(generation=membership.generation, member=member, error=how)
                standby = starting.process if starting is not None and starting.is_standby else None
                self.record(replace(failed, standby=standby))
        self._planned = {}
        self.form()
        self.notify_members = True

    def _record_failure(self, error: str, *, member: str | None = None, reported_by: str | None = None) -> None:
        generation = self.membership.generation
        self.state.shortfall.failed(len(self._formed), time.monotonic())
        self.record(events.WorkerFailed(generation=generation, member=member, reported_by=reported_by, error=error))
        self.notify_members = True

    def retire(self, member: str) -> None:
        """Removes a member that is done. It has failed if its generation continues."""
        is_alive = self.membership.is_current(member) and self.membership.why_gone(member) is None
        if is_alive and self.event_log.ended is None:
            self.mark_failed(member, "it left its generation without being asked to")
        self.membership.retire(member)
        self.form()

    def signals(self, member: Member, generation: int) -> Signals:
        """Returns the signals for a member of a generation."""
        membership, now_s = self.membership, time.monotonic()
        is_current = generation == membership.generation
        reconfigure = is_current and self._change_wanted and membership.wants_change(now_s)
        return Signals(
            stop=self.state.stop,
            ended=self.event_log.ended or membership.why_gone(member.id),
            failed_generation=generation if is_current and membership.failure is not None else None,
            reconfigure=reconfigure,
            planned=self.planned_place_of(member.id) if reconfigure and membership.has_time(now_s, PREPARE_S) else None,
            commit=self.state.open_request,
            verify=self.state.open_verify_request if is_current else 0,
            show_stacks=self.state.stacks_requests if is_current and self._stacks_requested_at is not None else 0,
        )

    def why_not_commit(self, member: Member, generation: int) -> str | None:
        """Returns why a member may not commit what it wrote in a generation; None if it may."""
        if not self.membership.has_joined(member.id) or not self._is_in_good_standing(member.id):
            reason = self.membership.why_gone(member.id) or "the rendezvous does not know it"
            return f"this worker counts as failed: {reason}"
        if generation < self.state.restored:
            return f"generation {self.state.restored} has started from a commit since generation {generation}"
        return None

    def check_started(self, started: list[str]) -> None:
        """Marks running workers as failed that have not joined within the start timeout."""
        now_s, timeout_s = time.monotonic(), max(self._options.hang_timeout_s, START_TIMEOUT_S)
        not_joined = [worker for worker in started if not self.membership.has_joined(worker)]
        self._not_joined = {worker: self._not_joined.get(worker, now_s) for worker in not_joined}
        for worker, since_s in self._not_joined.items():
            if now_s - since_s >= timeout_s:
                how = f"not ready to train {timeout_s:g} s after its start (hang_timeout_s): it hangs in an import or "
                how += "while it builds the model. Raise hang_timeout_s if that may take longer."
                self.mark_failed(worker, how)

    # Generations.

    def form(self) -> None:
        """Forms the next generation if possible."""
        if self.state.open_request and self.membership.all_wait() and self.membership.has_committed():
            self.fulfill_requests(self.state.requests)  # too few workers train, and their state is committed
        self.membership.commit_wanted = bool(self.state.open_request)
        formed = self.membership.form(time.monotonic())
        self._record_dismissals()
        if formed is None:
            return
        if formed.source is None:
            self.state.restored = formed.number
        reported, speed = self.event_log.progress.get("step", 0), self.event_log.steps_per_s or 0.0
        self.state.attempts.generation_formed(formed, reported, speed)
        recovered_s = self.state.shortfall.formed(formed, self.membership.limit, time.monotonic())
        self._snapshot.save(self.state)
        self.hangs.begin([member.id for member in formed.members], time.monotonic())
        self._stacks_requested_at, self._planned, self._formed = None, {}, formed.assignments(*self._store)
        if self._account:
            self.record(events.GenerationAccount(generation=formed.number - 1, account=self._account))
            self._account = {}
        standing_by = len(self.membership.known()) - len(formed.members) if self.membership.may_stand_by else 0
        self.record(replace(formed.event(), standing_by=standing_by, recovered_s=recovered_s))
        self.notify_members = True

    def _record_dismissals(self) -> None:
        for member, kind in (dismissed := list(self.membership.dismissed.items())[self.state.recorded_dismissals :]):
            self.record(events.WorkerLeft(generation=self.membership.generation, member=member, kind=kind))
        if dismissed:
            self.state.recorded_dismissals += len(dismissed)
            self.notify_members = True
            self._snapshot.save(self.state)

    # What is due by the clock.

    def tick(self) -> None:
        """Forms a generation that is due, interrupts overdue steps, and ends hangs."""
        now_s = time.monotonic()
        self.form()
        self._plan(now_s)
        if self.membership.interrupt_if_overdue(now_s):
            self.record(events.DrainOverdue(generation=self.membership.generation))
            self.notify_members = True
        self._check_sections()
        self._check_for_hang(now_s)
        step, timeout_s = self.event_log.progress.get("step", 0), self._options.heartbeat_timeout_s
        if error := self.state.attempts.verdict(step, self.membership, now_s, timeout_s):
            self._fail_with_commit(error)
        self._snapshot.save(self.state)

    def _fail_with_commit(self, error: ElasticDDPError) -> None:
        """Ends the run, once members that wait for others have committed their state."""
        membership = self.membership
        if membership.all_wait() and not membership.has_committed():
            if not self.state.open_request:
                self.state.requests += 1
            self.apply_request()
        current = membership.current
        if not (membership.is_training() and current is not None and current.handover_only):
            self._fail(error)

    def _plan(self, now_s: float) -> None:
        """Updates whether membership should change and the places that members get then, both at once."""
        before = (self._change_wanted, self._planned)
        self._change_wanted, self._planned = self.membership.wants_change(now_s), self.membership.plan(now_s)
        self.notify_members |= before != (self._change_wanted, self._planned)

    def _check_for_hang(self, now_s: float) -> None:
        """On a hang, first asks all members for their stacks, then decides."""
        for member in self.hangs.places():
            if self.membership.why_gone(member) is not None:
                self.hangs.remove(member)
        if self.membership.all_wait():  # waiting for workers is not a hang
            self.hangs.begin(self.hangs.places(), now_s)
        if self.event_log.ended is not None or not self.hangs.is_hung(now_s):
            self._stacks_requested_at = None
        elif self._stacks_requested_at is None:
            self.state.stacks_requests += 1
            self._stacks_requested_at = now_s
            self.notify_members = True
        elif now_s - self._stacks_requested_at >= STACKS_WITHIN_S:
            self._stacks_requested_at = None
            self._end_hang(now_s)

    def _check_sections(self) -> None:
        """Ends the run if ranks of the current generation wait for each other at different places of the program."""
        membership = self.membership
        ids = [member.id for member in membership.current.members] if membership.current is not None else []
        if membership.failure is not None and (any(map(membership.why_gone, ids)) or not membership.all_wait()):
            return  # a failed member has broken it, or not all have come
        reports = self.hangs.reports(ids)
        if error := find_mismatch(reports, len(ids), self._options.num_micro_batches):
            self._fail(error)

    def _end_hang(self, now_s: float) -> None:
        places, verdict = self.hangs.places(), self.hangs.decide(is_broken=self.membership.failure is not None)
        facts: Any = {"places": places, "culprits": [*verdict.culprits], "seconds": self.hangs.timeout_s}
        self.record(events.HangDetected(generation=self.membership.generation, **facts))
        for member, how in verdict.culprits.items():
            self.state.attempts.record(self.membership, member, how, now_s, is_hang=True)
            self.membership.mark_failed(member, how)
            self._record_failure(how, member=member)
        if verdict.failure is not None:
            self.membership.failure = verdict.failure
            self._record_failure(verdict.failure)
        if verdict.end is not None:
            self._fail(verdict.end)
        self.hangs.begin(places, now_s)  # the other members get another timeout
        self.form()

    def apply_request(self) -> None:
        """Saves a request of the user, a node or a member, and does what follows from it."""
        self._snapshot.save(self.state)
        self.form()
        self._plan(time.monotonic())
        self.notify_members = True

    def ask_to_leave(self, member: Member, within_s: float, why: str) -> None:
        """Asks a member to leave within a number of seconds."""
        if self.membership.why_gone(member.id) is None:
            self.record(events.DrainNoticed(member=member.id, node=member.node, within_s=within_s, by=why))
            self.membership.ask_to_leave([member.id], DrainNotice(time.monotonic(), within_s))
            self.apply_request()

    def drain(self, node_id: str, within_s: float, by: str) -> None:
        """Asks all members on a node to leave within a number of seconds, unless they were asked before."""
        if self.membership.drain(node_id, DrainNotice(time.monotonic(), within_s)):
            if any(member.node_id == node_id for member in self.membership.known()):
                self.record(events.DrainNoticed(node_id=node_id, within_s=within_s, by=by))
            self.apply_request()

    def resize(self, num_workers: int) -> None:
        """Sets the maximum number of workers."""
        self.record(events.ResizeRequested(num_workers=num_workers))
        self.membership.wanted = num_workers
        self.apply_request()

    def exclude(self, member: Member, within_s: float) -> None:
        """Keeps the run off the device of a member that computes wrong values.

        Its node is drained. If all members are on this node, the run goes on with one worker fewer instead, unless it
        needs all: a replacement would get the same device.
        """
        staying = [other for other in self.membership.known() if other.id != member.id]
        if any(other.node_id != member.node_id for other in staying):
            self.drain(member.node_id, within_s, "verify")
        elif len(staying) >= self.membership.min_workers:
            self.ask_to_leave(member, within_s, "verify")
            self.resize(len(staying))
        self.mark_failed(member.id, "it computes wrong values")

    def undrain(self, node_id: str) -> None:
        """Admits members from a node again that was drained."""
        if node_id in self.membership.draining:
            self.membership.undrain(node_id)
            self.record(events.DrainCancelled(node_id=node_id))
            self.apply_request()

    def fulfill_requests(self, newest: int) -> None:
        """Marks all commit requests up to this one as fulfilled."""
        if newest > self.state.fulfilled_requests:
            self.state.fulfilled_requests = newest
            self._snapshot.save(self.state)
            self.notify_members = True

    def directives(self, started: list[str]) -> WorkerDirectives:
        """Returns what the controller does about its running workers. Deletes details of all others."""
        membership = self.membership
        self._record_dismissals()
        membership.prune(started)
        self.state.recorded_dismissals = len(membership.dismissed)
        failed = membership.failed()
        newcomers = [worker for worker in started if membership.is_newcomer(worker)]
        return WorkerDirectives(
            failed={worker: failed[worker] for worker in started if worker in failed},
            newcomers=newcomers,
            dismissed=[worker for worker in started if worker in membership.dismissed],
            leaving=membership.leaving,
            avoid=list(membership.draining),
            limit=membership.limit,
            is_over=self.is_over,
            is_steady=not (newcomers or self.is_over) and is_steady(membership, self.event_log),
        )

    @property
    def is_saving(self) -> bool:
        return bool(self._saver) and self.membership.why_gone(self._saver) is None

    @property
    def last_commit(self) -> int | None:
        """Steps done in the newest commit."""
        newest = self.event_log.last(events.CommitSucceeded) or self.event_log.last(events.Resumed)
        return self._options.last_commit if newest is None else newest.step

    def status(self, standbys: frozenset[str] | set[str] = frozenset()) -> dict[str, Any]:
        """Returns the state of the run, for `elastic-ddp status`. `standbys`: ids of standbys."""
        return status_of(self.state, self.event_log, standbys, is_over=self.is_over) | {"last_commit": self.last_commit}

    def report(self, event: Event, progress: dict[str, Any] | None, sender: str = "", number: int = 0) -> None:
        """Takes an event for the ledger and a progress report, and does what follows from them. See `EventLog.add`."""
        has_failed = not self._is_in_good_standing(sender)
        if not has_failed:
            self.event_log.update_progress(progress)
        elif isinstance(event, TrainingEvent) and event.generation < self.membership.generation:
            event = events.ReportIgnored(generation=event.generation, what=event.event, at=event.at)
        elif isinstance(event, events.GenerationEnded):
            event = replace(event, account=None)
        if not self.event_log.add(event, sender, number):
            return
        self.notify_driver = True
        match event:
            case events.FirstStep():
                self.membership.mark_trained(event.generation)
            case events.CommitStarted():
                self._saver = sender
            case events.CommitSucceeded():
                self._saver, self.state.failed_saves = "", 0
                self.fulfill_requests(event.request or 0)
            case events.StepVerified(request=request) | events.CorruptionFound(request=request) if (
                request and request > self.state.verified_requests
            ):
                text = event.text if isinstance(event, events.CorruptionFound) else ""
                self.state.verified_requests, self.state.verified = request, text
            case events.CommitFailed():
                self._saver = ""
                if event.counts and not has_failed:
                    self._count_failed_save(event)

    def _count_failed_save(self, failed: events.CommitFailed) -> None:
        """Ends the run after too many consecutive failures."""
        self.state.failed_saves += 1
        if self.state.failed_saves > self._options.max_failed_saves:
            newest = "no commit" if self.last_commit is None else f"step {self.last_commit}"
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

    def _fail(self, error: ElasticDDPError) -> None:
        self.end({"status": "failed", "kind": type(error).__name__, "error": str(error)})

    def end(self, outcome: dict[str, Any]) -> None:
        """Ends the run. The first outcome counts."""
        if self.event_log.end(outcome):
            self.notify_members = self.notify_driver = True
