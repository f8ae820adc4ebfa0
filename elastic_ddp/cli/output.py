"""The output of commands: consoles, tables and JSON."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console, RenderableType
from rich.table import Table

LABEL_WIDTH = 11
"""Columns of the labels of `facts_table`, at least."""
_for_json: list[TextIO] = []
"""The standard output that this process began with, once it is reserved for JSON."""


def _reserve_stdout(requested: bool) -> bool:
    """Sends what is written to descriptor 1 to standard error, except for `print_json`.

    Ray's C++ code logs to descriptor 1, for example when a node dies.
    """
    try:
        is_descriptor = requested and sys.stdout is not None and sys.stdout.fileno() == 1
    except io.UnsupportedOperation:  # a test reads it
        is_descriptor = False
    if is_descriptor and not _for_json:
        sys.stdout.flush()
        _for_json.append(os.fdopen(os.dup(1), "w"))
        os.dup2(2, 1)
    return requested


def json_option(text: str) -> Any:
    """Returns the option `--json`, with which standard output has what `print_json` prints, and nothing else."""
    return typer.Option("--json", callback=_reserve_stdout, help=text)


AsJson = Annotated[bool, json_option("Print JSON instead of text.")]


def print_json(value: Any, *, indent: int | None = 1) -> None:
    """Prints the result of a command with `--json`."""
    print(json.dumps(value, indent=indent), file=_for_json[0] if _for_json else sys.stdout, flush=True)


def console(*, stderr: bool = False) -> Console:
    """Returns the console for standard output or error. It prints names as they are, without markup or emoji."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else 200  # long lines can be searched
    return Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)


def print_plain(out: Console, content: RenderableType) -> None:
    """Prints content, where there is no terminal without the blanks with which Rich fills lines."""
    if out.is_terminal:
        out.print(content)
        return
    with out.capture() as printed:
        out.print(content)
    print("\n".join(line.rstrip() for line in printed.get().splitlines()))


def table(*columns: str, text: tuple[str, ...] = ()) -> Table:
    """Returns an empty table with these headings.

    Columns in `text` are left-aligned and wrap. All others are right-aligned and are never cut or wrapped.
    """
    result = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in columns:
        is_text = column in text
        result.add_column(column, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    return result


def facts_table() -> Table:
    """Returns an empty table of a label and a fact in each row. Facts wrap."""
    result = Table.grid(padding=(0, 2, 0, 0))
    result.add_column(style="dim", min_width=LABEL_WIDTH)
    result.add_column(overflow="fold")
    return result


def ranges(numbers: Sequence[int]) -> str:
    """Returns "0-6, 9" for sorted numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
