"""The main chart of a run: its workers with what changed them, its loss and its throughput over time."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from elastic_ddp.formatting import duration
from elastic_ddp.report import figure
from elastic_ddp.report.figure import Chart
from elastic_ddp.report.history import History, finite, throughput
from elastic_ddp.report.marks import LOOKS

_COMMIT_COLOR = "#7a8a2b"
_START_UP_COLOR = "rgba(128,128,128,0.15)"
_THROUGH_ALL_PANELS = {"layer": "below", "yref": "paper", "y0": 0, "y1": 1}
_MAX_SHAPES = 200
_INTERVALS = 120
"""Number of equal intervals of the time, in each of which the throughput has one value."""
_NAMED_SHARE = 0.15
"""Share of the time from which on a start-up has its name in the chart."""


def timeline(histories: Sequence[History]) -> Chart | None:
    """World size with what changed it, training loss and throughput, over one time axis."""
    size, unit = figure.time_unit(histories)
    workers: list[dict[str, Any]] = []
    losses: list[dict[str, Any]] = []
    rates: list[dict[str, Any]] = []
    for index, history in enumerate(histories):
        run = figure.of_run(histories, index)
        area = {"fill": "tozeroy", "fillcolor": "rgba(59,120,194,0.2)"} if len(histories) == 1 else {}
        workers.append(
            {
                **run,
                **area,
                "mode": "lines",
                "line": {**run["line"], "width": 2, "shape": "hv"},
                "x": [at / size for at, _ in history.sizes],
                "y": [count for _, count in history.sizes],
                "hovertemplate": f"%{{y}} workers at %{{x:.2f}} {unit}{figure.hover_end(histories)}",
            }
        )
        points = figure.broken(figure.thin([point for point in history.points if point.loss is not None], "loss"))
        losses.append(
            {
                **run,
                **figure.line(points, lambda point: point.at / size, attrgetter("loss")),
                "showlegend": False,
                "text": ["" if point is None else f"step {point.step:,}" for point in points],
                "hovertemplate": f"loss %{{y:.5g}} at %{{text}}{figure.hover_end(histories)}",
            }
        )
        length_s = max(history.seconds, 1e-3)
        rates.append(
            {
                **run,
                "showlegend": False,
                "mode": "lines",
                "line": {**run["line"], "shape": "vh"},
                "x": [length_s * number / _INTERVALS / size for number in range(1, _INTERVALS + 1)],
                "y": [finite(rate) for rate in throughput(history.points, length_s, _INTERVALS)],
                "hovertemplate": f"%{{y:,.0f}} samples/s{figure.hover_end(histories)}",
            }
        )
        workers += _marks(histories, index, size)
    titles, data = figure.stacked(("workers", workers), ("training loss", losses), ("samples/s", rates))
    if not titles:
        return None
    layout = figure.time_panels(titles, histories)
    highest = max((count for history in histories for _, count in history.sizes), default=0)
    layout["yaxis"] |= {"range": [-0.12 * max(highest, 1), 1.25 * max(highest, 1)], "dtick": max(1, highest // 4)}
    if "samples/s" in titles:
        layout[figure.layout_axis(titles.index("samples/s"))]["rangemode"] = "tozero"
    if len(histories) == 1:
        layout["shapes"] = [*_lines(histories[0], size), *_shades(histories[0], size)]
        layout["annotations"] += _start_up_names(histories[0], size)
    return Chart(title="What happened", caption=_caption(histories), data=data, layout=layout)


def _caption(histories: Sequence[History]) -> str:
    """What the lines and symbols are."""
    captions = ["Gray: start-up, until workers train."]
    if len(histories) > 1:
        kinds = {mark.kind for history in histories for mark in history.marks}
        symbols = [f"{look.glyph}\N{NO-BREAK SPACE}{look.words}" for kind, look in LOOKS.items() if kind in kinds]
        symbols += ["|\N{NO-BREAK SPACE}commit"] if any(history.saves for history in histories) else []
        captions = [f"Symbols: {', '.join(symbols)}."] if symbols else []
        captions.append("Before its first workers, each run starts up.")
    if any(history.summary["sessions"] > 1 for history in histories):
        captions.append("The time between the sessions of a run is left out.")
    return " ".join(captions)


def _marks(histories: Sequence[History], index: int, size: float) -> list[dict[str, Any]]:
    """The changes of a run and its commits, as symbols on its world size."""
    history, is_alone = histories[index], len(histories) == 1
    rows = []
    for kind, look in LOOKS.items():
        marks = [mark for mark in history.marks if mark.kind == kind]
        texts = [f"{mark.text} (step {mark.step or 0:,})" for mark in marks]
        rows.append((look.words, look.symbol, look.color, [(mark.at, mark.world_size) for mark in marks], texts))
    saves = [save for save in history.saves if save.error is None]
    texts = [f"step {save.step:,} committed in {duration(save.seconds)}" for save in saves]
    rows.append(("commit", "line-ns-open", _COMMIT_COLOR, [(save.at, 0) for save in saves], texts))
    return [
        {
            "mode": "markers",
            "name": name,
            "legendgroup": name,
            "showlegend": is_alone,
            "x": [at / size for at, _ in places],
            "y": [world_size for _, world_size in places],
            "text": [figure.escape(text) for text in texts],
            "hovertemplate": f"%{{text}}<extra>{'' if is_alone else figure.escape(history.label)}</extra>",
            "marker": {"symbol": symbol, "size": 11, "color": color if is_alone else figure.color_of(index)},
            "cliponaxis": False,
        }
        for name, symbol, color, places, texts in rows
    ]


def _lines(history: History, size: float) -> list[dict[str, Any]]:
    """Lines through all panels where workers failed or drained, and where a session ended or began."""
    return [
        {
            **_THROUGH_ALL_PANELS,
            "type": "line",
            "x0": mark.at / size,
            "x1": mark.at / size,
            "line": {"color": LOOKS[mark.kind].color, "width": 1, "dash": "dot"},
        }
        for mark in history.marks[:_MAX_SHAPES]
        if mark.kind not in ("joined", "left")
    ]


def _shades(history: History, size: float) -> list[dict[str, Any]]:
    """A gray area through all panels for each start-up."""
    return [
        {
            **_THROUGH_ALL_PANELS,
            "type": "rect",
            "x0": begin / size,
            "x1": end / size,
            "line": {"width": 0},
            "fillcolor": _START_UP_COLOR,
        }
        for begin, end in history.start_ups[:_MAX_SHAPES]
    ]


def _start_up_names(history: History, size: float) -> list[dict[str, Any]]:
    """The word in the first panel, where there is room for it."""
    return [
        {
            "text": "start-up",
            "x": (begin + end) / 2 / size,
            "y": 1,
            "yref": "y",
            "yanchor": "middle",
            "showarrow": False,
        }
        for begin, end in history.start_ups
        if end - begin > _NAMED_SHARE * history.seconds
    ]
