"""Text for the terminal about a run, in 80 columns: its summary, and the phases of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from elastic_ddp.cli.output import facts_table, table
from elastic_ddp.formatting import duration, format_rate, plural
from elastic_ddp.telemetry.description import describe_status, describe_steps, workers_gone
from elastic_ddp.telemetry.goodput import PARTS, stall_parts
from elastic_ddp.telemetry.phases import MIN_STEPS

STYLES = {"training": "bold green", "running": "bold green", "finished": "bold green", "failed": "bold red"}
"""Styles of states; all other states are yellow."""


def render(summary: Mapping[str, Any]) -> RenderableType:
    """Returns the facts of a run, a line for each generation, and one for each world size if there were several."""
    title = Text(str(summary["name"] or "run"), style="bold")
    status = Text(describe_status(summary), style=STYLES.get(summary["status"], "bold yellow"))
    parts: list[RenderableType] = [title, _facts(summary, status)]
    if summary["generations"]:
        parts += [Text(), Text("generations", style="dim"), _generations(summary)]
    if len(summary["scaling"]) > 1:
        base = plural(summary["scaling"][0]["world_size"], "worker")
        heading = f"scaling, without start-up; efficiency is relative to {base}"
        parts += [Text(), Text(heading, style="dim"), _scaling(summary)]
    return Group(*parts)


def _facts(summary: Mapping[str, Any], status: Text) -> Table:
    facts = facts_table()
    facts.add_row("status", status)
    interval_s = summary["commit_interval_s"]
    bottleneck = summary["bottleneck"]
    skipped = summary["skipped_steps"]
    loss = summary["loss"]
    first = format_number(loss["first"])
    newest = f"last {bottleneck['num_steps']:,} steps" if bottleneck else ""
    rows = {
        "error": summary["error"],
        "steps": describe_steps(summary) + (f", {skipped:,} skipped" if skipped else ""),
        "corruption": _corruption(summary),
        "epochs": format_number(summary["epochs"]),
        "samples": format_number(summary["samples"]) + _rates(summary),
        "time": duration(summary["wall_seconds"]),
        "goodput": _goodput(summary["goodput"]),
        "loss": f"{first} → {format_number(loss['last'])}{_at_step(loss['step'], summary)}" if first else "",
        "metrics": "  ".join(
            f"{name} {format_number(value)}{_at_step(summary['evaluated_at'].get(name), summary)}"
            for name, value in summary["metrics"].items()
        ),
        "whole run": f"step {describe_phases(summary['phases'])}" if summary["phases"] else "",
        newest: f"bound by {describe_bottleneck(bottleneck)}" if bottleneck else "",
        "GPU memory": "" if summary["memory_bytes"] is None else f"{format_gib(summary['memory_bytes'])} peak",
        "workers": workers_gone(summary),
        "sessions": summary["sessions"],
        "commits": f"{summary['commits']:,}" + (f", one every {interval_s:,.1f} s" if interval_s is not None else ""),
        "weights hash": summary["weights_sha256"],
        "samples hash": summary["samples_sha256"],
        "storage": summary["storage"],
        "versions": "  ".join(f"{name} {version}" for name, version in summary["versions"].items()),
    }
    for label, value in rows.items():
        if value not in (None, ""):
            facts.add_row(label, Text(str(value)))
    return facts


def _corruption(summary: Mapping[str, Any]) -> str:
    """Returns what verified steps found; nothing without one."""
    count = summary["corruptions"]
    step = summary["verified_step"]
    if count:
        return f"found {plural(count, 'time')}; `elastic-ddp events` has the ranks"
    return "" if step is None else f"none up to step {step:,}, the newest verified state"


def _generations(summary: Mapping[str, Any]) -> Table:
    """One row for each generation. With several sessions, `2.1` is the first generation of the second session."""
    rows = table("gen", "workers", "from step", "to step", "stall", "reason", "ended by", text=("reason", "ended by"))
    for generation in summary["generations"]:
        session = f"{generation['session_number']}." if summary["sessions"] > 1 else ""
        stall_s = sum(stall_parts(generation, summary["phases"]).values())
        rows.add_row(
            f"{session}{generation['generation']}",
            str(generation["world_size"]),
            format_number(generation["first_step"]),
            format_number(generation["last_step"]),
            "" if generation["rendezvous_s"] is None else f"{stall_s:.2f} s",
            Text(generation["reason"]),
            Text(generation["ended_by"] or ""),
        )
    return rows


def _scaling(summary: Mapping[str, Any]) -> Table:
    rows = table("workers", "samples/s", "per worker", "efficiency", "steps")
    for row in summary["scaling"]:
        rates = format_rate(row["samples_per_s"]), format_rate(row["samples_per_s_per_worker"])
        rows.add_row(f"{row['world_size']:,}", *rates, f"{row['efficiency']:.0%}", f"{row['steps']:,}")
    return rows


def _goodput(seconds: Mapping[str, Any]) -> str | None:
    """The share of the time that was training, and the other parts of at least 0.1 s."""
    if seconds["goodput"] is None:
        return None
    parts = [f"{part.replace('_', '-')} {duration(seconds[part])}" for part in PARTS if round(seconds[part], 1)]
    return f"{100 * seconds['goodput']:.1f} %  {' · '.join(parts)}"


def training_rate(summary: Mapping[str, Any]) -> float | None:
    """Returns the samples per second of the time that was training; None if that is not known."""
    useful_s = summary["goodput"]["useful"]
    is_known = summary["samples"] and useful_s and summary["goodput"]["goodput"] is not None
    return summary["samples"] / useful_s if is_known else None


def _rates(summary: Mapping[str, Any]) -> str:
    training = training_rate(summary)
    whole = summary["samples_per_second"]
    if not whole:
        return ""
    over_all = f"{format_rate(whole)} samples/s over the whole time"
    return f"  ({over_all})" if training is None else f"  ({format_rate(training)} samples/s in training; {over_all})"


def _at_step(step: int | None, summary: Mapping[str, Any]) -> str:
    """The step of a value, if it is not the newest step."""
    return "" if step in (None, summary["steps"]) else f" (step {step:,})"


def format_number(value: Any) -> str:
    """Returns a number as tables show it; other values as text, and None as no text."""
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def describe_step(facts: Mapping[str, Any]) -> list[str]:
    """Returns lines about the phases of a step, and what bounds the run. `facts` as in `RunHandle.status`."""
    measured = facts["phases"]
    bottleneck = facts["bottleneck"]
    if measured is None:
        is_new = facts["state"] == "training"
        return [f"phases: known after {MIN_STEPS} steps of this generation"] if is_new else []
    lines = [f"step {describe_phases(measured['phases'])}"]
    return [*lines, f"bound by {describe_bottleneck(bottleneck)}"] if bottleneck is not None else lines


def columns_of_ranks(facts: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns what is measured of each rank, by the name of the column: the values in the order of ranks."""
    measured = facts["phases"]
    columns = dict[str, list[str]]()
    ranks = {member["rank"] for member in facts["members"]}
    if measured is None or not ranks <= set(range(len(measured["work_s"]))):
        return columns
    columns["work"] = [_step_time(seconds) for seconds in measured["work_s"]]
    if measured["memory_bytes"] is not None:
        columns["GPU memory"] = [format_gib(used) for used in measured["memory_bytes"]]
    if measured["utilization"] is not None:
        columns["GPU"] = ["-" if share is None else f"{100 * share:.0f} %" for share in measured["utilization"]]
    return columns


def describe_phases(phases: Mapping[str, float]) -> str:
    """Returns the duration of a step and the share of each phase, the largest first."""
    step_s = sum(phases.values())
    shares = sorted(((seconds / step_s, phase) for phase, seconds in phases.items()), reverse=True)
    named = [f"{phase} {100 * share:.0f} %" for share, phase in shares if share >= 0.005]
    return f"{_step_time(step_s)}: {', '.join(named)}"


def describe_bottleneck(bottleneck: Mapping[str, Any]) -> str:
    """Returns the bottleneck of a run and the advice."""
    return f"{bottleneck['kind']}: {bottleneck['reason']} {bottleneck['advice']}"


def format_gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"


def _step_time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
