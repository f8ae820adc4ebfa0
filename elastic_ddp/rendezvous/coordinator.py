"""What a rendezvous decides and puts on record, without Ray, threads or asyncio: who is in which generation, what its
members should know, and what is due by the clock.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

from elastic_ddp.distributed.process_group import Assignment
from elastic_ddp.errors import StorageError
from elastic_ddp.rendezvous.event_log import EventLog
from elastic_ddp.rendezvous.hang import ActivityReport, HangWatch
from elastic_ddp.rendezvous.members import DrainNotice, JoinRequest, Member
from elastic_ddp.rendezvous.membership import LEFT, Membership
from elastic_ddp.rendezvous.messages import Ended, PlannedAssignment, RendezvousOptions, Signals, WorkerDirectives
from elastic_ddp.rendezvous.snapshot import Snapshot, State
from elastic_ddp.telemetry.events import (
    CommitFailed,
    CommitStarted,
    CommitSucceeded,
    DrainNoticed,
    DrainOverdue,
    EvaluationFinished,
    EvaluationStarted,
    Event,
    FirstStep,
    GenerationAccount,
    GenerationEnded,
    GenerationFormed,
    GenerationStarted,
    HangDetected,
    NewcomerFailed,
    RendezvousRestarted,
    ReportIgnored,
    Resumed,
    StepsCompleted,
    WorkerFailed,
    WorkerLeft,
)

PREPARE_S = 5.0
"""How long training goes on while members read the first rows of their parts in the next generation."""
START_S = 120.0
"""What a worker may take to get ready to train, at least; longer if `hang_timeout_s` is longer."""
STACKS_S = 2.0
"""How long workers that hang may take to say where."""
_OF_TRAINING = (
    GenerationStarted,
    FirstStep,
    StepsCompleted,
    EvaluationStarted,
    EvaluationFinished,
    GenerationEnded,
)
"""What members say of the generation that they are in."""


class Coordinator:
    """Every call that changes anything is made under one lock, and may leave something to tell.

    Args:
        options: what it goes by.
        store: host and port of the store in which members of a generation find each other.

    Attributes:
        changed: there is something new for members, who have not been told.
        has_news: the same for the driver.
    """

    def __init__(self, options: RendezvousOptions, store: tuple[str, int]) -> None:
        self._options = options
        self._host, self._port = store
        self._memory = Snapshot(options.memory)
        state = self._memory.load()
        self.is_second = state is not None
        """Whether another process was the rendezvous before this one."""
        self.state = state or State(Membership(min_workers=options.min_workers, max_workers=options.max_workers))
        self.membership = self.state.membership
        self.journal = EventLog(self._memory)
        self.changed = self.has_news = False
        self._formed: dict[str, Assignment] = {}
        self._prospects: dict[str, tuple[int, int]] = {}
        self._wanted_change = False
        self._account: dict[str, float] = {}
        """The longest that those who come from the current generation gave."""
        self._watch = HangWatch(options.hang_timeout_s)
        self._expected: dict[str, float] = {}
        """Workers that were started and have not come, and since when."""
        self._stacks_wanted_at: float | None = None
        self._saver = ""
        """The member that has begun the newest save, until that ends."""

    def go_on(self) -> list[str]:
        """Takes up what the process before this one left, whose members it returns."""
        members = [member.id for member in self.membership.known()]
        self.record(RendezvousRestarted(generation=self.membership.generation, pid=os.getpid()))
        self._watch.begin(members, time.monotonic())
        return members

    # Members.

    def arrive(
        self, arrival: JoinRequest, *, after: int, failure: str | None, account: dict[str, float] | None
    ) -> None:
        """A member comes from generation `after`, 0 for none."""
        healthy = self.membership.failure is None
        counts = after == self.membership.generation and self.membership.why_gone(arrival.member.id) in (None, LEFT)
        if account and counts:
            self._account = max(self._account, account, key=lambda each: sum(each.values()))
        if self.membership.arrive(arrival, failure=failure) is not None:
            self._record_dismissals()
            return
        if healthy and self.membership.failure is not None:
            number, error = self.membership.generation, self.membership.failure
            self.record(WorkerFailed(generation=number, reported_by=arrival.member.id, error=error))
            self.changed = True
        self.form()

    def place_of(self, member: str, after: int) -> Assignment | Ended | None:
        """A member's place in a generation later than `after`, or why it gets none; None if that is open."""
        assignment = self._formed.get(member)
        if assignment is not None and assignment.generation > after:
            return assignment
        gone = self.membership.why_gone(member)
        return Ended(gone) if gone is not None else None

    def prospect_of(self, member: str) -> PlannedAssignment | None:
        """The place that a member may get."""
        place = self._prospects.get(member)
        return None if place is None else PlannedAssignment(*place, self._steps_done)

    def prospect_of_one_to_come(self, member: Member) -> PlannedAssignment | None:
        """The place that somebody may get who has not come yet."""
        places = self.membership.prospects(time.monotonic(), also=member)
        return PlannedAssignment(*places[member.id], self._steps_done) if member.id in places else None

    @property
    def _steps_done(self) -> int:
        """By the newest word of rank 0, which may be a poll old."""
        return int(self.journal.progress.get("step", 0))

    def lose(self, member: str, how: str) -> None:
        """A member's pulse ended."""
        known = self.membership.why_gone(member) is not None
        generation, current = self.membership.generation, self.membership.current
        was_in_it = not known and current is not None and member in current.ids
        if self.membership.lose(member, how) or was_in_it:
            self.record(WorkerFailed(generation=generation, member=member, error=how))
        elif not known and self.journal.ended is None:
            self.record(NewcomerFailed(generation=generation, member=member, error=how))
        self._prospects = {}  # of a generation that does not come to be
        self.form()
        self.changed = True

    def retire(self, member: str) -> None:
        """A member is through. If the run is not, and goes on with it, that is a loss."""
        current = self.membership.current
        is_in_it = current is not None and member in current.ids and self.membership.why_gone(member) is None
        if is_in_it and self.journal.ended is None:
            self.lose(member, "it left its generation, and was not asked to")
        self.membership.retire(member)
        self.form()

    def hear(self, member: str, whereabouts: ActivityReport) -> None:
        """A member says where it is."""
        self._watch.hear(member, whereabouts, time.monotonic())

    def signals(self, member: Member, generation: int) -> Signals:
        """What a member of a generation should know."""
        membership = self.membership
        is_current = generation == membership.generation
        reconfigure = is_current and self._wanted_change and membership.wants_change(time.monotonic())
        return Signals(
            stop=self.state.stop,
            ended=self.journal.ended or membership.why_gone(member.id),
            broken=generation if is_current and membership.failure is not None else None,
            reconfigure=reconfigure,
            prospect=self.prospect_of(member.id) if reconfigure and self._has_time() else None,
            commit=self.state.open_request,
            show_stacks=self.state.stacks_requests if is_current and self._stacks_wanted_at is not None else 0,
        )

    def _has_time(self) -> bool:
        """Whether those who are to go can wait for others to get ready."""
        return self.membership.has_time(time.monotonic(), PREPARE_S)

    def why_not_commit(self, member: Member, generation: int) -> str | None:
        """Why what a member has written in a generation may not be committed; None if it may. It may if the member
        takes part in the run, or did until it left in peace, and no generation has begun from a commit since."""
        gone = self.membership.why_gone(member.id)
        if not self.membership.has_seen(member.id) or gone not in (None, LEFT):
            return f"this worker was presumed dead: {gone or 'it is not known'}"
        if generation < self.state.restored:
            return f"generation {self.state.restored} has begun from a commit since generation {generation}"
        return None

    def expect(self, started: list[str]) -> None:
        """These workers there are. One that does not come at all is given up."""
        now_s, timeout_s = time.monotonic(), max(self._options.hang_timeout_s, START_S)
        self._expected = {
            each: self._expected.get(each, now_s) for each in started if not self.membership.has_seen(each)
        }
        for member, since_s in self._expected.items():
            if now_s - since_s >= timeout_s:
                self.lose(
                    member,
                    f"it was not ready to train {timeout_s:g} s after its start (hang_timeout_s): it hangs in an "
                    "import, or where it builds the model. Raise hang_timeout_s if that may take longer",
                )

    def fail(self, member: Member, error: str) -> bool:
        """A member failed. Returns whether it was a newcomer to a run that trains, and so is replaced."""
        if not self.membership.is_newcomer(member.id):
            return False
        self.lose(member.id, error)
        return True

    def forget(self, started: list[str]) -> None:
        """What is of use only for workers that there are."""
        self._record_dismissals()
        self.membership.forget(started)
        self.state.recorded_dismissals = len(self.membership.dismissed)

    # Generations.

    def form(self) -> None:
        """Forms the next generation if that can be."""
        self._meet_request()
        self.membership.commit_wanted = bool(self.state.open_request)
        formed = self.membership.form(time.monotonic())
        self._record_dismissals()
        if formed is None:
            return
        if formed.source is None:
            self.state.restored = formed.number
        self.save()
        self._watch.begin([member.id for member in formed.members], time.monotonic())
        self._stacks_wanted_at = None
        self._prospects = {}
        self._formed = {
            member.id: Assignment(
                generation=formed.number,
                rank=rank,
                world_size=len(formed.members),
                store_host=self._host,
                store_port=self._port,
                source=formed.source,
                receivers=formed.receivers,
                reason=formed.reason,
                first_step=formed.first_step,
                handover_only=formed.brief,
                same_members=formed.again,
                in_collective_task=formed.amid,
            )
            for rank, member in enumerate(formed.members)
        }
        if self._account:
            self.record(GenerationAccount(generation=formed.number - 1, account=self._account))
            self._account = {}
        members = [{"rank": rank, "node": member.node, "pid": member.pid} for rank, member in enumerate(formed.members)]
        self.record(
            GenerationFormed(
                generation=formed.number,
                world_size=len(members),
                reason=formed.reason,
                first_step=formed.first_step,
                waited_s=formed.waited_s,
                members=members,
            )
        )
        self.changed = True

    def _record_dismissals(self) -> None:
        for member, kind in list(self.membership.dismissed.items())[self.state.recorded_dismissals :]:
            self.record(WorkerLeft(generation=self.membership.generation, member=member, kind=kind))
            self.changed = True
        if self.state.recorded_dismissals < len(self.membership.dismissed):
            self.state.recorded_dismissals = len(self.membership.dismissed)
            self.save()

    # By the clock.

    def tick(self) -> None:
        """What is due: members who waited long enough, notices that run out, hangs."""
        now_s = time.monotonic()
        self.form()
        self._look_ahead(now_s)
        if self.membership.break_if_overdue(now_s):
            self.record(DrainOverdue(generation=self.membership.generation))
            self.changed = True
        self._look_for_a_hang(now_s)
        self.save()

    def _look_ahead(self, now_s: float) -> None:
        """Whether membership is to change, and who would be where then: members are told both at once."""
        before = (self._wanted_change, self._prospects)
        self._wanted_change, self._prospects = self.membership.wants_change(now_s), self.membership.prospects(now_s)
        if before != (self._wanted_change, self._prospects):
            self.changed = True

    def _look_for_a_hang(self, now_s: float) -> None:
        """First everybody says where its threads are, then those whom others wait for are given up."""
        for member in self._watch.places():
            if self.membership.why_gone(member) is not None:
                self._watch.forget(member)
        if self.membership.all_wait():  # for others to come, as long as that takes
            self._watch.begin(self._watch.places(), now_s)
        if self.journal.ended is not None or not self._watch.is_hung(now_s):
            self._stacks_wanted_at = None
        elif self._stacks_wanted_at is None:
            self.state.stacks_requests += 1
            self._stacks_wanted_at = now_s
            self.changed = True
        elif now_s - self._stacks_wanted_at >= STACKS_S:
            self._stacks_wanted_at = None
            self._end_hang(now_s)

    def _end_hang(self, now_s: float) -> None:
        generation, places = self.membership.generation, self._watch.places()
        verdict = self._watch.judge(is_broken=self.membership.failure is not None)
        culprits, silent_s = [*verdict.culprits], self._watch.timeout_s
        self.record(HangDetected(generation=generation, places=places, culprits=culprits, seconds=silent_s))
        for member, how in verdict.culprits.items():
            self.membership.lose(member, how)
            self.record(WorkerFailed(generation=generation, member=member, error=how))
        if verdict.failure is not None:
            self.membership.failure = verdict.failure
            self.record(WorkerFailed(generation=generation, error=verdict.failure))
        if verdict.end is not None:
            self.end({"status": "failed", "kind": type(verdict.end).__name__, "error": str(verdict.end)})
        self._watch.begin(places, now_s)  # one more timeout for those who are left
        self.form()
        self.changed = True

    # What others want of it.

    def act(self) -> None:
        """Somebody is to go, or to come: does what follows from that, whatever happens to this process."""
        self.save()
        self.form()
        self._look_ahead(time.monotonic())
        self.changed = True

    def ask_to_leave(self, member: Member, within_s: float, why: str) -> None:
        """A member has been told to go."""
        if self.membership.why_gone(member.id) is None:
            self.record(DrainNoticed(member=member.id, node=member.node, within_s=within_s, by=why))
            self.membership.ask_to_leave([member.id], DrainNotice(time.monotonic(), within_s))
            self.act()

    def drain(self, node_id: str, within_s: float, by: str) -> None:
        """A node is to go, if that was not known."""
        if self.membership.drain(node_id, DrainNotice(time.monotonic(), within_s)):
            if any(each.node_id == node_id for each in self.membership.known()):
                self.record(DrainNoticed(node_id=node_id, within_s=within_s, by=by))
            self.act()

    def request_commit(self) -> int:
        """Asks for a commit at the next step boundary; returns the request's number."""
        self.state.requests += 1
        request = self.state.requests
        self.act()
        return request

    def _meet_request(self) -> None:
        """Where all wait, for there are too few, what they hold may be committed already."""
        if self.state.open_request and self.membership.all_wait() and self.membership.has_committed():
            self.meet_requests(self.state.requests)

    def meet_requests(self, newest: int) -> None:
        """There is a commit for all requests up to this one."""
        if newest > self.state.requests_met:
            self.state.requests_met = newest
            self.save()
            self.changed = True

    def orders(self, started: list[str]) -> WorkerDirectives:
        """For the controller, of the workers that it has started."""
        membership = self.membership
        failed = membership.failed()
        return WorkerDirectives(
            failed={each: failed[each] for each in started if each in failed},
            newcomers=[each for each in started if membership.is_newcomer(each)],
            dismissed=[each for each in started if each in membership.dismissed],
            leaving=membership.leaving,
            avoid=membership.draining,
            limit=membership.limit,
            is_over=self.journal.ended is not None or self.state.stop,
        )

    @property
    def is_saving(self) -> bool:
        """Whether a member that is there has begun a save that has not ended."""
        return bool(self._saver) and self.membership.why_gone(self._saver) is None

    @property
    def last_commit(self) -> int | None:
        """Steps done in the newest commit."""
        newest = self.journal.last(CommitSucceeded) or self.journal.last(Resumed)
        return self._options.last_commit if newest is None else newest.step

    def doing(self) -> str:
        """The run's state, for `status`: starting, training, waiting, stopping, or how it ended."""
        if self.journal.ended or self.state.stop:
            return self.journal.ended or "stopping"
        if not self.journal.last(GenerationStarted):
            return "starting"
        return "training" if self.membership.is_training() else "waiting"

    def facts(self) -> dict[str, Any]:
        """For `elastic-ddp status`."""
        membership, state, facts = self.membership, self.doing(), self.journal.facts()
        return {
            "state": state,
            "wanted": membership.wanted,
            "members": [
                {"rank": rank, "node": each.node, "node_id": each.node_id, "pid": each.pid, "id": each.id}
                for rank, each in enumerate(membership.current.members if membership.current is not None else ())
                if membership.why_gone(each.id) is None
            ],
            "draining": membership.draining,
            "last_commit": self.last_commit,
            **facts,
            "world_size": 0 if state == "waiting" else facts["world_size"],
        }

    # The record.

    def take(
        self, messages: list[Event], progress: dict[str, Any] | None = None, sender: str = "", first: int = 0
    ) -> None:
        """Takes messages for the record, and how far training is. See `EventLog.take`."""
        is_lost = self.membership.why_gone(sender) not in (None, LEFT)
        if is_lost:
            # What it counted meanwhile was no time of the run's, and how far it is nobody's word any more.
            progress = None
            messages = [self._without_hindsight(each) for each in messages]
        messages = self.journal.take(messages, progress, sender, first)
        for each in messages:
            match each:
                case FirstStep():
                    self.membership.made_a_step(each.generation)
                case CommitStarted():
                    self._saver = sender
                case CommitSucceeded():
                    self._saver, self.state.failed_saves = "", 0
                    self.meet_requests(each.request or 0)
                case CommitFailed():
                    self._saver = ""
                    if each.counts and not is_lost:
                        self._count_failed_save(each.error, "the storage" if each.of_storage else "what that names")
        self.has_news = self.has_news or bool(messages)

    def _without_hindsight(self, message: Event) -> Event:
        """What a lost member says of training, when that has gone on without it, is put on record, but not as news."""
        if not isinstance(message, _OF_TRAINING):
            return message
        if message.generation < self.membership.generation:
            return ReportIgnored(generation=message.generation, what=message.event, at=message.at)
        return replace(message, account=None) if isinstance(message, GenerationEnded) else message

    def _count_failed_save(self, error: str, to_mend: str) -> None:
        """Ends the run when there are too many."""
        self.state.failed_saves += 1
        if self.state.failed_saves > self._options.max_failed_saves:
            newest = "no commit" if self.last_commit is None else f"a commit of step {self.last_commit}"
            self.end(
                {
                    "status": "failed",
                    "kind": StorageError.__name__,
                    "error": f"{self.state.failed_saves} saves in a row failed (checkpoint.max_failed_saves="
                    f"{self._options.max_failed_saves}), the last one: {error}. There is {newest}; mend {to_mend}, "
                    "and run the same command again",
                }
            )
        self.save()

    def record(self, event: Event) -> None:
        """Records an event of the rendezvous itself, with the current time as `at`."""
        self.take([replace(event, at=time.time())])

    def end(self, outcome: dict[str, Any]) -> None:
        """The run is over. The first word counts."""
        if self.journal.end(outcome):
            self.changed = self.has_news = True

    def save(self) -> None:
        """For a process after this one."""
        self._memory.save(self.state)
