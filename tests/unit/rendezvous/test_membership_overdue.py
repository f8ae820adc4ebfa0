"""Membership: members whose drain deadline is near, inside steps and evaluations."""

from __future__ import annotations

from elastic_ddp.rendezvous.members import DRAIN, DrainNotice
from tests.unit.membership_harness import MembershipHarness, harness_of, ids_of


def test_a_step_is_interrupted_after_three_quarters_of_a_notice() -> None:
    harness = harness_of("ab", min_workers=2)
    harness.membership.ask_to_leave("b", DrainNotice(harness.now, 20.0))
    harness.now += 14.9
    assert not harness.membership.interrupt_if_overdue(harness.now)
    harness.now += 0.1
    assert harness.membership.interrupt_if_overdue(harness.now)
    assert not harness.membership.interrupt_if_overdue(harness.now)
    harness.all_join("abc", 5)
    generation = harness.formed()
    assert (ids_of(generation), generation.reason) == (["a", "c"], "workers joined and left")


def test_a_notice_interrupts_one_step() -> None:
    harness = harness_of("ab", min_workers=2)
    harness.membership.ask_to_leave("b", DrainNotice(harness.now, 20.0))
    harness.now += 15
    assert harness.membership.interrupt_if_overdue(harness.now)
    harness.join("a", 4)
    harness.join("b", 5, between_steps=False, resumable=False)  # only it can finish its step's block
    assert harness.names() == ["b"]
    harness.now += 1
    assert not harness.membership.interrupt_if_overdue(harness.now)


def test_an_overdue_member_leaves_an_evaluation_if_others_hold_the_state() -> None:
    harness = harness_of("abc")
    harness.membership.ask_to_leave("b", DrainNotice(harness.now, 20.0))
    harness.now += 15
    assert harness.membership.interrupt_if_overdue(harness.now)
    for name in "abc":
        harness.join(name, 5, between_steps=False)
    assert harness.names() == ["a", "c"]
    assert harness.membership.dismissed == {"b": DRAIN}


def interrupt_overdue(harness: MembershipHarness, names: str) -> None:
    """Gives members a notice, and lets three quarters of it pass."""
    harness.membership.ask_to_leave(names, DrainNotice(harness.now, 20.0))
    harness.now += 15
    assert harness.membership.interrupt_if_overdue(harness.now)


def test_an_overdue_last_holder_in_an_evaluation_transfers_the_state() -> None:
    harness = harness_of("a")
    harness.all_join("b")
    interrupt_overdue(harness, "a")
    harness.join("a", 5, between_steps=False)
    handover = harness.formed()
    assert ids_of(handover) == ["a", "b"]
    assert (handover.handover_only, handover.in_collective_task, handover.source, handover.receivers) == (
        True,
        False,
        0,
        (1,),
    )
    harness.join("a", 5, between_steps=False)
    harness.join("b", 5)
    generation = harness.formed()
    assert (ids_of(generation), generation.source) == (["b"], 0)
    assert (generation.handover_only, generation.in_collective_task) == (False, False), (
        "it does not continue the task of a"
    )
    assert harness.membership.dismissed == {"a": DRAIN}


def test_overdue_members_in_an_evaluation_leave_after_one_commits() -> None:
    harness = harness_of("abc", min_workers=2)
    interrupt_overdue(harness, "abc")
    harness.join("a", 4, between_steps=False)
    harness.join("b", 5, between_steps=False)
    harness.join("c", 5, between_steps=False)
    handover = harness.formed()
    assert (ids_of(handover), handover.handover_only, handover.receivers) == (["b"], True, ())
    assert harness.membership.dismissed == {"a": DRAIN, "c": DRAIN}
    harness.join("b", 5, between_steps=False, committed=5)
    assert harness.form() is None
    assert harness.membership.dismissed == {"a": DRAIN, "c": DRAIN, "b": DRAIN}
    harness.all_join("def")
    assert harness.formed().source is None


def test_an_overdue_member_commits_if_the_limit_is_one_worker() -> None:
    harness = harness_of("a", max_workers=1)
    harness.all_join("b")
    interrupt_overdue(harness, "a")
    harness.join("a", 5, between_steps=False)
    assert harness.names() == ["a"]
    harness.join("a", 5, between_steps=False, committed=5)
    generation = harness.formed()
    assert (ids_of(generation), generation.source) == (["b"], None)


def test_a_lagging_member_gets_the_state_and_continues_the_evaluation() -> None:
    harness = harness_of("ab")
    harness.all_join("c")
    interrupt_overdue(harness, "a")
    harness.join("a", 5, between_steps=False)
    harness.join("b", 4, between_steps=False)
    handover = harness.formed()
    assert (ids_of(handover), handover.receivers) == (["a", "b"], (1,)), "no newcomer joins during the task"
    harness.join("a", 5, between_steps=False)
    harness.join("b", 5, between_steps=False)
    generation = harness.formed()
    assert (ids_of(generation), generation.in_collective_task) == (["b"], True)
    assert harness.membership.dismissed == {"a": DRAIN}


def test_a_state_inside_a_steps_block_is_not_transferred() -> None:
    harness = harness_of("a")
    harness.all_join("b")
    interrupt_overdue(harness, "a")
    harness.join("a", 5, between_steps=False, resumable=False)
    generation = harness.formed()
    assert (ids_of(generation), generation.handover_only, generation.in_collective_task) == (
        ["a"],
        False,
        True,
    )


def test_a_handover_generation_is_not_interrupted() -> None:
    harness = harness_of("ab", min_workers=2)
    harness.membership.ask_to_leave("ab", DrainNotice(harness.now, 20.0))
    harness.now += 10
    harness.all_join("ab", 5)
    assert harness.formed().handover_only
    harness.now += 6
    assert not harness.membership.interrupt_if_overdue(harness.now)


def test_a_waiting_member_that_is_overdue_interrupts_nothing() -> None:
    harness = harness_of("ab", min_workers=2)
    harness.membership.ask_to_leave("b", DrainNotice(harness.now, 20.0))
    harness.join("b", 5)
    harness.now += 20
    assert not harness.membership.interrupt_if_overdue(harness.now)
