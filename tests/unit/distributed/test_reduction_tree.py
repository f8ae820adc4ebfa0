"""The ranges and the reduction tree of a step, for any number of micro-batches M and ranks W."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ddp.distributed.reduction_tree import (
    Node,
    fold_in,
    fold_to_root,
    maximal_subtrees,
    micro_batch_ranges,
    processing_order,
)


@st.composite
def plans(draw: st.DrawFn, max_micro_batches: int = 300) -> tuple[int, int]:
    """Draws (M, W) with 1 <= W <= M."""
    num_micro_batches = draw(st.integers(1, max_micro_batches))
    return num_micro_batches, draw(st.integers(1, num_micro_batches))


@st.composite
def owned_ranges(draw: st.DrawFn) -> range:
    start = draw(st.integers(0, 300))
    return range(start, start + draw(st.integers(0, 100)))


def plus(left: str, right: str) -> str:
    return f"({left}+{right})"


def paired(num_leaves: int) -> str:
    """Returns the tree from another definition: pair neighbours until one is left; an odd one moves up."""
    level = [str(leaf) for leaf in range(num_leaves)]
    while len(level) > 1:
        pairs = [plus(*level[at : at + 2]) if at + 1 < len(level) else level[at] for at in range(0, len(level), 2)]
        level = pairs
    return level[0]


def summed(ranks: Sequence[Sequence[int]], num_leaves: int) -> str:
    """Returns the sum over all ranks, each of which folds its micro-batches in the given order."""
    gathered: dict[Node, str] = {}
    for order in ranks:
        sums: dict[Node, str] = {}
        for micro_batch in order:
            if micro_batch < num_leaves:
                fold_in(sums, Node(0, micro_batch), str(micro_batch), plus)
        gathered |= sums
    return fold_to_root(gathered, num_leaves, plus)


@given(plans(500))
def test_every_micro_batch_belongs_to_one_rank_and_ranges_are_even(plan: tuple[int, int]) -> None:
    num_micro_batches, world_size = plan
    ranges = micro_batch_ranges(*plan)
    assert len(ranges) == world_size
    assert [m for owned in ranges for m in owned] == list(range(num_micro_batches))
    sizes = [len(owned) for owned in ranges]
    assert max(sizes) - min(sizes) <= 1


def test_boundaries_lie_between_the_largest_subtrees_that_evenness_allows() -> None:
    assert micro_batch_ranges(6, 4) == [range(2), range(2, 4), range(4, 5), range(5, 6)]
    assert micro_batch_ranges(12, 5) == [range(2), range(2, 4), range(4, 6), range(6, 9), range(9, 12)]


@given(owned_ranges())
def test_maximal_subtrees_tile_the_range_and_cannot_be_larger(owned: range) -> None:
    assert sorted(processing_order(owned)) == list(owned)
    subtrees = maximal_subtrees(owned)
    assert [m for node in subtrees for m in node.micro_batches] == list(owned)
    for node in subtrees:
        parent = Node(node.level + 1, node.number // 2).micro_batches
        assert parent.start < owned.start or parent.stop > owned.stop


@given(plans(), st.data())
def test_folding_ends_with_the_maximal_subtrees_in_any_order(plan: tuple[int, int], data: st.DataObject) -> None:
    """So a rank knows from the ranges alone which sums its peers will send."""
    ranges = micro_batch_ranges(*plan)
    owned = ranges[data.draw(st.integers(0, len(ranges) - 1))]
    sums: dict[Node, str] = {}
    for micro_batch in data.draw(st.permutations(owned)):
        fold_in(sums, Node(0, micro_batch), str(micro_batch), plus)
    assert sorted(sums) == sorted(maximal_subtrees(owned))


def held(order: Sequence[int]) -> int:
    """Returns the largest number of partial sums, besides the current gradient, over micro-batches in this order."""
    most = 0
    sums: dict[Node, str] = {}
    for micro_batch in order:
        most = max(most, len(sums))
        fold_in(sums, Node(0, micro_batch), "", plus)
    return most


def most_held(num_micro_batches: int, world_size: int) -> int:
    """Returns the maximum of `held` over all ranks."""
    return max(held(processing_order(owned)) for owned in micro_batch_ranges(num_micro_batches, world_size))


@given(plans(300))
def test_the_number_of_partial_sums_is_logarithmic_in_the_range(plan: tuple[int, int]) -> None:
    num_micro_batches, world_size = plan
    assert most_held(*plan) <= math.ceil(math.log2(num_micro_batches / world_size)) + 1


def test_ascending_order_would_need_twice_as_many_partial_sums() -> None:
    assert held(processing_order(range(1, 128))) == 6
    assert held(range(1, 128)) == 12


@given(plans(40), st.data())
def test_the_sum_is_the_same_expression_at_every_world_size_and_in_any_order(
    plan: tuple[int, int], data: st.DataObject
) -> None:
    """Short steps are included, in which only the first micro-batches have rows."""
    num_leaves = data.draw(st.integers(1, plan[0]))
    ranges = micro_batch_ranges(*plan)
    expected = paired(num_leaves)
    assert summed([processing_order(owned) for owned in ranges], num_leaves) == expected
    assert summed([data.draw(st.permutations(owned)) for owned in ranges], num_leaves) == expected


def test_small_trees_as_expressions() -> None:
    expressions = [summed([range(num_leaves)], num_leaves) for num_leaves in (1, 2, 3, 5, 7)]
    assert expressions == ["0", "(0+1)", "((0+1)+2)", "(((0+1)+(2+3))+4)", "(((0+1)+(2+3))+((4+5)+6))"]


def test_a_missing_subtree_raises() -> None:
    with pytest.raises(ValueError, match="cover 3 of 4 micro-batches"):
        fold_to_root({Node(1, 0): 1.0, Node(0, 3): 1.0}, 4, lambda left, right: left + right)
