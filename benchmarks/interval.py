"""Simulates the time that a run loses with `checkpoint.interval = "auto"`: `python benchmarks/interval.py`.

The intervals come from the code of a run. Time, saves and failures of all workers are simulated, with a seed. Lost time
is the stalls of saves, and the steps redone after a failure; the time of restarts is left out. The same failures hit
fixed intervals: the default, ten minutes, and the best of a grid, which is known only afterwards.
"""

from __future__ import annotations

import argparse
import math
import random
from typing import Any, NamedTuple

from arguments import positive_int
from rich.console import Console
from rich.table import Table

from elastic_ddp.checkpoint.interval import MeasuredInterval

STEP_S = 0.5
STALLS_S = (0.05, 0.5, 5.0)
"""How long a save stalls training."""
SAVE_TO_STALL = 10
"""Duration of a save, as a multiple of its stall."""
BETWEEN_FAILURES_S = {"10 min": 600.0, "1 h": 3600.0, "8 h": 28_800.0}
DEFAULT_S, LONG_S = 60.0, 600.0
GRID_S = [DEFAULT_S, LONG_S, *(10 * 1.1**power for power in range(60))]
"""Up to 46 minutes."""


class Save(NamedTuple):
    durable_at: float
    worked_s: float
    """Time of the steps in it since the run started or resumed."""
    record: dict[str, Any]


class Run:
    """A simulated run.

    Args:
        stall_s: how long a save stalls training.
        fixed_s: interval between commits; None for `auto`.
    """

    def __init__(self, stall_s: float, fixed_s: float | None) -> None:
        self._stall_s, self._save_s, self._fixed_s = stall_s, SAVE_TO_STALL * stall_s, fixed_s
        self._now = 0.0
        self._record: dict[str, Any] | None = None
        """Record of the newest commit; None before the first session."""

    def run_session(self, seconds: float) -> float:
        """Runs one session until all workers fail. Returns the seconds of steps that it has committed."""
        auto, end, noted_at = self._begin(), self._now + seconds, self._now
        worked_s = kept_s = 0.0
        save: Save | None = None
        while True:
            interval_s = auto.seconds if self._fixed_s is None else self._fixed_s
            steps = math.ceil(max(0.0, noted_at + interval_s - self._now) / STEP_S)
            spent_s = steps * STEP_S if steps else self._stall_s
            if save is not None and save.durable_at <= min(end, self._now + spent_s):
                kept_s, self._record, save = save.worked_s, save.record, None
                auto.saved(self._save_s)
            if self._now + spent_s > end:
                self._now = end
                return kept_s
            self._now += spent_s
            worked_s += steps * STEP_S
            if not steps:
                auto.stalled(self._stall_s)
                noted_at, save = self._now, Save(self._now + self._save_s, worked_s, auto.record())

    def _begin(self) -> MeasuredInterval:
        """Returns the interval of a run that resumes after the failure of all workers."""
        auto = MeasuredInterval("auto", None, lambda: self._now)
        if self._record is None:
            self._record = {}
        else:
            auto.merge(self._record)
            auto.record_failure()
        return auto


def lost_share(stall_s: float, fixed_s: float | None, sessions_s: list[float]) -> float:
    """Returns the fraction of the sessions' time that is lost."""
    run = Run(stall_s, fixed_s)
    return 1 - sum(run.run_session(seconds) for seconds in sessions_s) / sum(sessions_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--failures", type=positive_int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    table = Table(title="lost, % of the time", box=None, padding=(0, 2))
    for column in ("failures every", "stall", "auto", "60 s", "10 min", "best", "of"):
        table.add_column(column, justify="right")
    for label, between_s in BETWEEN_FAILURES_S.items():
        draw = random.Random(f"{options.seed} {label}")
        sessions_s = [draw.expovariate(1 / between_s) for _ in range(options.failures)]
        for stall_s in STALLS_S:
            auto, default, long = (lost_share(stall_s, fixed_s, sessions_s) for fixed_s in (None, DEFAULT_S, LONG_S))
            grid_s = [
                interval_s for interval_s in GRID_S if interval_s > SAVE_TO_STALL * stall_s
            ]  # saves do not overlap
            best, best_s = min((lost_share(stall_s, fixed_s, sessions_s), fixed_s) for fixed_s in grid_s)
            shares = (f"{100 * share:.2f}" for share in (auto, default, long, best))
            table.add_row(label, f"{stall_s:g} s", *shares, f"{best_s:,.0f} s")
    Console().print(table)


if __name__ == "__main__":
    main()
