"""Who trains together: how members that are asked to leave go, and who is kept for its state."""

from __future__ import annotations

from elastic_ddp.rendezvous.members import AT_ONCE, DRAIN, RESIZE, DrainNotice
from elastic_ddp.rendezvous.membership import LEFT, PATIENCE_S, WORKER_FAILED
from tests.unit.membership_harness import BROKEN, DEAD, MembershipHarness, club_of


def test_members_that_are_asked_to_leave_are_left_out_of_the_next_generation() -> None:
    club = club_of("abc")
    club.membership.ask_to_leave(["b"])
    assert club.wants_change
    club.all_arrive("abc", 5)
    generation = club.formed()
    assert [each.id for each in generation.members] == ["a", "c"]
    assert (generation.reason, generation.receivers) == ("workers left", ())


def test_who_joins_while_another_leaves_is_told_of_both() -> None:
    club = club_of("ab", max_workers=2)
    club.all_arrive("c")
    club.membership.ask_to_leave("a")
    club.all_arrive("ab", 5)
    generation = club.formed()
    assert ([each.id for each in generation.members], generation.reason) == (["b", "c"], "workers joined and left")


def test_the_last_holder_of_the_newest_state_is_kept_once_and_then_asked_to_go() -> None:
    club = club_of("ab", max_workers=3)
    club.membership.ask_to_leave("ab")
    club.all_arrive("c")
    club.all_arrive("ab", 5)
    generation = club.formed()
    assert [each.id for each in generation.members] == ["a", "c"]
    assert (generation.source, generation.receivers, generation.brief) == (0, (1,), True)
    assert club.wants_change
    club.all_arrive("ac", 5)
    generation = club.formed()
    assert [each.id for each in generation.members] == ["c"]
    assert (generation.source, generation.receivers, generation.first_step) == (0, (), 5)
    assert not generation.brief
    assert generation.reason == "workers left"


def test_one_who_is_kept_for_its_state_takes_the_place_of_a_newcomer() -> None:
    club = club_of("a", max_workers=2)
    club.membership.ask_to_leave("a")
    club.all_arrive("bc")
    club.all_arrive("a", 5)
    assert club.names() == ["a", "b"]


def test_one_who_leaves_is_kept_if_it_alone_made_the_last_step() -> None:
    club = club_of("abc")
    club.membership.ask_to_leave("b")
    club.membership.lose("c", DEAD)
    club.arrive("a", 5)
    club.arrive("b", 6)
    generation = club.formed()
    assert sorted(each.id for each in generation.members) == ["a", "b"]
    assert generation.first_step == 6
    assert generation.members[generation.source or 0].id == "b"
    assert club.wants_change


def test_one_who_should_leave_is_kept_when_nobody_else_is_there() -> None:
    club = club_of("a")
    club.membership.ask_to_leave("a")
    club.all_arrive("a", 5)
    generation = club.formed()
    assert ([each.id for each in generation.members], generation.reason) == (["a"], "workers leave")


def test_a_loss_is_what_a_generation_of_those_who_leave_is_formed_for() -> None:
    club = club_of("ab")
    club.membership.ask_to_leave("b")
    club.membership.lose("a", DEAD)
    club.arrive("b", 5, failure="a peer was lost")
    generation = club.formed()
    assert (generation.brief, generation.reason) == (True, WORKER_FAILED)


def test_members_that_all_leave_go_once_the_newest_state_is_committed() -> None:
    club = club_of("ab")
    club.membership.ask_to_leave("ab")
    club.arrive("a", 5, committed=5)
    club.arrive("b", 5)
    assert club.form() is None
    assert club.membership.dismissed == {"a": DRAIN, "b": DRAIN}
    assert club.membership.failed() == {}
    club.all_arrive("cd")
    generation = club.formed()
    assert [each.id for each in generation.members] == ["c", "d"]
    assert (generation.source, generation.number) == (None, 2)


def test_of_members_that_all_leave_one_commits_first_and_makes_no_step() -> None:
    club = club_of("ab", min_workers=2)
    club.membership.ask_to_leave("ab")
    club.arrive("a", 5, committed=4)
    club.arrive("b", 5)
    generation = club.formed()
    assert ([each.id for each in generation.members], generation.brief, generation.receivers) == (["a"], True, ())
    assert club.membership.dismissed == {"b": DRAIN}
    club.arrive("a", 5, committed=5)
    assert club.form() is None
    assert club.membership.dismissed == {"b": DRAIN, "a": DRAIN}


def test_a_survivor_that_leaves_commits_though_there_are_fewer_than_min_workers() -> None:
    club = club_of("ab", min_workers=2)
    club.membership.lose("b", DEAD)
    club.arrive("a", 5, failure=BROKEN)
    assert club.form() is None
    club.membership.ask_to_leave("a")
    assert club.names() == ["a"]


def test_a_step_that_outlasts_three_quarters_of_a_notice_is_broken() -> None:
    club = club_of("ab", min_workers=2)
    club.membership.ask_to_leave("b", DrainNotice(club.now, 20.0))
    club.now += 14.9
    assert not club.membership.break_if_overdue(club.now)
    club.now += 0.1
    assert club.membership.break_if_overdue(club.now)
    assert not club.membership.break_if_overdue(club.now)
    club.all_arrive("abc", 5)
    generation = club.formed()
    assert ([each.id for each in generation.members], generation.reason) == (["a", "c"], "workers joined and left")


def test_a_notice_breaks_one_generation_and_no_other() -> None:
    club = club_of("ab", min_workers=2)
    club.membership.ask_to_leave("b", DrainNotice(club.now, 20.0))
    club.now += 15
    assert club.membership.break_if_overdue(club.now)
    club.arrive("a", 4)
    club.arrive("b", 5, between_steps=False, resumable=False)  # nobody else can do the rest of its step's block
    assert club.names() == ["b"]
    club.now += 1
    assert not club.membership.break_if_overdue(club.now)


def test_one_whose_time_is_nearly_up_leaves_in_an_evaluation_too_if_others_hold_the_state() -> None:
    club = club_of("abc")
    club.membership.ask_to_leave("b", DrainNotice(club.now, 20.0))
    club.now += 15
    assert club.membership.break_if_overdue(club.now)
    for name in "abc":
        club.arrive(name, 5, between_steps=False)
    assert club.names() == ["a", "c"]
    assert club.membership.dismissed == {"b": DRAIN}


def overdue_amid_an_evaluation(club: MembershipHarness, names: str) -> None:
    """Those who are to go have not got out of it when three quarters of their time are over."""
    club.membership.ask_to_leave(names, DrainNotice(club.now, 20.0))
    club.now += 15
    assert club.membership.break_if_overdue(club.now)


def test_the_last_holder_of_the_state_that_has_to_go_amid_an_evaluation_hands_it_to_who_waits() -> None:
    club = club_of("a")
    club.all_arrive("b")
    overdue_amid_an_evaluation(club, "a")
    club.arrive("a", 5, between_steps=False)
    brief = club.formed()
    assert [each.id for each in brief.members] == ["a", "b"]
    assert (brief.brief, brief.amid, brief.source, brief.receivers) == (True, False, 0, (1,))
    club.arrive("a", 5, between_steps=False)
    club.arrive("b", 5)
    generation = club.formed()
    assert ([each.id for each in generation.members], generation.source) == (["b"], 0)
    assert (generation.brief, generation.amid) == (False, False), "which goes on from there, and not with what a did"
    assert club.membership.dismissed == {"a": DRAIN}


def test_those_who_all_have_to_go_amid_an_evaluation_have_one_commit_and_then_go() -> None:
    club = club_of("abc", min_workers=2)
    overdue_amid_an_evaluation(club, "abc")
    club.arrive("a", 4, between_steps=False)
    club.arrive("b", 5, between_steps=False)
    club.arrive("c", 5, between_steps=False)
    brief = club.formed()
    assert ([each.id for each in brief.members], brief.brief, brief.receivers) == (["b"], True, ())
    assert club.membership.dismissed == {"a": DRAIN, "c": DRAIN}
    club.arrive("b", 5, between_steps=False, committed=5)
    assert club.form() is None
    assert club.membership.dismissed == {"a": DRAIN, "c": DRAIN, "b": DRAIN}
    club.all_arrive("def")
    assert club.formed().source is None


def test_where_there_is_room_for_one_worker_the_one_that_has_to_go_commits_for_the_next() -> None:
    club = club_of("a", max_workers=1)
    club.all_arrive("b")
    overdue_amid_an_evaluation(club, "a")
    club.arrive("a", 5, between_steps=False)
    assert club.names() == ["a"]
    club.arrive("a", 5, between_steps=False, committed=5)
    generation = club.formed()
    assert ([each.id for each in generation.members], generation.source) == (["b"], None)


def test_who_lags_behind_one_that_has_to_go_gets_its_state_and_goes_on_with_the_evaluation() -> None:
    club = club_of("ab")
    club.all_arrive("c")
    overdue_amid_an_evaluation(club, "a")
    club.arrive("a", 5, between_steps=False)
    club.arrive("b", 4, between_steps=False)
    brief = club.formed()
    assert ([each.id for each in brief.members], brief.receivers) == (["a", "b"], (1,)), "nobody joins amid it"
    club.arrive("a", 5, between_steps=False)
    club.arrive("b", 5, between_steps=False)
    generation = club.formed()
    assert ([each.id for each in generation.members], generation.amid) == (["b"], True)
    assert club.membership.dismissed == {"a": DRAIN}


def test_a_state_in_the_midst_of_a_steps_block_is_not_handed_over() -> None:
    club = club_of("a")
    club.all_arrive("b")
    overdue_amid_an_evaluation(club, "a")
    club.arrive("a", 5, between_steps=False, resumable=False)
    generation = club.formed()
    assert ([each.id for each in generation.members], generation.brief, generation.amid) == (["a"], False, True)


def test_a_generation_in_which_state_is_handed_on_is_not_broken_by_a_notice() -> None:
    club = club_of("ab", min_workers=2)
    club.membership.ask_to_leave("ab", DrainNotice(club.now, 20.0))
    club.now += 10
    club.all_arrive("ab", 5)
    assert club.formed().brief
    club.now += 6
    assert not club.membership.break_if_overdue(club.now)


def test_of_two_notices_the_one_that_leaves_less_time_counts() -> None:
    club = club_of("ab", min_workers=2, nodes={"b": "x"})
    assert club.membership.drain("id of x", DrainNotice(club.now, 600.0))
    assert club.membership.drain("id of x", DrainNotice(club.now, 60.0))
    assert not club.membership.drain("id of x", DrainNotice(club.now, 60.0)), "that is no news"
    assert not club.membership.drain("id of x", DrainNotice(club.now, 600.0))
    club.membership.ask_to_leave("b", DrainNotice(club.now, 600.0))
    club.now += 30
    assert club.wants_change, "half of the minute is over"
    assert club.membership.has_time(club.now, 14.9)
    assert not club.membership.has_time(club.now, 15.0)


def test_a_generation_knows_whether_it_has_the_members_of_the_one_before() -> None:
    club = club_of("ab")
    club.all_arrive("ab", 5)
    assert club.formed().again
    club.all_arrive("abc", 6)
    assert not club.formed().again


def test_one_who_waits_to_leave_breaks_nothing() -> None:
    club = club_of("ab", min_workers=2)
    club.membership.ask_to_leave("b", DrainNotice(club.now, 20.0))
    club.arrive("b", 5)
    club.now += 20
    assert not club.membership.break_if_overdue(club.now)


def test_one_with_notice_stays_while_it_is_needed_for_half_of_the_time() -> None:
    club = club_of("ab", min_workers=2)
    club.membership.ask_to_leave("b", DrainNotice(club.now, 20.0))
    assert not club.wants_change
    club.now += 9.9
    assert not club.wants_change
    club.now += 0.1
    assert club.wants_change
    club.all_arrive("ab", 5)
    assert club.form() is None  # and a keeps the state until there are enough
    assert club.membership.dismissed == {"b": DRAIN}
    club.all_arrive("c")
    generation = club.formed()
    assert ([each.id for each in generation.members], generation.source) == (["a", "c"], 0)


def test_one_with_notice_leaves_as_soon_as_another_has_come() -> None:
    club = club_of("ab", min_workers=2, max_workers=2)
    club.membership.ask_to_leave("b", DrainNotice(club.now, 20.0))
    club.all_arrive("c")
    assert club.wants_change
    club.all_arrive("ab", 5)
    assert club.names() == ["a", "c"]
    assert club.membership.dismissed == {"b": DRAIN}


def test_a_generation_is_not_formed_again_for_a_newcomer_that_is_not_enough_to_let_anybody_go() -> None:
    club = club_of("abc", min_workers=3, max_workers=3)
    for name in "bc":
        club.membership.ask_to_leave(name, DrainNotice(club.now, 120.0))
    club.all_arrive("d")
    club.now += PATIENCE_S
    assert not club.wants_change
    club.all_arrive("e")
    assert club.wants_change
    club.all_arrive("abc", 5)
    assert club.names() == ["a", "d", "e"]


def test_one_with_notice_still_counts_when_another_is_lost() -> None:
    club = club_of("abc", min_workers=2)
    club.membership.ask_to_leave("c", DrainNotice(club.now, 20.0))
    club.membership.lose("b", DEAD)
    club.all_arrive("ac", 5)
    assert club.names() == ["a", "c"]


def test_a_node_that_is_drained_lets_its_members_go_and_nobody_in() -> None:
    club = club_of("abc", nodes={"c": "x"})
    assert club.membership.drain("id of x", AT_ONCE)
    assert not club.membership.drain("id of x", AT_ONCE)
    assert club.wants_change
    assert club.arrive("d", node="x") == LEFT
    club.all_arrive("abc", 5)
    assert club.names() == ["a", "b"]
    assert club.membership.dismissed == {"d": DRAIN, "c": DRAIN}


def test_a_newcomer_that_is_told_to_go_is_let_go_at_once() -> None:
    club = club_of("ab")
    club.all_arrive("c")
    club.membership.ask_to_leave("c")
    assert club.membership.dismissed == {"c": DRAIN}
    assert not club.wants_change


def test_a_run_that_is_made_smaller_lets_the_last_ranks_go() -> None:
    club = club_of("abcd")
    club.membership.wanted = 2
    assert club.wants_change
    club.all_arrive("abcd", 5)
    assert club.names() == ["a", "b"]
    assert club.membership.dismissed == {"c": RESIZE, "d": RESIZE}
    assert not club.wants_change


def test_who_stays_waits_where_one_that_goes_commits_the_newest_state() -> None:
    club = club_of("ab")
    club.membership.wanted = 1
    club.membership.ask_to_leave("b")
    club.membership.lose("nobody", DEAD)
    club.arrive("a", 5, failure=BROKEN)
    club.arrive("b", 6, failure=BROKEN)
    brief = club.formed()
    assert ([each.id for each in brief.members], brief.brief, brief.receivers) == (["b"], True, ())
    assert club.arrive("b", 6, committed=6) is None
    assert club.names() == ["a"]
    assert club.membership.dismissed == {"b": DRAIN}


def test_a_run_that_is_made_smaller_while_it_breaks_keeps_one_who_made_the_last_step() -> None:
    club = club_of("abc")
    club.membership.wanted = 1
    club.arrive("a", 5, failure=BROKEN)
    club.arrive("b", 5)
    club.arrive("c", 6)
    assert club.names() == ["c"]


def test_a_newcomer_that_was_not_wanted_any_more_is_let_go() -> None:
    club = club_of("abc", max_workers=4)
    club.all_arrive("d")
    club.membership.wanted = 2
    club.all_arrive("abc", 5)
    assert club.names() == ["a", "b"]
    assert club.membership.dismissed == {"c": RESIZE, "d": RESIZE}


def test_newcomers_for_whom_there_is_no_room_any_more_are_let_go_while_others_train() -> None:
    club = club_of("abc", max_workers=5)
    club.all_arrive("d")
    club.now += 0.1
    club.all_arrive("e")
    club.membership.wanted = 4
    assert club.form() is None
    assert club.membership.dismissed == {"e": RESIZE}
    club.membership.wanted = 3
    assert club.form() is None
    assert club.membership.dismissed == {"e": RESIZE, "d": RESIZE}
    club.arrive("f")  # which was on its way meanwhile
    assert club.form() is None
    assert club.membership.why_gone("f") == LEFT
    assert club.membership.num_alive == 3


def test_a_newcomer_that_is_to_take_the_place_of_one_that_goes_is_kept_in_a_run_that_was_resized() -> None:
    club = club_of("abc", min_workers=3, max_workers=5)
    club.membership.wanted = 3
    club.membership.ask_to_leave("c", DrainNotice(club.now, 20.0))
    club.all_arrive("d")
    assert club.form() is None and not club.membership.dismissed
    club.all_arrive("abc", 5)
    assert club.names() == ["a", "b", "d"]


def test_nobody_leaves_in_the_midst_of_an_evaluation() -> None:
    club = club_of("abc")
    club.membership.ask_to_leave("a")
    club.membership.lose("c", DEAD)
    club.arrive("a", 5, between_steps=False)
    club.arrive("b", 5, between_steps=False)
    assert club.names() == ["a", "b"]
    assert club.wants_change


def test_max_workers_is_not_exceeded_by_one_who_is_kept_for_its_state() -> None:
    club = club_of("a", max_workers=1)
    club.all_arrive("b")
    club.membership.ask_to_leave("a")
    club.all_arrive("a", 5)
    assert len(club.formed().members) == 1


def test_when_all_should_leave_a_holder_of_the_newest_state_is_kept() -> None:
    club = club_of("ab")
    club.membership.ask_to_leave("ab")
    club.arrive("a", 5)
    club.arrive("b", 6, failure=BROKEN)
    assert club.formed().first_step == 6
