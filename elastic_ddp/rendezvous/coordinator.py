"""Applies the decisions of `Membership`: answers to members, signals, generations and events. No Ray or asyncio."""

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
from elastic_ddp.rendezvous.members import JoinRequest, Member
from elastic_ddp.rendezvous.membership import LEFT, Membership
from elastic_ddp.rendezvous.messages import (
    DriverUpdate,
    Ended,
    MemberRequest,
    PlannedAssignment,
    RendezvousOptions,
    Signals,
)
from elastic_ddp.rendezvous.snapshot import Snapshot, State
from elastic_ddp.telemetry import events
from elastic_ddp.telemetry.event import Event, TrainingEvent

PREPARE_S = 5.0
"""How long, at most, training continues while members read the first rows of their parts in the next generation."""


class Coordinator:
    """Applies the reports of members to the state of a run. For one thread.

    Args:
        options: of the run.
        store: the address of the generations' store.
        notify_members, notify_driver: called when calls that wait for a change have something new to return.
    """

    def __init__(
        self,
        options: RendezvousOptions,
        *,
        store: tuple[str, int],
        notify_members: Callable[[], None],
        notify_driver: Callable[[], None],
    ) -> None:
        self.options = options
        self._store = store
        self.notify_members = notify_members
        self.notify_driver = notify_driver
        self._snapshot = Snapshot(options.snapshot_folder)
        state = self._snapshot.load()
        self.is_restarted = state is not None
        self.state = state or State(Membership(options))
        self.membership = self.state.membership
        self.event_log = EventLog(self._snapshot)
        self.hangs = HangDetector(options.hang_timeout_s)
        self.standbys: set[str] = set()
        """Ids of workers that wait to replace another one."""
        self._formed: dict[str, Assignment] = {}
        self._planned: dict[str, tuple[int, int]] = {}
        self._change_wanted = False
        self._account: dict[str, float] = {}
        """The longest account among members that came from the current generation."""
        self._saver = ""
        """The member that is writing a checkpoint."""

    def take_over(self) -> list[str]:
        """Resumes from the state of the previous process. Returns the ids of the members."""
        members = [member.id for member in self.membership.known()]
        self.record(events.RendezvousRestarted(generation=self.membership.generation, pid=os.getpid()))
        self.hangs.begin(members, time.monotonic())
        return members

    def save(self) -> None:
        self._snapshot.save(self.state)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended or is stopping."""
        return self.event_log.ended is not None or self.membership.wanted.stop

    # Members.

    def worker_starts(self, member: Member) -> None:
        """Takes note of a worker that connects."""
        if not self.membership.has_joined(member.id):
            self.state.attempts.starting[member.id] = member

    def join(self, request: JoinRequest) -> Assignment | Ended | None:
        """Takes a join request, and returns what `place_of` does."""
        member = request.member.id
        place = self.place_of(member, request.after)
        if isinstance(place, Assignment) or self.event_log.ended is not None:
            return place  # also while the run stops: the other members wait for it
        if self.membership.wanted.stop and request.after == 0:
            self.retire(request.member)
            return Ended("stopped")
        request = replace(request, at_s=time.monotonic())
        if request.activity is not None:
            self.hangs.update(member, request.activity, request.at_s)
        was_healthy = self.membership.failure is None
        self.state.attempts.starting.pop(member, None)
        is_of_current = request.after == self.membership.generation
        if request.account and is_of_current and self._is_in_good_standing(member):
            self._account = max(self._account, request.account, key=lambda phases: sum(phases.values()))
        if self.membership.join(request) is not None:
            self.record_dismissals()
        else:
            if was_healthy and self.membership.failure is not None:
                self.record_failure(self.membership.failure, reported_by=member)
            self.check_sections()
            self.form()
        return self.place_of(member, request.after)

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
        return None if place is None else PlannedAssignment(*place, step=self.event_log.step)

    def mark_failed(self, member: str, how: str, *, is_hang: bool = False) -> None:
        """Records that a member has failed, and ends its generation."""
        membership = self.membership
        starting = self.state.attempts.starting.get(member)
        if membership.why_gone(member) is None:
            self.state.attempts.record(membership, member, how, time.monotonic(), is_hang=is_hang)
            membership.mark_failed(member, how)
            if membership.is_current(member):
                self.record_failure(how, member=member)
            elif self.event_log.ended is None and (starting is None or starting.node_id not in membership.draining):
                standby = starting.process if starting is not None and starting.is_standby else None
                generation = membership.generation
                self.record(events.NewcomerFailed(generation=generation, member=member, error=how, standby=standby))
        self.standbys.discard(member)
        self._planned = {}
        self.form()
        self.notify_members()

    def record_failure(self, error: str, *, member: str | None = None, reported_by: str | None = None) -> None:
        """Records how the current generation has failed."""
        generation = self.membership.generation
        self.state.shortfall.failed(len(self._formed), time.monotonic())
        self.record(events.WorkerFailed(generation=generation, member=member, reported_by=reported_by, error=error))
        self.notify_members()

    def retire(self, member: Member) -> None:
        """Removes a member that is done. The member has failed if its generation continues."""
        is_alive = self.membership.is_current(member.id) and self.membership.why_gone(member.id) is None
        if is_alive and self.event_log.ended is None:
            self.mark_failed(member.id, "it left its generation without being asked to")
        self.membership.remove(member.id)
        self.form()

    def update(self, member: Member, progress: dict[str, Any] | None, activity: ActivityReport) -> None:
        """Takes the regular reports of a member."""
        if self.membership.why_gone(member.id) is None:
            self.event_log.update_progress(progress)
        self.hangs.update(member.id, activity, time.monotonic())
        if activity.place == STANDBY:
            self.standbys.add(member.id)
        else:
            self.standbys.discard(member.id)

    def signals(self, member: Member, generation: int, requests: tuple[MemberRequest, ...]) -> Signals:
        """Returns the signals for a member of a generation, and `requests` for it."""
        membership = self.membership
        wanted = membership.wanted
        now_s = time.monotonic()
        is_current = generation == membership.generation
        reconfigure = is_current and self._change_wanted and membership.wants_change(now_s)
        return Signals(
            stop=wanted.stop,
            ended=self.event_log.ended or membership.why_gone(member.id),
            failed_generation=generation if is_current and membership.failure is not None else None,
            reconfigure=reconfigure,
            planned=self.planned_place_of(member.id) if reconfigure and membership.has_time(now_s, PREPARE_S) else None,
            commit=wanted.commits.open,
            verify=wanted.verified_steps.open if is_current else 0,
            requests=requests,
        )

    def why_not_commit(self, member: Member, generation: int) -> str | None:
        """Returns why a member may not commit what it wrote in a generation; None if it may."""
        if not self.membership.has_joined(member.id) or not self._is_in_good_standing(member.id):
            reason = self.membership.why_gone(member.id) or "the rendezvous does not know it"
            return f"this worker counts as failed: {reason}"
        if generation < self.state.restored:
            return f"generation {self.state.restored} has started from a commit since generation {generation}"
        return None

    # Generations.

    def apply_request(self) -> None:
        """Saves a request, and forms or plans a generation that follows from it."""
        self.save()
        self.form()
        self.plan(time.monotonic())
        self.notify_members()

    def form(self) -> None:
        """Forms the next generation if possible."""
        membership, commits, now_s = self.membership, self.membership.wanted.commits, time.monotonic()
        if commits.open and membership.all_wait() and membership.has_committed():
            self.fulfill_commits(commits.newest)  # too few workers train, and their state is committed
        formed = membership.form(now_s)
        self.record_dismissals()
        if formed is None:
            return
        if formed.source is None:
            self.state.restored = formed.number
        self.state.attempts.generation_formed(formed, self.event_log.step, self.event_log.steps_per_s or 0.0)
        recovered_s = self.state.shortfall.formed(formed, membership.limit, now_s)
        self.save()
        self.hangs.begin([member.id for member in formed.members], now_s)
        self._planned = {}
        self._formed = formed.assignments(*self._store)
        if self._account:
            self.record(events.GenerationAccount(generation=formed.number - 1, account=self._account))
            self._account = {}
        standing_by = len(membership.known()) - len(formed.members) if self.options.may_stand_by else 0
        self.record(replace(formed.event(), standing_by=standing_by, recovered_s=recovered_s))
        self.notify_members()

    def record_dismissals(self) -> None:
        """Records the members that left because they were asked to."""
        dismissed, recorded = self.membership.dismissed, self.state.recorded_dismissals
        new = [member for member in dismissed if member not in recorded]
        for member in new:
            generation = self.membership.generation
            self.record(events.WorkerLeft(generation=generation, member=member, kind=dismissed[member]))
        if new:
            self.state.recorded_dismissals = {*dismissed}
            self.save()
            self.notify_members()

    def plan(self, now_s: float) -> None:
        """Updates whether membership should change and the places that members get then, both at once."""
        before = (self._change_wanted, self._planned)
        self._change_wanted = self.membership.wants_change(now_s)
        self._planned = self.membership.plan(now_s)
        if before != (self._change_wanted, self._planned):
            self.notify_members()

    def check_sections(self) -> None:
        """Ends the run if ranks of the current generation wait for each other at different places of the program."""
        membership = self.membership
        ids = [member.id for member in membership.current.members] if membership.current is not None else []
        if membership.failure is not None and (any(map(membership.why_gone, ids)) or not membership.all_wait()):
            return  # a failed member has broken it, or not all have come
        error = find_mismatch(self.hangs.idle(ids), len(ids), self.options.num_micro_batches)
        if error is not None:
            self.fail(error)

    def fulfill_commits(self, newest: int) -> None:
        """Marks all commit requests up to this one as fulfilled."""
        commits = self.membership.wanted.commits
        if newest > commits.fulfilled:
            commits.fulfilled = newest
            self.save()
            self.notify_members()

    # The ledger, the driver, and the end.

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
        self.notify_driver()
        wanted = self.membership.wanted
        match event:
            case events.FirstStep():
                self.membership.mark_trained(event.generation)
            case events.CommitStarted():
                self._saver = sender
            case events.CommitSucceeded():
                self._saver = ""
                self.state.failed_saves = 0
                self.fulfill_commits(event.request or 0)
            case events.StepVerified(request=request) | events.CorruptionFound(request=request) if (
                request and request > wanted.verified_steps.fulfilled
            ):
                wanted.verified_steps.fulfilled = request
                wanted.finding = event.text if isinstance(event, events.CorruptionFound) else ""
            case events.CommitFailed():
                self._saver = ""
                if event.counts and not has_failed:
                    self._count_failed_save(event)

    def _count_failed_save(self, failed: events.CommitFailed) -> None:
        """Ends the run after too many consecutive failures."""
        self.state.failed_saves += 1
        if self.state.failed_saves > self.options.max_failed_saves:
            newest = "no commit" if self.last_commit is None else f"step {self.last_commit}"
            self.fail(
                StorageError(
                    f"{self.state.failed_saves} saves in a row failed (checkpoint.max_failed_saves="
                    f"{self.options.max_failed_saves}). Last error: {failed.error}. Newest commit: {newest}. Repair "
                    f"{'the storage' if failed.of_storage else 'the cause'} and run the same command again."
                )
            )
        self.save()

    def record(self, event: Event) -> None:
        """Records an event of the rendezvous itself, with the current time as `at`."""
        self.report(replace(event, at=time.time()), None)

    @property
    def last_commit(self) -> int | None:
        """Steps done in the newest commit."""
        newest = self.event_log.last(events.CommitSucceeded) or self.event_log.last(events.Resumed)
        return self.options.last_commit if newest is None else newest.step

    def driver_update(self, after: int) -> DriverUpdate:
        """Returns the events after the first `after`, and the run's state."""
        return DriverUpdate(
            events=self.event_log.after(after),
            progress=self.event_log.progress,
            outcome=self.event_log.outcome,
            num_alive=len(self.membership.known()),
            stopping=self.membership.wanted.stop,
            is_saving=bool(self._saver) and self.membership.why_gone(self._saver) is None,
            draining=tuple(self.membership.draining),
        )

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

    def fail(self, error: ElasticDDPError) -> None:
        """Ends the run with an error."""
        self._end({"status": "failed", "kind": type(error).__name__, "error": str(error)})

    def _end(self, outcome: dict[str, Any]) -> None:
        if self.event_log.end(outcome):
            self.notify_members()
            self.notify_driver()
