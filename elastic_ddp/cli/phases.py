"""What commands print about the phases of a run's steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def describe_phases(phases: Mapping[str, float] | None) -> str:
    """Returns the share of each phase in a step, the largest first; empty if nothing is measured."""
    step_s = sum(phases.values()) if phases else 0.0
    if not phases or not step_s:
        return ""
    shares = sorted(((seconds / step_s, phase) for phase, seconds in phases.items()), reverse=True)
    named = [f"{phase} {100 * share:.0f} %" for share, phase in shares if share >= 0.005]
    return f"{_seconds(step_s)}: {' · '.join(named)}"


def describe_bottleneck(bottleneck: Mapping[str, Any] | None) -> str:
    """Returns what bounds a run and what to try; empty without a verdict."""
    return "" if bottleneck is None else f"{bottleneck['kind']}: {bottleneck['reason']} {bottleneck['advice']}"


def describe_memory(memory_bytes: Sequence[int] | None, utilization: Sequence[float | None] | None) -> list[str]:
    """Returns each rank's peak of GPU memory and its utilization, in the order of ranks; empty on CPUs."""
    busy = utilization or [None] * len(memory_bytes or ())
    return [
        f"{used / 2**30:,.1f} GiB" + ("" if share is None else f", {100 * share:.0f} % busy")
        for used, share in zip(memory_bytes or (), busy, strict=False)
    ]


def work_of(measured: Mapping[str, Any] | None, rank: int) -> str:
    """Returns a rank's work in one step; empty if it is not known."""
    work_s = measured["work_s"] if measured is not None else []
    return _seconds(work_s[rank]) if rank < len(work_s) else ""


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
