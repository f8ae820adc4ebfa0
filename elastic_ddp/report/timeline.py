"""The main chart of a run: its workers with what changed them, its loss and its throughput over time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from elastic_ddp.formatting import duration
from elastic_ddp.report import figure
from elastic_ddp.report.figure import Chart, Panel, Trace
from elastic_ddp.report.history import History, finite, thin, throughput, time_unit, value_of
from elastic_ddp.report.marks import LOOKS

_MAX_SHAPES = 200
_INTERVALS = 120
"""Number of equal intervals of the time, in each of which the throughput has one value."""
_NAMED_SHARE = 0.15
"""Share of the time from which on a start-up has its name in the chart."""


def timeline(histories: Sequence[History]) -> Chart | None:
    """World size with what changed it, training loss and throughput, over one time axis."""
    size, unit = time_unit(histories)
    workers: list[Trace] = []
    losses: list[Trace] = []
    rates: list[Trace] = []
    for index, history in enumerate(histories):
        run = figure.of_run(histories, index, f"%{{y}} workers at %{{x:.2f}} {unit}")
        sizes = {"x": [at / size for at, _ in history.sizes], "y": [count for _, count in history.sizes]}
        area = {"fill": "tozeroy", "fillcolor": "rgba(59,120,194,0.2)"} if len(histories) == 1 else {}
        workers += [{**run, **sizes, **area, "line": {"width": 2, "shape": "hv"}}]
        workers += _marks(histories, index, size)

        points = thin([point for point in history.points if value_of(point, "loss") is not None], "loss")
        run = figure.of_run(histories, index, "loss %{y:.5g} at %{text}")
        losses.append({**run, **figure.line(points, lambda point: point.at / size, partial(value_of, name="loss"))})

        length_s = max(history.seconds, 1e-3)
        run = figure.of_run(histories, index, "%{y:,.0f} samples/s")
        ends = [length_s * number / _INTERVALS / size for number in range(1, _INTERVALS + 1)]
        values = [finite(rate) for rate in throughput(history.points, length_s, _INTERVALS)]
        rates.append({**run, "x": ends, "y": values, "line": {"shape": "vh"}})
    highest = max((count for history in histories for _, count in history.sizes), default=0) or 1
    drawn = figure.time_panels(
        histories,
        Panel("workers", workers, {"range": [-0.12 * highest, 1.25 * highest], "dtick": max(1, highest // 4)}),
        Panel("training loss", losses),
        Panel("samples/s", rates, {"rangemode": "tozero"}),
    )
    if drawn is None:
        return None
    if len(histories) == 1:
        drawn.update_layout(shapes=_shapes(histories[0], size))
    return Chart(title="What happened", caption=_caption(histories), figure=drawn)


def _caption(histories: Sequence[History]) -> str:
    """What the lines and symbols are."""
    captions = ["Gray: start-up, until workers train."]
    if len(histories) > 1:
        symbols = ", ".join(f"{look.glyph}\N{NO-BREAK SPACE}{kind}" for kind, look in LOOKS.items())
        captions = [f"Symbols: {symbols}."]
        captions.append("Before its first workers, each run starts up.")
    if any(history.summary["sessions"] > 1 for history in histories):
        captions.append("The time between the sessions of a run is left out.")
    return " ".join(captions)


def _marks(histories: Sequence[History], index: int, size: float) -> list[Trace]:
    """The changes of a run and its commits, as symbols on its world size."""
    history = histories[index]
    found: dict[str, list[tuple[float, int, str]]] = {kind: [] for kind in LOOKS}
    for mark in history.marks:
        found[mark.kind].append((mark.at / size, mark.world_size, f"{mark.text} (step {mark.step or 0:,})"))
    for each in history.commits:
        text = f"step {each.event.step:,} committed in {duration(each.event.seconds)}"
        found["commit"].append((each.at / size, 0, text))
    return [
        {
            **figure.of_run(histories, index, "%{text}"),
            "mode": "markers",
            "name": kind,
            "legendgroup": kind,
            "showlegend": len(histories) == 1,
            "x": [at for at, _, _ in rows],
            "y": [world_size for _, world_size, _ in rows],
            "text": [figure.escape(text) for _, _, text in rows],
            "marker": {
                "symbol": LOOKS[kind].symbol,
                "size": 11,
                "color": LOOKS[kind].color if len(histories) == 1 else figure.color_of(index),
            },
            "cliponaxis": False,
        }
        for kind, rows in found.items()
    ]


def _shapes(history: History, size: float) -> list[dict[str, Any]]:
    """Lines through all panels where workers failed or drained, and where a session ended or began; and a gray area for
    each start-up, with its name where there is room."""
    common = {"y0": 0, "y1": 1, "yref": "paper", "layer": "below"}
    lines = [
        {
            "type": "line",
            "x0": mark.at / size,
            "x1": mark.at / size,
            "line": {"color": LOOKS[mark.kind].color, "width": 1, "dash": "dot"},
        }
        for mark in history.marks[:_MAX_SHAPES]
        if mark.kind not in ("joined", "left")
    ]
    areas = [
        {
            "type": "rect",
            "x0": begin / size,
            "x1": end / size,
            "line": {"width": 0},
            "fillcolor": "rgba(128,128,128,0.15)",
            "label": {
                "text": "start-up" if end - begin > _NAMED_SHARE * history.seconds else "",
                "textposition": "top center",
            },
        }
        for begin, end in history.start_ups[:_MAX_SHAPES]
    ]
    return [{**shape, **common} for shape in lines + areas]
