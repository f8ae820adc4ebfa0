"""Charts of what ranks measured: loss and metrics, phases of a step, GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, methodcaller

from elastic_ddp.report import figure
from elastic_ddp.report.figure import Chart, Panel, Trace
from elastic_ddp.report.history import History, Point, thin, time_unit

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
    rows = []
    for name in names:
        traces = []
        for index, history in enumerate(histories):
            points = thin(_points_of(history, name), name)
            traces.append(
                {
                    **figure.of_run(histories, index, f"{figure.escape(name)} %{{y:.5g}} at %{{text}}"),
                    **figure.line(points, attrgetter("step"), methodcaller("value", name)),
                    "mode": "lines+markers" if len(points) < 60 else "lines",
                    "marker": {"size": 5, "color": figure.color_of(index)},
                }
            )
        rows.append(Panel(name, traces))
    drawn = figure.panels(rows, "step")
    caption = f"{left_out} more metrics are not shown." if left_out else ""
    return None if drawn is None else Chart(title="Loss and metrics", caption=caption, figure=drawn)


def _points_of(history: History, name: str) -> list[Point]:
    """The points that have this metric: those of evaluations, if there are any."""
    measured = [point for point in history.evaluations if point.value(name) is not None]
    return measured or [point for point in history.points if point.value(name) is not None]


def phases(histories: Sequence[History]) -> Chart | None:
    """Where the time of a step goes, and how much longer the slowest rank works than the median."""
    areas = [Panel(f"{figure.prefix(histories, each)}ms per step", _areas(each, histories)) for each in histories]
    slowdowns = _measured(histories, "slowdown", 1.0, "%{y:.2f} × the median: rank %{text}")
    slowdowns = [{**trace, "showlegend": False} for trace in slowdowns]
    drawn = figure.time_panels(histories, *areas, Panel("work of the slowest rank, × the median", slowdowns))
    if drawn is None:
        return None
    verdicts = [
        f"{figure.prefix(histories, history)}The last steps are bound by {verdict['kind']}: {verdict['reason']} "
        f"{verdict['advice']}"
        for history in histories
        if (verdict := history.summary["bottleneck"]) is not None
    ]
    caption = "\n".join(["Averages over ranks. Other ranks wait for the slowest in communication.", *verdicts])
    return Chart(title="Phases of a step", caption=caption, figure=drawn)


def _areas(history: History, histories: Sequence[History]) -> list[Trace]:
    """The phases of one run, stacked. Each session is an area of its own, so that there is a gap before the next."""
    size, _ = time_unit(histories)
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
    drawn = figure.time_panels(
        histories,
        Panel("peak memory (GiB)", memory, {"rangemode": "tozero"}),
        Panel("utilization (%)", utilization, {"range": [0, 100]}),
    )
    caption = "Memory: of the rank with the most. Utilization: mean of the ranks."
    return None if drawn is None else Chart(title="GPUs", caption=caption, figure=drawn)


def _measured(histories: Sequence[History], name: str, factor: float, hover: str) -> list[Trace]:
    """One line over time for each run that has measured this value."""
    size, _ = time_unit(histories)
    traces = []
    for index, history in enumerate(histories):
        known = [each for each in history.measurements if getattr(each, name) is not None]
        line = figure.line(
            known,
            x=lambda each: each.at / size,
            y=lambda each: factor * getattr(each, name),
            text=lambda each: f"{each.slowest_rank} at step {each.step:,}",
        )
        traces.append({**figure.of_run(histories, index, hover), **line})
    return traces
