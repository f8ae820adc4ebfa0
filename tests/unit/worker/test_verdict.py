"""The rank at fault is found from the digests of all ranks."""

from __future__ import annotations

import pytest

from elastic_ddp.worker.verdict import REPEATS, Check, Digests, Report, Verdict, judge, plan_checks

NAMES = ("head", "body")
RIGHT, WRONG, OTHER = (1, 2), (1, 3), (4, 5)


def in_step(checks: tuple[Check, ...], wrong: dict[int, Digests], world_size: int) -> list[Report]:
    """The reports of a step in which each rank computes right bits, but for those in `wrong`."""
    reports = [Report(state="s") for _ in range(world_size)]
    for check in checks:
        for rank in {check.owner, *check.checkers}:
            times = check.repeats + (rank == check.owner and check.repeats > 1)
            reports[rank].digests[check.micro_batch] = [wrong.get(rank, RIGHT)] * times
    return reports


def arbitrated(world_size: int, first: dict[int, Digests], then: dict[int, Digests]) -> Verdict:
    """The verdict after a step with wrong bits in `first` is repeated, with wrong bits in `then`."""
    checks = plan_checks(0, [[rank] for rank in range(world_size)], 1)
    reports = in_step(checks, first, world_size)
    verdict = judge(checks, reports, {}, NAMES)
    assert verdict.disputed and verdict.at_fault is None
    former = {
        check.micro_batch: {
            rank: report.digests[check.micro_batch][0]
            for rank, report in enumerate(reports)
            if check.micro_batch in report.digests
        }
        for check in verdict.disputed
    }
    return judge(verdict.disputed, in_step(verdict.disputed, then, world_size), former, NAMES)


def test_equal_bits_are_clean() -> None:
    checks = plan_checks(0, [[0, 3], [1], [2]], 1)
    assert judge(checks, in_step(checks, {}, 3), {}, NAMES).is_clean


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_each_rank_is_checked_by_another_one_and_pairs_and_micro_batches_move(world_size: int) -> None:
    owned = [[rank, rank + world_size] for rank in range(world_size)]
    pairs, micro_batches = set(), set()
    for number in range(4 * world_size):
        checks = plan_checks(number, owned, 1)
        assert sorted(check.owner for check in checks) == sorted(check.checkers[0] for check in checks)
        assert all(check.micro_batch in owned[check.owner] and check.checkers != (check.owner,) for check in checks)
        pairs |= {(check.owner, *check.checkers) for check in checks}
        micro_batches |= {check.micro_batch for check in checks}
    assert len(pairs) == world_size * (world_size - 1) and micro_batches == set(range(2 * world_size))


def test_a_rank_on_another_node_comes_first_and_one_rank_checks_nothing() -> None:
    assert [check.checkers for check in plan_checks(0, [[0], [1], [2], [3]], 2)] == [(2,), (3,), (0,), (1,)]
    assert plan_checks(0, [[0, 1]], 1) == ()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_is_wrong_each_time_is_at_fault(rank: int) -> None:
    verdict = arbitrated(3, {rank: WRONG}, {rank: WRONG})
    assert verdict.at_fault == rank and "in parameter body" in verdict.text


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_was_wrong_once_is_at_fault(world_size: int) -> None:
    verdict = arbitrated(world_size, {1: WRONG}, {})
    assert verdict.at_fault == 1 and "once" in verdict.text


def test_of_two_ranks_that_differ_both_are_suspects() -> None:
    verdict = arbitrated(2, {1: WRONG}, {1: WRONG})
    assert verdict.at_fault is None and verdict.suspects == (0, 1)


def test_ranks_that_differ_from_all_others_make_the_job_suspect() -> None:
    verdict = arbitrated(3, {0: WRONG, 1: OTHER}, {0: WRONG, 1: OTHER})
    assert verdict.at_fault is None and "nondeterministic" in verdict.text


@pytest.mark.parametrize(("states", "at_fault"), [("aab", 2), ("abb", 0), ("ab", None), ("abc", None), ("aabb", None)])
def test_a_rank_with_another_state_is_at_fault_if_all_others_agree(states: str, at_fault: int | None) -> None:
    verdict = judge((), [Report(state=state) for state in states], {}, NAMES)
    assert verdict.at_fault == at_fault and "state" in verdict.text and REPEATS > 1
