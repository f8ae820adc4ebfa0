"""The curves of a run over time, and how a terminal shows them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from rich.text import Text

from elastic_ddp.report.history import History, throughput, value_of
from elastic_ddp.report.marks import LOOKS

_BARS = "▁▂▃▄▅▆▇"
"""Not the full block: a line of bars would touch the one above it."""


class Timeline:
    """The curves of a run in equal intervals of its time, which are the columns of a terminal.

    Args:
        history: the run, without the time between its sessions.
        idle_s: seconds since its last event if it is live, or None if it is not.
    """

    def __init__(self, history: History, idle_s: float | None) -> None:
        self._history = history
        self.length_s = max(history.seconds + (idle_s or 0.0), 1e-3)
        """Seconds of all sessions."""
        self._sizes = history.sizes if idle_s is None else history.sizes[:-1]

    def marks(self, columns: int) -> Text:
        """Returns the marks of the events in each interval, of which the most important is shown."""
        found: dict[int, str] = {}
        for mark in sorted(self._history.marks, key=lambda mark: list(LOOKS).index(mark.kind)):
            found.setdefault(self._column(mark.at, columns), mark.kind)
        text = Text()
        for column in range(columns):
            if column in found:
                look = LOOKS[found[column]]
                text.append(look.glyph, style=f"bold {look.color}")
            else:
                text.append(" ")
        return text

    def world_sizes(self, columns: int) -> list[float]:
        """The mean number of workers in each interval, and at last the current number."""
        at, sizes = np.array([*self._sizes, (self.length_s, 0.0)]).T
        worker_seconds = np.concatenate([[0.0], np.cumsum(sizes[:-1] * np.diff(at))])
        edges = np.linspace(0.0, self.length_s, columns + 1)
        means = np.diff(np.interp(edges, at, worker_seconds)) / np.diff(edges)
        return [*means[:-1].tolist(), float(self._sizes[-1][1])]

    def samples_per_s(self, columns: int) -> list[float]:
        """The throughput in each interval."""
        return throughput(self._history.points, self.length_s, columns)

    def losses(self, columns: int) -> list[float]:
        """The last known loss in each interval; NaN before the first of a session, and after the last."""
        found = [math.nan] * columns
        until = 0
        session = None
        for point in self._history.points:
            loss = value_of(point, "loss")
            if loss is not None:
                column = self._column(point.at, columns)
                if session == point.session:
                    found[until:column] = found[until - 1 : until] * (column - until)
                found[column] = loss
                until = column + 1
                session = point.session
        return found

    def _column(self, at: float, columns: int) -> int:
        return min(columns - 1, int(at / self.length_s * columns))


def sparkline(values: Iterable[float], *, floor: float | None = None) -> str:
    """Returns values as bars of seven heights, from the smallest value (or `floor`) to the largest; blank for NaN."""
    values = list(values)
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return ""
    low = min(known) if floor is None else floor
    high = max(known)
    bars = []
    for value in values:
        share = 0.0 if high <= low else (value - low) / (high - low)
        bars.append(" " if math.isnan(value) else _BARS[min(len(_BARS) - 1, int(share * len(_BARS)))])
    return "".join(bars)
