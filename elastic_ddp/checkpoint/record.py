"""The facts in a commit's record that are read again, and the order of commits by a metric.

A metric's value counts for the next commit that is begun after it was measured.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from elastic_ddp.errors import shorten

METRICS = "metrics"
"""The key of a commit's record that holds the newest value of each metric."""

Mode = Literal["min", "max"]


@dataclass(frozen=True)
class Measurement:
    """A value of a metric, and the number of steps done when it was measured."""

    value: float
    step: int


def different_runs(record: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Returns the names of the settings in which the runs of two commits differ, if both records have them."""
    mine = record.get("identity", {})
    theirs = other.get("identity", {})
    return [name for name in mine if name in theirs and mine[name] != theirs[name]]


def measurements(record: Mapping[str, Any]) -> dict[str, Measurement]:
    """Returns the metrics in a commit's record, by name."""
    return {name: Measurement(float(entry["value"]), entry["step"]) for name, entry in record.get(METRICS, {}).items()}


def best_first(measured: Mapping[int, Measurement | None], mode: Mode) -> list[int]:
    """Returns the steps of the commits that have a value, best value first; among equal values the earlier step first.

    `measured` maps each commit's step to the value in its record. Later commits repeat a measurement until there is a
    newer one; a measurement counts for its first commit.
    """
    first: dict[Measurement, int] = {}
    for step, measurement in sorted(measured.items()):
        if measurement is not None:
            first.setdefault(measurement, step)
    sign = 1 if mode == "min" else -1
    return [step for _, step in sorted((sign * measurement.value, step) for measurement, step in first.items())]


def describe_unmeasured(metric: str, measured: Iterable[str]) -> str:
    """Returns text for a run whose commits have no value of its metric, with the names that have one."""
    return (
        f"checkpoint.best_metric={metric!r} has no value so far, so no commit is the best. Metrics that have one: "
        f"{shorten(sorted(measured))}. Correct the setting, unless a later step.log or run.evaluate has this name."
    )


class Metrics:
    """The newest value of every metric that one worker knows. Thread-safe."""

    def __init__(self) -> None:
        self._newest: dict[str, Measurement] = {}
        self._lock = threading.Lock()

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Adds values measured after `step` steps."""
        with self._lock:
            self._newest |= {name: Measurement(float(value), step) for name, value in values.items()}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Replaces all values by the values in a commit's record."""
        with self._lock:
            self._newest = measurements(record)

    def merge(self, record: Mapping[str, Any]) -> None:
        """Adds the values of a commit's record that are newer than the known ones."""
        with self._lock:
            for name, measurement in measurements(record).items():
                if name not in self._newest or measurement.step > self._newest[name].step:
                    self._newest[name] = measurement

    def to_record(self) -> dict[str, Any]:
        """Returns the entry for a commit's record. JSON has no NaN or infinity: such values are left out."""
        with self._lock:
            finite = {name: asdict(entry) for name, entry in self._newest.items() if math.isfinite(entry.value)}
        return {METRICS: finite}
