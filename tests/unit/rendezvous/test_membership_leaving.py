"""Membership: how members leave after a drain notice or a resize, how their state is kept, and near a deadline."""

from __future__ import annotations

from elastic_ddp.rendezvous.members import DRAIN, RESIZE, DrainNotice
from elastic_ddp.rendezvous.membership import LEFT, STARTING_WAIT_S
from elastic_ddp.telemetry.event import WORKER_FAILED
from tests.unit.membership_harness import AT_ONCE, BROKEN, FAILED, MembershipHarness, harness_of, ids_of


def test_members_that_must_leave_are_not_in_the_next_generation() -> None:
    harness = harness_of("abc")
    harness.membership.ask_to_leave(["b"], AT_ONCE)
    assert harness.wants_change
    harness.all_join("abc", 5)
    generation = harness.formed()
    assert ids_of(generation) == ["a", "c"]
    assert (generation.reason, generation.receivers) == ("workers left", ())


def test_the_last_holder_of_the_state_transfers_it_and_then_leaves() -> None:
    harness = harness_of("ab", max_workers=3)
    harness.membership.ask_to_leave("ab", AT_ONCE)
    harness.all_join("c")
    harness.all_join("ab", 5)
    generation = harness.formed()
    assert ids_of(generation) == ["a", "c"]
    assert (generation.source, generation.receivers, generation.handover_only) == (0, (1,), True)
    assert harness.wants_change
    harness.all_join("ac", 5)
    generation = harness.formed()
    assert ids_of(generation) == ["c"]
    assert (generation.source, generation.receivers, generation.first_step) == (0, (), 5)
    assert not generation.handover_only
    assert generation.reason == "workers left"


def test_a_member_kept_for_its_state_takes_a_newcomers_place() -> None:
    harness = harness_of("a", max_workers=2)
    harness.membership.ask_to_leave("a", AT_ONCE)
    harness.all_join("bc")
    harness.all_join("a", 5)
    assert harness.names() == ["a", "b"]


def test_a_leaving_member_is_kept_if_only_it_holds_the_last_step() -> None:
    harness = harness_of("abc")
    harness.membership.ask_to_leave("b", AT_ONCE)
    harness.membership.mark_failed("c", FAILED)
    harness.join("a", 5)
    harness.join("b", 6)
    generation = harness.formed()
    assert sorted(ids_of(generation)) == ["a", "b"]
    assert generation.first_step == 6
    assert generation.members[generation.source or 0].id == "b"
    assert harness.wants_change


def test_a_failure_is_the_reason_of_a_handover_generation_after_it() -> None:
    harness = harness_of("ab")
    harness.membership.ask_to_leave("b", AT_ONCE)
    harness.membership.mark_failed("a", FAILED)
    harness.join("b", 5, failure=BROKEN)
    generation = harness.formed()
    assert (generation.handover_only, generation.reason) == (True, WORKER_FAILED)


def test_one_of_the_members_that_all_leave_commits_first() -> None:
    harness = harness_of("ab", min_workers=2)
    harness.membership.ask_to_leave("ab", AT_ONCE)
    harness.join("a", 5, committed=4)
    harness.join("b", 5)
    generation = harness.formed()
    assert (ids_of(generation), generation.handover_only, generation.receivers) == (
        ["a"],
        True,
        (),
    )
    assert harness.membership.dismissed == {"b": DRAIN}
    harness.join("a", 5, committed=5)
    assert harness.form() is None
    assert harness.membership.dismissed == {"b": DRAIN, "a": DRAIN} and harness.membership.failed() == {}
    harness.all_join("cd")
    generation = harness.formed()
    assert (ids_of(generation), generation.source, generation.number) == (["c", "d"], None, 3)


def test_the_earlier_of_two_deadlines_counts() -> None:
    harness = harness_of("ab", min_workers=2, nodes={"b": "x"})
    assert harness.membership.avoid("id of x", DrainNotice(harness.now, 600.0))
    assert harness.membership.avoid("id of x", DrainNotice(harness.now, 60.0))
    assert not harness.membership.avoid("id of x", DrainNotice(harness.now, 60.0)), "the deadline is the same"
    assert not harness.membership.avoid("id of x", DrainNotice(harness.now, 600.0))
    harness.membership.ask_to_leave("b", DrainNotice(harness.now, 600.0))
    harness.now += 30
    assert harness.wants_change, "half of the minute has passed"
    assert harness.membership.has_time(harness.now, 14.9)
    assert not harness.membership.has_time(harness.now, 15.0)


def test_a_needed_member_stays_for_half_of_its_notice() -> None:
    harness = harness_of("ab", min_workers=2)
    harness.membership.ask_to_leave("b", DrainNotice(harness.now, 20.0))
    assert not harness.wants_change
    harness.now += 9.9
    assert not harness.wants_change
    harness.now += 0.1
    assert harness.wants_change
    harness.all_join("ab", 5)
    assert harness.form() is None  # a keeps the state until there are enough
    assert harness.membership.dismissed == {"b": DRAIN}
    harness.all_join("c")
    generation = harness.formed()
    assert (ids_of(generation), generation.source) == (["a", "c"], 0)


def test_a_newcomer_that_replaces_no_one_does_not_end_a_generation() -> None:
    harness = harness_of("abc", min_workers=3, max_workers=3)
    for name in "bc":
        harness.membership.ask_to_leave(name, DrainNotice(harness.now, 120.0))
    harness.all_join("d")
    harness.now += STARTING_WAIT_S
    assert not harness.wants_change
    harness.all_join("e")
    assert harness.wants_change
    harness.all_join("abc", 5)
    assert harness.names() == ["a", "d", "e"]


def test_a_member_with_a_notice_counts_when_another_fails() -> None:
    harness = harness_of("abc", min_workers=2)
    harness.membership.ask_to_leave("c", DrainNotice(harness.now, 20.0))
    harness.membership.mark_failed("b", FAILED)
    harness.all_join("ac", 5)
    assert harness.names() == ["a", "c"]


def test_members_of_a_drained_node_leave_and_none_joins_from_it() -> None:
    harness = harness_of("abc", nodes={"c": "x"})
    assert harness.membership.avoid("id of x", AT_ONCE)
    assert not harness.membership.avoid("id of x", AT_ONCE)
    assert harness.wants_change
    assert harness.join("d", node="x") == LEFT
    harness.all_join("abc", 5)
    assert harness.names() == ["a", "b"]
    assert harness.membership.dismissed == {"d": DRAIN, "c": DRAIN}


def test_members_stay_on_a_node_that_is_no_longer_drained_and_others_join_from_it() -> None:
    harness = harness_of("abc", nodes={"c": "x"})
    harness.membership.avoid("id of x", AT_ONCE)
    harness.membership.admit("id of x")
    assert not harness.wants_change and not harness.membership.leaving
    assert harness.join("d", node="x") is None
    harness.all_join("abc", 5)
    assert harness.names() == ["a", "b", "c", "d"]


def test_a_member_with_a_notice_of_its_own_leaves_also_after_an_undrain() -> None:
    harness = harness_of("ab", nodes={"b": "x"})
    harness.membership.ask_to_leave("b", DrainNotice(harness.now, 20.0))
    harness.membership.avoid("id of x", DrainNotice(harness.now, 60.0))
    harness.membership.admit("id of x")
    assert harness.membership.leaving == ["b"]


def test_a_resize_dismisses_the_last_ranks() -> None:
    harness = harness_of("abcd")
    harness.membership.wanted.num_workers = 2
    assert harness.wants_change
    harness.all_join("abcd", 5)
    assert harness.names() == ["a", "b"]
    assert harness.membership.dismissed == {"c": RESIZE, "d": RESIZE}
    assert not harness.wants_change


def test_a_resized_run_waits_for_a_leaving_member_to_commit() -> None:
    harness = harness_of("ab")
    harness.membership.wanted.num_workers = 1
    harness.membership.ask_to_leave("b", AT_ONCE)
    harness.membership.mark_failed("unknown", FAILED)
    harness.join("a", 5, failure=BROKEN)
    harness.join("b", 6, failure=BROKEN)
    handover = harness.formed()
    assert (ids_of(handover), handover.handover_only, handover.receivers) == (["b"], True, ())
    assert harness.join("b", 6, committed=6) is None
    assert harness.names() == ["a"]
    assert harness.membership.dismissed == {"b": DRAIN}


def test_a_resize_dismisses_surplus_newcomers_while_others_train() -> None:
    harness = harness_of("abc", max_workers=5)
    harness.all_join("d")
    harness.now += 0.1
    harness.all_join("e")
    harness.membership.wanted.num_workers = 4
    assert harness.form() is None
    assert harness.membership.dismissed == {"e": RESIZE}
    harness.membership.wanted.num_workers = 3
    assert harness.form() is None
    assert harness.membership.dismissed == {"e": RESIZE, "d": RESIZE}
    harness.join("f")  # it was starting
    assert harness.form() is None
    assert harness.membership.why_gone("f") == LEFT
    assert len(harness.membership.known()) == 3


def test_a_resize_keeps_a_newcomer_that_replaces_a_leaving_member() -> None:
    harness = harness_of("abc", min_workers=3, max_workers=5)
    harness.membership.wanted.num_workers = 3
    harness.membership.ask_to_leave("c", DrainNotice(harness.now, 20.0))
    harness.all_join("d")
    assert harness.form() is None and not harness.membership.dismissed
    harness.all_join("abc", 5)
    assert harness.names() == ["a", "b", "d"]


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
