"""Charts of what ranks measured: loss and metrics, phases of a step, GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, methodcaller
from typing import Any

from elastic_ddp.report import figure
from elastic_ddp.report.figure import Chart
from elastic_ddp.report.history import History, Point

PHASE_COLORS = {
    "data": "#d55e00",
    "forward": "#7cc4f0",
    "backward": "#0b62a4",
    "communication": "#ecd03f",
    "optimizer": "#009e73",
}
"""Colors that people with color blindness can tell apart. Other phases are gray."""
_MAX_METRICS = 12


def metrics(histories: Sequence[History]) -> Chart | None:
    """The training loss and each metric, over steps. One with a single value has no chart."""
    found = ["loss"]
    for history in histories:
        found += [name for point in (*history.evaluations, *history.points) for name in point.metrics]
    found = [name for name in dict.fromkeys(found) if any(len(_points_of(each, name)) > 1 for each in histories)]
    names, left_out = found[:_MAX_METRICS], len(found[_MAX_METRICS:])
    data: list[dict[str, Any]] = []
    for row, name in enumerate(names):
        for index, history in enumerate(histories):
            points = figure.broken(figure.thin(_points_of(history, name), name))
            data.append(
                {
                    **figure.of_run(histories, index),
                    **figure.line(points, attrgetter("step"), methodcaller("value", name)),
                    "mode": "lines+markers" if len(points) < 60 else "lines",
                    "showlegend": row == 0 and len(histories) > 1,
                    "marker": {"size": 5, "color": figure.color_of(index)},
                    "yaxis": figure.y_axis(row),
                    "hovertemplate": f"{figure.escape(name)} %{{y:.5g}} at step %{{x:,}}{figure.hover_end(histories)}",
                }
            )
    if not names:
        return None
    caption = f"{left_out} more metrics are not shown." if left_out else ""
    return Chart(title="Loss and metrics", caption=caption, data=data, layout=figure.panels(names, "step"))


def _points_of(history: History, name: str) -> list[Point]:
    """The points that have this metric: those of evaluations, if there are any."""
    measured = [point for point in history.evaluations if point.value(name) is not None]
    return measured or [point for point in history.points if point.value(name) is not None]


def phases(histories: Sequence[History]) -> Chart | None:
    """Where the time of a step goes, and how much longer the slowest rank works than the median."""
    rows = [(f"{figure.prefix(histories, history)}ms per step", _areas(history, histories)) for history in histories]
    slowdowns = _measured(histories, "slowdown", 1.0, "%{y:.2f} × the median: rank %{text}")
    slowdowns = [{**trace, "showlegend": False} for trace in slowdowns]
    titles, data = figure.stacked(*rows, ("work of the slowest rank, × the median", slowdowns))
    if not titles:
        return None
    figure.show_once(data)
    verdicts = [
        f"{figure.prefix(histories, history)}The last steps are bound by {verdict['kind']}: {verdict['reason']} "
        f"{verdict['advice']}"
        for history in histories
        if (verdict := history.summary["bottleneck"]) is not None
    ]
    caption = "\n".join(["Averages over ranks. Other ranks wait for the slowest in communication.", *verdicts])
    return Chart(title="Phases of a step", caption=caption, data=data, layout=figure.time_panels(titles, histories))


def _areas(history: History, histories: Sequence[History]) -> list[dict[str, Any]]:
    """The phases of one run, stacked. Each session is an area of its own, so that there is a gap before the next."""
    size, _ = figure.time_unit(histories)
    names = list(dict.fromkeys(name for each in history.measurements for name in each.phases))
    traces = []
    for session in dict.fromkeys(each.session for each in history.measurements):
        measured = [each for each in history.measurements if each.session == session]
        for name in names:
            color, label = PHASE_COLORS.get(name, "#b3b3b3"), figure.escape(name.replace("_", " "))
            traces.append(
                {
                    "name": label,
                    "legendgroup": label,
                    "showlegend": True,
                    "mode": "lines",
                    "stackgroup": f"{figure.escape(history.label)} {session}",
                    "line": {"width": 0.5, "color": color},
                    "fillcolor": color,
                    "x": [each.at / size for each in measured],
                    "y": [1000.0 * each.phases.get(name, 0.0) for each in measured],
                    "text": [f"step {each.step:,}" for each in measured],
                    "hovertemplate": f"{label} %{{y:,.1f}} ms, %{{text}}<extra></extra>",
                }
            )
    return traces


def gpus(histories: Sequence[History]) -> Chart | None:
    """Memory of the fullest GPU, and the mean utilization."""
    memory = _measured(histories, "memory_bytes", 2.0**-30, "%{y:.2f} GiB")
    utilization = _measured(histories, "utilization", 100.0, "%{y:.0f} %")
    titles, data = figure.stacked(("peak memory (GiB)", memory), ("utilization (%)", utilization))
    if not titles:
        return None
    figure.show_once(data)
    layout = figure.time_panels(titles, histories)
    for row, title in enumerate(titles):
        layout[figure.layout_axis(row)] |= {"range": [0, 100]} if "%" in title else {"rangemode": "tozero"}
    caption = "Memory: of the rank with the most. Utilization: mean of the ranks."
    return Chart(title="GPUs", caption=caption, data=data, layout=layout)


def _measured(histories: Sequence[History], name: str, factor: float, hover: str) -> list[dict[str, Any]]:
    """One line over time for each run that has measured this value."""
    size, _ = figure.time_unit(histories)
    traces = []
    for index, history in enumerate(histories):
        known = figure.broken([each for each in history.measurements if getattr(each, name) is not None])
        traces.append(
            {
                **figure.of_run(histories, index),
                **figure.line(known, lambda each: each.at / size, lambda each: factor * getattr(each, name)),
                "text": ["" if each is None else f"{each.slowest_rank} at step {each.step:,}" for each in known],
                "hovertemplate": hover + figure.hover_end(histories),
            }
        )
    return traces
