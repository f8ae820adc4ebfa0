"""Who trains together: how generations form, break, and let newcomers in."""

from __future__ import annotations

import pytest

from elastic_ddp.rendezvous.members import GROUP_WAIT_S
from elastic_ddp.rendezvous.membership import BATCH_S, LEFT, PROCESS_GONE, STARTING_WAIT_S
from tests.unit.membership_harness import AT_ONCE, BROKEN, DEAD, MembershipHarness, harness_of, member

# The first generation.


def test_the_first_generation_waits_for_the_whole_group() -> None:
    harness = MembershipHarness(size=3)
    assert harness.form() is None
    harness.all_join("ab")
    harness.now += GROUP_WAIT_S - 0.1
    assert harness.form() is None
    harness.all_join("c")
    generation = harness.formed()
    assert (generation.number, generation.reason) == (1, "start")
    assert [each.id for each in generation.members] == ["a", "b", "c"]
    assert harness.membership.current == generation
    assert harness.form() is None


def test_a_member_that_asks_again_counts_once() -> None:
    harness = MembershipHarness(size=2)
    harness.all_join("aa")
    assert harness.form() is None
    harness.all_join("b")
    assert harness.names() == ["a", "b"]


def test_the_first_generation_goes_without_those_who_do_not_come_in_time() -> None:
    harness = MembershipHarness(size=3)
    harness.all_join("a")
    harness.now += GROUP_WAIT_S / 2
    harness.all_join("b")
    harness.now += GROUP_WAIT_S / 2  # counted from the first
    assert harness.names() == ["a", "b"]


def test_members_of_the_first_generation_that_come_at_once_are_ranked_as_in_their_group() -> None:
    harness = MembershipHarness(size=3)
    for name, rank in (("c", 2), ("a", 0), ("b", 1)):
        assert harness.join(name, rank=rank) is None
    assert harness.names() == ["a", "b", "c"]


def test_who_dies_before_the_first_generation_is_not_in_it() -> None:
    harness = MembershipHarness(size=3)
    harness.all_join("abc")
    harness.membership.mark_failed("b", DEAD)
    assert harness.form() is None
    harness.now += GROUP_WAIT_S
    assert harness.names() == ["a", "c"]


def test_below_min_workers_nothing_forms_however_long_it_takes() -> None:
    harness = MembershipHarness(min_workers=3, size=2)
    harness.all_join("ab")
    harness.now += 100 * GROUP_WAIT_S
    assert harness.form() is None
    harness.all_join("c")
    assert harness.names() == ["a", "b", "c"]


def test_survivors_below_min_workers_wait_for_newcomers() -> None:
    harness = harness_of("ab", min_workers=2)
    harness.membership.mark_failed("a", DEAD)
    harness.all_join("b", 3)
    harness.now += 100 * GROUP_WAIT_S
    assert harness.form() is None
    harness.all_join("c")
    assert harness.names() == ["b", "c"]


def test_a_minimum_that_is_lowered_lets_those_who_wait_go_on() -> None:
    harness = harness_of("ab", min_workers=2)
    harness.membership.mark_failed("a", DEAD)
    harness.all_join("b", 3)
    assert harness.form() is None
    harness.membership.min_workers = 1
    assert harness.names() == ["b"]


def test_one_who_asks_again_has_waited_since_it_first_came() -> None:
    harness = MembershipHarness(size=2)
    for _ in range(int(GROUP_WAIT_S)):  # a member that waits asks once a second
        harness.all_join("a")
        harness.now += 1
    assert harness.form() is not None


# Losses.


def test_survivors_form_at_once_when_the_dead_one_is_known() -> None:
    harness = harness_of("abc")
    harness.membership.mark_failed("b", DEAD)
    harness.all_join("ac", 5)
    generation = harness.formed()
    assert [each.id for each in generation.members] == ["a", "c"]
    assert (generation.number, generation.reason, generation.first_step) == (2, "worker failed", 5)
    assert harness.membership.failure is None


def test_no_generation_forms_while_a_living_member_has_not_come() -> None:
    harness = harness_of("abc")
    assert harness.join("a", 5, failure=BROKEN) is None
    assert harness.join("b", 5, failure=BROKEN) is None
    harness.now += 100 * GROUP_WAIT_S
    assert harness.form() is None
    harness.membership.mark_failed("c", DEAD)
    assert harness.names() == ["a", "b"]


def test_a_death_that_comes_to_be_known_last_lets_those_who_wait_form() -> None:
    harness = harness_of("abcd")
    for name in "ab":
        assert harness.join(name, 5, failure=BROKEN) is None
    harness.membership.mark_failed("c", DEAD)  # the generation was broken already
    assert harness.form() is None
    harness.membership.mark_failed("d", DEAD)
    assert harness.names() == ["a", "b"]


def test_two_losses_at_once_make_one_generation() -> None:
    harness = harness_of("abcd")
    harness.membership.mark_failed("a", DEAD)
    harness.membership.mark_failed("d", "no heartbeat for 5 s")
    assert harness.membership.failure == DEAD  # the first word counts
    harness.all_join("bc", 5)
    generation = harness.formed()
    assert (generation.number, [each.id for each in generation.members]) == (2, ["b", "c"])
    assert harness.form() is None
    assert harness.membership.failed() == {"a": DEAD, "d": "no heartbeat for 5 s"}


def test_one_who_dies_while_it_waits_is_not_waited_for() -> None:
    harness = harness_of("abc")
    harness.membership.mark_failed("a", DEAD)
    harness.all_join("b", 5)
    harness.membership.mark_failed("b", DEAD)
    assert harness.form() is None
    harness.all_join("c", 5)
    assert harness.names() == ["c"]


def test_a_newcomer_that_dies_while_it_waits_breaks_nothing() -> None:
    harness = harness_of("ab")
    harness.all_join("c")
    harness.membership.mark_failed("c", DEAD)
    harness.now += BATCH_S
    assert harness.membership.failure is None
    assert not harness.wants_change


def test_a_broken_connection_without_a_death_makes_a_generation_of_the_same_members() -> None:
    harness = harness_of("abc")
    for name in "cab":
        assert harness.join(name, 5, failure=BROKEN) is None
    generation = harness.formed()
    assert (generation.number, generation.reason) == (2, "worker failed")
    assert [each.id for each in generation.members] == ["a", "b", "c"]


def test_the_first_word_of_how_a_generation_broke_counts() -> None:
    harness = harness_of("abc")
    harness.join("a", 5, failure="the first")
    harness.join("b", 5, failure="the second")
    assert harness.membership.failure == "the first"


def test_a_loss_that_one_outside_of_the_generation_reports_is_none_of_it() -> None:
    harness = harness_of("ab")
    assert harness.join("c", failure=BROKEN) is None
    assert harness.membership.failure is None


def test_one_presumed_dead_that_returns_is_refused() -> None:
    harness = harness_of("ab")
    harness.membership.mark_failed("a", "no heartbeat for 5 s")
    assert harness.join("a", 5, failure=BROKEN) == "no heartbeat for 5 s"
    assert harness.membership.why_gone("a") == "no heartbeat for 5 s"
    harness.all_join("b", 5)
    assert harness.names() == ["b"]
    assert harness.join("a", 5) == "no heartbeat for 5 s"
    assert harness.membership.failure is None


def test_without_survivors_newcomers_gather_as_at_the_start() -> None:
    harness = harness_of("ab")
    harness.membership.mark_failed("a", DEAD)
    harness.membership.mark_failed("b", DEAD)
    harness.all_join("c")
    assert harness.form() is None
    harness.all_join("d")
    generation = harness.formed()
    assert [each.id for each in generation.members] == ["c", "d"]
    assert (generation.source, generation.first_step, generation.reason) == (None, None, "worker failed")


def test_one_that_left_is_no_loss_and_is_not_waited_for() -> None:
    harness = harness_of("ab")
    harness.membership.retire("a")
    harness.membership.mark_failed("a", DEAD)  # its process ends after that
    assert harness.membership.failed() == {}
    assert harness.membership.why_gone("a") == LEFT
    assert len(harness.membership.known()) == 1
    harness.all_join("b", 5)
    generation = harness.formed()
    assert ([each.id for each in generation.members], generation.reason) == (["b"], "workers left")


def test_one_that_died_stays_dead_when_it_retires() -> None:
    harness = harness_of("ab")
    harness.membership.mark_failed("a", DEAD)
    harness.membership.retire("a")
    assert harness.membership.failed() == {"a": DEAD}


def test_those_who_train_and_those_who_wait_are_alive() -> None:
    harness = harness_of("abc")
    assert len(harness.membership.known()) == 3
    harness.all_join("d")
    assert len(harness.membership.known()) == 4
    harness.membership.mark_failed("a", DEAD)
    harness.membership.retire("b")
    harness.all_join("c", 5)
    assert len(harness.membership.known()) == 2


def test_a_generation_that_is_too_small_ends_once_what_it_does_together_is_done() -> None:
    harness = harness_of("abc", min_workers=2)
    for each in "bc":
        harness.membership.mark_failed(each, DEAD)
    harness.join("a", 5, between_steps=False, failure=BROKEN)
    assert harness.names() == ["a"], "nobody else could do it"
    assert harness.wants_change
    harness.join("a", 5)
    assert harness.form() is None
    harness.all_join("d")
    assert harness.names() == ["a", "d"]


def test_those_who_wait_for_others_commit_if_somebody_asks_them_to() -> None:
    harness = harness_of("abc", min_workers=3)
    harness.membership.mark_failed("c", DEAD)
    harness.all_join("ab", 5)
    assert harness.form() is None and not harness.membership.has_committed()
    harness.membership.commit_wanted = True
    generation = harness.formed()
    assert generation.handover_only and generation.receivers == () and generation.ids == {"a"}
    harness.join("a", 5, committed=5)
    assert harness.form() is None and harness.membership.has_committed()
    harness.membership.commit_wanted = False
    harness.all_join("d")
    assert harness.names() == ["a", "b", "d"]


def test_of_members_whose_processes_are_gone_is_kept_that_they_are() -> None:
    harness = harness_of("abc")
    harness.membership.mark_failed("b", DEAD)
    harness.membership.ask_to_leave("c", AT_ONCE)
    harness.all_join("ac", 5)
    assert harness.names() == ["a"]
    harness.membership.prune(["a", "b", "c"])
    assert harness.membership.failed() == {"b": DEAD} and list(harness.membership.dismissed) == ["c"]
    harness.membership.prune(["a"])
    assert harness.membership.failed() == {} and not harness.membership.dismissed and harness.membership.leaving == []
    assert harness.join("b", 5) == harness.join("c", 5) == PROCESS_GONE
    assert harness.membership.is_newcomer("d") and not harness.membership.is_newcomer("a")


# Newcomers.


def test_a_newcomer_waits_until_those_who_train_are_asked_to_let_it_in() -> None:
    harness = harness_of("ab")
    assert not harness.wants_change
    harness.all_join("c")
    assert not harness.wants_change
    assert harness.form() is None  # nobody of the generation waits
    harness.now += BATCH_S
    assert harness.wants_change
    harness.all_join("a", 5)
    assert harness.form() is None
    harness.all_join("b", 5)
    generation = harness.formed()
    assert [each.id for each in generation.members] == ["a", "b", "c"]
    assert generation.reason == "workers joined"
    assert not harness.wants_change


def test_as_many_newcomers_as_there_is_room_for_do_not_wait_for_others() -> None:
    harness = harness_of("ab", max_workers=4)
    harness.all_join("c")
    assert not harness.wants_change
    harness.all_join("d")
    assert harness.wants_change


def test_nobody_is_asked_to_let_in_more_than_there_is_room_for() -> None:
    harness = harness_of("ab", max_workers=2)
    harness.all_join("c")
    harness.now += 100 * BATCH_S
    assert not harness.wants_change


def test_newcomers_join_the_survivors_of_a_loss_without_being_asked_for() -> None:
    harness = harness_of("ab", max_workers=2)
    harness.all_join("c")
    harness.membership.mark_failed("a", DEAD)
    harness.all_join("b", 5)
    generation = harness.formed()
    assert ([each.id for each in generation.members], generation.reason) == (["b", "c"], "worker failed")


def test_a_generation_that_broke_is_not_asked_to_change() -> None:
    harness = harness_of("ab")
    harness.all_join("c")
    harness.membership.mark_failed("a", DEAD)
    harness.now += BATCH_S
    assert not harness.wants_change


def test_newcomers_are_left_out_when_a_survivor_is_not_between_steps() -> None:
    harness = harness_of("abc")
    harness.all_join("d")
    harness.membership.mark_failed("a", DEAD)
    harness.join("b", 5, between_steps=False)
    harness.join("c", 5)
    assert harness.names() == ["b", "c"]
    harness.now += BATCH_S  # and are let in when the evaluation is over
    assert harness.wants_change
    harness.all_join("bc", 6)
    assert harness.names() == ["b", "c", "d"]


@pytest.mark.parametrize("is_to_go", [False, True])
def test_who_is_behind_those_in_the_midst_of_a_steps_block_waits_until_they_are_through(is_to_go: bool) -> None:
    """One has not made the step, another only half of it. They would get what is the state of no step."""
    harness = harness_of("abcd")
    harness.membership.mark_failed("a", DEAD)
    harness.join("b", 6, between_steps=False, resumable=False)
    harness.join("c", 5)
    if is_to_go:
        harness.membership.ask_to_leave("c", AT_ONCE)
    harness.join("d")
    generation = harness.formed()
    assert (generation.ids, generation.in_collective_task, generation.receivers) == ({"b"}, True, ())
    assert ("c" in harness.membership.dismissed) is is_to_go
    harness.now += BATCH_S
    assert harness.wants_change
    harness.join("b", 6)
    generation = harness.formed()
    assert [each.id for each in generation.members] == ["b", *("" if is_to_go else "c"), "d"]
    assert (generation.source, generation.first_step) == (0, 6)
    assert generation.receivers == ((1,) if is_to_go else (1, 2))


def test_a_generation_knows_whether_some_of_its_members_were_amid_something() -> None:
    harness = harness_of("abc")
    assert harness.membership.current is not None and not harness.membership.current.in_collective_task
    harness.membership.mark_failed("a", DEAD)
    harness.join("b", 5, between_steps=False)
    harness.join("c", 5)
    assert harness.formed().in_collective_task
    harness.all_join("bc", 6)
    assert not harness.formed().in_collective_task


def test_all_wait_where_there_are_too_few() -> None:
    harness = harness_of("abc", min_workers=2)
    assert not harness.membership.all_wait()
    harness.membership.mark_failed("a", DEAD)
    harness.membership.mark_failed("b", DEAD)
    assert not harness.membership.all_wait()
    harness.all_join("c", 5)
    assert harness.form() is None and harness.membership.all_wait()
    harness.all_join("d")
    assert harness.names() == ["c", "d"]
    assert not harness.membership.all_wait()


def test_newcomers_that_are_left_out_do_not_keep_survivors_from_finishing_what_they_do() -> None:
    harness = harness_of("ab", min_workers=2)
    harness.all_join("c")
    harness.membership.mark_failed("a", DEAD)
    harness.join("b", 5, between_steps=False)
    assert harness.names() == ["b"]


def test_max_workers_is_not_exceeded_and_who_came_first_gets_in_first() -> None:
    harness = harness_of("ab", max_workers=3)
    for name in "dc":
        harness.now += 1
        harness.all_join(name)
    harness.all_join("ab", 5)
    assert harness.names() == ["a", "b", "d"]
    assert not harness.wants_change
    harness.membership.mark_failed("a", DEAD)
    harness.all_join("bd", 7)
    assert harness.names() == ["b", "d", "c"]


def in_prospect(harness: MembershipHarness, joining: str | None = None) -> list[str]:
    """Who would be in the next generation, in rank order."""
    newcomer = member(joining, "n") if joining is not None else None
    places = harness.membership.plan(harness.now, newcomer)
    assert [place for place, _ in sorted(places.values())] == list(range(len(places)))
    assert all(size == len(places) for _, size in places.values())
    return sorted(places, key=lambda each: places[each])


def test_members_and_newcomers_are_told_the_places_that_they_get() -> None:
    harness = harness_of("abc", max_workers=4, nodes={"a": "x", "b": "y", "c": "x"})
    assert in_prospect(harness) == ["a", "c", "b"]
    assert in_prospect(harness, joining="d") == ["a", "c", "b", "d"]
    harness.join("d", node="y")
    assert in_prospect(harness) == in_prospect(harness, joining="e") == ["a", "c", "b", "d"], "there is room for one"
    harness.membership.ask_to_leave(["c"], AT_ONCE)
    assert in_prospect(harness, joining="e") == ["a", "b", "d", "e"], "who comes takes the place of who goes"
    harness.all_join("abc", 5)
    assert harness.names() == ["a", "b", "d"]


def test_nothing_is_in_prospect_where_nothing_is_known() -> None:
    harness = MembershipHarness(size=2)
    harness.join("a")
    assert in_prospect(harness) == in_prospect(harness, joining="b") == [], "nobody trains yet"
    harness = harness_of("ab", min_workers=2)
    harness.membership.mark_failed("a", DEAD)
    assert in_prospect(harness, joining="c") == [], "a generation that broke is waited for by all"
    harness = harness_of("ab")
    harness.membership.ask_to_leave("ab", AT_ONCE)
    assert in_prospect(harness) == [], "they are to commit before they go"


def test_the_first_generation_takes_no_more_than_max_workers() -> None:
    harness = MembershipHarness(max_workers=2, size=3)
    harness.all_join("abc")
    assert harness.names() == ["a", "b"]


def test_a_newcomer_that_asks_again_is_let_in_all_the_same() -> None:
    harness = harness_of("ab")
    harness.all_join("c")
    harness.now += BATCH_S
    assert harness.wants_change
    harness.all_join("c")
    assert harness.wants_change


def test_a_newcomer_waits_longer_for_those_on_their_way() -> None:
    harness = harness_of("ab")
    harness.membership.num_starting = 1
    harness.all_join("c")
    harness.now += BATCH_S
    assert not harness.wants_change
    harness.now += STARTING_WAIT_S
    assert harness.wants_change
    harness.membership.num_starting = 0
    assert harness.wants_change


def test_one_who_was_left_out_is_not_let_in_again() -> None:
    harness = harness_of("abc")
    harness.membership.ask_to_leave("c", AT_ONCE)
    harness.all_join("abc", 5)
    assert harness.names() == ["a", "b"]
    harness.now += BATCH_S
    assert not harness.wants_change


# Who has the state.


def test_at_the_start_nobody_has_any_state() -> None:
    harness = MembershipHarness()
    harness.all_join("ab")
    generation = harness.formed()
    assert (generation.source, generation.receivers, generation.first_step) == (None, (0, 1), None)


def test_the_source_is_the_most_advanced_and_the_others_receive() -> None:
    harness = harness_of("abcd")
    harness.membership.mark_failed("d", DEAD)
    harness.join("a", 5)
    harness.join("b", 6)
    harness.join("c", 5)
    harness.join("e")
    generation = harness.formed()
    assert [each.id for each in generation.members] == ["a", "b", "c", "e"]
    assert (generation.source, generation.receivers, generation.first_step) == (1, (0, 2, 3), 6)


def test_nobody_who_is_up_to_date_receives() -> None:
    harness = harness_of("abc")
    harness.membership.mark_failed("a", DEAD)
    harness.all_join("bc", 6)
    generation = harness.formed()
    assert (generation.source, generation.receivers, generation.first_step) == (0, (), 6)


def test_a_state_of_no_steps_is_a_state() -> None:
    harness = harness_of("ab")
    harness.all_join("ab", 0)
    harness.join("c")
    generation = harness.formed()
    assert (generation.source, generation.receivers, generation.first_step) == (0, (2,), 0)


def test_a_generation_that_broke_while_it_formed_starts_from_the_newest_commit_again() -> None:
    harness = harness_of("abc")
    harness.membership.mark_failed("a", DEAD)
    harness.all_join("bc", None)
    generation = harness.formed()
    assert (generation.source, generation.first_step) == (None, None)


# Ranks.


def test_ranks_are_grouped_by_node_in_the_order_of_the_nodes_seniors() -> None:
    harness = MembershipHarness(size=5)
    for name, node in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "z"), ("e", "y")):
        harness.join(name, node=node)
    assert harness.names() == ["a", "c", "b", "e", "d"]


def test_rank_0_is_a_survivor_if_there_is_one_and_newcomers_rank_after_those_of_their_node() -> None:
    harness = MembershipHarness(size=3)
    for name, node in (("a", "x"), ("b", "y"), ("c", "z")):
        harness.join(name, node=node)
    harness.formed()
    harness.join("d", node="x")
    harness.join("e", node="z")
    harness.membership.mark_failed("a", DEAD)
    harness.all_join("cb", 5)
    assert harness.names() == ["b", "c", "e", "d"]


# Reasons.


def test_a_generation_of_the_same_members_without_a_loss_was_formed_again() -> None:
    harness = harness_of("ab")
    harness.all_join("ab", 5)
    assert harness.formed().reason == "formed again"


def test_what_ended_a_generation_is_forgotten_with_the_next() -> None:
    harness = harness_of("abc")
    harness.membership.mark_failed("a", DEAD)
    harness.all_join("bc", 5)
    assert harness.formed().reason == "worker failed"
    harness.all_join("bcd", 6)
    assert harness.formed().reason == "workers joined"


def test_one_that_was_let_go_before_the_controller_counted_it_is_remembered_until_it_has() -> None:
    harness = harness_of("ab", max_workers=3)
    harness.all_join("c")
    harness.membership.ask_to_leave("c", AT_ONCE)
    harness.membership.ask_to_leave("d", AT_ONCE)  # SIGTERM, before it has come
    harness.membership.prune(["a", "b"])
    assert list(harness.membership.dismissed) == ["c"]
    assert harness.join("d") == LEFT, "it heard the signal, and goes"
    harness.membership.prune(["a", "b", "c", "d"])
    assert list(harness.membership.dismissed) == ["c", "d"]
    harness.membership.prune(["a", "b"])
    assert not harness.membership.dismissed


def test_who_is_lost_before_its_first_step_never_trained() -> None:
    harness = harness_of("ab", max_workers=3)
    assert not harness.membership.is_newcomer("a"), "where nobody has trained nobody is new"
    harness.membership.mark_trained(harness.membership.generation)
    harness.all_join("c")
    harness.now += BATCH_S
    harness.all_join("ab", 5)
    assert harness.names() == ["a", "b", "c"]
    harness.membership.mark_trained(harness.membership.generation - 1)
    assert harness.membership.is_newcomer("c"), "it has not got the state yet"
    assert not harness.membership.is_newcomer("a")
    harness.membership.mark_trained(harness.membership.generation)
    assert not harness.membership.is_newcomer("c")
