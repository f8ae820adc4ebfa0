"""Common parts of the charts of a report: colors, panels, and lines of one run.

All text of a ledger goes through `escape`, since Plotly reads tags in labels.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from plotly.graph_objects import Figure
from plotly.subplots import make_subplots

from elastic_ddp.errors import printable
from elastic_ddp.report.history import History, Point, time_unit

RUN_COLORS = ("#3b78c2", "#e08214", "#2a9d6e", "#a05cc4", "#c2476b", "#7a8a2b", "#1f9bb5", "#9c6b4a")
_PANEL_PX, _GAP_PX, _FRAME_PX = 140, 30, 100
"""Heights of a panel, of the space between two panels, and of the legend and the axis together."""
_BAR_PX = 32
_GRID = "rgba(128,128,128,0.25)"
_AXIS = {"gridcolor": _GRID, "zerolinecolor": _GRID, "linecolor": _GRID, "tickcolor": _GRID, "ticks": "outside"}
_TEMPLATE = {
    "layout": {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#808080"},
        "margin": {"l": 44, "r": 10, "t": 26, "b": 44},
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": "#333", "font": {"color": "#fff"}, "align": "left"},
        "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "traceorder": "normal"},
        "xaxis": _AXIS,
        "yaxis": _AXIS,
    },
    "data": {"scatter": [{"mode": "lines", "line": {"width": 1.5}}]},
}
"""The layout of all charts. It is legible in both color schemes of the page."""

Trace = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One figure of the page, with plain text around it."""

    title: str
    caption: str
    figure: Figure


@dataclass(frozen=True)
class Panel:
    """A row of a figure."""

    title: str
    """With the unit of its values."""
    traces: list[Trace]
    y_axis: dict[str, Any] = field(default_factory=dict)


def panels(rows: Sequence[Panel], x_title: str) -> Figure | None:
    """Returns a figure of the panels that have values, with one x axis; None if no panel has values.

    Each name is in the legend once.
    """
    # Plotly draws an empty panel with errors.
    filled = [[trace for trace in row.traces if any(value is not None for value in trace["y"])] for row in rows]
    shown = [(row, traces) for row, traces in zip(rows, filled, strict=True) if traces]
    if not shown:
        return None
    plot_px = len(shown) * (_PANEL_PX + _GAP_PX) - _GAP_PX
    figure = make_subplots(
        rows=len(shown),
        shared_xaxes=True,
        vertical_spacing=_GAP_PX / plot_px,
        subplot_titles=[escape(row.title) for row, _ in shown],
    )
    named = set()
    for number, (row, traces) in enumerate(shown, start=1):
        for trace in traces:
            is_new = trace["name"] not in named
            figure.add_trace({**trace, "showlegend": trace["showlegend"] and is_new}, row=number, col=1)
            named.add(trace["name"])
        figure.update_yaxes(row.y_axis, row=number)
    figure.update_annotations(x=0, xanchor="left", font_size=12)
    figure.update_xaxes(rangemode="tozero", zeroline=False)
    figure.update_xaxes(title_text=x_title, row=len(shown))
    return figure.update_layout(template=_TEMPLATE, height=plot_px + _FRAME_PX, legend_y=1 + _GAP_PX / plot_px)


def time_panels(histories: Sequence[History], *rows: Panel) -> Figure | None:
    """Returns `panels` over the time of the longest run: the same axis in all charts."""
    size, unit = time_unit(histories)
    figure = panels(rows, f"time in the run ({unit})")
    if figure is not None:
        figure.update_xaxes(range=[0, 1.02 * max(1.0, *(history.seconds for history in histories)) / size])
    return figure


def bars(traces: Sequence[Trace], count: int, x_title: str) -> Figure:
    """Returns a figure of `count` horizontal bars, the first at the top."""
    figure = Figure([{"type": "bar", "orientation": "h", **trace} for trace in traces])
    figure.update_xaxes(title_text=x_title, rangemode="tozero")
    figure.update_yaxes(automargin=True, showgrid=False, autorange="reversed")
    return figure.update_layout(template=_TEMPLATE, height=_FRAME_PX + _BAR_PX * count, bargap=0.25)


def color_of(index: int) -> str:
    """The color of a run, by its place in the report."""
    return RUN_COLORS[index % len(RUN_COLORS)]


def of_run(histories: Sequence[History], index: int, hover: str) -> Trace:
    """Common properties of the traces of one run. Lines have the color of the markers."""
    label = escape(histories[index].label)
    are_several = len(histories) > 1
    return {
        "name": label,
        "legendgroup": label,
        "showlegend": are_several,
        "marker": {"color": color_of(index)},
        "hovertemplate": f"{hover}<extra>{label if are_several else ''}</extra>",
    }


def line(
    points: Sequence[Point[Any]],
    x: Callable[[Point[Any]], float],
    y: Callable[[Point[Any]], float | None],
    text: Callable[[Point[Any]], str] = lambda point: f"step {point.event.step:,}",
) -> Trace:
    """A line through points, with a gap between two sessions, and a text for each point."""
    parts: list[Point[Any] | None] = []
    for before, point in pairwise([*points[:1], *points]):
        parts += [point] if before.session == point.session else [None, point]
    return {
        "mode": "lines" if len(parts) > 1 else "markers",
        "x": [None if point is None else x(point) for point in parts],
        "y": [None if point is None else y(point) for point in parts],
        "text": ["" if point is None else text(point) for point in parts],
    }


def prefix(histories: Sequence[History], history: History) -> str:
    """The begin of a caption about one run: its name if there are several."""
    return f"{history.label}: " if len(histories) > 1 else ""


def escape(text: str) -> str:
    """Text as Plotly shows it."""
    return html.escape(printable(text), quote=False)
