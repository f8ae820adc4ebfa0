"""Shows the progress of a run: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Self, TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic_ddp.console import Tolerant
from elastic_ddp.formatting import clock_face, format_rate, plural

_REDRAW_S, _LINE_S, _UNCHANGED_LINE_S = 0.1, 5.0, 30.0
"""Seconds between updates of the live line, between plain lines, and between plain lines that repeat a state."""
_RATE_S = 30.0
"""Length of the window of a rate."""


class Progress:
    """Shows a run's progress inside its context.

    Args:
        total_steps: steps of the whole run, if known.
        console: standard error by default.
        clock: monotonic time in seconds.
    """

    def __init__(
        self, total_steps: int | None, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or Console(file=cast(TextIO, Tolerant(sys.stderr)))
        self._clock = clock
        self._step = 0
        self._total = total_steps
        self._loss: float | None = None
        self._world_size = 0
        self._state = ""
        self._rate = MovingRate()
        self._shown_at = -math.inf
        self._shown_state = ""
        self._shown_step: int | None = None
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            # No refresh thread: a forked worker must not inherit one.
            self._live = Live(self._line(), console=self._console, auto_refresh=False)
            self._live.start(refresh=True)
        return self

    def __exit__(self, *error: object) -> None:
        """Leaves the last numbers on the screen."""
        if self._live is not None or self._shown_step not in (None, self._step):
            self._show()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(
        self,
        step: int,
        loss: float | None = None,
        samples: int = 0,
        world_size: int = 0,
        state: str = "training",
    ) -> None:
        """Takes the newest numbers, and shows them when due. A new state and the last step are always shown.

        Args:
            step: steps done.
            loss: training loss; None keeps the known value.
            samples: samples used. A lower value than before resets the rate.
            world_size: number of workers.
            state: what the run is doing; shown unless it is "training".
        """
        now = self._clock()
        if state != "training" or state != self._state:
            self._rate.clear()  # the rate covers time with training only
        self._step = step
        self._world_size = world_size
        self._state = state
        self._loss = self._loss if loss is None else loss
        self._rate.add(now, step, samples)
        finished = self._total is not None and step >= self._total and step != self._shown_step
        line_s = _LINE_S if state == "training" else _UNCHANGED_LINE_S
        is_due = now - self._shown_at >= (line_s if self._live is None else _REDRAW_S)
        if is_due or state != self._shown_state or finished:
            self._shown_at = now
            self._shown_state = state
            self._show()

    def note(self, text: str) -> None:
        """Prints a line about an event; it stays above the live line."""
        self._console.print(Text(text), soft_wrap=True)

    def _show(self) -> None:
        self._shown_step = self._step
        if self._live is not None:
            self._live.update(self._line(), refresh=True)
        else:
            self._console.print(self._facts(), soft_wrap=True)

    def _facts(self) -> Text:
        facts = [f"step {self._step:,}" + ("" if self._total is None else f"/{self._total:,}")]
        if self._loss is not None:
            facts.append(f"loss {float(self._loss):.4g}")
        samples_per_s = self._rate.samples_per_s
        steps_per_s = self._rate.steps_per_s
        if samples_per_s is not None:
            facts.append(f"{format_rate(samples_per_s)} samples/s")
        if self._state in ("", "training"):  # otherwise it is the size of the last generation
            facts.append(plural(self._world_size, "worker"))
        else:
            facts.append(self._state)
        if self._total is not None and steps_per_s:
            facts.append(f"{clock_face((self._total - self._step) / steps_per_s)} left")
        return Text("  ".join(facts))

    def _line(self) -> Table:
        line = Table.grid(padding=(0, 1))
        bar = [ProgressBar(total=self._total, completed=min(self._step, self._total), width=24)] if self._total else []
        line.add_row(*bar, self._facts())
        return line


class MovingRate:
    """Steps and samples per second over the last 30 s."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int, int]] = deque()

    def clear(self) -> None:
        self._points.clear()

    def add(self, now: float, step: int, samples: int) -> None:
        """Adds totals at a time. Totals that decrease reset the window."""
        if self._points and (step < self._points[-1][1] or samples < self._points[-1][2]):
            self._points.clear()
        self._points.append((now, step, samples))
        while len(self._points) > 2 and now - self._points[1][0] >= _RATE_S:
            self._points.popleft()

    @property
    def steps_per_s(self) -> float | None:
        return self._slope(1)

    @property
    def samples_per_s(self) -> float | None:
        return self._slope(2)

    def _slope(self, column: int) -> float | None:
        if len(self._points) < 2:
            return None
        first, last = self._points[0], self._points[-1]
        return (last[column] - first[column]) / (last[0] - first[0]) if last[0] > first[0] else None
