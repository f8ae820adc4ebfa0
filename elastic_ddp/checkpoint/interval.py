"""The interval between commits, from the measured cost of a save and the rate of worker failures.

With C seconds of stall per save and a mean of M seconds between failures, sqrt(2 C M) seconds between commits lose the
least time, to first order: J. W. Young, "A first order approximation to the optimum checkpoint interval",
Communications of the ACM 17(9), 1974.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

PRIOR_MTBF_S = 3600.0
"""Assumed mean time between failures of a run until failures were observed."""
FIRST_INTERVAL_S = 60.0
"""Interval until a save was measured."""
_NUM_MEASURED = 5
"""Number of newest saves whose median counts. The first save takes longer: it allocates its memory."""


def mean_time_between_failures(failures: int, watched_s: float) -> float:
    """Returns the inverse of the failure rate's posterior mean, in seconds, with a Gamma(1, PRIOR_MTBF_S) prior."""
    return (PRIOR_MTBF_S + watched_s) / (1 + failures)


def interval_s(*, stall_s: float, save_s: float, mtbf_s: float | None, max_overhead: float | None) -> float:
    """Returns the seconds from one commit to the next.

    Args:
        stall_s: for how long a save stalls training.
        save_s: how long a save takes, a lower bound of the interval: saves do not overlap.
        mtbf_s: mean time between failures, for Young's interval; None for the shortest interval allowed.
        max_overhead: largest fraction of the time that stalls may take; None for no limit.
    """
    optimal = 0.0 if mtbf_s is None else math.sqrt(2 * stall_s * mtbf_s)
    allowed = 0.0 if max_overhead is None else stall_s / max_overhead
    return max(optimal, allowed, save_s)


class MeasuredInterval:
    """The commit interval of a run, as one worker measures it.

    Args:
        interval: "auto" for Young's interval.
        max_overhead: largest fraction of the time that stalls may take; without "auto", it alone sets the interval.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self, interval: Literal["auto"] | None, max_overhead: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._is_auto = interval == "auto"
        self._max_overhead = max_overhead
        self._clock = clock
        # Tuples, replaced as a whole: the training thread and the saving thread both use them.
        self._stalls: tuple[float, ...] = ()
        self._saves: tuple[float, ...] = ()
        self._began_at = clock()
        self._failures = 0

    def stalled(self, seconds: float) -> None:
        """Adds a measurement of how long a save stalled training."""
        self._stalls = (*self._stalls, seconds)[-_NUM_MEASURED:]

    def saved(self, seconds: float) -> None:
        """Adds a measurement of how long a save took, from its begin to the commit."""
        self._saves = (*self._saves, seconds)[-_NUM_MEASURED:]

    def record_failure(self) -> None:
        """Counts a failure of one or several workers."""
        self._failures += 1

    @property
    def save_s(self) -> float:
        """How long a save takes; 0 until one was measured."""
        return statistics.median(self._saves) if self._saves else 0.0

    @property
    def seconds(self) -> float:
        """The interval, from all measurements so far."""
        if not self._stalls:
            return FIRST_INTERVAL_S
        watched_s = self._clock() - self._began_at
        return interval_s(
            stall_s=statistics.median(self._stalls),
            save_s=self.save_s,
            mtbf_s=mean_time_between_failures(self._failures, watched_s) if self._is_auto else None,
            max_overhead=self._max_overhead,
        )

    def record(self) -> dict[str, Any]:
        """Returns the facts for a commit's record, from which a later session continues."""
        return {"losses": self._failures, "watched_s": round(self._clock() - self._began_at, 3)}

    def merge(self, record: Mapping[str, Any]) -> None:
        """Adopts the counts of a commit's record if they exceed this worker's counts."""
        self._failures = max(self._failures, record.get("losses", 0))
        self._began_at = min(self._began_at, self._clock() - record.get("watched_s", 0.0))
