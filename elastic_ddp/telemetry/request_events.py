"""The events of requests to a live run. All others are in `events.py`."""

from __future__ import annotations

from elastic_ddp.telemetry.event import GenerationEvent


class Profiled(GenerationEvent):
    """Ranks have recorded steps for `elastic-ddp profile`; they were slower. The first of them reports it."""

    first_step: int
    """Index of the first recorded step, from 0."""
    num_steps: int
    """Number of recorded steps."""
    ranks: list[int]
    """The ranks that were asked for a trace."""
    folder: str
    """Folder of the traces, in the run's folder."""
