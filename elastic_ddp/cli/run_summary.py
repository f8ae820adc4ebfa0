"""Renders the summary of a run for the terminal, in 80 columns."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from elastic_ddp.cli.output import plural, table
from elastic_ddp.cli.phases import describe_bottleneck, describe_phases, format_gib
from elastic_ddp.telemetry.goodput import PARTS

_STYLES = {
    "running": "bold green",
    "finished": "bold green",
    "stopped": "bold yellow",
    "failed": "bold red",
    "unfinished": "bold yellow",
}


def render(summary: Mapping[str, Any]) -> RenderableType:
    """Returns the facts of a run, a line for each generation, and one for each world size if there were several.

    The status can also be `running`.
    """
    parts: list[RenderableType] = [Text(str(summary["name"] or "run"), style="bold"), _facts(summary)]
    if summary["generations"]:
        parts += [Text(), Text("generations", style="dim"), _generations(summary)]
    if len(summary["scaling"]) > 1:
        base = plural(summary["scaling"][0]["world_size"], "worker")
        heading = f"scaling, without start-up; efficiency is relative to {base}"
        parts += [Text(), Text(heading, style="dim"), _scaling(summary)]
    return Group(*parts)


def _facts(summary: Mapping[str, Any]) -> Table:
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    status = str(summary["status"])
    facts.add_row("status", Text(status, style=_STYLES[status]))
    total, rate, interval_s = (summary[name] for name in ("total_steps", "samples_per_second", "commit_interval_s"))
    loss, workers = summary["loss"], {"failed": summary["workers_lost"], "drained": summary["workers_drained"]}
    rows = {
        "error": summary["error"],
        "steps": _number(summary["steps"])
        + (f" of {total:,}" if total not in (None, summary["steps"]) else "")
        + (f", {skipped:,} skipped" if (skipped := summary.get("skipped_steps")) else ""),
        "epochs": _number(summary["epochs"]),
        "samples": _number(summary["samples"]) + (f"  ({rate:,.0f} samples/s)" if rate else ""),
        "time": timedelta(seconds=round(summary["wall_seconds"])),
        "goodput": _goodput(summary["goodput"]),
        "loss": f"{_number(loss['first'])} → {_number(loss['last'])}{_at_step(loss['step'], summary)}"
        if loss["first"] is not None
        else "",
        "metrics": "  ".join(
            f"{name} {_number(value)}{_at_step(summary['evaluated_at'].get(name), summary)}"
            for name, value in summary["metrics"].items()
        ),
        "step": describe_phases(summary["phases"]),
        "bound by": describe_bottleneck(summary["bottleneck"]),
        "GPU memory": "" if summary["memory_bytes"] is None else f"{format_gib(summary['memory_bytes'])} peak",
        "workers": ", ".join(f"{count:,} {what}" for what, count in workers.items() if count),
        "sessions": summary["sessions"],
        "commits": _number(summary["commits"]) + (f", one every {interval_s:,.1f} s" if interval_s is not None else ""),
        "weights hash": summary["weights_sha256"],
        "samples hash": summary["samples_sha256"],
        "storage": summary["storage"],
        "versions": "  ".join(f"{name} {version}" for name, version in summary["versions"].items()),
    }
    for label, value in rows.items():
        if value not in (None, ""):
            facts.add_row(label, Text(str(value)))
    return facts


def _generations(summary: Mapping[str, Any]) -> Table:
    """One row for each generation. With several sessions, `2.1` is the first generation of the second session."""
    rows = table(
        "gen", "workers", "first step", "last step", "stall", "reason", "ended by", text=("reason", "ended by")
    )
    for generation in summary["generations"]:
        session = f"{generation['session_number']}." if summary["sessions"] > 1 else ""
        is_newest = generation is summary["generations"][-1] and generation["session_number"] == summary["sessions"]
        is_live = summary["status"] == "running" and is_newest
        rows.add_row(
            f"{session}{generation['generation']}",
            str(generation["world_size"]),
            _number(generation["first_step"]),
            _number(generation["last_step"]),
            _stall(generation),
            Text(str(generation["reason"])),
            Text(str(generation["ended_by"] or ("" if is_live else "not recorded"))),
        )
    return rows


def _scaling(summary: Mapping[str, Any]) -> Table:
    rows = table("workers", "samples/s", "per worker", "efficiency", "steps")
    for row in summary["scaling"]:
        per_worker, efficiency = row["samples_per_s_per_worker"], row["efficiency"]
        rate = f"{row['samples_per_s']:,.1f}"
        rows.add_row(f"{row['world_size']:,}", rate, f"{per_worker:,.1f}", f"{efficiency:.0%}", f"{row['steps']:,}")
    return rows


def _goodput(seconds: Mapping[str, Any]) -> str | None:
    """The share of the time that was training, and the other parts of at least 0.1 s."""
    if seconds["goodput"] is None:
        return None
    parts = [f"{part.replace('_', '-')} {seconds[part]:,.1f} s" for part in PARTS if round(seconds[part], 1)]
    return f"{100 * seconds['goodput']:.1f} %  {' · '.join(parts)}"


def _at_step(step: int | None, summary: Mapping[str, Any]) -> str:
    """The step of a value, if it is not the newest step."""
    return "" if step in (None, summary["steps"]) else f" (step {step:,})"


def _stall(generation: Mapping[str, Any]) -> str:
    if generation["rendezvous_s"] is None:
        return ""
    stall_s = (generation["detection_s"] or 0.0) + generation["rendezvous_s"] + generation["hand_over_s"]
    return f"{stall_s:.2f} s"


def _number(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
