"""Classifies the workers of a group: which train, have failed and why, or are leaving. No Ray, plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic_ddp.rendezvous.messages import WorkerDirectives

_EXIT_DETAIL, _CONNECTION_CLOSED = "Worker exit detail: ", "connection error code 2"
"""Parts of Ray's message about a process that has exited."""


@dataclass(frozen=True)
class WorkerStates:
    """The workers of a group by state. Workers are given by their ranks in the group."""

    all: frozenset[int]
    finished: frozenset[int]
    """Workers whose function returned because the run is over."""
    dismissed: frozenset[int]
    """Workers that the rendezvous released, or whose function returned before the end of the run."""
    exited: frozenset[int]
    """Dismissed workers that have exited or are overdue."""
    failed: dict[int, Exception]

    @property
    def run_is_over(self) -> bool:
        return bool(self.finished) and self.finished == self.all - self.dismissed

    @property
    def none_trains(self) -> bool:
        return self.all <= self.finished | self.dismissed | self.failed.keys()

    @property
    def all_exited(self) -> bool:
        return self.exited == self.all


def classify_workers(
    workers: Sequence[str],
    directives: WorkerDirectives,
    *,
    ended: Set[int],
    errors: Mapping[int, Exception],
    is_overdue: Callable[[str], bool],
) -> WorkerStates:
    """Returns the state of each worker.

    `workers` has ids by rank; `ended` has the ranks whose function has returned or raised. Directives must be newer
    than `ended`: a worker is dismissed before it returns without an error, unless the run is over.
    """
    dismissed = {rank for rank, worker in enumerate(workers) if worker in directives.dismissed}
    if not directives.is_over:  # these were dismissed before the controller knew them
        dismissed |= ended - errors.keys()
    failed: dict[int, Exception] = {rank: error for rank, error in errors.items() if rank not in dismissed}
    for rank, worker in enumerate(workers):
        if worker in directives.failed:
            failed[rank] = RuntimeError(directives.failed[worker])
    return WorkerStates(
        all=frozenset(range(len(workers))),
        finished=frozenset(ended - dismissed - failed.keys()),
        dismissed=frozenset(dismissed),
        exited=frozenset(rank for rank in dismissed if rank in ended or is_overdue(workers[rank])),
        failed=failed,
    )


def death_cause(error: Exception) -> str:
    """Returns Ray's reason for the end of a process; empty if Ray only saw the connection close."""
    text = str(error)
    if _CONNECTION_CLOSED in text:
        return ""
    return text.partition(_EXIT_DETAIL)[2] or text.strip().rpartition("\n")[2]
