"""`AgreedEvents`: events that all ranks know, which reach the ledger although rank 0 fails."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from elastic_ddp.telemetry.event import AgreedEvent, Event

KEPT = 64
"""Number of newest events that a rank keeps. Rank 0 sends its reports in the background, so it may die with several."""


class AgreedEvents:
    """Records facts that all ranks know, for example the loss of a step, once.

    Rank 0 reports it. The other ranks keep each event, because one of them may become rank 0 after rank 0 died with
    unsent events. The rendezvous drops those that it has.
    """

    def __init__(self, record: Callable[[Event], object], clock: Callable[[], float] = time.time) -> None:
        self._record, self._clock = record, clock
        self._newest: deque[AgreedEvent] = deque(maxlen=KEPT)

    def record(self, event: AgreedEvent, *, is_rank_0: bool) -> None:
        """Takes an event. Every rank calls it."""
        event = replace(event, at=self._clock())
        self._newest.append(event)
        if is_rank_0:
            self._record(event)

    @property
    def newest(self) -> list[AgreedEvent]:
        """The newest events, oldest first."""
        return list(self._newest)

    def report_again(self) -> None:
        """Reports the newest events for the rank 0 of earlier generations. The rank that follows it calls this."""
        for event in self._newest:
            self._record(event)
