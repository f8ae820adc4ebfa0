"""Who trains together: random histories, against what always has to hold."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elastic_ddp.rendezvous.members import GROUP_WAIT_S, FormedGeneration, JoinRequest, Member
from elastic_ddp.rendezvous.membership import BATCH_S, Membership
from tests.unit.membership_harness import AT_ONCE, BROKEN, DEAD, member


@dataclass
class Worker:
    """A worker as it is in truth, whatever the membership knows of it."""

    member: Member
    at_s: float
    step: int | None = None
    waits: bool = True
    alive: bool = True
    """Neither dead, nor presumed so, nor gone for good."""
    leaving: bool = False
    between_steps: bool = True


class Histories(RuleBasedStateMachine):
    """Workers come, train, die, lose connections, are asked to leave and go, in any order. When the membership forms
    a generation it has to be the right one, and when it does not there has to be a reason."""

    def __init__(self) -> None:
        super().__init__()
        self.workers: dict[str, Worker] = {}
        self.generation: FormedGeneration | None = None
        self.broken = False
        self.now = 0.0
        self.number = 0

    @initialize(
        size=st.integers(1, 4),
        max_workers=st.integers(1, 4),
        min_workers=st.integers(1, 2),
    )
    def begin(self, size: int, max_workers: int, min_workers: int) -> None:
        min_workers = min(min_workers, max_workers)
        self.size = size
        self.membership = Membership(min_workers=min_workers, max_workers=max_workers)
        for _ in range(size):
            self.a_worker_starts(node="x")

    # What is so.

    def current(self) -> list[Worker]:
        return [self.workers[each.id] for each in self.generation.members] if self.generation is not None else []

    def survivors(self) -> list[Worker]:
        return [each for each in self.current() if each.alive]

    def training(self) -> list[Worker]:
        return [each for each in self.survivors() if not each.waits]

    def waiting(self) -> list[Worker]:
        return [each for each in self.workers.values() if each.alive and each.waits]

    def newcomers(self) -> list[Worker]:
        current = {each.member.id for each in self.current()}
        return [each for each in self.waiting() if each.member.id not in current]

    def any_of(self, data: st.DataObject, workers: list[Worker]) -> Worker:
        return data.draw(st.sampled_from(sorted(workers, key=lambda each: int(each.member.id))))

    def says_arrival(self, worker: Worker, failure: str | None = None) -> None:
        arrival = JoinRequest(
            member=worker.member, step=worker.step, between_steps=worker.between_steps, at_s=worker.at_s
        )
        assert self.membership.join(arrival, failure=failure) is None

    def comes_back(self, worker: Worker, failure: str | None, between_steps: bool = True) -> None:
        worker.waits, worker.at_s, worker.between_steps = True, self.now, between_steps
        self.broken = self.broken or failure is not None
        self.says_arrival(worker, failure)

    # What happens.

    @precondition(lambda self: len(self.waiting()) + len(self.training()) < 7)
    @rule(node=st.sampled_from("xyz"))
    def a_worker_starts(self, node: str) -> None:
        self.number += 1
        name = str(self.number)
        new = member(name, node, self.size, rank=self.number)
        self.workers[name] = Worker(new, self.now)
        self.says_arrival(self.workers[name])
        self.form()

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def a_worker_asks_again(self, data: st.DataObject) -> None:
        self.says_arrival(self.any_of(data, self.waiting()))
        self.form()

    @rule(seconds=st.sampled_from([BATCH_S / 2, BATCH_S, GROUP_WAIT_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.form()

    @precondition(lambda self: not self.broken and self.current() and self.training() == self.current())
    @rule()
    def a_step_is_made(self) -> None:
        for each in self.current():
            each.step = (each.step or 0) + 1

    @precondition(lambda self: self.training() or self.waiting())
    @rule(data=st.data(), how=st.sampled_from([DEAD, "no heartbeat for 5 s"]), nearly_done=st.booleans())
    def a_worker_dies(self, data: st.DataObject, how: str, nearly_done: bool) -> None:
        dead = self.any_of(data, self.training() + self.waiting())
        in_generation = dead in self.current()
        if in_generation and nearly_done and not self.broken and self.training() == self.current():
            for each in self.training():  # some made the step in which it died, and others did not
                each.step = (each.step or 0) + data.draw(st.integers(0, 1))
        dead.alive = False
        self.membership.mark_failed(dead.member.id, how)
        self.broken = self.broken or in_generation
        self.form()

    @precondition(lambda self: not self.broken and self.current() and self.training() == self.current())
    @rule(data=st.data())
    def connections_break_in_a_step(self, data: st.DataObject) -> None:
        for each in self.training():
            each.step = (each.step or 0) + data.draw(st.integers(0, 1))
            self.comes_back(each, BROKEN)
            self.form()

    @precondition(lambda self: any(not each.alive for each in self.workers.values()))
    @rule(data=st.data())
    def one_presumed_dead_returns(self, data: st.DataObject) -> None:
        gone = self.any_of(data, [each for each in self.workers.values() if not each.alive])
        arrival = JoinRequest(member=gone.member, step=gone.step, between_steps=True, at_s=self.now)
        assert self.membership.join(arrival, failure=BROKEN) is not None
        self.form()

    @precondition(lambda self: self.training())
    @rule(data=st.data(), in_evaluation=st.booleans())
    def a_survivor_notices_a_loss(self, data: st.DataObject, in_evaluation: bool) -> None:
        self.comes_back(self.any_of(data, self.training()), BROKEN, between_steps=not in_evaluation)
        self.form()

    @precondition(
        lambda self: self.training() and self.training() == self.survivors() and self.membership.wants_change(self.now)
    )
    @rule()
    def a_step_ends_where_a_change_is_wanted(self) -> None:
        for each in self.training():
            self.comes_back(each, None)
            self.form()

    @precondition(lambda self: self.broken and self.training())
    @rule()
    def all_survivors_notice_a_loss(self) -> None:
        for each in self.training():
            self.comes_back(each, BROKEN)
            self.form()

    @precondition(lambda self: any(not each.leaving for each in self.survivors()))
    @rule(data=st.data())
    def a_worker_is_asked_to_leave(self, data: st.DataObject) -> None:
        leaving = self.any_of(data, [each for each in self.survivors() if not each.leaving])
        leaving.leaving = True
        self.membership.ask_to_leave([leaving.member.id], AT_ONCE)
        self.form()

    @precondition(lambda self: self.waiting() or self.training())
    @rule(data=st.data())
    def a_worker_goes_for_good(self, data: st.DataObject) -> None:
        going = self.any_of(data, self.training() + self.waiting())
        going.alive = False
        self.membership.retire(going.member.id)
        self.form()

    @rule()
    def all_workers_die_and_others_start(self) -> None:
        self.broken = self.broken or bool(self.survivors())
        for each in self.workers.values():
            if each.alive:
                each.alive = False
                self.membership.mark_failed(each.member.id, DEAD)
        for _ in range(self.size):
            self.a_worker_starts(node="x")

    # What has to hold.

    def form(self) -> None:
        waiting, survivors = self.waiting(), self.survivors()
        before = self.generation
        broken = self.broken
        formed = self.membership.form(self.now)
        for name in self.membership.dismissed:
            assert self.workers[name].leaving
            self.workers[name].alive = False
        if formed is None:
            self.check_that_there_is_a_reason(waiting, survivors)
            return
        members = [self.workers[each.id] for each in formed.members]
        self.check_members(members, waiting, survivors)
        self.check_state(formed, members, waiting, survivors)
        self.check_ranks(members, survivors)
        assert formed.number == (before.number + 1 if before is not None else 1)
        before_ids = {each.id for each in before.members} if before is not None else set()
        ids = {each.id for each in formed.members}
        if before is None:
            expected = "start"
        elif broken:
            expected = "worker failed"
        elif formed.handover_only:
            expected = "workers leave"
        else:
            words = [word for word, moved in (("joined", ids - before_ids), ("left", before_ids - ids)) if moved]
            expected = f"workers {' and '.join(words)}" if words else "formed again"
        assert formed.reason == expected
        self.generation, self.broken = formed, False
        for each in members:
            each.waits, each.step = False, formed.first_step or 0
        assert self.membership.form(self.now) is None  # nobody is in two generations at once

    def check_that_there_is_a_reason(self, waiting: list[Worker], survivors: list[Worker]) -> None:
        if any(not each.waits for each in survivors) or not waiting:
            return
        too_few = len([each for each in waiting if not each.leaving]) < self.membership.min_workers
        if survivors:
            assert too_few
            assert all(each.between_steps for each in survivors) or len(waiting) == len(survivors)
            return
        gathered = len(waiting) >= self.size or self.now - min(each.at_s for each in waiting) >= GROUP_WAIT_S
        assert too_few or not gathered

    def check_members(self, members: list[Worker], waiting: list[Worker], survivors: list[Worker]) -> None:
        assert all(each in waiting for each in members)  # so they are alive, and train nowhere
        assert all(each.waits for each in survivors)
        assert len({each.member.id for each in members}) == len(members)
        assert 1 <= len(members) <= self.membership.max_workers
        if not survivors:
            assert len(waiting) >= self.size or self.now - min(each.at_s for each in waiting) >= GROUP_WAIT_S
        if all(each.between_steps for each in survivors):
            assert len(members) >= self.membership.min_workers or any(each.leaving for each in members)
        else:
            assert all(each in survivors for each in members)
            return
        assert all(each in members for each in survivors if not each.leaving)
        # Who leaves is kept only where nobody else has the newest state: one to hand it over, or all to commit it.
        if any(each.leaving for each in members):
            newest = max(each.step or 0 for each in waiting)
            assert not any(each.step == newest and not each.leaving for each in waiting)
            assert sum(each.leaving for each in members) == 1

    def check_state(
        self, formed: FormedGeneration, members: list[Worker], waiting: list[Worker], survivors: list[Worker]
    ) -> None:
        steps = [each.step for each in members if each.step is not None]
        assert formed.first_step == max(steps, default=None)
        if formed.source is None:
            assert not steps
        else:
            assert members[formed.source].step == formed.first_step
        assert formed.receivers == tuple(
            rank for rank, each in enumerate(members) if each.step is None or each.step != formed.first_step
        )
        asked = waiting if all(each.between_steps for each in survivors) else survivors
        if any(not each.leaving for each in asked):  # the newest state of all is not lost
            assert formed.first_step == max((each.step for each in asked if each.step is not None), default=None)

    def check_ranks(self, members: list[Worker], survivors: list[Worker]) -> None:
        nodes = [each.member.node for each in members]
        runs = [node for place, node in enumerate(nodes) if place == 0 or nodes[place - 1] != node]
        assert len(runs) == len(set(runs))
        if any(each in survivors for each in members):
            assert members[0] in survivors

    @invariant()
    def a_change_is_wanted_when_somebody_waits_for_it(self) -> None:
        if self.generation is None:
            return
        wanted = self.membership.wants_change(self.now)
        if self.broken or not self.survivors():
            assert not wanted, "there is nobody to be asked"
            return
        leaving = any(each.leaving and each.alive for each in self.current())
        newcomers = [each for each in self.newcomers() if not each.leaving]
        room = self.membership.max_workers - len(self.current())
        if leaving or (room > 0 and any(self.now - each.at_s >= BATCH_S for each in newcomers)):
            assert wanted
        elif len(self.survivors()) < self.membership.min_workers:
            assert wanted, "they are too few to go on"
        elif not self.newcomers():
            assert not wanted

    @invariant()
    def places_in_prospect_are_those_of_a_generation(self) -> None:
        if self.generation is None:
            return
        places = self.membership.plan(self.now)
        assert sorted(places.values()) == [(rank, len(places)) for rank in range(len(places))]
        alive = {each.member.id for each in [*self.waiting(), *self.training()]}
        assert places.keys() <= alive and len(places) <= self.membership.max_workers
        assert not (places and self.broken)

    @invariant()
    def the_living_are_counted(self) -> None:
        assert len(self.membership.known()) == len(self.waiting()) + len(self.training())


Histories.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestHistories = Histories.TestCase
