"""How often a run commits where that follows from what was measured: what a save costs, and how often workers are lost.

sqrt(2 C M) seconds between commits lose the least time, to first order, where a commit holds training up for C seconds
and M seconds pass between failures on average: J. W. Young, "A first order approximation to the optimum checkpoint
interval", Communications of the ACM 17(9), 1974. J. T. Daly, "A higher order estimate of the optimum checkpoint
interval for restart dumps", Future Generation Computer Systems 22(3), 2006, refines it where C is near M, as it is in
no run that gets anywhere.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

PRIOR_MTBF_S = 3600.0
"""How long it takes a run to lose a worker, until that is known better: a spot node lives for hours, and a run has
several."""
FIRST_INTERVAL_S = 60.0
"""Until a save was measured."""
_MEASURED = 5
"""Saves whose median counts: the first one takes longer, as it gets its memory."""


def mean_time_between_failures(failures: int, watched_s: float) -> float:
    """Seconds, from so many losses in so many seconds, and one more in `PRIOR_MTBF_S`: the inverse of the mean of the
    rate's posterior, with a Gamma(1, PRIOR_MTBF_S) prior."""
    return (PRIOR_MTBF_S + watched_s) / (1 + failures)


def interval_s(*, stall_s: float, save_s: float, mtbf_s: float | None, max_overhead: float | None) -> float:
    """Seconds from one commit to the next.

    Args:
        stall_s: for which a save holds training up.
        save_s: that a save takes. The interval is no shorter, as there is one save at a time.
        mtbf_s: mean time between failures, for the interval of Young; None for the shortest that is allowed.
        max_overhead: the largest share of the time that may go into stalls; None for any.
    """
    wanted = 0.0 if mtbf_s is None else math.sqrt(2 * stall_s * mtbf_s)
    allowed = 0.0 if max_overhead is None else stall_s / max_overhead
    return max(wanted, allowed, save_s)


class MeasuredInterval:
    """The interval of a run, as one worker measures it.

    Args:
        interval: "auto" for that of Young.
        max_overhead: a bound to it, or, without it, all there is to it.
        clock: seconds that only go forward.
    """

    def __init__(
        self,
        interval: Literal["auto"] | None,
        max_overhead: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_auto, self._max_overhead, self._clock = interval == "auto", max_overhead, clock
        # Replaced as a whole: one thread trains, and another saves.
        self._stalls: tuple[float, ...] = ()
        self._saves: tuple[float, ...] = ()
        self._began_at = clock()
        self._failures = 0

    def stalled(self, seconds: float) -> None:
        """A save held training up."""
        self._stalls = (*self._stalls, seconds)[-_MEASURED:]

    def saved(self, seconds: float) -> None:
        """A save took so long, from its begin to the commit."""
        self._saves = (*self._saves, seconds)[-_MEASURED:]

    def record_failure(self) -> None:
        """Workers were lost."""
        self._failures += 1

    @property
    def seconds(self) -> float:
        """The interval, by all that is known."""
        if not self._stalls:
            return FIRST_INTERVAL_S
        return interval_s(
            stall_s=statistics.median(self._stalls),
            save_s=statistics.median(self._saves) if self._saves else 0.0,
            mtbf_s=mean_time_between_failures(self._failures, self._watched_s) if self._is_auto else None,
            max_overhead=self._max_overhead,
        )

    @property
    def _watched_s(self) -> float:
        return self._clock() - self._began_at

    def record(self) -> dict[str, Any]:
        """What of it a commit keeps, for those who go on from that."""
        return {"losses": self._failures, "watched_s": round(self._watched_s, 3)}

    def go_on_from(self, record: Mapping[str, Any]) -> None:
        """Counts in what was seen before a commit, if its record says, and was not seen by this worker itself."""
        self._failures = max(self._failures, record.get("losses", 0))
        self._began_at = min(self._began_at, self._clock() - record.get("watched_s", 0.0))
