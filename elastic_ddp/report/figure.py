"""What the charts of a report have in common: colors, axes, and lines of one run.

A chart is Plotly's JSON for a figure, made without Plotly. All text of a ledger goes through `escape`, since Plotly
reads tags in labels.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from elastic_ddp.errors import printable
from elastic_ddp.report.history import History, Measurement, Point

P = TypeVar("P", Point, Measurement)

RUN_COLORS = ("#3b78c2", "#e08214", "#2a9d6e", "#a05cc4", "#c2476b", "#7a8a2b", "#1f9bb5", "#9c6b4a")
FAILED_COLOR = "#d62728"
_MAX_POINTS = 2000
"""Points of a line; more are thinned out."""
_ROW_PX, _GAP_PX, _FRAME_PX = 140, 30, 100
"""Height of a panel, of the space above it, and of what is around all of them: legend, axis."""
_UNITS = ((3 * 86_400, 86_400, "d"), (3 * 3_600, 3_600, "h"), (300, 60, "min"), (0, 1, "s"))
"""From how many seconds on, the seconds in a unit, and its name."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One figure of the page: `data` and `layout` are Plotly's, `title` and `caption` plain text around it."""

    title: str
    caption: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]


def color_of(index: int) -> str:
    """The color of a run, by its place in the report."""
    return RUN_COLORS[index % len(RUN_COLORS)]


def of_run(histories: Sequence[History], index: int) -> dict[str, Any]:
    """What the lines of one run have in common."""
    label = escape(histories[index].label)
    line = {"color": color_of(index), "width": 1.5}
    return {"name": label, "legendgroup": label, "line": line, "showlegend": len(histories) > 1}


def prefix(histories: Sequence[History], history: History) -> str:
    """The begin of a caption about one run: its name if there are several."""
    return f"{history.label}: " if len(histories) > 1 else ""


def line(points: Sequence[P | None], x: Callable[[P], float], y: Callable[[P], float | None]) -> dict[str, Any]:
    """A line through points, with a gap at each None."""
    return {
        "mode": "lines" if len(points) > 1 else "markers",
        "x": [None if point is None else x(point) for point in points],
        "y": [None if point is None else y(point) for point in points],
    }


def show_once(data: Sequence[dict[str, Any]]) -> None:
    """Leaves each name in the legend once."""
    named: set[str] = set()
    for trace in data:
        trace["showlegend"] = trace["showlegend"] and trace["name"] not in named
        named.add(trace["name"])


def thin(points: list[Point], name: str) -> list[Point]:
    """Returns the points of the smallest and of the largest value in each of equally many neighbors."""
    width = -(-2 * len(points) // _MAX_POINTS)
    if width <= 2:
        return points
    kept = []
    for begin in range(0, len(points), width):
        part = range(begin, min(begin + width, len(points)))
        ends = sorted(part, key=lambda index: points[index].value(name) or 0.0)
        kept += [points[index] for index in sorted({ends[0], ends[-1]})]
    return kept


def broken(points: Iterable[P]) -> list[P | None]:
    """Returns the points, with None where a session follows another."""
    result: list[P | None] = []
    session: int | None = None
    for point in points:
        if session not in (None, point.session):
            result.append(None)
        session = point.session
        result.append(point)
    return result


def time_unit(histories: Sequence[History]) -> tuple[float, str]:
    """The seconds in the unit of the time axis, and its name: the same for all runs."""
    longest_s = max((history.seconds for history in histories), default=0.0)
    return next((size, unit) for at_least, size, unit in _UNITS if longest_s >= at_least)


def stacked(*rows: tuple[str, list[dict[str, Any]]]) -> tuple[list[str], list[dict[str, Any]]]:
    """Returns the titles of the panels that have values, and their traces. Plotly draws an empty panel with errors."""
    titles: list[str] = []
    data: list[dict[str, Any]] = []
    for title, traces in rows:
        if shown := [trace for trace in traces if any(value is not None for value in trace["y"])]:
            data += [{**trace, "yaxis": y_axis(len(titles))} for trace in shown]
            titles.append(title)
    return titles, data


def panels(titles: Sequence[str], x_title: str) -> dict[str, Any]:
    """A layout of panels below each other, which share the x axis. Each has its title, with its unit, above it."""
    count = len(titles)
    plot_px = count * _ROW_PX + (count - 1) * _GAP_PX
    layout: dict[str, Any] = {
        "height": plot_px + _FRAME_PX,
        "xaxis": {"title": {"text": x_title}, "anchor": y_axis(count - 1), "rangemode": "tozero", "zeroline": False},
        "legend": {"y": 1 + _GAP_PX / plot_px},
        "annotations": [],
    }
    for row, title in enumerate(titles):
        top = 1 - row * (_ROW_PX + _GAP_PX) / plot_px
        layout[layout_axis(row)] = {"domain": [max(0.0, top - _ROW_PX / plot_px), top]}
        place = {"xref": "paper", "x": 0, "xanchor": "left", "yref": "paper", "y": top, "yanchor": "bottom"}
        layout["annotations"].append({**place, "text": escape(title), "showarrow": False})
    return layout


def time_panels(titles: Sequence[str], histories: Sequence[History]) -> dict[str, Any]:
    """A layout of panels over the time of the longest run: the same axis in all charts."""
    size, unit = time_unit(histories)
    layout = panels(titles, f"time in the run ({unit})")
    layout["xaxis"]["range"] = [0, 1.02 * max(1.0, *(history.seconds for history in histories)) / size]
    return layout


def bars(count: int, x_title: str) -> dict[str, Any]:
    """A layout of horizontal bars."""
    return {
        "height": 90 + 28 * count,
        "xaxis": {"title": {"text": x_title}, "rangemode": "tozero"},
        "yaxis": {"automargin": True, "showgrid": False},
        "bargap": 0.25,
    }


def y_axis(row: int) -> str:
    """The y axis of a panel, as a trace names it."""
    return "y" if row == 0 else f"y{row + 1}"


def layout_axis(row: int) -> str:
    """The y axis of a panel, as the layout names it."""
    return y_axis(row).replace("y", "yaxis")


def hover_end(histories: Sequence[History]) -> str:
    """The end of a hover text: the run's name if there are several."""
    return "<extra>%{fullData.name}</extra>" if len(histories) > 1 else "<extra></extra>"


def escape(text: str) -> str:
    """Text as Plotly shows it."""
    return html.escape(printable(text), quote=False)
