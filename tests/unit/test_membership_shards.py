"""Membership: how the shards of a state change hands when members join and leave."""

from __future__ import annotations

from elastic_ddp.distributed.assignment import Resharding
from tests.unit.membership_harness import AT_ONCE, FAILED, harness_of, ids_of


def test_newcomers_get_rows_from_the_members_that_hold_shards() -> None:
    harness = harness_of("ab")
    harness.all_join("c")
    harness.all_hold("ab", 5)
    formed = harness.formed()
    assert (ids_of(formed), formed.source, formed.receivers, formed.first_step) == (["a", "b", "c"], 0, (2,), 5)
    assert formed.resharding == Resharding(2, (0, 1), (0, 1, 2)) and not formed.handover_only


def test_a_member_that_leaves_first_hands_over_its_rows() -> None:
    harness = harness_of("abc")
    harness.membership.ask_to_leave("a", AT_ONCE)
    harness.all_hold("abc", 5)
    formed = harness.formed()
    assert (ids_of(formed), formed.handover_only) == (["a", "b", "c"], True)
    assert formed.resharding == Resharding(3, (0, 1, 2), (1, 2))
    harness.all_hold("bc", 5)
    harness.join("a")
    formed = harness.formed()
    assert (ids_of(formed), formed.first_step, formed.handover_only) == (["b", "c"], 5, False)
    assert formed.resharding == Resharding(2, (0, 1), (0, 1))
    assert "a" in harness.membership.dismissed


def test_a_resize_hands_the_rows_of_the_surplus_over() -> None:
    harness = harness_of("abc")
    harness.membership.wanted = 2
    assert harness.wants_change
    harness.all_hold("abc", 5)
    formed = harness.formed()
    assert formed.handover_only and formed.resharding == Resharding(3, (0, 1, 2), (0, 1))
    harness.all_hold("ab", 5)
    harness.join("c")
    assert harness.names() == ["a", "b"]


def test_a_member_that_replaces_another_gets_rows_in_the_same_generation() -> None:
    harness = harness_of("ab", max_workers=3)
    harness.membership.ask_to_leave("a", AT_ONCE)
    harness.all_join("c")
    harness.all_hold("ab", 5)
    formed = harness.formed()
    assert ids_of(formed) == ["a", "b", "c"] and formed.handover_only
    assert formed.resharding == Resharding(2, (0, 1), (1, 2)) and formed.receivers == (2,)


def test_members_that_all_leave_commit_their_shards() -> None:
    harness = harness_of("ab")
    harness.membership.ask_to_leave("ab", AT_ONCE)
    harness.all_hold("ab", 5)
    formed = harness.formed()
    assert formed.handover_only and formed.receivers == ()
    assert formed.resharding == Resharding(2, (0, 1), (0, 1))


def test_a_requested_commit_of_too_few_members_needs_all_shards() -> None:
    harness = harness_of("abc", min_workers=3)
    harness.membership.commit_wanted = True
    harness.membership.ask_to_leave("c", AT_ONCE)
    harness.all_hold("abc", 5)
    formed = harness.formed()
    assert formed.handover_only and formed.resharding == Resharding(3, (0, 1, 2), (0, 1))
    harness.all_hold("ab", 5)
    harness.join("c")
    formed = harness.formed()
    assert formed.handover_only and formed.resharding == Resharding(2, (0, 1), (0, 1))


def test_a_state_that_lacks_a_shard_is_lost() -> None:
    harness = harness_of("abc")
    harness.all_hold("abc", 5)
    harness.membership.mark_failed("b", FAILED)
    formed = harness.formed()
    assert ids_of(formed) == ["a", "c"]
    assert (formed.source, formed.first_step, formed.resharding) == (None, None, None)
