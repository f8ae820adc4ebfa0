"""A limit for steps, and tasks between steps, that keep failing though no worker dies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_ddp.errors import WorkersFailedError

if TYPE_CHECKING:
    from elastic_ddp.worker.generation import Generation

MAX_FAILURES_IN_A_ROW = 3
"""After this many failures with the same workers, the step itself is the likely cause, not a connection."""


class ConsecutiveFailures:
    """Counts how often in a row the same workers failed in the same step."""

    def __init__(self) -> None:
        self._count, self._step = 0, -1

    def record(self, step: int) -> None:
        """Counts a failure in `step`."""
        self._count = self._count + 1 if step >= self._step else 1
        self._step = step

    def record_success(self, step: int) -> None:
        """Resets the count, unless `step` is repeated on the way to the step that failed."""
        if step >= self._step:
            self._count = 0

    def reset_for(self, generation: Generation) -> None:
        """Resets the count if the new generation has other members, which may succeed."""
        if not generation.group.assignment.same_members:
            self._count = 0

    def check(self, what: str, failure: str) -> None:
        """Raises a WorkersFailedError at the limit. `failure` describes the last failure in `what`."""
        if self._count >= MAX_FAILURES_IN_A_ROW:
            raise WorkersFailedError(
                f"{what} failed {MAX_FAILURES_IN_A_ROW} times in a row on the same workers, and none of them died. The "
                f"last failure: {failure}. If one rank is slower than the others there, raise collective_timeout_s."
            )
