"""What commands print about the phases of a run's steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_ddp.telemetry.phases import MIN_STEPS


def describe_step(facts: Mapping[str, Any]) -> list[str]:
    """Returns lines about the phases of a step, and what bounds the run. `facts` as in `RunHandle.status`."""
    measured, bottleneck = facts["phases"], facts["bottleneck"]
    if measured is None:
        is_new = facts["state"] == "training"
        return [f"phases: known after {MIN_STEPS} steps of this generation"] if is_new else []
    lines = [f"step {describe_phases(measured['phases'])}"]
    return [*lines, f"bound by {describe_bottleneck(bottleneck)}"] if bottleneck is not None else lines


def columns_of_ranks(facts: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns what is measured of each rank, by the name of the column: the values in the order of ranks."""
    measured, columns = facts["phases"], dict[str, list[str]]()
    ranks = {member["rank"] for member in facts["members"]}
    if measured is None or not ranks <= set(range(len(measured["work_s"]))):
        return columns
    columns["work"] = [_duration(seconds) for seconds in measured["work_s"]]
    if measured["memory_bytes"] is not None:
        columns["GPU memory"] = [format_gib(used) for used in measured["memory_bytes"]]
    if measured["utilization"] is not None:
        columns["GPU"] = ["-" if share is None else f"{100 * share:.0f} %" for share in measured["utilization"]]
    return columns


def describe_phases(phases: Mapping[str, float] | None) -> str:
    """Returns the duration of a step and the share of each phase, the largest first; empty if nothing is measured."""
    step_s = sum(phases.values()) if phases else 0.0
    if not phases or not step_s:
        return ""
    shares = sorted(((seconds / step_s, phase) for phase, seconds in phases.items()), reverse=True)
    named = [f"{phase} {100 * share:.0f} %" for share, phase in shares if share >= 0.005]
    return f"{_duration(step_s)}: {', '.join(named)}"


def describe_bottleneck(bottleneck: Mapping[str, Any] | None) -> str:
    """Returns the bottleneck of a run and the advice; empty without a verdict."""
    return "" if bottleneck is None else f"{bottleneck['kind']}: {bottleneck['reason']} {bottleneck['advice']}"


def format_gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
