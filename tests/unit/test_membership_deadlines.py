"""Who trains together where workers and nodes are given notice: histories by seed, in which time passes."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from elastic_ddp.rendezvous.members import DrainNotice, FormedGeneration, JoinRequest, Member
from elastic_ddp.rendezvous.membership import Membership
from tests.unit.membership_harness import BROKEN, DEAD, member

SEEDS = 1600
CALM_S = 60.0


@dataclass
class Worker:
    """As it is in truth."""

    member: Member
    step: int | None = None
    committed: int | None = None
    waits: bool = False
    is_amid: bool = False
    """It evaluates, with all who began it, and not between steps."""
    resumable: bool = True
    """Others can go on from its state: it is not in the midst of a step's block."""
    is_stuck: bool = False
    """It was not when its time was nearly up, and went on with what it was amid, whatever became of it."""
    alive: bool = True
    """Neither dead nor let go."""


class History:
    """Workers come, train, evaluate, commit, die (also while a generation forms), get notice with deadlines, alone or
    with their node, at the end of which they are killed, and the run is resized. At the end it is calm, and there is
    room for all on a node of its own."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.least = self.random.randint(1, 2)
        self.most = self.random.randint(self.least, 4)
        self.membership = Membership(min_workers=self.least, max_workers=self.most)
        self.workers: dict[str, Worker] = {}
        self.notices: dict[str, DrainNotice] = {}
        """By the id of a worker, or of a node."""
        self.generation: FormedGeneration | None = None
        self.now, self.stored = 100.0, 0
        self.may_die_while_forming = True

    def go(self) -> None:
        for _ in range(self.least):
            self.a_worker_starts(self.random.choice("xyz"))
        self.form()
        events = {
            self.a_step: 5,
            self.an_evaluation_begins: 2,
            self.an_evaluation_ends: 1,
            lambda: self.a_worker_starts(self.random.choice("xyz")): 3,
            self.a_worker_dies: 2,
            self.a_worker_gets_notice: 2,
            self.a_node_gets_notice: 1,
            self.the_run_is_resized: 1,
            self.time_passes: 5,
        }
        for _ in range(self.random.randint(10, 60)):
            if not self.notice_a_loss():
                [event] = self.random.choices([*events], [*events.values()])
                event()
            self.step_is_broken_off()
            self.form()
        self.calm_down()

    def calm_down(self) -> None:
        self.may_die_while_forming = False
        for _ in range(self.most):
            self.a_worker_starts("room for all")
        end = self.now + CALM_S
        while self.now < end:
            self.a_moment_passes()
            if not self.notice_a_loss():
                self.an_evaluation_ends()
                self.a_step()
            self.form()
        assert len(self.training()) >= min(self.membership.limit, self.most)
        assert not any(self.notice_of(each) for each in self.training())
        assert not self.membership.wants_change(self.now)
        assert self.membership.wanted is None or len(self.living()) == len(self.training()), (
            "who is not wanted is let go"
        )

    # What is so.

    def living(self) -> list[Worker]:
        return [each for each in self.workers.values() if each.alive]

    def current(self) -> list[Worker]:
        return [self.workers[each.id] for each in self.generation.members] if self.generation is not None else []

    def training(self) -> list[Worker]:
        return [each for each in self.current() if each.alive and not each.waits]

    def held(self) -> int:
        """Steps that are not lost: in the memory of the living, or committed."""
        return max([each.step for each in self.living() if each.step is not None] + [self.stored])

    # What happens.

    def a_worker_starts(self, node: str) -> None:
        if len(self.living()) < 6 or node not in "xyz":
            name = str(len(self.workers) + 1)
            self.workers[name] = Worker(member(name, node, size=self.least, rank=len(self.workers)))
            self.arrives(self.workers[name])

    def arrives(self, worker: Worker, failure: str | None = None) -> None:
        worker.waits = True
        arrival = JoinRequest(
            member=worker.member,
            step=worker.step,
            between_steps=not worker.is_amid,
            resumable=worker.resumable,
            committed=worker.committed,
            at_s=self.now,
        )
        self.membership.join(arrival, failure=failure)
        self.let_go()

    def let_go(self) -> None:
        for each in self.living():
            if self.membership.why_gone(each.member.id) is not None:
                before, each.alive = self.held(), False
                assert self.held() == before, f"step {before} went with {each.member.id}"

    def notice_of(self, worker: Worker) -> DrainNotice | None:
        """The shortest of its own and of its node."""
        mine = [self.notices[key] for key in (worker.member.id, worker.member.node_id) if key in self.notices]
        return min(mine, key=lambda each: each.ends_s, default=None)

    def is_overdue(self, worker: Worker) -> bool:
        notice = self.notice_of(worker)
        return notice is not None and notice.is_overdue(self.now)

    def a_step(self) -> None:
        training = self.training()
        if not training or len(training) < len(self.current()) or any(each.is_amid for each in training):
            return
        for each in training:
            each.step = (each.step or 0) + 1
        if self.random.random() < 0.2:
            training[0].committed = self.stored = max(self.stored, training[0].step or 0)
        if self.membership.wants_change(self.now):
            for each in training:
                self.arrives(each)

    def an_evaluation_begins(self) -> None:
        training, resumable = self.training(), self.random.random() < 0.8
        if training and len(training) == len(self.current()) and self.membership.failure is None:
            for each in training:
                each.is_amid, each.resumable = True, resumable

    def an_evaluation_ends(self) -> None:
        if self.membership.failure is None:
            for each in self.training():
                each.is_amid, each.resumable = False, True

    def a_worker_dies(self) -> None:
        if self.living():
            dead = self.random.choice(self.living())
            if dead in self.training():  # some have made the step in which it dies, and then evaluate
                goes_on = [each.is_amid for each in self.training()]
                for each in self.training():
                    if not any(goes_on) and self.random.randint(0, 1):
                        each.step, each.is_amid = (each.step or 0) + 1, self.random.random() < 0.2
            self.dies(dead)

    def dies(self, worker: Worker) -> None:
        worker.alive = False
        self.membership.mark_failed(worker.member.id, DEAD)

    def notice_a_loss(self) -> bool:
        survivors = self.training()
        if self.membership.failure is None or not survivors:
            return False
        for each in survivors:
            self.arrives(each, BROKEN)
        return True

    def give_notice(self, whom: str) -> DrainNotice:
        notice = DrainNotice(self.now, self.random.choice([2.0, 8.0, 30.0]))
        self.notices[whom] = min(notice, self.notices.get(whom, notice), key=lambda each: each.ends_s)
        return notice

    def a_worker_gets_notice(self) -> None:
        if self.living():
            leaving = self.random.choice(self.living()).member.id
            self.membership.ask_to_leave([leaving], self.give_notice(leaving))
            self.let_go()

    def a_node_gets_notice(self) -> None:
        node = f"id of {self.random.choice('xyz')}"
        self.membership.drain(node, self.give_notice(node))
        self.let_go()

    def step_is_broken_off(self) -> None:
        """If it is not to be waited for any more."""
        self.membership.interrupt_if_overdue(self.now)
        overdue = [each for each in self.training() if self.is_overdue(each) and not each.is_stuck]
        assert not overdue or self.membership.failure is not None, "a step is waited for"

    def the_run_is_resized(self) -> None:
        self.membership.wanted = self.random.randint(self.least, self.most)

    def time_passes(self) -> None:
        end = self.now + self.random.choice([0.5, 1.0, 3.0, 10.0])
        while self.now < end:
            self.a_moment_passes()
            self.form()
            while self.notice_a_loss():  # also that of one who died while the generation formed
                self.form()

    def a_moment_passes(self) -> None:
        """Those whose time is up are killed."""
        self.now += 0.5
        for each in self.living():
            if (notice := self.notice_of(each)) is not None and notice.ends_s <= self.now:
                before = self.held()
                self.dies(each)
                assert self.held() == before or each.is_stuck, f"step {before} died with {each.member.id}"
        self.step_is_broken_off()

    # What has to hold.

    def form(self) -> None:
        formed = self.membership.form(self.now)
        self.let_go()
        if formed is None:
            return
        self.generation, members = formed, [self.workers[each.id] for each in formed.members]
        assert all(each.alive and each.waits for each in members)
        assert len(members) <= self.most and (
            formed.handover_only or formed.in_collective_task or len(members) >= self.least
        )
        steps = [each.step for each in self.living() if each.step is not None]
        if steps and max(steps) > self.stored:
            assert formed.first_step == max(steps), "the newest state counts"
        if formed.source is not None and formed.receivers:
            assert members[formed.source].resumable, "what it has is the state of no step"
        for each in members:
            each.waits = False
        if self.may_die_while_forming and self.random.random() < 0.1:
            self.dies(self.random.choice(members))
            return
        for rank, each in enumerate(members):
            if formed.source is None or rank in formed.receivers:
                each.step = self.stored if formed.first_step is None else formed.first_step
        assert formed.in_collective_task == (not formed.handover_only and any(each.is_amid for each in members))
        if not formed.handover_only and any(self.is_overdue(each) for each in members):
            assert any(not each.resumable for each in members), "one whose time is nearly up is to go on"
            for each in members:
                each.is_stuck = True
        if not formed.handover_only and not all(each.is_amid for each in members):
            for each in members:
                each.is_amid, each.resumable = False, True
        if formed.handover_only:
            if not formed.receivers:
                members[0].committed = self.stored = max(self.stored, members[0].step or 0)
            for each in members:
                self.arrives(each)
            self.form()


@pytest.mark.parametrize("first", range(0, SEEDS, 400))
def test_no_state_is_lost_to_a_notice_and_in_the_end_all_train_who_may(first: int) -> None:
    for seed in range(first, first + 400):
        try:
            History(seed).go()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
