"""A counter of Ray's metrics that starts at zero."""

from __future__ import annotations

from collections.abc import Mapping

from ray.util.metrics import Counter


def start_at_zero(counter: Counter, tags: Mapping[str, str]) -> None:
    """Exports a counter before its first increment, without which Prometheus' `increase` misses that one.

    Ray's `inc` refuses 0.
    """
    counter._record(0.0, dict(tags))
