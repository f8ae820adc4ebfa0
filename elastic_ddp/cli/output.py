"""What all commands print with."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import datetime

from rich.console import Console
from rich.table import Table


def console(*, stderr: bool = False) -> Console:
    """Returns the console for standard output or error. It prints names as they are, without markup or emoji."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else 200  # long lines can be searched
    return Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)


def table(*columns: str, text: tuple[str, ...] = ()) -> Table:
    """Returns an empty table with these headings.

    Columns in `text` are left-aligned and wrap. All others are right-aligned and are never cut or wrapped.
    """
    result = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in columns:
        is_text = column in text
        result.add_column(column, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    return result


def format_time(seconds: float, pattern: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Returns a Unix time in the local time zone."""
    return datetime.fromtimestamp(seconds).astimezone().strftime(pattern)


def plural(count: int, noun: str) -> str:
    """Returns "1 worker" or "2 workers"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def ranges(numbers: Sequence[int]) -> str:
    """Returns "0-6, 9" for sorted numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
