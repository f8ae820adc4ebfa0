"""Membership: how generations form, their members and states, and how they end by failures."""

from __future__ import annotations

import pytest

from elastic_ddp.rendezvous.membership import BATCH_S, LEFT, PROCESS_GONE, STARTING_WAIT_S
from elastic_ddp.rendezvous.planner import GROUP_WAIT_S
from tests.unit.membership_harness import AT_ONCE, BROKEN, FAILED, MembershipHarness, harness_of, ids_of, member

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
    assert ids_of(generation) == ["a", "b", "c"]
    assert harness.membership.current == generation
    assert harness.form() is None


def test_the_first_generation_forms_without_late_members() -> None:
    harness = MembershipHarness(size=3)
    harness.all_join("a")
    harness.now += GROUP_WAIT_S / 2
    harness.all_join("b")
    harness.now += GROUP_WAIT_S / 2  # from the first request on
    assert harness.names() == ["a", "b"]


def test_the_first_generation_keeps_the_order_of_the_group() -> None:
    harness = MembershipHarness(size=3)
    for name, rank in (("c", 2), ("a", 0), ("b", 1)):
        assert harness.join(name, rank=rank) is None
    assert harness.names() == ["a", "b", "c"]


def test_no_generation_forms_below_min_workers() -> None:
    harness = MembershipHarness(min_workers=3, size=2)
    harness.all_join("ab")
    harness.now += 100 * GROUP_WAIT_S
    assert harness.form() is None
    harness.all_join("c")
    assert harness.names() == ["a", "b", "c"]


def test_survivors_below_min_workers_wait_for_newcomers() -> None:
    harness = harness_of("ab", min_workers=2)
    harness.membership.mark_failed("a", FAILED)
    harness.all_join("b", 3)
    harness.now += 100 * GROUP_WAIT_S
    assert harness.form() is None
    harness.all_join("c")
    assert harness.names() == ["b", "c"]


def test_the_wait_counts_from_the_first_join_request() -> None:
    harness = MembershipHarness(size=2)
    for _ in range(int(GROUP_WAIT_S)):  # a waiting member asks once a second
        harness.all_join("a")
        harness.now += 1
    assert harness.form() is not None


# Failures.


def test_survivors_form_at_once_when_the_failure_is_known() -> None:
    harness = harness_of("abc")
    harness.membership.mark_failed("b", FAILED)
    harness.all_join("ac", 5)
    generation = harness.formed()
    assert ids_of(generation) == ["a", "c"]
    assert (generation.number, generation.reason, generation.first_step) == (2, "worker failed", 5)
    assert harness.membership.failure is None


def test_no_generation_forms_until_all_survivors_wait() -> None:
    harness = harness_of("abc")
    assert harness.join("a", 5, failure=BROKEN) is None
    assert harness.join("b", 5, failure=BROKEN) is None
    harness.now += 100 * GROUP_WAIT_S
    assert harness.form() is None
    harness.membership.mark_failed("c", FAILED)
    assert harness.names() == ["a", "b"]


def test_two_failures_at_once_make_one_generation() -> None:
    harness = harness_of("abcd")
    harness.membership.mark_failed("a", FAILED)
    harness.membership.mark_failed("d", "no heartbeat for 5 s")
    assert harness.membership.failure == FAILED  # the first report counts
    harness.all_join("bc", 5)
    generation = harness.formed()
    assert (generation.number, ids_of(generation)) == (2, ["b", "c"])
    assert harness.form() is None
    assert harness.membership.failed() == {"a": FAILED, "d": "no heartbeat for 5 s"}


def test_a_newcomer_that_fails_while_it_waits_ends_no_generation() -> None:
    harness = harness_of("ab")
    harness.all_join("c")
    harness.membership.mark_failed("c", FAILED)
    harness.now += BATCH_S
    assert harness.membership.failure is None
    assert not harness.wants_change


def test_a_broken_connection_alone_makes_a_generation_of_the_same_members() -> None:
    harness = harness_of("abc")
    for name in "cab":
        assert harness.join(name, 5, failure=BROKEN) is None
    generation = harness.formed()
    assert (generation.number, generation.reason) == (2, "worker failed")
    assert ids_of(generation) == ["a", "b", "c"]


def test_a_failure_reported_by_a_newcomer_does_not_end_the_generation() -> None:
    harness = harness_of("ab")
    assert harness.join("c", failure=BROKEN) is None
    assert harness.membership.failure is None


def test_a_member_that_counts_as_failed_is_refused() -> None:
    harness = harness_of("ab")
    harness.membership.mark_failed("a", "no heartbeat for 5 s")
    assert harness.join("a", 5, failure=BROKEN) == "no heartbeat for 5 s"
    assert harness.membership.why_gone("a") == "no heartbeat for 5 s"
    harness.all_join("b", 5)
    assert harness.names() == ["b"]
    assert harness.join("a", 5) == "no heartbeat for 5 s"
    assert harness.membership.failure is None


def test_without_survivors_newcomers_wait_for_their_group() -> None:
    harness = harness_of("ab")
    harness.membership.mark_failed("a", FAILED)
    harness.membership.mark_failed("b", FAILED)
    harness.all_join("c")
    assert harness.form() is None
    harness.all_join("d")
    generation = harness.formed()
    assert ids_of(generation) == ["c", "d"]
    assert (generation.source, generation.first_step, generation.reason) == (None, None, "worker failed")


def test_a_member_that_left_is_no_failure_and_is_not_waited_for() -> None:
    harness = harness_of("ab")
    harness.membership.remove("a")
    harness.membership.mark_failed("a", FAILED)  # its process ends after that
    assert harness.membership.failed() == {}
    assert harness.membership.why_gone("a") == LEFT
    harness.all_join("b", 5)
    generation = harness.formed()
    assert (ids_of(generation), generation.reason) == (["b"], "workers left")
    harness.membership.mark_failed("b", FAILED)
    harness.membership.remove("b")
    assert harness.membership.failed() == {"b": FAILED}


def test_a_generation_that_is_too_small_ends_after_its_collective_task() -> None:
    harness = harness_of("abc", min_workers=2)
    for name in "bc":
        harness.membership.mark_failed(name, FAILED)
    harness.join("a", 5, between_steps=False, failure=BROKEN)
    assert harness.names() == ["a"], "only it can finish the task"
    assert harness.wants_change
    harness.join("a", 5)
    assert harness.form() is None
    harness.all_join("d")
    assert harness.names() == ["a", "d"]


def test_members_that_are_too_few_commit_on_request() -> None:
    harness = harness_of("abc", min_workers=3)
    harness.membership.mark_failed("c", FAILED)
    harness.all_join("ab", 5)
    assert harness.form() is None and not harness.membership.has_committed()
    harness.membership.wanted.commits.newest = 1
    generation = harness.formed()
    assert generation.handover_only and generation.receivers == () and generation.ids == {"a"}
    harness.join("a", 5, committed=5)
    assert harness.form() is None and harness.membership.has_committed()
    harness.membership.wanted.commits.fulfilled = 1
    harness.all_join("d")
    assert harness.names() == ["a", "b", "d"]


def test_pruned_members_stay_gone() -> None:
    harness = harness_of("abc")
    harness.membership.mark_failed("b", FAILED)
    harness.membership.ask_to_leave("c", AT_ONCE)
    harness.all_join("ac", 5)
    assert harness.names() == ["a"]
    harness.membership.update_workers(["a", "b", "c"], 0)
    assert harness.membership.failed() == {"b": FAILED} and list(harness.membership.dismissed) == ["c"]
    harness.membership.update_workers(["a"], 0)
    assert harness.membership.failed() == {} and not harness.membership.dismissed and harness.membership.leaving == []
    assert harness.join("b", 5) == harness.join("c", 5) == PROCESS_GONE
    assert harness.membership.is_newcomer("d") and not harness.membership.is_newcomer("a")


# Newcomers.


def test_a_newcomer_waits_until_the_generation_ends_for_it() -> None:
    harness = harness_of("ab")
    assert not harness.wants_change
    harness.all_join("c")
    assert not harness.wants_change
    assert harness.form() is None  # no member of the generation waits
    harness.now += BATCH_S
    assert harness.wants_change
    harness.all_join("a", 5)
    assert harness.form() is None
    harness.all_join("b", 5)
    generation = harness.formed()
    assert ids_of(generation) == ["a", "b", "c"]
    assert generation.reason == "workers joined"
    assert not harness.wants_change


def test_newcomers_that_fill_the_limit_do_not_wait_for_others() -> None:
    harness = harness_of("ab", max_workers=4)
    harness.all_join("c")
    assert not harness.wants_change
    harness.all_join("d")
    assert harness.wants_change


def test_newcomers_wait_while_a_survivor_is_in_a_collective_task() -> None:
    harness = harness_of("abc")
    harness.all_join("d")
    harness.membership.mark_failed("a", FAILED)
    harness.join("b", 5, between_steps=False)
    harness.join("c", 5)
    assert harness.names() == ["b", "c"]
    harness.now += BATCH_S  # they join after the evaluation
    assert harness.wants_change
    harness.all_join("bc", 6)
    assert harness.names() == ["b", "c", "d"]


@pytest.mark.parametrize("must_leave", [False, True])
def test_members_that_lag_wait_while_others_are_inside_a_steps_block(must_leave: bool) -> None:
    """The state inside a step's block is not the state of a step, so it cannot be transferred."""
    harness = harness_of("abcd")
    harness.membership.mark_failed("a", FAILED)
    harness.join("b", 6, between_steps=False, resumable=False)
    harness.join("c", 5)
    if must_leave:
        harness.membership.ask_to_leave("c", AT_ONCE)
    harness.join("d")
    generation = harness.formed()
    assert (generation.ids, generation.in_collective_task, generation.receivers) == ({"b"}, True, ())
    assert ("c" in harness.membership.dismissed) is must_leave
    harness.now += BATCH_S
    assert harness.wants_change
    harness.join("b", 6)
    generation = harness.formed()
    assert ids_of(generation) == ["b", *("" if must_leave else "c"), "d"]
    assert (generation.source, generation.first_step) == (0, 6)
    assert generation.receivers == ((1,) if must_leave else (1, 2))


def test_all_members_wait_while_they_are_too_few() -> None:
    harness = harness_of("abc", min_workers=2)
    assert not harness.membership.all_wait()
    harness.membership.mark_failed("a", FAILED)
    harness.membership.mark_failed("b", FAILED)
    assert not harness.membership.all_wait()
    harness.all_join("c", 5)
    assert harness.form() is None and harness.membership.all_wait()
    harness.all_join("d")
    assert harness.names() == ["c", "d"]
    assert not harness.membership.all_wait()


def test_newcomers_join_in_order_up_to_max_workers() -> None:
    harness = harness_of("ab", max_workers=3)
    for name in "dc":
        harness.now += 1
        harness.all_join(name)
    harness.all_join("ab", 5)
    assert harness.names() == ["a", "b", "d"]
    assert not harness.wants_change
    harness.membership.mark_failed("a", FAILED)
    harness.all_join("bd", 7)
    assert harness.names() == ["b", "d", "c"]


def planned(harness: MembershipHarness, joining: str | None = None) -> list[str]:
    """The members of the next generation, in rank order."""
    newcomer = member(joining, "n") if joining is not None else None
    places = harness.membership.plan(harness.now, newcomer)
    assert [rank for rank, _ in sorted(places.values())] == list(range(len(places)))
    assert all(size == len(places) for _, size in places.values())
    return sorted(places, key=lambda name: places[name])


def test_planned_places_are_those_of_the_next_generation() -> None:
    harness = harness_of("abc", max_workers=4, nodes={"a": "x", "b": "y", "c": "x"})
    assert planned(harness) == ["a", "c", "b"]
    assert planned(harness, joining="d") == ["a", "c", "b", "d"]
    harness.join("d", node="y")
    assert planned(harness) == planned(harness, joining="e") == ["a", "c", "b", "d"], "one more fits"
    harness.membership.ask_to_leave(["c"], AT_ONCE)
    assert planned(harness, joining="e") == ["a", "b", "d", "e"], "a newcomer replaces the leaving member"
    harness.all_join("abc", 5)
    assert harness.names() == ["a", "b", "d"]


def test_there_is_no_plan_without_a_healthy_generation() -> None:
    harness = MembershipHarness(size=2)
    harness.join("a")
    assert planned(harness) == planned(harness, joining="b") == [], "no generation has formed"
    harness = harness_of("ab", min_workers=2)
    harness.membership.mark_failed("a", FAILED)
    assert planned(harness, joining="c") == [], "the generation has failed"
    harness = harness_of("ab")
    harness.membership.ask_to_leave("ab", AT_ONCE)
    assert planned(harness) == [], "they commit before they leave"


def test_a_newcomer_waits_longer_while_others_are_starting() -> None:
    harness = harness_of("ab")
    harness.membership.update_workers(["a", "b"], 1)
    harness.all_join("c")
    harness.now += BATCH_S
    assert not harness.wants_change
    harness.now += STARTING_WAIT_S
    assert harness.wants_change
    harness.membership.update_workers(["a", "b"], 0)
    assert harness.wants_change


# The source of the state.


def test_the_source_is_the_most_advanced_and_the_others_receive() -> None:
    harness = harness_of("abcd")
    harness.membership.mark_failed("d", FAILED)
    harness.join("a", 5)
    harness.join("b", 6)
    harness.join("c", 5)
    harness.join("e")
    generation = harness.formed()
    assert ids_of(generation) == ["a", "b", "c", "e"]
    assert (generation.source, generation.receivers, generation.first_step) == (1, (0, 2, 3), 6)


def test_a_state_of_zero_steps_is_a_state() -> None:
    harness = harness_of("ab")
    harness.all_join("ab", 0)
    harness.join("c")
    generation = harness.formed()
    assert (generation.source, generation.receivers, generation.first_step) == (0, (2,), 0)


def test_survivors_without_a_state_start_from_the_newest_commit() -> None:
    harness = harness_of("abc")
    harness.membership.mark_failed("a", FAILED)
    harness.all_join("bc", None)
    generation = harness.formed()
    assert (generation.source, generation.first_step) == (None, None)


# Ranks.


def test_ranks_are_adjacent_on_a_node_in_order_of_seniority() -> None:
    harness = MembershipHarness(size=5)
    for name, node in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "z"), ("e", "y")):
        harness.join(name, node=node)
    assert harness.names() == ["a", "c", "b", "e", "d"]


# Reasons.


def test_a_generation_of_the_same_members_is_formed_again() -> None:
    harness = harness_of("ab")
    harness.all_join("ab", 5)
    generation = harness.formed()
    assert generation.reason == "formed again" and generation.same_members
    harness.all_join("abc", 6)
    assert not harness.formed().same_members


def test_a_dismissed_member_is_known_until_the_controller_has_listed_it() -> None:
    harness = harness_of("ab", max_workers=3)
    harness.all_join("c")
    harness.membership.ask_to_leave("c", AT_ONCE)
    harness.membership.ask_to_leave("d", AT_ONCE)  # SIGTERM, before it joins
    harness.membership.update_workers(["a", "b"], 0)
    assert list(harness.membership.dismissed) == ["c"]
    assert harness.join("d") == LEFT, "it got the signal"
    harness.membership.update_workers(["a", "b", "c", "d"], 0)
    assert list(harness.membership.dismissed) == ["c", "d"]
    harness.membership.update_workers(["a", "b"], 0)
    assert not harness.membership.dismissed


def test_a_member_is_a_newcomer_until_its_first_step() -> None:
    harness = harness_of("ab", max_workers=3)
    assert not harness.membership.is_newcomer("a"), "no worker has trained yet"
    harness.membership.mark_trained(harness.membership.generation)
    harness.all_join("c")
    harness.now += BATCH_S
    harness.all_join("ab", 5)
    assert harness.names() == ["a", "b", "c"]
    harness.membership.mark_trained(harness.membership.generation - 1)
    assert harness.membership.is_newcomer("c"), "it does not have the state yet"
    assert not harness.membership.is_newcomer("a")
    harness.membership.mark_trained(harness.membership.generation)
    assert not harness.membership.is_newcomer("c")
