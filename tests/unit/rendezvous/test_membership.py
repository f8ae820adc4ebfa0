"""Membership: how generations form, and how they end by failures."""

from __future__ import annotations

from elastic_ddp.rendezvous.membership import BATCH_S, LEFT, PROCESS_GONE
from elastic_ddp.rendezvous.planner import GROUP_WAIT_S
from tests.unit.membership_harness import AT_ONCE, BROKEN, FAILED, MembershipHarness, harness_of, ids_of

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


def test_a_repeated_join_request_counts_once() -> None:
    harness = MembershipHarness(size=2)
    harness.all_join("aa")
    assert harness.form() is None
    harness.all_join("b")
    assert harness.names() == ["a", "b"]


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


def test_a_member_that_fails_before_the_first_generation_is_not_in_it() -> None:
    harness = MembershipHarness(size=3)
    harness.all_join("abc")
    harness.membership.mark_failed("b", FAILED)
    assert harness.form() is None
    harness.now += GROUP_WAIT_S
    assert harness.names() == ["a", "c"]


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


def test_lowering_min_workers_lets_waiting_members_form() -> None:
    harness = harness_of("ab", min_workers=2)
    harness.membership.mark_failed("a", FAILED)
    harness.all_join("b", 3)
    assert harness.form() is None
    harness.membership.min_workers = 1
    assert harness.names() == ["b"]


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


def test_waiting_members_form_once_the_last_failure_is_known() -> None:
    harness = harness_of("abcd")
    for name in "ab":
        assert harness.join(name, 5, failure=BROKEN) is None
    harness.membership.mark_failed("c", FAILED)  # the generation has failed already
    assert harness.form() is None
    harness.membership.mark_failed("d", FAILED)
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


def test_a_member_that_fails_while_it_waits_is_not_waited_for() -> None:
    harness = harness_of("abc")
    harness.membership.mark_failed("a", FAILED)
    harness.all_join("b", 5)
    harness.membership.mark_failed("b", FAILED)
    assert harness.form() is None
    harness.all_join("c", 5)
    assert harness.names() == ["c"]


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


def test_the_first_report_of_a_failure_counts() -> None:
    harness = harness_of("abc")
    harness.join("a", 5, failure="the first")
    harness.join("b", 5, failure="the second")
    assert harness.membership.failure == "the first"


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
    harness.membership.retire("a")
    harness.membership.mark_failed("a", FAILED)  # its process ends after that
    assert harness.membership.failed() == {}
    assert harness.membership.why_gone("a") == LEFT
    assert len(harness.membership.known()) == 1
    harness.all_join("b", 5)
    generation = harness.formed()
    assert (ids_of(generation), generation.reason) == (["b"], "workers left")


def test_a_failed_member_stays_failed_when_it_retires() -> None:
    harness = harness_of("ab")
    harness.membership.mark_failed("a", FAILED)
    harness.membership.retire("a")
    assert harness.membership.failed() == {"a": FAILED}


def test_training_and_waiting_members_are_known() -> None:
    harness = harness_of("abc")
    assert len(harness.membership.known()) == 3
    harness.all_join("d")
    assert len(harness.membership.known()) == 4
    harness.membership.mark_failed("a", FAILED)
    harness.membership.retire("b")
    harness.all_join("c", 5)
    assert len(harness.membership.known()) == 2


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
    harness.membership.commit_wanted = True
    generation = harness.formed()
    assert generation.handover_only and generation.receivers == () and generation.ids == {"a"}
    harness.join("a", 5, committed=5)
    assert harness.form() is None and harness.membership.has_committed()
    harness.membership.commit_wanted = False
    harness.all_join("d")
    assert harness.names() == ["a", "b", "d"]


def test_pruned_members_stay_gone() -> None:
    harness = harness_of("abc")
    harness.membership.mark_failed("b", FAILED)
    harness.membership.ask_to_leave("c", AT_ONCE)
    harness.all_join("ac", 5)
    assert harness.names() == ["a"]
    harness.membership.prune(["a", "b", "c"])
    assert harness.membership.failed() == {"b": FAILED} and list(harness.membership.dismissed) == ["c"]
    harness.membership.prune(["a"])
    assert harness.membership.failed() == {} and not harness.membership.dismissed and harness.membership.leaving == []
    assert harness.join("b", 5) == harness.join("c", 5) == PROCESS_GONE
    assert harness.membership.is_newcomer("d") and not harness.membership.is_newcomer("a")
