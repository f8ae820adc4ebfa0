"""The picture of a run: its workers and its training loss over time, as SVG. It needs no other package."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from elastic_ddp.errors import printable
from elastic_ddp.report.headline import headline
from elastic_ddp.report.history import History, broken, thin, time_unit
from elastic_ddp.report.marks import LOOKS

_WIDTH, _LEFT, _RIGHT = 800, 56, 12
_PANELS = {"workers": (90, 160), "training loss": (180, 398)}
"""Top and bottom of each panel."""
_HEIGHT = 444
_MAX_CHARACTERS = 118
_STYLE = (
    "svg{font:12px system-ui,sans-serif}text{fill:#6e7781}.grid{stroke:#80808050;fill:none}"
    ".title{font-weight:600}.line{stroke:#3b82d0;fill:none;stroke-width:1.6}.area{fill:#3b82d0;opacity:.15}"
)
"""Colors that can be read on a white and on a black page."""


def draw(history: History) -> str:
    """Returns the picture as SVG: the workers above the training loss, and what happened to the run."""
    size, unit = time_unit([history])
    losses = thin([point for point in history.points if point.loss is not None], "loss")
    values = [point.loss for point in losses if point.loss is not None]
    # Start-up is left out: nothing happens in it.
    begin = min((point.at for point in history.points), default=0.0)
    end = max(history.seconds, begin + 1e-9)
    x = _Scale(begin, end, _LEFT, _WIDTH - _RIGHT)
    most = max((count for _, count in history.sizes), default=1) or 1
    workers = _Scale(0, 1.15 * most, *_PANELS["workers"][::-1])
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    loss = _Scale(low - 0.05 * (high - low or 1), high + 0.05 * (high - low or 1), *_PANELS["training loss"][::-1])
    what = headline(history.summary)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}"',
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}">',
        f"<title>{_text(f'{history.label}: {what}')}</title>",
        f"<style>{_STYLE}</style>",
        f'<text class="title" x="{_LEFT}" y="16">{_text(_shortened(history.label))}</text>',
        f'<text x="{_LEFT}" y="33">{_text(_shortened(what))}</text>',
        *_grid(workers, [count for count in range(most + 1) if count % max(1, most // 3) == 0], "workers"),
        *_grid(loss, _ticks(loss.low, loss.high), "training loss"),
        *_time_axis(x, size, unit),
        *_steps(history, x, workers),
    ]
    for line in _runs([None if point is None else (x(point.at), loss(point.loss or 0.0)) for point in broken(losses)]):
        parts.append(f'<polyline class="line" points="{_points(line)}"/>')
    return "\n".join([*parts, *_marks(history, x, workers), "</svg>\n"])


class _Scale:
    """Maps values to pixels."""

    def __init__(self, low: float, high: float, first_px: float, last_px: float) -> None:
        self.low, self.high = low, high
        self._first_px, self._last_px = first_px, last_px

    def __call__(self, value: float) -> float:
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(self._first_px + share * (self._last_px - self._first_px), 1)


def _grid(y: _Scale, ticks: Sequence[float], title: str) -> Iterator[str]:
    top, bottom = _PANELS[title]
    for tick in ticks:
        yield f'<path class="grid" d="M{_LEFT} {y(tick)}H{_WIDTH - _RIGHT}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y(tick) + 4}" text-anchor="end">{tick:g}</text>'
    middle = (top + bottom) / 2
    yield f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{title}</text>'


def _time_axis(x: _Scale, size: float, unit: str) -> Iterator[str]:
    bottom = _PANELS["training loss"][1]
    for tick in _ticks(x.low / size, x.high / size):
        place = x(tick * size)
        yield f'<path class="grid" d="M{place} {bottom}v5"/>'
        yield f'<text x="{place}" y="{bottom + 18}" text-anchor="middle">{tick:g}</text>'
    yield f'<text x="{(_LEFT + _WIDTH) / 2}" y="{bottom + 38}" text-anchor="middle">time in the run ({unit})</text>'


def _steps(history: History, x: _Scale, y: _Scale) -> Iterator[str]:
    """The number of workers, as a line of steps and the area below it."""
    corners: list[tuple[float, float]] = []
    for (at, count), (until, _) in pairwise(history.sizes):
        corners += [(x(at), y(count)), (x(until), y(count))]
    if corners:
        floor = [(corners[-1][0], y(0)), (corners[0][0], y(0))]
        yield f'<polygon class="area" points="{_points([*corners, *floor])}"/>'
        yield f'<polyline class="line" points="{_points(corners)}"/>'


def _marks(history: History, x: _Scale, y: _Scale) -> Iterator[str]:
    """A line for each change, and a triangle for workers that join, with its name in one of two rows if it fits."""
    free_from = [0.0, 0.0]
    for mark in history.marks:
        if mark.kind == "left":
            continue
        name, color = LOOKS[mark.kind].short_words, LOOKS[mark.kind].color
        place, width = x(mark.at), 7 * len(name)
        if mark.kind == "joined":
            yield f'<path d="M{place - 5} {y(mark.world_size) + 5}h10l-5 -9z" fill="{color}"/>'
        else:
            bottom = _PANELS["training loss"][1]
            yield f'<path d="M{place} 78V{bottom}" stroke="{color}" stroke-dasharray="3 3"/>'
        begin = place if place + width < _WIDTH else place - width
        for row, free in enumerate(free_from):
            if begin >= free:
                free_from[row] = begin + width + 8
                anchor = "start" if begin == place else "end"
                yield f'<text x="{place}" y="{74 - 14 * row}" text-anchor="{anchor}" style="fill:{color}">{name}</text>'
                break


def _ticks(low: float, high: float) -> list[float]:
    """Returns about five round numbers between two."""
    raw = (high - low) / 8
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    first = math.ceil(low / step)
    return [round(step * number, 12) for number in range(first, math.floor(high / step) + 1)]


def _runs(points: Sequence[tuple[float, float] | None]) -> Iterator[list[tuple[float, float]]]:
    """Yields the parts of a line between its breaks."""
    part: list[tuple[float, float]] = []
    for point in [*points, None]:
        if point is not None:
            part.append(point)
        elif part:
            yield part
            part = []


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in points)


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 1]}…"


def _text(text: str) -> str:
    return html.escape(printable(text))
