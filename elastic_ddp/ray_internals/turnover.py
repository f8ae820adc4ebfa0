"""Which workers of a group stay and which go, by what Ray Train knows of their functions and the rendezvous of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic_ddp.rendezvous.messages import WorkerDirectives


@dataclass(frozen=True)
class Turnover:
    """Workers of a group, by their ranks in it."""

    everyone: frozenset[int]
    through: frozenset[int]
    """Whose function has returned, as the run is over."""
    dismissed: frozenset[int]
    """Let go in peace, by the rendezvous or by the end of their function."""
    left: frozenset[int]
    """Of these, who has gone, or is overdue."""
    failed: dict[int, Exception]

    @property
    def is_over(self) -> bool:
        """Whether all who were not let go are through."""
        return bool(self.through) and self.through == self.everyone - self.dismissed

    @property
    def nobody_trains(self) -> bool:
        """Whether there is nobody to go on with, once the lost are gone."""
        return self.everyone <= self.through | self.dismissed | self.failed.keys()

    @property
    def all_have_left(self) -> bool:
        """Whether every worker was let go, and has gone."""
        return self.left == self.everyone


def classify_workers(
    workers: Sequence[str],
    orders: WorkerDirectives,
    *,
    done: Set[int],
    errors: Mapping[int, Exception],
    is_overdue: Callable[[str], bool],
) -> Turnover:
    """Sorts the workers of a group.

    Args:
        workers: their ids, by rank.
        orders: what the rendezvous says of them, asked after Ray Train was: who has returned in peace was dismissed
            by then, or the run is over.
        done: whose function has ended.
        errors: how, for those where it failed; a worker that is dead is among them.
        is_overdue: whether one that was dismissed has had enough time to leave.
    """
    dismissed = {rank for rank, each in enumerate(workers) if each in orders.dismissed}
    if not orders.is_over:  # who returns all the same was let go before the rendezvous had it in its list
        dismissed |= done - errors.keys()
    failed: dict[int, Exception] = {
        **{rank: error for rank, error in errors.items() if rank not in dismissed},
        **{rank: RuntimeError(orders.failed[each]) for rank, each in enumerate(workers) if each in orders.failed},
    }
    return Turnover(
        everyone=frozenset(range(len(workers))),
        through=frozenset(done - dismissed - failed.keys()),
        dismissed=frozenset(dismissed),
        left=frozenset(rank for rank in dismissed if rank in done or is_overdue(workers[rank])),
        failed=failed,
    )
