"""A run in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_ddp.formatting import duration, plural


def headline(summary: Mapping[str, Any]) -> str:
    """Returns what happened to a run, in one sentence."""
    sizes = [row["world_size"] for row in summary["generations"]]
    parts = [f"{_progress(summary)} in {duration(summary['wall_seconds'])}{_workers(sizes)}"]
    lost, drained = summary["workers_lost"], summary["workers_drained"]
    changes = [f"{plural(lost, 'worker')} failed"] if lost else []
    changes += [f"{drained:,} drained" if lost else f"{plural(drained, 'worker')} drained"] if drained else []
    parts.append(", ".join(changes) or "no worker failed or drained")
    if (resumes := summary["sessions"] - 1) > 0:
        parts.append("resumed once" if resumes == 1 else f"resumed {resumes:,} times")
    if (share := summary["goodput"]["goodput"]) is not None:
        parts.append(f"goodput {share:.1%}")
    return f"{'; '.join(parts)}."


def _progress(summary: Mapping[str, Any]) -> str:
    steps, total = summary["steps"] or 0, summary["total_steps"]
    done = f"{steps:,} of {total:,} steps" if total not in (None, steps) else plural(steps, "step")
    status = str(summary["status"])
    words = {"finished": "Finished", "running": "Running, with", "dead": "Unfinished: its driver died after"}
    words |= {"unfinished": "Running or unfinished, with", "left": "Left its loop after"}
    return f"{words.get(status, f'{status.capitalize()} after')} {done}"


def _workers(sizes: list[int]) -> str:
    if not sizes:
        return ""
    low, high = min(sizes), max(sizes)
    return f" on {plural(high, 'worker')}" if low == high else f" on {low:,} to {plural(high, 'worker')}"
