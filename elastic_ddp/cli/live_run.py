"""The argument of commands for a live run, and the run that it names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from elastic_ddp.driver.run_handle import RunHandle

LiveRun = Annotated[str, typer.Argument(metavar="RUN", help="A live run: its name, or <storage>/<name>.")]


def get_run(run: str) -> RunHandle:
    """Returns a handle to a live run. Raises ConfigError if it is not live."""
    from elastic_ddp.driver import run_handle  # imports Ray

    return run_handle.get_run(run)
