"""Durations, times, sizes and the sentence that says what happened to a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def counted(count: int, noun: str) -> str:
    """Returns "1 worker" or "2 workers"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def duration(seconds: float) -> str:
    """Returns a duration in at most two units, such as "0.31 s", "2 min 5 s" or "3 h"."""
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    largest = next(index for index, (size, _) in enumerate(_UNITS) if whole >= size)
    parts = []
    for size, unit in _UNITS[largest : largest + 2]:
        count, whole = divmod(whole, size)
        parts += [f"{count:,} {unit}"] if count else []
    return " ".join(parts)


def num_bytes(count: float) -> str:
    """Returns a size such as "1.2 GiB"."""
    power = min(int(math.log(max(abs(count), 1), 1024)), 4)
    scaled, unit = count / 1024**power, ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{scaled:,.0f} {unit}" if power == 0 or scaled >= 100 else f"{scaled:.2g} {unit}"


def clock_time(unix_s: float, form: str = "%Y-%m-%d %H:%M:%S %Z") -> str:
    """Returns a Unix time in this machine's time zone, such as "2026-11-27 10:54:37 UTC"."""
    return datetime.fromtimestamp(unix_s).astimezone().strftime(form)


def headline(summary: Mapping[str, Any]) -> str:
    """Returns what happened to a run, in one sentence."""
    sizes = [row["world_size"] for row in summary["generations"]]
    parts = [f"{_progress(summary)} in {duration(summary['wall_seconds'])}{_workers(sizes)}"]
    lost, drained = summary["workers_lost"], summary["workers_drained"]
    changes = [f"{counted(lost, 'worker')} failed"] if lost else []
    changes += [f"{drained:,} drained" if lost else f"{counted(drained, 'worker')} drained"] if drained else []
    parts.append(", ".join(changes) or "no worker failed or drained")
    if (resumes := summary["sessions"] - 1) > 0:
        parts.append("resumed once" if resumes == 1 else f"resumed {resumes:,} times")
    if (share := summary["goodput"]["goodput"]) is not None:
        parts.append(f"goodput {share:.1%}")
    return f"{'; '.join(parts)}."


def _progress(summary: Mapping[str, Any]) -> str:
    steps, total = summary["steps"] or 0, summary["total_steps"]
    done = f"{steps:,} of {total:,} steps" if total not in (None, steps) else counted(steps, "step")
    status = str(summary["status"])
    words = {"finished": "Finished", "running": "Running, with", "dead": "Unfinished: its driver died after"}
    words["unfinished"] = "Running or unfinished, with"
    return f"{words.get(status, f'{status.capitalize()} after')} {done}"


def _workers(sizes: list[int]) -> str:
    if not sizes:
        return ""
    low, high = min(sizes), max(sizes)
    return f" on {counted(high, 'worker')}" if low == high else f" on {low:,} to {counted(high, 'worker')}"
