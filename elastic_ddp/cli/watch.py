"""`elastic-ddp watch`: a live view of a run on the terminal."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.live import Live

from elastic_ddp.cli.output import console, print_plain
from elastic_ddp.cli.runs import RecordedRun, RunLedger
from elastic_ddp.cli.watch_view import MAX_WIDTH, frame

_POLL_S = 1.0


def watch(
    run: RecordedRun,
    once: Annotated[bool, typer.Option("--once", help="Print the view once.")] = False,
) -> None:
    """Watch a run on the terminal.

    The view has the workers, the throughput and the loss over the same time, the phases of a step, the goodput, the
    commits, the workers of each node, and the newest events. It is read from the run's ledger, so the command needs no
    cluster. It ends with the run, or on Ctrl-C, which does not disturb the run.
    """
    ledger, out = RunLedger(run), console()
    events = ledger.read()
    if once or not out.is_terminal:
        out.width = min(out.width, MAX_WIDTH)
        print_plain(out, frame(events, time.time(), width=out.width, driver_is_dead=ledger.is_driver_alive() is False))
        return
    with Live(console=out, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            begun = time.monotonic()
            added, is_over = ledger.poll()
            events += added
            live.update(frame(events, time.time(), width=out.width, driver_is_dead=is_over), refresh=True)
            if is_over:
                return
            time.sleep(max(_POLL_S, 4 * (time.monotonic() - begun)))  # a long ledger takes seconds
