"""Who trains together: how members that are asked to leave go, and who is kept for its state."""

from __future__ import annotations

from elastic_ddp.rendezvous.members import DRAIN, RESIZE, DrainNotice
from elastic_ddp.rendezvous.membership import LEFT, STARTING_WAIT_S, WORKER_FAILED
from tests.unit.membership_harness import AT_ONCE, BROKEN, DEAD, MembershipHarness, harness_of


def test_members_that_are_asked_to_leave_are_left_out_of_the_next_generation() -> None:
    harness = harness_of("abc")
    harness.membership.ask_to_leave(["b"], AT_ONCE)
    assert harness.wants_change
    harness.all_join("abc", 5)
    generation = harness.formed()
    assert [each.id for each in generation.members] == ["a", "c"]
    assert (generation.reason, generation.receivers) == ("workers left", ())


def test_who_joins_while_another_leaves_is_told_of_both() -> None:
    harness = harness_of("ab", max_workers=2)
    harness.all_join("c")
    harness.membership.ask_to_leave("a", AT_ONCE)
    harness.all_join("ab", 5)
    generation = harness.formed()
    assert ([each.id for each in generation.members], generation.reason) == (["b", "c"], "workers joined and left")


def test_the_last_holder_of_the_newest_state_is_kept_once_and_then_asked_to_go() -> None:
    harness = harness_of("ab", max_workers=3)
    harness.membership.ask_to_leave("ab", AT_ONCE)
    harness.all_join("c")
    harness.all_join("ab", 5)
    generation = harness.formed()
    assert [each.id for each in generation.members] == ["a", "c"]
    assert (generation.source, generation.receivers, generation.handover_only) == (0, (1,), True)
    assert harness.wants_change
    harness.all_join("ac", 5)
    generation = harness.formed()
    assert [each.id for each in generation.members] == ["c"]
    assert (generation.source, generation.receivers, generation.first_step) == (0, (), 5)
    assert not generation.handover_only
    assert generation.reason == "workers left"


def test_one_who_is_kept_for_its_state_takes_the_place_of_a_newcomer() -> None:
    harness = harness_of("a", max_workers=2)
    harness.membership.ask_to_leave("a", AT_ONCE)
    harness.all_join("bc")
    harness.all_join("a", 5)
    assert harness.names() == ["a", "b"]


def test_one_who_leaves_is_kept_if_it_alone_made_the_last_step() -> None:
    harness = harness_of("abc")
    harness.membership.ask_to_leave("b", AT_ONCE)
    harness.membership.mark_failed("c", DEAD)
    harness.join("a", 5)
    harness.join("b", 6)
    generation = harness.formed()
    assert sorted(each.id for each in generation.members) == ["a", "b"]
    assert generation.first_step == 6
    assert generation.members[generation.source or 0].id == "b"
    assert harness.wants_change


def test_one_who_should_leave_is_kept_when_nobody_else_is_there() -> None:
    harness = harness_of("a")
    harness.membership.ask_to_leave("a", AT_ONCE)
    harness.all_join("a", 5)
    generation = harness.formed()
    assert ([each.id for each in generation.members], generation.reason) == (["a"], "workers leave")


def test_a_loss_is_what_a_generation_of_those_who_leave_is_formed_for() -> None:
    harness = harness_of("ab")
    harness.membership.ask_to_leave("b", AT_ONCE)
    harness.membership.mark_failed("a", DEAD)
    harness.join("b", 5, failure="a peer was lost")
    generation = harness.formed()
    assert (generation.handover_only, generation.reason) == (True, WORKER_FAILED)


def test_members_that_all_leave_go_once_the_newest_state_is_committed() -> None:
    harness = harness_of("ab")
    harness.membership.ask_to_leave("ab", AT_ONCE)
    harness.join("a", 5, committed=5)
    harness.join("b", 5)
    assert harness.form() is None
    assert harness.membership.dismissed == {"a": DRAIN, "b": DRAIN}
    assert harness.membership.failed() == {}
    harness.all_join("cd")
    generation = harness.formed()
    assert [each.id for each in generation.members] == ["c", "d"]
    assert (generation.source, generation.number) == (None, 2)


def test_of_members_that_all_leave_one_commits_first_and_makes_no_step() -> None:
    harness = harness_of("ab", min_workers=2)
    harness.membership.ask_to_leave("ab", AT_ONCE)
    harness.join("a", 5, committed=4)
    harness.join("b", 5)
    generation = harness.formed()
    assert ([each.id for each in generation.members], generation.handover_only, generation.receivers) == (
        ["a"],
        True,
        (),
    )
    assert harness.membership.dismissed == {"b": DRAIN}
    harness.join("a", 5, committed=5)
    assert harness.form() is None
    assert harness.membership.dismissed == {"b": DRAIN, "a": DRAIN}


def test_a_survivor_that_leaves_commits_though_there_are_fewer_than_min_workers() -> None:
    harness = harness_of("ab", min_workers=2)
    harness.membership.mark_failed("b", DEAD)
    harness.join("a", 5, failure=BROKEN)
    assert harness.form() is None
    harness.membership.ask_to_leave("a", AT_ONCE)
    assert harness.names() == ["a"]


def test_a_step_that_outlasts_three_quarters_of_a_notice_is_broken() -> None:
    harness = harness_of("ab", min_workers=2)
    harness.membership.ask_to_leave("b", DrainNotice(harness.now, 20.0))
    harness.now += 14.9
    assert not harness.membership.interrupt_if_overdue(harness.now)
    harness.now += 0.1
    assert harness.membership.interrupt_if_overdue(harness.now)
    assert not harness.membership.interrupt_if_overdue(harness.now)
    harness.all_join("abc", 5)
    generation = harness.formed()
    assert ([each.id for each in generation.members], generation.reason) == (["a", "c"], "workers joined and left")


def test_a_notice_breaks_one_generation_and_no_other() -> None:
    harness = harness_of("ab", min_workers=2)
    harness.membership.ask_to_leave("b", DrainNotice(harness.now, 20.0))
    harness.now += 15
    assert harness.membership.interrupt_if_overdue(harness.now)
    harness.join("a", 4)
    harness.join("b", 5, between_steps=False, resumable=False)  # nobody else can do the rest of its step's block
    assert harness.names() == ["b"]
    harness.now += 1
    assert not harness.membership.interrupt_if_overdue(harness.now)


def test_one_whose_time_is_nearly_up_leaves_in_an_evaluation_too_if_others_hold_the_state() -> None:
    harness = harness_of("abc")
    harness.membership.ask_to_leave("b", DrainNotice(harness.now, 20.0))
    harness.now += 15
    assert harness.membership.interrupt_if_overdue(harness.now)
    for name in "abc":
        harness.join(name, 5, between_steps=False)
    assert harness.names() == ["a", "c"]
    assert harness.membership.dismissed == {"b": DRAIN}


def overdue_amid_an_evaluation(harness: MembershipHarness, names: str) -> None:
    """Those who are to go have not got out of it when three quarters of their time are over."""
    harness.membership.ask_to_leave(names, DrainNotice(harness.now, 20.0))
    harness.now += 15
    assert harness.membership.interrupt_if_overdue(harness.now)


def test_the_last_holder_of_the_state_that_has_to_go_amid_an_evaluation_hands_it_to_who_waits() -> None:
    harness = harness_of("a")
    harness.all_join("b")
    overdue_amid_an_evaluation(harness, "a")
    harness.join("a", 5, between_steps=False)
    brief = harness.formed()
    assert [each.id for each in brief.members] == ["a", "b"]
    assert (brief.handover_only, brief.in_collective_task, brief.source, brief.receivers) == (True, False, 0, (1,))
    harness.join("a", 5, between_steps=False)
    harness.join("b", 5)
    generation = harness.formed()
    assert ([each.id for each in generation.members], generation.source) == (["b"], 0)
    assert (generation.handover_only, generation.in_collective_task) == (False, False), (
        "which goes on from there, and not with what a did"
    )
    assert harness.membership.dismissed == {"a": DRAIN}


def test_those_who_all_have_to_go_amid_an_evaluation_have_one_commit_and_then_go() -> None:
    harness = harness_of("abc", min_workers=2)
    overdue_amid_an_evaluation(harness, "abc")
    harness.join("a", 4, between_steps=False)
    harness.join("b", 5, between_steps=False)
    harness.join("c", 5, between_steps=False)
    brief = harness.formed()
    assert ([each.id for each in brief.members], brief.handover_only, brief.receivers) == (["b"], True, ())
    assert harness.membership.dismissed == {"a": DRAIN, "c": DRAIN}
    harness.join("b", 5, between_steps=False, committed=5)
    assert harness.form() is None
    assert harness.membership.dismissed == {"a": DRAIN, "c": DRAIN, "b": DRAIN}
    harness.all_join("def")
    assert harness.formed().source is None


def test_where_there_is_room_for_one_worker_the_one_that_has_to_go_commits_for_the_next() -> None:
    harness = harness_of("a", max_workers=1)
    harness.all_join("b")
    overdue_amid_an_evaluation(harness, "a")
    harness.join("a", 5, between_steps=False)
    assert harness.names() == ["a"]
    harness.join("a", 5, between_steps=False, committed=5)
    generation = harness.formed()
    assert ([each.id for each in generation.members], generation.source) == (["b"], None)


def test_who_lags_behind_one_that_has_to_go_gets_its_state_and_goes_on_with_the_evaluation() -> None:
    harness = harness_of("ab")
    harness.all_join("c")
    overdue_amid_an_evaluation(harness, "a")
    harness.join("a", 5, between_steps=False)
    harness.join("b", 4, between_steps=False)
    brief = harness.formed()
    assert ([each.id for each in brief.members], brief.receivers) == (["a", "b"], (1,)), "nobody joins amid it"
    harness.join("a", 5, between_steps=False)
    harness.join("b", 5, between_steps=False)
    generation = harness.formed()
    assert ([each.id for each in generation.members], generation.in_collective_task) == (["b"], True)
    assert harness.membership.dismissed == {"a": DRAIN}


def test_a_state_in_the_midst_of_a_steps_block_is_not_handed_over() -> None:
    harness = harness_of("a")
    harness.all_join("b")
    overdue_amid_an_evaluation(harness, "a")
    harness.join("a", 5, between_steps=False, resumable=False)
    generation = harness.formed()
    assert ([each.id for each in generation.members], generation.handover_only, generation.in_collective_task) == (
        ["a"],
        False,
        True,
    )


def test_a_generation_in_which_state_is_handed_on_is_not_broken_by_a_notice() -> None:
    harness = harness_of("ab", min_workers=2)
    harness.membership.ask_to_leave("ab", DrainNotice(harness.now, 20.0))
    harness.now += 10
    harness.all_join("ab", 5)
    assert harness.formed().handover_only
    harness.now += 6
    assert not harness.membership.interrupt_if_overdue(harness.now)


def test_of_two_notices_the_one_that_leaves_less_time_counts() -> None:
    harness = harness_of("ab", min_workers=2, nodes={"b": "x"})
    assert harness.membership.drain("id of x", DrainNotice(harness.now, 600.0))
    assert harness.membership.drain("id of x", DrainNotice(harness.now, 60.0))
    assert not harness.membership.drain("id of x", DrainNotice(harness.now, 60.0)), "that is no news"
    assert not harness.membership.drain("id of x", DrainNotice(harness.now, 600.0))
    harness.membership.ask_to_leave("b", DrainNotice(harness.now, 600.0))
    harness.now += 30
    assert harness.wants_change, "half of the minute is over"
    assert harness.membership.has_time(harness.now, 14.9)
    assert not harness.membership.has_time(harness.now, 15.0)


def test_a_generation_knows_whether_it_has_the_members_of_the_one_before() -> None:
    harness = harness_of("ab")
    harness.all_join("ab", 5)
    assert harness.formed().same_members
    harness.all_join("abc", 6)
    assert not harness.formed().same_members


def test_one_who_waits_to_leave_breaks_nothing() -> None:
    harness = harness_of("ab", min_workers=2)
    harness.membership.ask_to_leave("b", DrainNotice(harness.now, 20.0))
    harness.join("b", 5)
    harness.now += 20
    assert not harness.membership.interrupt_if_overdue(harness.now)


def test_one_with_notice_stays_while_it_is_needed_for_half_of_the_time() -> None:
    harness = harness_of("ab", min_workers=2)
    harness.membership.ask_to_leave("b", DrainNotice(harness.now, 20.0))
    assert not harness.wants_change
    harness.now += 9.9
    assert not harness.wants_change
    harness.now += 0.1
    assert harness.wants_change
    harness.all_join("ab", 5)
    assert harness.form() is None  # and a keeps the state until there are enough
    assert harness.membership.dismissed == {"b": DRAIN}
    harness.all_join("c")
    generation = harness.formed()
    assert ([each.id for each in generation.members], generation.source) == (["a", "c"], 0)


def test_one_with_notice_leaves_as_soon_as_another_has_come() -> None:
    harness = harness_of("ab", min_workers=2, max_workers=2)
    harness.membership.ask_to_leave("b", DrainNotice(harness.now, 20.0))
    harness.all_join("c")
    assert harness.wants_change
    harness.all_join("ab", 5)
    assert harness.names() == ["a", "c"]
    assert harness.membership.dismissed == {"b": DRAIN}


def test_a_generation_is_not_formed_again_for_a_newcomer_that_is_not_enough_to_let_anybody_go() -> None:
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


def test_one_with_notice_still_counts_when_another_is_lost() -> None:
    harness = harness_of("abc", min_workers=2)
    harness.membership.ask_to_leave("c", DrainNotice(harness.now, 20.0))
    harness.membership.mark_failed("b", DEAD)
    harness.all_join("ac", 5)
    assert harness.names() == ["a", "c"]


def test_a_node_that_is_drained_lets_its_members_go_and_nobody_in() -> None:
    harness = harness_of("abc", nodes={"c": "x"})
    assert harness.membership.drain("id of x", AT_ONCE)
    assert not harness.membership.drain("id of x", AT_ONCE)
    assert harness.wants_change
    assert harness.join("d", node="x") == LEFT
    harness.all_join("abc", 5)
    assert harness.names() == ["a", "b"]
    assert harness.membership.dismissed == {"d": DRAIN, "c": DRAIN}


def test_a_newcomer_that_is_told_to_go_is_let_go_at_once() -> None:
    harness = harness_of("ab")
    harness.all_join("c")
    harness.membership.ask_to_leave("c", AT_ONCE)
    assert harness.membership.dismissed == {"c": DRAIN}
    assert not harness.wants_change


def test_a_run_that_is_made_smaller_lets_the_last_ranks_go() -> None:
    harness = harness_of("abcd")
    harness.membership.wanted = 2
    assert harness.wants_change
    harness.all_join("abcd", 5)
    assert harness.names() == ["a", "b"]
    assert harness.membership.dismissed == {"c": RESIZE, "d": RESIZE}
    assert not harness.wants_change


def test_who_stays_waits_where_one_that_goes_commits_the_newest_state() -> None:
    harness = harness_of("ab")
    harness.membership.wanted = 1
    harness.membership.ask_to_leave("b", AT_ONCE)
    harness.membership.mark_failed("nobody", DEAD)
    harness.join("a", 5, failure=BROKEN)
    harness.join("b", 6, failure=BROKEN)
    brief = harness.formed()
    assert ([each.id for each in brief.members], brief.handover_only, brief.receivers) == (["b"], True, ())
    assert harness.join("b", 6, committed=6) is None
    assert harness.names() == ["a"]
    assert harness.membership.dismissed == {"b": DRAIN}


def test_a_run_that_is_made_smaller_while_it_breaks_keeps_one_who_made_the_last_step() -> None:
    harness = harness_of("abc")
    harness.membership.wanted = 1
    harness.join("a", 5, failure=BROKEN)
    harness.join("b", 5)
    harness.join("c", 6)
    assert harness.names() == ["c"]


def test_a_newcomer_that_was_not_wanted_any_more_is_let_go() -> None:
    harness = harness_of("abc", max_workers=4)
    harness.all_join("d")
    harness.membership.wanted = 2
    harness.all_join("abc", 5)
    assert harness.names() == ["a", "b"]
    assert harness.membership.dismissed == {"c": RESIZE, "d": RESIZE}


def test_newcomers_for_whom_there_is_no_room_any_more_are_let_go_while_others_train() -> None:
    harness = harness_of("abc", max_workers=5)
    harness.all_join("d")
    harness.now += 0.1
    harness.all_join("e")
    harness.membership.wanted = 4
    assert harness.form() is None
    assert harness.membership.dismissed == {"e": RESIZE}
    harness.membership.wanted = 3
    assert harness.form() is None
    assert harness.membership.dismissed == {"e": RESIZE, "d": RESIZE}
    harness.join("f")  # which was on its way meanwhile
    assert harness.form() is None
    assert harness.membership.why_gone("f") == LEFT
    assert len(harness.membership.known()) == 3


def test_a_newcomer_that_is_to_take_the_place_of_one_that_goes_is_kept_in_a_run_that_was_resized() -> None:
    harness = harness_of("abc", min_workers=3, max_workers=5)
    harness.membership.wanted = 3
    harness.membership.ask_to_leave("c", DrainNotice(harness.now, 20.0))
    harness.all_join("d")
    assert harness.form() is None and not harness.membership.dismissed
    harness.all_join("abc", 5)
    assert harness.names() == ["a", "b", "d"]


def test_nobody_leaves_in_the_midst_of_an_evaluation() -> None:
    harness = harness_of("abc")
    harness.membership.ask_to_leave("a", AT_ONCE)
    harness.membership.mark_failed("c", DEAD)
    harness.join("a", 5, between_steps=False)
    harness.join("b", 5, between_steps=False)
    assert harness.names() == ["a", "b"]
    assert harness.wants_change


def test_max_workers_is_not_exceeded_by_one_who_is_kept_for_its_state() -> None:
    harness = harness_of("a", max_workers=1)
    harness.all_join("b")
    harness.membership.ask_to_leave("a", AT_ONCE)
    harness.all_join("a", 5)
    assert len(harness.formed().members) == 1


def test_when_all_should_leave_a_holder_of_the_newest_state_is_kept() -> None:
    harness = harness_of("ab")
    harness.membership.ask_to_leave("ab", AT_ONCE)
    harness.join("a", 5)
    harness.join("b", 6, failure=BROKEN)
    assert harness.formed().first_step == 6
