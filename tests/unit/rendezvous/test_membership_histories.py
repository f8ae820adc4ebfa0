"""Membership: random histories with failures, drain notices for workers and nodes, resizes, and a running clock."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import groupby

from elastic_ddp.rendezvous.members import DrainNotice, FormedGeneration, JoinRequest, Member
from elastic_ddp.rendezvous.membership import Membership
from tests.unit.membership_harness import BROKEN, FAILED, member, options_of

SEEDS = 500
CALM_S = 45.0


@dataclass
class Worker:
    """The actual state of a worker."""

    member: Member
    step: int | None = None
    committed: int | None = None
    waits: bool = False
    in_task: bool = False
    """Whether it is in an evaluation."""
    resumable: bool = True
    """Whether others can continue from its state: it is not inside a step's block."""
    is_stuck: bool = False
    """Whether it continues a task although it is overdue, because its state is not resumable."""
    alive: bool = True
    """Whether it has not failed or left."""


class History:
    """Workers start, train, evaluate, commit and fail, also while a generation forms. Connections break. Workers and
    nodes get notices, and are killed at their deadlines. The run is resized. At the end no more faults happen and all
    workers fit."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.least = self.random.randint(1, 2)
        self.most = self.random.randint(self.least, 4)
        self.membership = Membership(options_of(self.least, self.most))
        self.workers: dict[str, Worker] = {}
        self.notices: dict[str, DrainNotice] = {}
        """Notices by the id of a worker or a node."""
        self.generation: FormedGeneration | None = None
        self.now, self.stored = 100.0, 0
        self.may_fail_while_forming = True

    def go(self) -> None:
        for _ in range(self.least):
            self.a_worker_starts(self.random.choice("xyz"))
        self.form()
        events = {
            self.a_step: 5,
            self.an_evaluation_begins: 2,
            self.an_evaluation_ends: 1,
            lambda: self.a_worker_starts(self.random.choice("xyz")): 3,
            self.a_worker_fails: 2,
            self.connections_break: 1,
            self.a_worker_that_is_gone_returns: 1,
            self.a_worker_gets_notice: 2,
            self.a_node_gets_notice: 1,
            self.the_run_is_resized: 1,
            self.time_passes: 5,
        }
        for _ in range(self.random.randint(10, 60)):
            if not self.detect_failure():
                [event] = self.random.choices([*events], [*events.values()])
                event()
            self.interrupt_step()
            self.form()
            self.check_plan()
        self.calm_down()

    def calm_down(self) -> None:
        self.may_fail_while_forming = False
        for _ in range(self.most):
            self.a_worker_starts("another node")
        end = self.now + CALM_S
        while self.now < end:
            self.half_a_second_passes()
            if not self.detect_failure():
                self.an_evaluation_ends()
                self.a_step()
            self.form()
        assert len(self.training()) >= min(self.membership.limit, self.most)
        assert not any(self.notice_of(worker) for worker in self.training())
        assert not self.membership.wants_change(self.now)
        assert self.membership.wanted.num_workers is None or len(self.living()) == len(self.training()), (
            "surplus workers left"
        )

    # State.

    def living(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.alive]

    def current(self) -> list[Worker]:
        return [self.workers[worker.id] for worker in self.generation.members] if self.generation is not None else []

    def training(self) -> list[Worker]:
        return [worker for worker in self.current() if worker.alive and not worker.waits]

    def held(self) -> int:
        """Steps done in the newest state that live workers hold or that is committed."""
        return max([worker.step for worker in self.living() if worker.step is not None] + [self.stored])

    # Events.

    def a_worker_starts(self, node: str) -> None:
        if len(self.living()) < 6 or node not in "xyz":
            name = str(len(self.workers) + 1)
            self.workers[name] = Worker(member(name, node, size=self.least, rank=len(self.workers)))
            self.join(self.workers[name])

    def join(self, worker: Worker, failure: str | None = None) -> None:
        worker.waits = True
        request = JoinRequest(
            member=worker.member,
            step=worker.step,
            between_steps=not worker.in_task,
            resumable=worker.resumable,
            committed=worker.committed,
            failure=failure,
            at_s=self.now,
        )
        self.membership.join(request)
        self.remove_gone()

    def remove_gone(self) -> None:
        for worker in self.living():
            if self.membership.why_gone(worker.member.id) is not None:
                before, worker.alive = self.held(), False
                assert self.held() == before, f"step {before} left with {worker.member.id}"

    def notice_of(self, worker: Worker) -> DrainNotice | None:
        """The earliest notice of the worker and its node."""
        notices = [self.notices[key] for key in (worker.member.id, worker.member.node_id) if key in self.notices]
        return min(notices, key=lambda notice: notice.ends_s, default=None)

    def is_overdue(self, worker: Worker) -> bool:
        notice = self.notice_of(worker)
        return notice is not None and notice.is_overdue(self.now)

    def a_step(self) -> None:
        training = self.training()
        if not training or len(training) < len(self.current()) or any(worker.in_task for worker in training):
            return
        for worker in training:
            worker.step = (worker.step or 0) + 1
        if self.random.random() < 0.2:
            training[0].committed = self.stored = max(self.stored, training[0].step or 0)
        if self.membership.wants_change(self.now):
            for worker in training:
                self.join(worker)

    def an_evaluation_begins(self) -> None:
        training, resumable = self.training(), self.random.random() < 0.8
        if training and len(training) == len(self.current()) and self.membership.failure is None:
            for worker in training:
                worker.in_task, worker.resumable = True, resumable

    def an_evaluation_ends(self) -> None:
        if self.membership.failure is None:
            for worker in self.training():
                worker.in_task, worker.resumable = False, True

    def a_worker_fails(self) -> None:
        if self.living():
            dead = self.random.choice(self.living())
            if dead in self.training():  # some complete the step in which it fails, and then evaluate
                in_task = [worker.in_task for worker in self.training()]
                for worker in self.training():
                    if not any(in_task) and self.random.randint(0, 1):
                        worker.step, worker.in_task = (worker.step or 0) + 1, self.random.random() < 0.2
            self.fail(dead)

    def connections_break(self) -> None:
        training = self.training()
        if len(training) == len(self.current()) and not any(worker.in_task for worker in training):
            for worker in training:
                worker.step = (worker.step or 0) + self.random.randint(0, 1)
                self.join(worker, BROKEN)

    def a_worker_that_is_gone_returns(self) -> None:
        for worker in self.workers.values():
            if not worker.alive:
                request = JoinRequest(
                    member=worker.member, step=worker.step, between_steps=True, failure=BROKEN, at_s=self.now
                )
                assert self.membership.join(request) is not None

    def fail(self, worker: Worker) -> None:
        worker.alive = False
        self.membership.mark_failed(worker.member.id, FAILED)

    def detect_failure(self) -> bool:
        survivors = self.training()
        if self.membership.failure is None or not survivors:
            return False
        for worker in survivors:
            self.join(worker, BROKEN)
        return True

    def give_notice(self, target: str) -> DrainNotice:
        notice = DrainNotice(self.now, self.random.choice([2.0, 8.0, 30.0]))
        self.notices[target] = min(notice, self.notices.get(target, notice), key=lambda one: one.ends_s)
        return notice

    def a_worker_gets_notice(self) -> None:
        if self.living():
            leaving = self.random.choice(self.living()).member.id
            self.membership.ask_to_leave([leaving], self.give_notice(leaving))
            self.remove_gone()

    def a_node_gets_notice(self) -> None:
        node = f"id of {self.random.choice('xyz')}"
        self.membership.avoid(node, self.give_notice(node))
        self.remove_gone()

    def interrupt_step(self) -> None:
        """Interrupts a step that an overdue worker does not finish."""
        self.membership.interrupt_if_overdue(self.now)
        overdue = [worker for worker in self.training() if self.is_overdue(worker) and not worker.is_stuck]
        assert not overdue or self.membership.failure is not None, "an overdue worker is still waited for"

    def the_run_is_resized(self) -> None:
        self.membership.wanted.num_workers = self.random.randint(self.least, self.most)

    def time_passes(self) -> None:
        end = self.now + self.random.choice([0.5, 1.0, 3.0, 10.0])
        while self.now < end:
            self.half_a_second_passes()
            self.form()
            while self.detect_failure():  # also of a worker that failed while the generation formed
                self.form()

    def half_a_second_passes(self) -> None:
        """Kills workers at their deadlines."""
        self.now += 0.5
        for worker in self.living():
            if (notice := self.notice_of(worker)) is not None and notice.ends_s <= self.now:
                before = self.held()
                self.fail(worker)
                assert self.held() == before or worker.is_stuck, f"step {before} was lost with {worker.member.id}"
        self.interrupt_step()

    # Checks.

    def check_plan(self) -> None:
        assert len(self.membership.known()) == len(self.living())
        places = self.membership.plan(self.now)
        assert sorted(places.values()) == [(rank, len(places)) for rank in range(len(places))]
        assert places.keys() <= {worker.member.id for worker in self.living()} and len(places) <= self.most
        assert self.membership.failure is None or not (places or self.membership.wants_change(self.now))

    def form(self) -> None:
        before = self.current()
        formed = self.membership.form(self.now)
        self.remove_gone()
        if formed is None:
            return
        members = [self.workers[worker.id] for worker in formed.members]
        assert formed.number == (1 if self.generation is None else self.generation.number + 1)
        self.generation = formed
        assert all(worker.alive and worker.waits for worker in members)
        assert all(worker.waits for worker in before if worker.alive)
        assert members[0] in before or not any(worker in before for worker in members), "rank 0 is a survivor"
        nodes = [worker.member.node for worker in members]
        assert len([*groupby(nodes)]) == len({*nodes}), "ranks are adjacent on a node"
        assert formed.receivers == tuple(
            rank for rank, worker in enumerate(members) if worker.step is None or worker.step != formed.first_step
        )
        assert len(members) <= self.most and (
            formed.handover_only or formed.in_collective_task or len(members) >= self.least
        )
        steps = [worker.step for worker in self.living() if worker.step is not None]
        if steps and max(steps) > self.stored:
            assert formed.first_step == max(steps), "the newest state counts"
        if formed.source is not None and formed.receivers:
            assert members[formed.source].resumable, "it sends the state of a step"
        for worker in members:
            worker.waits = False
        if self.may_fail_while_forming and self.random.random() < 0.1:
            self.fail(self.random.choice(members))
            return
        for rank, worker in enumerate(members):
            if formed.source is None or rank in formed.receivers:
                worker.step = self.stored if formed.first_step is None else formed.first_step
        assert formed.in_collective_task == (not formed.handover_only and any(worker.in_task for worker in members))
        if not formed.handover_only and any(self.is_overdue(worker) for worker in members):
            assert any(not worker.resumable for worker in members), "an overdue worker continues"
            for worker in members:
                worker.is_stuck = True
        if not formed.handover_only and not all(worker.in_task for worker in members):
            for worker in members:
                worker.in_task, worker.resumable = False, True
        if formed.handover_only:
            if not formed.receivers:
                members[0].committed = self.stored = max(self.stored, members[0].step or 0)
            for worker in members:
                self.join(worker)
            self.form()


def test_no_drain_loses_a_state_and_all_wanted_members_train_in_the_end() -> None:
    for seed in range(SEEDS):
        try:
            History(seed).go()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
