"""What was measured of a run's states, as commits record it, and which commit each value is of.

An evaluation between two steps may come when the commit of the state that it measures has begun. That commit does not
know the value; those after it do.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

METRICS = "metrics"
"""Where a commit's record has the newest value of each metric that was known when it was made."""
_LATE = "measured_later"
"""Where it has values of states whose own commits were begun before, by metric."""
_SPARE = 8
"""So many more of them are remembered than commits are kept for their values: not every commit comes to be."""

Mode = Literal["min", "max"]


@dataclass(frozen=True)
class Measurement:
    """A value of a metric, and the steps that the state had behind it of which it is."""

    value: float
    step: int


def measurements(record: Mapping[str, Any]) -> dict[str, Measurement]:
    """The newest of all metrics in a commit's record."""
    return {name: _measurement(each) for name, each in record.get(METRICS, {}).items()}


def measurements_of(metric: str | None, record: Mapping[str, Any]) -> tuple[Measurement, ...]:
    """All of one metric in a commit's record, of its own state and of others."""
    newest = measurements(record).get(metric or "")
    late = record.get(_LATE, {}).get(metric, ())
    return (*map(_measurement, late), *([newest] if newest is not None else ()))


def best_first(told: Mapping[int, Iterable[Measurement]], mode: Mode) -> list[int]:
    """Steps of commits in the order of their values, those without one left out; of equal ones the earlier is better.

    A measurement is of the first commit at or after the state that was measured. A commit may have several: the one of
    its own state counts, or of the nearest before it. The newest commit has a value only if its own state was measured:
    that may be still to come, and be worse than what was measured on the way to it.

    Args:
        told: of each commit, what its record tells of the metric.
    """
    steps, values = sorted(told), dict[int, Measurement]()
    for each in sorted((each for step in steps for each in told[step]), key=lambda each: each.step):
        if (place := bisect_left(steps, each.step)) < len(steps):
            values[steps[place]] = each
    if steps and steps[-1] in values and values[steps[-1]].step != steps[-1]:
        del values[steps[-1]]
    return sorted(values, key=lambda step: (_cost(values[step], mode), step))


class Metrics:
    """What one worker knows: the newest value of every metric, and the best ones by one metric that came too late for
    the commits of their states.

    Args:
        metric, best, mode: by which metric, and for how many commits.
    """

    def __init__(self, metric: str | None = None, best: int = 0, mode: Mode = "min") -> None:
        self._metric, self._num_late, self._mode = metric, best + _SPARE if best else 0, mode
        self._newest: dict[str, Measurement] = {}
        self._late: list[Measurement] = []
        self._lock = threading.Lock()

    def take(self, step: int, values: Mapping[str, float], *, is_late: bool) -> None:
        """Values of the state after so many steps; `is_late` if its commit has begun."""
        new = {name: Measurement(float(value), step) for name, value in values.items()}
        with self._lock:
            self._newest = self._newest | new
            if is_late and (mine := new.get(self._metric or "")) is not None and math.isfinite(mine.value):
                self._late = [each for each in self._late if each.step != step]
                self._remember([mine])

    def go_on_from(self, record: Mapping[str, Any]) -> None:
        """Knows what a commit's record tells, and nothing else."""
        with self._lock:
            self._newest, self._late = {}, []
        self.learn(record)

    def learn(self, record: Mapping[str, Any]) -> None:
        """Knows also what a commit's record tells."""
        with self._lock:
            told = measurements(record)
            newer = {name: each for name, each in self._newest.items() if name in told and each.step >= told[name].step}
            self._newest = self._newest | told | newer
            self._remember(map(_measurement, record.get(_LATE, {}).get(self._metric, ())))

    def _remember(self, late: Iterable[Measurement]) -> None:
        of_each = {each.step: each for each in [*late, *self._late]}
        self._late = sorted(of_each.values(), key=lambda each: _cost(each, self._mode))[: self._num_late]

    def record(self) -> dict[str, Any]:
        """For a commit. JSON has no NaN, and a commit is worth more than a metric."""
        newest = {name: asdict(each) for name, each in self._newest.items() if math.isfinite(each.value)}
        late = {self._metric: [asdict(each) for each in self._late]} if self._late else {}
        return {METRICS: newest, **({_LATE: late} if late else {})}


def _measurement(recorded: Mapping[str, Any]) -> Measurement:
    return Measurement(float(recorded["value"]), recorded["step"])


def _cost(measured: Measurement, mode: Mode) -> float:
    return measured.value if mode == "min" else -measured.value
