"""The micro-batches of each rank, and the tree along which their results are added. Pure functions.

Floating-point addition does not associate. A sum has the same bits at every world size only if the order of its
additions does not depend on the world size. Here the order is a balanced binary tree over the micro-batches of a step.
Leaf m is micro-batch m. Node (level, number) covers the micro-batches from number * 2^level to
(number + 1) * 2^level - 1. A node without a right sibling moves up a level unchanged.

With DDP a rank owns neighbouring micro-batches. It adds them into the largest subtrees that lie inside its range. The
sums of these subtrees, brought together from all ranks, are then added up to the root. With FSDP micro-batches are
dealt out in turn, so that each round brings neighbouring leaves of all ranks together, which are added at once.

In the short last step of an epoch, the last micro-batches may have no rows. Such micro-batches are not leaves: adding
zeros for them would turn -0.0 into 0.0, and only at some world sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import NamedTuple, TypeVar

Value = TypeVar("Value")
Add = Callable[[Value, Value], Value]
"""Adds the right value to the left one. It may work in place on the left one, which is not used afterwards."""


class Node(NamedTuple):
    """A subtree: the group `number`, counted from 0, of 2^level neighbouring micro-batches."""

    level: int
    number: int

    @property
    def micro_batches(self) -> range:
        return range(self.number << self.level, (self.number + 1) << self.level)


def micro_batch_ranges(num_micro_batches: int, world_size: int) -> list[range]:
    """Returns each rank's micro-batches, at least one: contiguous ranges whose lengths differ by at most one.

    Where possible, boundaries are at the edges of the tree's largest subtrees. A rank then holds fewer partial sums.
    """
    smallest = num_micro_batches // world_size
    largest = -(-num_micro_batches // world_size)
    bounds = [0]
    for ranks_left in range(world_size - 1, 0, -1):
        first = max(bounds[-1] + smallest, num_micro_batches - ranks_left * largest)
        last = min(bounds[-1] + largest, num_micro_batches - ranks_left * smallest)
        even = num_micro_batches * (world_size - ranks_left) / world_size
        bounds.append(max(range(first, last + 1), key=lambda bound: (bound & -bound, -abs(bound - even))))
    bounds.append(num_micro_batches)
    return [range(low, high) for low, high in pairwise(bounds)]


def dealt_micro_batches(num_micro_batches: int, world_size: int) -> list[range]:
    """Returns each rank's micro-batches, dealt out in turn: round k has micro-batches k * W to k * W + W - 1."""
    return [range(rank, num_micro_batches, world_size) for rank in range(world_size)]


def with_rows(owned: range, num_leaves: int) -> range:
    """Returns the leaves among a rank's micro-batches."""
    return range(owned.start, min(owned.stop, num_leaves), owned.step)


def maximal_subtrees(owned: range) -> list[Node]:
    """Returns the largest subtrees that tile a rank's micro-batches, from left to right."""
    if owned.step > 1:
        return [Node(0, micro_batch) for micro_batch in owned]
    subtrees = []
    low = owned.start
    while low < owned.stop:
        level = 0
        while low % (2 << level) == 0 and low + (2 << level) <= owned.stop:
            level += 1
        subtrees.append(Node(level, low >> level))
        low += 1 << level
    return subtrees


def processing_order(owned: range) -> list[int]:
    """Returns a rank's micro-batches in the order in which it computes them: the largest subtree first.

    A subtree of 2^k micro-batches needs up to k partial sums besides the sums of finished subtrees. Largest first,
    both together are at most ceil(log2(M/W)) + 1. In ascending order, some ranges need nearly twice that.
    """
    largest_first = sorted(maximal_subtrees(owned), key=lambda node: -node.level)
    return [m for node in largest_first for m in node.micro_batches]


def fold_in(sums: dict[Node, Value], node: Node, value: Value, add: Add[Value]) -> None:
    """Adds a subtree's sum to `sums`, in place. Merges it with its sibling's sum for as long as `sums` has one."""
    while (sibling := Node(node.level, node.number ^ 1)) in sums:
        other = sums.pop(sibling)
        value = add(value, other) if node.number < sibling.number else add(other, value)
        node = Node(node.level + 1, node.number // 2)
    sums[node] = value


def fold_to_root(sums: Mapping[Node, Value], num_leaves: int, add: Add[Value]) -> Value:
    """Returns the sum over all leaves, from subtrees. Raises a ValueError if they do not tile the leaves."""
    covered = sum(len(range(node.micro_batches.start, min(node.micro_batches.stop, num_leaves))) for node in sums)
    if covered != num_leaves:
        raise ValueError(f"{sorted(sums)} cover {covered} of {num_leaves} micro-batches")
    sums = dict(sums)
    top = (num_leaves - 1).bit_length()
    for level in range(top):
        for node in sorted(node for node in sums if node.level == level):
            if node in sums:
                left = sums.pop(node)
                right = sums.pop(Node(level, node.number + 1), None)
                sums[Node(level + 1, node.number // 2)] = left if right is None else add(left, right)
    return sums[Node(top, 0)]
