"""`elastic-ddp report`: a page about runs, from their ledgers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from elastic_ddp.cli.output import console
from elastic_ddp.cli.runs import RunLedger
from elastic_ddp.errors import ConfigError, StorageError
from elastic_ddp.report.history import read_history, with_dead_driver


def report(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN", help="Folders of runs, <storage>/<name>, or their names.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")] = Path("report.html"),
) -> None:
    """Write a page about one or several runs.

    The page shows the outcome of each run, its workers over time with every join, failure and drain, loss and metrics,
    throughput, phases of a step, goodput, stalls, commits, scaling, events, the configuration and the versions. It is
    one file that needs no network. The command needs no cluster.
    """
    if output.suffix != ".html":
        raise ConfigError(f"{output}: unknown suffix. Use .html.")
    try:
        from elastic_ddp.report.page import render_page
    except ImportError as error:
        raise ConfigError(
            "A report needs Plotly, which is not installed. Install it with: pip install 'plotly>=6'."
        ) from error
    histories = []
    for run in runs:
        ledger = RunLedger(run)
        history = read_history(ledger.read())
        history.summary["status"] = ledger.live_status(history.summary["status"])
        histories.append(with_dead_driver(history) if history.summary["status"] == "dead" else history)
    names = [history.label for history in histories]
    histories = [
        history if names.count(history.label) == 1 else replace(history, label=run)
        for history, run in zip(histories, runs, strict=True)
    ]
    try:
        output.write_text(render_page(histories), encoding="utf-8", errors="replace")
    except OSError as error:
        raise StorageError(f"cannot write {output}: {error.strerror}. Check its folder and the free space.") from error
    console().print(f"written to {output}", soft_wrap=True)
