"""Who trains together: how generations form, break, and let newcomers in."""

from __future__ import annotations

import pytest

from elastic_ddp.rendezvous.membership import GATHER_S, LEFT, LONG_GONE, PATIENCE_S, SETTLE_S
from tests.unit.membership_harness import BROKEN, DEAD, MembershipHarness, club_of, member

# The first generation.


def test_the_first_generation_waits_for_the_whole_group() -> None:
    club = MembershipHarness(size=3)
    assert club.form() is None
    club.all_arrive("ab")
    club.now += GATHER_S - 0.1
    assert club.form() is None
    club.all_arrive("c")
    generation = club.formed()
    assert (generation.number, generation.reason) == (1, "start")
    assert [each.id for each in generation.members] == ["a", "b", "c"]
    assert club.membership.current == generation
    assert club.form() is None


def test_a_member_that_asks_again_counts_once() -> None:
    club = MembershipHarness(size=2)
    club.all_arrive("aa")
    assert club.form() is None
    club.all_arrive("b")
    assert club.names() == ["a", "b"]


def test_the_first_generation_goes_without_those_who_do_not_come_in_time() -> None:
    club = MembershipHarness(size=3)
    club.all_arrive("a")
    club.now += GATHER_S / 2
    club.all_arrive("b")
    club.now += GATHER_S / 2  # counted from the first
    assert club.names() == ["a", "b"]


def test_members_of_the_first_generation_that_come_at_once_are_ranked_as_in_their_group() -> None:
    club = MembershipHarness(size=3)
    for name, rank in (("c", 2), ("a", 0), ("b", 1)):
        assert club.arrive(name, rank=rank) is None
    assert club.names() == ["a", "b", "c"]


def test_who_dies_before_the_first_generation_is_not_in_it() -> None:
    club = MembershipHarness(size=3)
    club.all_arrive("abc")
    assert not club.membership.lose("b", DEAD)
    assert club.form() is None
    club.now += GATHER_S
    assert club.names() == ["a", "c"]


def test_below_min_workers_nothing_forms_however_long_it_takes() -> None:
    club = MembershipHarness(min_workers=3, size=2)
    club.all_arrive("ab")
    club.now += 100 * GATHER_S
    assert club.form() is None
    club.all_arrive("c")
    assert club.names() == ["a", "b", "c"]


def test_survivors_below_min_workers_wait_for_newcomers() -> None:
    club = club_of("ab", min_workers=2)
    club.membership.lose("a", DEAD)
    club.all_arrive("b", 3)
    club.now += 100 * GATHER_S
    assert club.form() is None
    club.all_arrive("c")
    assert club.names() == ["b", "c"]


def test_a_minimum_that_is_lowered_lets_those_who_wait_go_on() -> None:
    club = club_of("ab", min_workers=2)
    club.membership.lose("a", DEAD)
    club.all_arrive("b", 3)
    assert club.form() is None
    club.membership.min_workers = 1
    assert club.names() == ["b"]


def test_one_who_asks_again_has_waited_since_it_first_came() -> None:
    club = MembershipHarness(size=2)
    for _ in range(int(GATHER_S)):  # a member that waits asks once a second
        club.all_arrive("a")
        club.now += 1
    assert club.form() is not None


# Losses.


def test_survivors_form_at_once_when_the_dead_one_is_known() -> None:
    club = club_of("abc")
    assert club.membership.lose("b", DEAD)
    club.all_arrive("ac", 5)
    generation = club.formed()
    assert [each.id for each in generation.members] == ["a", "c"]
    assert (generation.number, generation.reason, generation.first_step) == (2, "worker lost", 5)
    assert club.membership.failure is None


def test_no_generation_forms_while_a_living_member_has_not_come() -> None:
    club = club_of("abc")
    assert club.arrive("a", 5, failure=BROKEN) is None
    assert club.arrive("b", 5, failure=BROKEN) is None
    club.now += 100 * GATHER_S
    assert club.form() is None
    club.membership.lose("c", DEAD)
    assert club.names() == ["a", "b"]


def test_a_death_that_comes_to_be_known_last_lets_those_who_wait_form() -> None:
    club = club_of("abcd")
    for name in "ab":
        assert club.arrive(name, 5, failure=BROKEN) is None
    assert not club.membership.lose("c", DEAD)  # the generation was broken already
    assert club.form() is None
    assert not club.membership.lose("d", DEAD)
    assert club.names() == ["a", "b"]


def test_two_losses_at_once_make_one_generation() -> None:
    club = club_of("abcd")
    assert club.membership.lose("a", DEAD)
    assert not club.membership.lose("d", "it was silent for 5 s")
    assert club.membership.failure == DEAD  # the first word counts
    club.all_arrive("bc", 5)
    generation = club.formed()
    assert (generation.number, [each.id for each in generation.members]) == (2, ["b", "c"])
    assert club.form() is None
    assert club.membership.failed() == {"a": DEAD, "d": "it was silent for 5 s"}


def test_one_who_dies_while_it_waits_is_not_waited_for() -> None:
    club = club_of("abc")
    club.membership.lose("a", DEAD)
    club.all_arrive("b", 5)
    assert not club.membership.lose("b", DEAD)
    assert club.form() is None
    club.all_arrive("c", 5)
    assert club.names() == ["c"]


def test_a_newcomer_that_dies_while_it_waits_breaks_nothing() -> None:
    club = club_of("ab")
    club.all_arrive("c")
    assert not club.membership.lose("c", DEAD)
    club.now += SETTLE_S
    assert club.membership.failure is None
    assert not club.wants_change


def test_a_broken_connection_without_a_death_makes_a_generation_of_the_same_members() -> None:
    club = club_of("abc")
    for name in "cab":
        assert club.arrive(name, 5, failure=BROKEN) is None
    generation = club.formed()
    assert (generation.number, generation.reason) == (2, "worker lost")
    assert [each.id for each in generation.members] == ["a", "b", "c"]


def test_the_first_word_of_how_a_generation_broke_counts() -> None:
    club = club_of("abc")
    club.arrive("a", 5, failure="the first")
    club.arrive("b", 5, failure="the second")
    assert club.membership.failure == "the first"


def test_a_loss_that_one_outside_of_the_generation_reports_is_none_of_it() -> None:
    club = club_of("ab")
    assert club.arrive("c", failure=BROKEN) is None
    assert club.membership.failure is None


def test_one_presumed_dead_that_returns_is_refused() -> None:
    club = club_of("ab")
    club.membership.lose("a", "it was silent for 5 s")
    assert club.arrive("a", 5, failure=BROKEN) == "it was silent for 5 s"
    assert club.membership.why_gone("a") == "it was silent for 5 s"
    club.all_arrive("b", 5)
    assert club.names() == ["b"]
    assert club.arrive("a", 5) == "it was silent for 5 s"
    assert club.membership.failure is None


def test_without_survivors_newcomers_gather_as_at_the_start() -> None:
    club = club_of("ab")
    club.membership.lose("a", DEAD)
    club.membership.lose("b", DEAD)
    club.all_arrive("c")
    assert club.form() is None
    club.all_arrive("d")
    generation = club.formed()
    assert [each.id for each in generation.members] == ["c", "d"]
    assert (generation.source, generation.first_step, generation.reason) == (None, None, "worker lost")


def test_one_that_left_is_no_loss_and_is_not_waited_for() -> None:
    club = club_of("ab")
    club.membership.retire("a")
    assert not club.membership.lose("a", DEAD)  # its process ends after that
    assert club.membership.failed() == {}
    assert club.membership.why_gone("a") == LEFT
    assert club.membership.num_alive == 1
    club.all_arrive("b", 5)
    generation = club.formed()
    assert ([each.id for each in generation.members], generation.reason) == (["b"], "workers left")


def test_one_that_died_stays_dead_when_it_retires() -> None:
    club = club_of("ab")
    club.membership.lose("a", DEAD)
    club.membership.retire("a")
    assert club.membership.failed() == {"a": DEAD}


def test_those_who_train_and_those_who_wait_are_alive() -> None:
    club = club_of("abc")
    assert club.membership.num_alive == 3
    club.all_arrive("d")
    assert club.membership.num_alive == 4
    club.membership.lose("a", DEAD)
    club.membership.retire("b")
    club.all_arrive("c", 5)
    assert club.membership.num_alive == 2


def test_a_generation_that_is_too_small_ends_once_what_it_does_together_is_done() -> None:
    club = club_of("abc", min_workers=2)
    for each in "bc":
        club.membership.lose(each, DEAD)
    club.arrive("a", 5, between_steps=False, failure=BROKEN)
    assert club.names() == ["a"], "nobody else could do it"
    assert club.wants_change
    club.arrive("a", 5)
    assert club.form() is None
    club.all_arrive("d")
    assert club.names() == ["a", "d"]


def test_those_who_wait_for_others_commit_if_somebody_asks_them_to() -> None:
    club = club_of("abc", min_workers=3)
    club.membership.lose("c", DEAD)
    club.all_arrive("ab", 5)
    assert club.form() is None and not club.membership.has_committed()
    club.membership.commit_wanted = True
    generation = club.formed()
    assert generation.brief and generation.receivers == () and generation.ids == {"a"}
    club.arrive("a", 5, committed=5)
    assert club.form() is None and club.membership.has_committed()
    club.membership.commit_wanted = False
    club.all_arrive("d")
    assert club.names() == ["a", "b", "d"]


def test_of_members_whose_processes_are_gone_is_kept_that_they_are() -> None:
    club = club_of("abc")
    club.membership.lose("b", DEAD)
    club.membership.ask_to_leave("c")
    club.all_arrive("ac", 5)
    assert club.names() == ["a"]
    club.membership.forget(["a", "b", "c"])
    assert club.membership.failed() == {"b": DEAD} and list(club.membership.dismissed) == ["c"]
    club.membership.forget(["a"])
    assert club.membership.failed() == {} and not club.membership.dismissed and club.membership.leaving == []
    assert club.arrive("b", 5) == club.arrive("c", 5) == LONG_GONE
    assert club.membership.is_newcomer("d") and not club.membership.is_newcomer("a")


# Newcomers.


def test_a_newcomer_waits_until_those_who_train_are_asked_to_let_it_in() -> None:
    club = club_of("ab")
    assert not club.wants_change
    club.all_arrive("c")
    assert not club.wants_change
    assert club.form() is None  # nobody of the generation waits
    club.now += SETTLE_S
    assert club.wants_change
    club.all_arrive("a", 5)
    assert club.form() is None
    club.all_arrive("b", 5)
    generation = club.formed()
    assert [each.id for each in generation.members] == ["a", "b", "c"]
    assert generation.reason == "workers joined"
    assert not club.wants_change


def test_as_many_newcomers_as_there_is_room_for_do_not_wait_for_others() -> None:
    club = club_of("ab", max_workers=4)
    club.all_arrive("c")
    assert not club.wants_change
    club.all_arrive("d")
    assert club.wants_change


def test_nobody_is_asked_to_let_in_more_than_there_is_room_for() -> None:
    club = club_of("ab", max_workers=2)
    club.all_arrive("c")
    club.now += 100 * SETTLE_S
    assert not club.wants_change


def test_newcomers_join_the_survivors_of_a_loss_without_being_asked_for() -> None:
    club = club_of("ab", max_workers=2)
    club.all_arrive("c")
    club.membership.lose("a", DEAD)
    club.all_arrive("b", 5)
    generation = club.formed()
    assert ([each.id for each in generation.members], generation.reason) == (["b", "c"], "worker lost")


def test_a_generation_that_broke_is_not_asked_to_change() -> None:
    club = club_of("ab")
    club.all_arrive("c")
    club.membership.lose("a", DEAD)
    club.now += SETTLE_S
    assert not club.wants_change


def test_newcomers_are_left_out_when_a_survivor_is_not_between_steps() -> None:
    club = club_of("abc")
    club.all_arrive("d")
    club.membership.lose("a", DEAD)
    club.arrive("b", 5, between_steps=False)
    club.arrive("c", 5)
    assert club.names() == ["b", "c"]
    club.now += SETTLE_S  # and are let in when the evaluation is over
    assert club.wants_change
    club.all_arrive("bc", 6)
    assert club.names() == ["b", "c", "d"]


@pytest.mark.parametrize("is_to_go", [False, True])
def test_who_is_behind_those_in_the_midst_of_a_steps_block_waits_until_they_are_through(is_to_go: bool) -> None:
    """One has not made the step, another only half of it. They would get what is the state of no step."""
    club = club_of("abcd")
    club.membership.lose("a", DEAD)
    club.arrive("b", 6, between_steps=False, resumable=False)
    club.arrive("c", 5)
    if is_to_go:
        club.membership.ask_to_leave("c")
    club.arrive("d")
    generation = club.formed()
    assert (generation.ids, generation.amid, generation.receivers) == ({"b"}, True, ())
    assert ("c" in club.membership.dismissed) is is_to_go
    club.now += SETTLE_S
    assert club.wants_change
    club.arrive("b", 6)
    generation = club.formed()
    assert [each.id for each in generation.members] == ["b", *("" if is_to_go else "c"), "d"]
    assert (generation.source, generation.first_step) == (0, 6)
    assert generation.receivers == ((1,) if is_to_go else (1, 2))


def test_a_generation_knows_whether_some_of_its_members_were_amid_something() -> None:
    club = club_of("abc")
    assert club.membership.current is not None and not club.membership.current.amid
    club.membership.lose("a", DEAD)
    club.arrive("b", 5, between_steps=False)
    club.arrive("c", 5)
    assert club.formed().amid
    club.all_arrive("bc", 6)
    assert not club.formed().amid


def test_all_wait_where_there_are_too_few() -> None:
    club = club_of("abc", min_workers=2)
    assert not club.membership.all_wait()
    club.membership.lose("a", DEAD)
    club.membership.lose("b", DEAD)
    assert not club.membership.all_wait()
    club.all_arrive("c", 5)
    assert club.form() is None and club.membership.all_wait()
    club.all_arrive("d")
    assert club.names() == ["c", "d"]
    assert not club.membership.all_wait()


def test_newcomers_that_are_left_out_do_not_keep_survivors_from_finishing_what_they_do() -> None:
    club = club_of("ab", min_workers=2)
    club.all_arrive("c")
    club.membership.lose("a", DEAD)
    club.arrive("b", 5, between_steps=False)
    assert club.names() == ["b"]


def test_max_workers_is_not_exceeded_and_who_came_first_gets_in_first() -> None:
    club = club_of("ab", max_workers=3)
    for name in "dc":
        club.now += 1
        club.all_arrive(name)
    club.all_arrive("ab", 5)
    assert club.names() == ["a", "b", "d"]
    assert not club.wants_change
    club.membership.lose("a", DEAD)
    club.all_arrive("bd", 7)
    assert club.names() == ["b", "d", "c"]


def in_prospect(club: MembershipHarness, also: str | None = None) -> list[str]:
    """Who would be in the next generation, in rank order."""
    newcomer = member(also, "n") if also is not None else None
    places = club.membership.prospects(club.now, newcomer)
    assert [place for place, _ in sorted(places.values())] == list(range(len(places)))
    assert all(size == len(places) for _, size in places.values())
    return sorted(places, key=lambda each: places[each])


def test_members_and_newcomers_are_told_the_places_that_they_get() -> None:
    club = club_of("abc", max_workers=4, nodes={"a": "x", "b": "y", "c": "x"})
    assert in_prospect(club) == ["a", "c", "b"]
    assert in_prospect(club, also="d") == ["a", "c", "b", "d"]
    club.arrive("d", node="y")
    assert in_prospect(club) == in_prospect(club, also="e") == ["a", "c", "b", "d"], "there is room for one"
    club.membership.ask_to_leave(["c"])
    assert in_prospect(club, also="e") == ["a", "b", "d", "e"], "who comes takes the place of who goes"
    club.all_arrive("abc", 5)
    assert club.names() == ["a", "b", "d"]


def test_nothing_is_in_prospect_where_nothing_is_known() -> None:
    club = MembershipHarness(size=2)
    club.arrive("a")
    assert in_prospect(club) == in_prospect(club, also="b") == [], "nobody trains yet"
    club = club_of("ab", min_workers=2)
    club.membership.lose("a", DEAD)
    assert in_prospect(club, also="c") == [], "a generation that broke is waited for by all"
    club = club_of("ab")
    club.membership.ask_to_leave("ab")
    assert in_prospect(club) == [], "they are to commit before they go"


def test_the_first_generation_takes_no_more_than_max_workers() -> None:
    club = MembershipHarness(max_workers=2, size=3)
    club.all_arrive("abc")
    assert club.names() == ["a", "b"]


def test_a_newcomer_that_asks_again_is_let_in_all_the_same() -> None:
    club = club_of("ab")
    club.all_arrive("c")
    club.now += SETTLE_S
    assert club.wants_change
    club.all_arrive("c")
    assert club.wants_change


def test_a_newcomer_waits_longer_for_those_on_their_way() -> None:
    club = club_of("ab")
    club.membership.on_their_way = 1
    club.all_arrive("c")
    club.now += SETTLE_S
    assert not club.wants_change
    club.now += PATIENCE_S
    assert club.wants_change
    club.membership.on_their_way = 0
    assert club.wants_change


def test_one_who_was_left_out_is_not_let_in_again() -> None:
    club = club_of("abc")
    club.membership.ask_to_leave("c")
    club.all_arrive("abc", 5)
    assert club.names() == ["a", "b"]
    club.now += SETTLE_S
    assert not club.wants_change


# Who has the state.


def test_at_the_start_nobody_has_any_state() -> None:
    club = MembershipHarness()
    club.all_arrive("ab")
    generation = club.formed()
    assert (generation.source, generation.receivers, generation.first_step) == (None, (0, 1), None)


def test_the_source_is_the_most_advanced_and_the_others_receive() -> None:
    club = club_of("abcd")
    club.membership.lose("d", DEAD)
    club.arrive("a", 5)
    club.arrive("b", 6)
    club.arrive("c", 5)
    club.arrive("e")
    generation = club.formed()
    assert [each.id for each in generation.members] == ["a", "b", "c", "e"]
    assert (generation.source, generation.receivers, generation.first_step) == (1, (0, 2, 3), 6)


def test_nobody_who_is_up_to_date_receives() -> None:
    club = club_of("abc")
    club.membership.lose("a", DEAD)
    club.all_arrive("bc", 6)
    generation = club.formed()
    assert (generation.source, generation.receivers, generation.first_step) == (0, (), 6)


def test_a_state_of_no_steps_is_a_state() -> None:
    club = club_of("ab")
    club.all_arrive("ab", 0)
    club.arrive("c")
    generation = club.formed()
    assert (generation.source, generation.receivers, generation.first_step) == (0, (2,), 0)


def test_a_generation_that_broke_while_it_formed_starts_from_the_newest_commit_again() -> None:
    club = club_of("abc")
    club.membership.lose("a", DEAD)
    club.all_arrive("bc", None)
    generation = club.formed()
    assert (generation.source, generation.first_step) == (None, None)


# Ranks.


def test_ranks_are_grouped_by_node_in_the_order_of_the_nodes_seniors() -> None:
    club = MembershipHarness(size=5)
    for name, node in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "z"), ("e", "y")):
        club.arrive(name, node=node)
    assert club.names() == ["a", "c", "b", "e", "d"]


def test_rank_0_is_a_survivor_if_there_is_one_and_newcomers_rank_after_those_of_their_node() -> None:
    club = MembershipHarness(size=3)
    for name, node in (("a", "x"), ("b", "y"), ("c", "z")):
        club.arrive(name, node=node)
    club.formed()
    club.arrive("d", node="x")
    club.arrive("e", node="z")
    club.membership.lose("a", DEAD)
    club.all_arrive("cb", 5)
    assert club.names() == ["b", "c", "e", "d"]


# Reasons.


def test_a_generation_of_the_same_members_without_a_loss_was_formed_again() -> None:
    club = club_of("ab")
    club.all_arrive("ab", 5)
    assert club.formed().reason == "formed again"


def test_what_ended_a_generation_is_forgotten_with_the_next() -> None:
    club = club_of("abc")
    club.membership.lose("a", DEAD)
    club.all_arrive("bc", 5)
    assert club.formed().reason == "worker lost"
    club.all_arrive("bcd", 6)
    assert club.formed().reason == "workers joined"


def test_one_that_was_let_go_before_the_controller_counted_it_is_remembered_until_it_has() -> None:
    club = club_of("ab", max_workers=3)
    club.all_arrive("c")
    club.membership.ask_to_leave("c")
    club.membership.ask_to_leave("d")  # SIGTERM, before it has come
    club.membership.forget(["a", "b"])
    assert list(club.membership.dismissed) == ["c"]
    assert club.arrive("d") == LEFT, "it heard the signal, and goes"
    club.membership.forget(["a", "b", "c", "d"])
    assert list(club.membership.dismissed) == ["c", "d"]
    club.membership.forget(["a", "b"])
    assert not club.membership.dismissed


def test_who_is_lost_before_its_first_step_never_trained() -> None:
    club = club_of("ab", max_workers=3)
    assert not club.membership.is_newcomer("a"), "where nobody has trained nobody is new"
    club.membership.made_a_step(club.membership.generation)
    club.all_arrive("c")
    club.now += SETTLE_S
    club.all_arrive("ab", 5)
    assert club.names() == ["a", "b", "c"]
    club.membership.made_a_step(club.membership.generation - 1)
    assert club.membership.is_newcomer("c"), "it has not got the state yet"
    assert not club.membership.is_newcomer("a")
    club.membership.made_a_step(club.membership.generation)
    assert not club.membership.is_newcomer("c")
