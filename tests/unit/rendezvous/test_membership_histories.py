"""Membership: random histories against invariants."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elastic_ddp.rendezvous.members import FormedGeneration, JoinRequest, Member
from elastic_ddp.rendezvous.membership import BATCH_S, Membership
from elastic_ddp.rendezvous.planner import GROUP_WAIT_S
from tests.unit.membership_harness import AT_ONCE, BROKEN, FAILED, member


@dataclass
class Worker:
    """The actual state of a worker."""

    member: Member
    at_s: float
    step: int | None = None
    waits: bool = True
    alive: bool = True
    """Whether it has not failed or left, nor counts as failed."""
    leaving: bool = False
    between_steps: bool = True


class Histories(RuleBasedStateMachine):
    """Workers start, train, fail, lose connections and leave in any order. The membership must form the expected
    generation, or have a reason not to."""

    def __init__(self) -> None:
        super().__init__()
        self.workers: dict[str, Worker] = {}
        self.generation: FormedGeneration | None = None
        self.has_failed = False
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

    # State.

    def current(self) -> list[Worker]:
        return [self.workers[worker.id] for worker in self.generation.members] if self.generation is not None else []

    def survivors(self) -> list[Worker]:
        return [worker for worker in self.current() if worker.alive]

    def training(self) -> list[Worker]:
        return [worker for worker in self.survivors() if not worker.waits]

    def waiting(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.alive and worker.waits]

    def newcomers(self) -> list[Worker]:
        current = {worker.member.id for worker in self.current()}
        return [worker for worker in self.waiting() if worker.member.id not in current]

    def any_of(self, data: st.DataObject, workers: list[Worker]) -> Worker:
        return data.draw(st.sampled_from(sorted(workers, key=lambda worker: int(worker.member.id))))

    def send_request(self, worker: Worker, failure: str | None = None) -> None:
        request = JoinRequest(
            member=worker.member, step=worker.step, between_steps=worker.between_steps, at_s=worker.at_s
        )
        assert self.membership.join(request, failure=failure) is None

    def rejoin(self, worker: Worker, failure: str | None, between_steps: bool = True) -> None:
        worker.waits, worker.at_s, worker.between_steps = True, self.now, between_steps
        self.has_failed = self.has_failed or failure is not None
        self.send_request(worker, failure)

    # Events.

    @precondition(lambda self: len(self.waiting()) + len(self.training()) < 7)
    @rule(node=st.sampled_from("xyz"))
    def a_worker_starts(self, node: str) -> None:
        self.number += 1
        name = str(self.number)
        new = member(name, node, self.size, rank=self.number)
        self.workers[name] = Worker(new, self.now)
        self.send_request(self.workers[name])
        self.form()

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def a_worker_repeats_its_request(self, data: st.DataObject) -> None:
        self.send_request(self.any_of(data, self.waiting()))
        self.form()

    @rule(seconds=st.sampled_from([BATCH_S / 2, BATCH_S, GROUP_WAIT_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.form()

    @precondition(lambda self: not self.has_failed and self.current() and self.training() == self.current())
    @rule()
    def a_step_is_made(self) -> None:
        for worker in self.current():
            worker.step = (worker.step or 0) + 1

    @precondition(lambda self: self.training() or self.waiting())
    @rule(data=st.data(), how=st.sampled_from([FAILED, "no heartbeat for 5 s"]), nearly_done=st.booleans())
    def a_worker_fails(self, data: st.DataObject, how: str, nearly_done: bool) -> None:
        failed = self.any_of(data, self.training() + self.waiting())
        in_generation = failed in self.current()
        if in_generation and nearly_done and not self.has_failed and self.training() == self.current():
            for worker in self.training():  # some complete the step in which it fails
                worker.step = (worker.step or 0) + data.draw(st.integers(0, 1))
        failed.alive = False
        self.membership.mark_failed(failed.member.id, how)
        self.has_failed = self.has_failed or in_generation
        self.form()

    @precondition(lambda self: not self.has_failed and self.current() and self.training() == self.current())
    @rule(data=st.data())
    def connections_break_in_a_step(self, data: st.DataObject) -> None:
        for worker in self.training():
            worker.step = (worker.step or 0) + data.draw(st.integers(0, 1))
            self.rejoin(worker, BROKEN)
            self.form()

    @precondition(lambda self: any(not worker.alive for worker in self.workers.values()))
    @rule(data=st.data())
    def a_failed_worker_returns(self, data: st.DataObject) -> None:
        gone = self.any_of(data, [worker for worker in self.workers.values() if not worker.alive])
        request = JoinRequest(member=gone.member, step=gone.step, between_steps=True, at_s=self.now)
        assert self.membership.join(request, failure=BROKEN) is not None
        self.form()

    @precondition(lambda self: self.training())
    @rule(data=st.data(), in_evaluation=st.booleans())
    def a_survivor_detects_a_failure(self, data: st.DataObject, in_evaluation: bool) -> None:
        self.rejoin(self.any_of(data, self.training()), BROKEN, between_steps=not in_evaluation)
        self.form()

    @precondition(
        lambda self: self.training() and self.training() == self.survivors() and self.membership.wants_change(self.now)
    )
    @rule()
    def a_step_ends_before_a_change(self) -> None:
        for worker in self.training():
            self.rejoin(worker, None)
            self.form()

    @precondition(lambda self: self.has_failed and self.training())
    @rule()
    def all_survivors_detect_a_failure(self) -> None:
        for worker in self.training():
            self.rejoin(worker, BROKEN)
            self.form()

    @precondition(lambda self: any(not worker.leaving for worker in self.survivors()))
    @rule(data=st.data())
    def a_worker_is_asked_to_leave(self, data: st.DataObject) -> None:
        leaving = self.any_of(data, [worker for worker in self.survivors() if not worker.leaving])
        leaving.leaving = True
        self.membership.ask_to_leave([leaving.member.id], AT_ONCE)
        self.form()

    @precondition(lambda self: self.waiting() or self.training())
    @rule(data=st.data())
    def a_worker_retires(self, data: st.DataObject) -> None:
        going = self.any_of(data, self.training() + self.waiting())
        going.alive = False
        self.membership.retire(going.member.id)
        self.form()

    @rule()
    def all_workers_fail_and_others_start(self) -> None:
        self.has_failed = self.has_failed or bool(self.survivors())
        for worker in self.workers.values():
            if worker.alive:
                worker.alive = False
                self.membership.mark_failed(worker.member.id, FAILED)
        for _ in range(self.size):
            self.a_worker_starts(node="x")

    # Checks.

    def form(self) -> None:
        waiting, survivors = self.waiting(), self.survivors()
        before = self.generation
        broken = self.has_failed
        formed = self.membership.form(self.now)
        for name in self.membership.dismissed:
            assert self.workers[name].leaving
            self.workers[name].alive = False
        if formed is None:
            self.check_reason_to_wait(waiting, survivors)
            return
        members = [self.workers[worker.id] for worker in formed.members]
        self.check_members(members, waiting, survivors)
        self.check_state(formed, members, waiting, survivors)
        self.check_ranks(members, survivors)
        assert formed.number == (before.number + 1 if before is not None else 1)
        before_ids = {worker.id for worker in before.members} if before is not None else set()
        ids = {worker.id for worker in formed.members}
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
        self.generation, self.has_failed = formed, False
        for worker in members:
            worker.waits, worker.step = False, formed.first_step or 0
        assert self.membership.form(self.now) is None  # no member is in two generations

    def check_reason_to_wait(self, waiting: list[Worker], survivors: list[Worker]) -> None:
        if any(not worker.waits for worker in survivors) or not waiting:
            return
        too_few = len([worker for worker in waiting if not worker.leaving]) < self.membership.min_workers
        if survivors:
            assert too_few
            assert all(worker.between_steps for worker in survivors) or len(waiting) == len(survivors)
            return
        gathered = len(waiting) >= self.size or self.now - min(worker.at_s for worker in waiting) >= GROUP_WAIT_S
        assert too_few or not gathered

    def check_members(self, members: list[Worker], waiting: list[Worker], survivors: list[Worker]) -> None:
        assert all(worker in waiting for worker in members)  # so they are alive and do not train
        assert all(worker.waits for worker in survivors)
        assert len({worker.member.id for worker in members}) == len(members)
        assert 1 <= len(members) <= self.membership.max_workers
        if not survivors:
            assert len(waiting) >= self.size or self.now - min(worker.at_s for worker in waiting) >= GROUP_WAIT_S
        if all(worker.between_steps for worker in survivors):
            assert len(members) >= self.membership.min_workers or any(worker.leaving for worker in members)
        else:
            assert all(worker in survivors for worker in members)
            return
        assert all(worker in members for worker in survivors if not worker.leaving)
        # A leaving worker is kept only if no other has the newest state, and then one of them.
        if any(worker.leaving for worker in members):
            newest = max(worker.step or 0 for worker in waiting)
            assert not any(worker.step == newest and not worker.leaving for worker in waiting)
            assert sum(worker.leaving for worker in members) == 1

    def check_state(
        self, formed: FormedGeneration, members: list[Worker], waiting: list[Worker], survivors: list[Worker]
    ) -> None:
        steps = [worker.step for worker in members if worker.step is not None]
        assert formed.first_step == max(steps, default=None)
        if formed.source is None:
            assert not steps
        else:
            assert members[formed.source].step == formed.first_step
        assert formed.receivers == tuple(
            rank for rank, worker in enumerate(members) if worker.step is None or worker.step != formed.first_step
        )
        asked = waiting if all(worker.between_steps for worker in survivors) else survivors
        if any(not worker.leaving for worker in asked):  # the newest state is kept
            assert formed.first_step == max((worker.step for worker in asked if worker.step is not None), default=None)

    def check_ranks(self, members: list[Worker], survivors: list[Worker]) -> None:
        nodes = [worker.member.node for worker in members]
        runs = [node for place, node in enumerate(nodes) if place == 0 or nodes[place - 1] != node]
        assert len(runs) == len(set(runs))
        if any(worker in survivors for worker in members):
            assert members[0] in survivors

    @invariant()
    def a_change_is_wanted_when_a_worker_waits_for_it(self) -> None:
        if self.generation is None:
            return
        wanted = self.membership.wants_change(self.now)
        if self.has_failed or not self.survivors():
            assert not wanted, "no healthy generation"
            return
        leaving = any(worker.leaving and worker.alive for worker in self.current())
        newcomers = [worker for worker in self.newcomers() if not worker.leaving]
        room = self.membership.max_workers - len(self.current())
        if leaving or (room > 0 and any(self.now - worker.at_s >= BATCH_S for worker in newcomers)):
            assert wanted
        elif len(self.survivors()) < self.membership.min_workers:
            assert wanted, "too few workers train"
        elif not self.newcomers():
            assert not wanted

    @invariant()
    def planned_places_are_those_of_a_generation(self) -> None:
        if self.generation is None:
            return
        places = self.membership.plan(self.now)
        assert sorted(places.values()) == [(rank, len(places)) for rank in range(len(places))]
        alive = {worker.member.id for worker in [*self.waiting(), *self.training()]}
        assert places.keys() <= alive and len(places) <= self.membership.max_workers
        assert not (places and self.has_failed)

    @invariant()
    def live_workers_are_known(self) -> None:
        assert len(self.membership.known()) == len(self.waiting()) + len(self.training())


Histories.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestHistories = Histories.TestCase
