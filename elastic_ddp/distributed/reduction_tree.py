"""Who computes which micro-batches, and the tree in which their results are added. Pure functions of plain values.

Floating-point addition does not associate, so a sum has the same bits at every world size only if the order of its
additions does not depend on the world size. Here it is a balanced binary tree over the micro-batches of a step:
leaf m is micro-batch m, and node (level, number) covers micro-batches number * 2^level up to (number + 1) * 2^level. A
node without a right sibling is handed up as it is. A rank folds its own range into the largest subtrees that lie
inside it; whoever brings the subtrees of all ranks together folds the rest.

In the short last step of an epoch the last micro-batches may have no rows. They are no leaves then: adding zeros for
them would turn -0.0 into 0.0, at some world sizes only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import NamedTuple, TypeVar

Value = TypeVar("Value")
Add = Callable[[Value, Value], Value]
"""Adds the right value to the left one. May work in place on the left one, which is not used again."""


class Node(NamedTuple):
    """A subtree: group `number`, from 0, of 2^level neighbouring micro-batches."""

    level: int
    number: int

    @property
    def micro_batches(self) -> range:
        return range(self.number << self.level, (self.number + 1) << self.level)


def micro_batch_ranges(num_micro_batches: int, world_size: int) -> list[range]:
    """The micro-batches of every rank: contiguous, all of them, and as even as can be (sizes differ by one at most).

    Where evenness leaves a boundary a choice, it goes where the tree has its largest subtrees: ranges are then made
    of fewer subtrees, and a rank holds fewer partial sums.
    """
    if not 1 <= world_size <= num_micro_batches:
        raise ValueError(f"world_size={world_size} has to be from 1 to the {num_micro_batches} micro-batches of a step")
    smallest, largest = num_micro_batches // world_size, -(-num_micro_batches // world_size)
    bounds = [0]
    for ranks_left in range(world_size - 1, 0, -1):
        first = max(bounds[-1] + smallest, num_micro_batches - ranks_left * largest)
        last = min(bounds[-1] + largest, num_micro_batches - ranks_left * smallest)
        even = num_micro_batches * (world_size - ranks_left) / world_size
        bounds.append(max(range(first, last + 1), key=lambda bound: (bound & -bound, -abs(bound - even))))
    bounds.append(num_micro_batches)
    return [range(low, high) for low, high in pairwise(bounds)]


def maximal_subtrees(owned: range) -> list[Node]:
    """The largest subtrees that tile `owned`, contiguous micro-batches, from left to right."""
    subtrees, low = [], owned.start
    while low < owned.stop:
        level = 0
        while low % (2 << level) == 0 and low + (2 << level) <= owned.stop:
            level += 1
        subtrees.append(Node(level, low >> level))
        low += 1 << level
    return subtrees


def processing_order(owned: range) -> list[int]:
    """`owned` in the order in which a rank computes it: the largest subtree first.

    While a subtree of 2^k micro-batches is computed, up to k partial sums are held beside the finished subtrees.
    Largest first, both together stay at ceil(log2(M/W)) + 1 at most; in ascending order some ranges need nearly
    twice that.
    """
    largest_first = sorted(maximal_subtrees(owned), key=lambda node: -node.level)
    return [m for node in largest_first for m in node.micro_batches]


def fold_in(sums: dict[Node, Value], node: Node, value: Value, add: Add[Value]) -> None:
    """Puts the sum of a subtree among `sums`, in place, and folds it with its sibling for as long as that is there."""
    while (sibling := Node(node.level, node.number ^ 1)) in sums:
        other = sums.pop(sibling)
        value = add(value, other) if node.number < sibling.number else add(other, value)
        node = Node(node.level + 1, node.number // 2)
    sums[node] = value


def fold_to_root(sums: Mapping[Node, Value], num_leaves: int, add: Add[Value]) -> Value:
    """The sum over all leaves, from the sums of subtrees that tile them.

    Raises:
        ValueError: they do not.
    """
    covered = sum(len(range(node.micro_batches.start, min(node.micro_batches.stop, num_leaves))) for node in sums)
    if covered != num_leaves:
        raise ValueError(f"{sorted(sums)} cover {covered} of {num_leaves} micro-batches")
    sums = dict(sums)
    top = (num_leaves - 1).bit_length()
    for level in range(top):
        for node in sorted(node for node in sums if node.level == level):
            if node in sums:
                left, right = sums.pop(node), sums.pop(Node(level, node.number + 1), None)
                sums[Node(level + 1, node.number // 2)] = left if right is None else add(left, right)
    return sums[Node(top, 0)]
