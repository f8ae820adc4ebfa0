"""`loop_of`: the one place where tests reach behind a `Run`."""

from __future__ import annotations

from elastic_ddp.worker.loop import Loop
from elastic_ddp.worker.run import Run


def loop_of(run: Run) -> Loop:
    """Returns the loop of a worker, whose membership, client, checkpointer and state a test may drive."""
    return run._loop
