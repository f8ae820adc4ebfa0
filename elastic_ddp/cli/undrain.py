"""`elastic-ddp undrain`."""

from __future__ import annotations

from typing import Annotated

import typer

from elastic_ddp.cli.output import console
from elastic_ddp.cli.runs import LiveRun, get_run


def undrain(
    run: LiveRun,
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node's address, or Ray's id of it.")],
) -> None:
    """Let a live run use a node again after drain.

    Workers that have not left stay, and new ones start within seconds. A node that Ray itself drains, such as after a
    spot notice, stays drained until Ray is restarted on it.
    """
    get_run(run).undrain(node)
    console().print(f"run {run}: workers may start on {node} again")
