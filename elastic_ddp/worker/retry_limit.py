"""How often in a row the same workers have lost the same thing, which then is taken for a fault in that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_ddp.errors import WorkersFailedError

if TYPE_CHECKING:
    from elastic_ddp.worker.generation import Generation

LOSSES_IN_A_ROW = 3
"""Times that the same workers lose it before it is taken for a fault in it rather than in a connection."""


class ConsecutiveFailures:
    """Of steps, or of what comes after steps."""

    def __init__(self) -> None:
        self._number, self._step = 0, -1

    def count(self, step: int) -> None:
        """One more, of this step."""
        self._number = self._number + 1 if step >= self._step else 1
        self._step = step

    def made(self, step: int) -> None:
        """It was not lost. Steps before the one that was may be made once more, from a commit."""
        if step >= self._step:
            self._number = 0

    def forget_unless_again(self, generation: Generation) -> None:
        """Others may fare better: only `again` it was formed by the workers of the one before, none of which died."""
        if not generation.group.assignment.same_members:
            self._number = 0

    def check(self, what: str, failure: str) -> None:
        """WorkersFailedError if that is enough; `lost` says how the last one came."""
        if self._number >= LOSSES_IN_A_ROW:
            raise WorkersFailedError(
                f"{what} was lost {LOSSES_IN_A_ROW} times in a row by the same workers, none of which died, so it is "
                f"not tried again. The last time: {failure}. If a rank needs longer than others in it, raise "
                "collective_timeout_s"
            )
