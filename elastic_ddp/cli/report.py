"""`elastic-ddp report`: a page about runs, or a picture of one, from their ledgers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elastic_ddp.cli.output import console
from elastic_ddp.cli.runs import RunLedger
from elastic_ddp.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from elastic_ddp.report.history import History


def report(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Folders of runs, <storage>/<name>, or their names.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write: .html for a page, .svg for a picture of one run.")
    ] = Path("report.html"),
) -> None:
    """Write a page about one or several runs.

    The page shows the outcome of each run, its workers over time with every join, failure and drain, loss and metrics,
    throughput, phases of a step, goodput, stalls, commits, scaling, events, the configuration and the versions. It is
    one file that needs no network. A file named .svg becomes a picture of workers and loss. The command needs no
    cluster.
    """
    from elastic_ddp.report.history import read_history, with_dead_driver
    from elastic_ddp.report.picture import draw

    if output.suffix not in (".html", ".svg"):
        raise ConfigError(f"{output}: unknown suffix. Use .html for a page, or .svg for a picture.")
    if output.suffix == ".svg" and len(runs) > 1:
        raise ConfigError(f"{output}: a picture shows one run, not {len(runs)}. Use .html to compare runs.")
    histories = []
    for run in runs:
        ledger = RunLedger(run)
        history, is_alive = read_history(ledger.read()), ledger.is_driver_alive()
        if history.summary["status"] == "unfinished" and is_alive:
            history.summary["status"] = "running"
        elif history.summary["status"] == "unfinished" and is_alive is False:
            history = with_dead_driver(history)
        histories.append(history)
    names = [history.label for history in histories]
    histories = [
        history if names.count(history.label) == 1 else replace(history, label=run)
        for history, run in zip(histories, runs, strict=True)
    ]
    text = draw(histories[0]) if output.suffix == ".svg" else _page(histories)
    try:
        output.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise StorageError(f"cannot write {output}: {error.strerror}. Check its folder and the free space.") from error
    console().print(f"written to {output}", soft_wrap=True)


def _page(histories: list[History]) -> str:
    try:
        from elastic_ddp.report.page import render_page
    except ImportError as error:
        raise ConfigError(
            "A report needs Plotly, which is not installed. Install it with: pip install 'elastic_ddp[report]'. "
            "A picture (.svg) does not need it."
        ) from error
    return render_page(histories)
