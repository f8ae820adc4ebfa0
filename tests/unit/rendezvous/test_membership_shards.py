"""Membership: how the shards of a state change hands when members join and leave."""

from __future__ import annotations

from typing import Any

from elastic_ddp.distributed.assignment import Resharding, Shards
from elastic_ddp.rendezvous.members import DrainNotice
from tests.unit.membership_harness import AT_ONCE, FAILED, MembershipHarness, harness_of, ids_of


def test_newcomers_get_rows_from_the_members_that_hold_shards() -> None:
    harness = harness_of("ab")
    harness.all_join("c")
    harness.all_hold("ab", 5)
    formed = harness.formed()
    assert (ids_of(formed), formed.source, formed.receivers, formed.first_step) == (["a", "b", "c"], 0, (2,), 5)
    assert formed.resharding == Resharding(2, ((0,), (1,), ()), (0, 1, 2)) and not formed.handover_only


def test_a_member_that_leaves_first_hands_over_its_rows() -> None:
    harness = harness_of("abc")
    harness.membership.ask_to_leave("a", AT_ONCE)
    harness.all_hold("abc", 5)
    formed = harness.formed()
    assert (ids_of(formed), formed.handover_only) == (["a", "b", "c"], True)
    assert formed.resharding == Resharding(3, ((0,), (1,), (2,)), (1, 2))
    harness.all_hold("bc", 5)
    harness.join("a")
    formed = harness.formed()
    assert (ids_of(formed), formed.first_step, formed.handover_only) == (["b", "c"], 5, False)
    assert formed.resharding == Resharding(2, ((0,), (1,)), (0, 1))
    assert "a" in harness.membership.dismissed


def test_a_resize_hands_the_rows_of_the_surplus_over() -> None:
    harness = harness_of("abc")
    harness.membership.wanted.num_workers = 2
    assert harness.wants_change
    harness.all_hold("abc", 5)
    formed = harness.formed()
    assert formed.handover_only and formed.resharding == Resharding(3, ((0,), (1,), (2,)), (0, 1))
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
    assert formed.resharding == Resharding(2, ((0,), (1,), ()), (1, 2)) and formed.receivers == (2,)


def test_members_that_all_leave_commit_their_shards() -> None:
    harness = harness_of("ab")
    harness.membership.ask_to_leave("ab", AT_ONCE)
    harness.all_hold("ab", 5)
    formed = harness.formed()
    assert formed.handover_only and formed.receivers == ()
    assert formed.resharding == Resharding(2, ((0,), (1,)), (0, 1))


def test_a_requested_commit_of_too_few_members_needs_all_shards() -> None:
    harness = harness_of("abc", min_workers=3)
    harness.membership.wanted.commits.newest = 1
    harness.membership.ask_to_leave("c", AT_ONCE)
    harness.all_hold("abc", 5)
    formed = harness.formed()
    assert formed.handover_only and formed.resharding == Resharding(3, ((0,), (1,), (2,)), (0, 1))
    harness.all_hold("ab", 5)
    harness.join("c")
    formed = harness.formed()
    assert formed.handover_only and formed.resharding == Resharding(2, ((0,), (1,)), (0, 1))


def all_mirror(harness: MembershipHarness, names: str, step: int, *, of: int, **changes: Any) -> None:
    """Members join of a generation of `of`, in which each holds its shard and the shard of the member before."""
    for name in names:
        number = "abcdefgh".index(name)
        assert harness.join(name, step, shards=Shards(of, (number, (number - 1) % of)), **changes) is None


def test_a_shard_outlives_its_owner_on_the_member_that_mirrors_it() -> None:
    harness = harness_of("abc")
    harness.membership.mark_failed("b", FAILED)
    all_mirror(harness, "ac", 5, of=3)
    formed = harness.formed()
    assert (ids_of(formed), formed.first_step, formed.handover_only) == (["a", "c"], 5, False)
    assert formed.resharding == Resharding(3, ((0, 2), (2, 1)), (0, 1))
    sources = [[formed.resharding.source(shard, rank) for shard in range(3)] for rank in range(2)]
    assert sources == [[0, 1, 0], [0, 1, 1]], "members send what others lack: of shard 1, the mirror"


def test_a_shard_is_lost_with_its_owner_and_its_mirror() -> None:
    harness = harness_of("abcd")
    for name in "bc":
        harness.membership.mark_failed(name, FAILED)
    all_mirror(harness, "ad", 5, of=4)
    assert harness.formed().first_step is None


def test_a_run_restarts_from_a_commit_if_shards_are_lost_inside_a_step() -> None:
    harness = harness_of("abc")
    for name in "bc":
        harness.membership.mark_failed(name, FAILED)
    all_mirror(harness, "a", 5, of=3, between_steps=False, resumable=False)
    formed = harness.formed()
    assert (ids_of(formed), formed.source) == (["a"], None)


def test_a_member_that_leaves_need_not_hand_over_what_is_mirrored() -> None:
    harness = harness_of("abc")
    harness.membership.ask_to_leave("a", AT_ONCE)
    all_mirror(harness, "abc", 5, of=3)
    formed = harness.formed()
    assert (ids_of(formed), formed.handover_only) == (["b", "c"], False)
    assert formed.resharding == Resharding(3, ((1, 0), (2, 1)), (0, 1))


def test_members_in_doubt_finish_the_step_that_another_one_has_finished() -> None:
    harness = harness_of("abc")
    harness.membership.mark_failed("b", FAILED)
    all_mirror(harness, "a", 5, of=3, can_finish=True)
    all_mirror(harness, "c", 6, of=3)
    formed = harness.formed()
    assert (formed.first_step, formed.source, formed.receivers) == (6, 1, (0,))
    assert formed.resharding == Resharding(3, ((0, 2), (2, 1)), (0, 1))


def test_members_that_are_all_in_doubt_repeat_the_step() -> None:
    harness = harness_of("abc")
    harness.membership.mark_failed("b", FAILED)
    all_mirror(harness, "ac", 5, of=3, can_finish=True)
    assert harness.formed().first_step == 5


def test_members_that_failed_before_the_vote_repeat_the_step_with_those_in_doubt() -> None:
    harness = harness_of("abc")
    all_mirror(harness, "ab", 5, of=3, can_finish=True)
    all_mirror(harness, "c", 5, of=3)
    formed = harness.formed()
    assert (formed.first_step, formed.receivers) == (5, ())


def test_survivors_without_memory_for_the_state_wait_for_a_replacement() -> None:
    harness = harness_of("abc")
    harness.membership.mark_failed("b", FAILED)
    all_mirror(harness, "ac", 5, of=3, fewest_workers=3)
    assert harness.form() is None
    harness.all_join("d")
    assert harness.names() == ["a", "c", "d"]


def test_survivors_without_memory_for_the_state_commit_it_when_the_run_stops() -> None:
    harness = harness_of("abc")
    harness.membership.mark_failed("b", FAILED)
    all_mirror(harness, "ac", 5, of=3, fewest_workers=3)
    harness.membership.wanted.stop = True
    assert harness.names() == ["a", "c"]


def test_members_that_leave_commit_what_does_not_fit_the_others() -> None:
    harness = harness_of("abc")
    harness.membership.ask_to_leave("a", AT_ONCE)
    for number, name in enumerate("abc"):
        assert harness.join(name, 5, shards=Shards(3, (number,)), fewest_workers=3) is None
    formed = harness.formed()
    assert formed.handover_only and formed.resharding == Resharding(3, ((0,), (1,), (2,)), (0, 1, 2))


def test_a_drain_without_memory_for_fewer_workers_waits_for_its_deadline() -> None:
    harness = harness_of("abc")
    for number, name in enumerate("abc"):
        assert harness.join(name, 5, shards=Shards(3, (number,)), fewest_workers=3) is None
    harness.formed()
    harness.membership.ask_to_leave("a", DrainNotice(given_s=harness.now, within_s=100.0))
    assert not harness.wants_change
    harness.now += 60.0
    assert harness.wants_change
