"""Renders the summary of a run for the terminal, in 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from elastic_ddp.cli.output import table
from elastic_ddp.telemetry.goodput import PARTS

_STYLES = {
    "running": "bold green",
    "finished": "bold green",
    "stopped": "bold yellow",
    "failed": "bold red",
    "unfinished": "bold yellow",
}


def render(summary: Mapping[str, Any]) -> RenderableType:
    """Returns the facts of a run, followed by one line for each generation.

    Args:
        summary: as in `summary.json`. The status can also be `running`.
    """
    title = Text(str(summary["name"] or "run"), style="bold")
    if not summary["generations"]:
        return Group(title, _facts(summary))
    return Group(title, _facts(summary), Text(), Text("generations", style="dim"), _generations(summary))


def _facts(summary: Mapping[str, Any]) -> Table:
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    status = str(summary["status"])
    facts.add_row("status", Text(status, style=_STYLES.get(status, "bold")))
    rows = {
        "error": summary["error"],
        "steps": _steps(summary),
        "epochs": None if summary["epochs"] is None else _number(summary["epochs"]),
        "samples": _samples(summary),
        "time": _duration(summary["wall_seconds"]),
        "goodput": _goodput(summary["goodput"]),
        "loss": _loss(summary),
        "metrics": "  ".join(_metrics(summary)),
        "workers": _workers(summary),
        "sessions": summary["sessions"],
        "commits": _commits(summary),
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
            _count(generation["first_step"]),
            _count(generation["last_step"]),
            _stall(generation),
            Text(str(generation["reason"])),
            Text(str(generation["ended_by"] or ("" if is_live else "not recorded"))),
        )
    return rows


def _steps(summary: Mapping[str, Any]) -> str | None:
    """Steps done, and the total if the run is not finished."""
    steps, total = summary["steps"], summary["total_steps"]
    return _count(steps) + (f" of {total:,}" if steps is not None and total not in (None, steps) else "")


def _samples(summary: Mapping[str, Any]) -> str | None:
    if summary["samples"] is None:
        return None
    rate = summary["samples_per_second"]
    return _count(summary["samples"]) + (f"  ({rate:,.0f} samples/s)" if rate else "")


def _goodput(seconds: Mapping[str, Any]) -> str | None:
    """The share of the time that was training, and the other parts of at least 0.1 s."""
    if seconds["goodput"] is None:
        return None
    parts = [f"{part.replace('_', '-')} {seconds[part]:,.1f} s" for part in PARTS if round(seconds[part], 1)]
    return f"{100 * seconds['goodput']:.1f} %  {' · '.join(parts)}"


def _loss(summary: Mapping[str, Any]) -> str | None:
    loss = summary["loss"]
    if loss["first"] is None:
        return None
    return f"{_number(loss['first'])} → {_number(loss['last'])}" + _at_step(loss["step"], summary)


def _metrics(summary: Mapping[str, Any]) -> Iterable[str]:
    for name, value in summary["metrics"].items():
        step = summary["evaluated_at"].get(name, summary["steps"])
        yield f"{name} {_number(value)}" + _at_step(step, summary)


def _at_step(step: int | None, summary: Mapping[str, Any]) -> str:
    """The step of a value, if it is not the newest step."""
    return "" if step in (None, summary["steps"]) else f" (step {step:,})"


def _workers(summary: Mapping[str, Any]) -> str:
    counts = {"failed": summary["workers_lost"], "drained": summary["workers_drained"]}
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)


def _commits(summary: Mapping[str, Any]) -> str:
    interval_s = summary["commit_interval_s"]
    return f"{summary['commits']:,}" + (f", one every {interval_s:,.1f} s" if interval_s is not None else "")


def _stall(generation: Mapping[str, Any]) -> str:
    if generation["rendezvous_s"] is None:
        return ""
    stall_s = (generation["detection_s"] or 0.0) + generation["rendezvous_s"] + generation["hand_over_s"]
    return f"{stall_s:.2f} s"


def _count(value: Any) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
