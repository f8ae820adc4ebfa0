"""The curves of a run over time, and how a terminal shows them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from rich.text import Text

from elastic_ddp.telemetry import events
from elastic_ddp.telemetry.event import RESUMED, Event

_BARS = "▁▂▃▄▅▆▇"
"""Not the full block: a line of bars would touch the one above it."""
MARKS = (
    ("✕", "bold red", "failed"),
    ("▼", "bold yellow", "left"),
    ("↻", "bold blue", "resumed"),
    ("▲", "bold green", "joined"),
)
"""What may happen to the workers of a run; of two in one column, the first here is shown."""


class Timeline:
    """The curves of a run over the time of its sessions, without the time between them, in equal intervals."""

    def __init__(self, ledger: Sequence[Event], now: float) -> None:
        self._sizes, self._samples, self._losses = [(0.0, 0.0)], [(0.0, 0.0)], list[tuple[float, float]]()
        self._marks: list[tuple[float, int]] = []
        session, begun, offset, samples, at = None, 0.0, 0.0, None, 0.0
        for event in ledger:
            if event.session != session:
                session, begun, offset, samples = event.session, event.time, at, None
                self._sizes.append((offset, 0.0))
            at = max(at, offset + event.time - begun)
            if (mark := self._mark(event)) is not None:
                self._marks.append((at, mark))
            match event:
                case events.GenerationStarted():
                    self._sizes.append((at, float(event.world_size)))
                    samples = None
                    self._samples.append((at, self._samples[-1][1]))
                case events.WorkerFailed() | events.GenerationEnded() | events.SessionEnded():
                    self._sizes.append((at, 0.0))
                case events.StepsCompleted():
                    done = event.samples or 0
                    more = max(0, done - samples) if samples is not None else 0
                    self._samples.append((at, self._samples[-1][1] + more))
                    samples = done
                    if event.loss is not None and math.isfinite(float(event.loss)):
                        self._losses.append((at, float(event.loss)))
        self.length_s = max(at, offset + now - begun, 1e-3)
        """Seconds of all sessions."""

    def _mark(self, event: Event) -> int | None:
        """Returns the index in `MARKS` of what an event is, or None."""
        match event:
            case events.WorkerFailed(reported_by=None):
                return 0
            case events.WorkerLeft():
                return 1
            case events.Resumed():
                return 2
            case events.GenerationStarted(world_size=size):
                before = [known for _, known in self._sizes if known]
                return 3 if before and size > before[-1] and event.reason != RESUMED else None
        return None

    def marks(self, columns: int) -> Text:
        """What happened to the workers in each interval."""
        found: list[int | None] = [None] * columns
        for at, mark in self._marks:
            column = min(columns - 1, int(at / self.length_s * columns))
            known = found[column]
            found[column] = mark if known is None else min(known, mark)
        text = Text()
        for each in found:
            text.append(" " if each is None else MARKS[each][0], style="" if each is None else MARKS[each][1])
        return text

    def world_sizes(self, columns: int) -> list[float]:
        """The mean number of workers that trained in each interval, and at last the current number."""
        at, sizes = np.array([*self._sizes, (self.length_s, 0.0)]).T
        worker_seconds = np.concatenate([[0.0], np.cumsum(sizes[:-1] * np.diff(at))])
        edges = self._edges(columns)
        means = np.diff(np.interp(edges, at, worker_seconds)) / np.diff(edges)
        return [*means[:-1].tolist(), float(sizes[-2])]

    def samples_per_s(self, columns: int) -> list[float]:
        edges = self._edges(columns)
        at, done = np.array(self._samples).T
        totals = np.interp(edges, at, done)
        rates: list[float] = (np.diff(totals) / np.diff(edges)).tolist()
        return rates

    def losses(self, columns: int) -> list[float]:
        """The last loss in each interval; NaN where there is none."""
        found = [math.nan] * columns
        for at, loss in self._losses:
            found[min(columns - 1, int(at / self.length_s * columns))] = loss
        return found

    def _edges(self, columns: int) -> np.ndarray:
        return np.linspace(0.0, self.length_s, columns + 1)


def sparkline(values: Iterable[float], *, floor: float | None = None) -> str:
    """Returns values as bars of seven heights, from the smallest value (or `floor`) to the largest; blank for NaN."""
    values = list(values)
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return ""
    low, high = min(known) if floor is None else floor, max(known)
    bars = []
    for value in values:
        share = 0.0 if high <= low else (value - low) / (high - low)
        bars.append(" " if math.isnan(value) else _BARS[min(len(_BARS) - 1, int(share * len(_BARS)))])
    return "".join(bars)
