"""Numbers, durations and times as messages and tables show them."""

from __future__ import annotations

import math
from datetime import datetime

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def plural(count: int, noun: str) -> str:
    """Returns "1 worker" or "2 workers"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def first_line(text: str) -> str:
    """Returns the first line of a message; empty for an empty one."""
    return text.strip().partition("\n")[0]


def last_line(text: str) -> str:
    """Returns the last line of a message, which is the error itself after a traceback; empty for an empty one."""
    return text.strip().rpartition("\n")[2]


def duration(seconds: float) -> str:
    """Returns a duration in at most two units: "0.31 s", "2 min 5 s" or "3 h"."""
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    largest = next(index for index, (size, _) in enumerate(_UNITS) if whole >= size)
    parts = []
    for size, unit in _UNITS[largest : largest + 2]:
        count, whole = divmod(whole, size)
        parts += [f"{count:,} {unit}"] if count else []
    return " ".join(parts)


def clock_face(seconds: float) -> str:
    """Returns a duration as `0:42` or `1:02:03`."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_time(unix_s: float, pattern: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Returns a Unix time in this machine's time zone."""
    return datetime.fromtimestamp(unix_s).astimezone().strftime(pattern)


def format_rate(rate: float) -> str:
    """Returns a rate in at least three significant digits: `0.0417`, `23.5` or `1,234`."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
