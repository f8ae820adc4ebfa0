"""Charts of what ranks measured: loss and metrics, phases of a step, GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from statistics import fmean
from typing import Any

from elastic_ddp.report import figure
from elastic_ddp.report.figure import Chart, Panel, Trace
from elastic_ddp.report.history import History, Point, slowdown, thin, time_unit, value_of
from elastic_ddp.telemetry.events import PhasesMeasured
from elastic_ddp.telemetry.phases import PHASE_COLORS

_MAX_METRICS = 12


def metrics(histories: Sequence[History]) -> Chart | None:
    """The training loss and each metric, over steps. One with a single value has no chart."""
    found = ["loss"]
    for history in histories:
        found += [point.event.name for point in history.evaluations]
        found += [name for point in history.points for name in point.event.metrics]
    found = [name for name in dict.fromkeys(found) if any(len(_points_of(each, name)) > 1 for each in histories)]
    left_out = len(found[_MAX_METRICS:])
    rows = []
    for name in found[:_MAX_METRICS]:
        traces = []
        for index, history in enumerate(histories):
            points = thin(_points_of(history, name), name)
            traces.append(
                {
                    **figure.of_run(histories, index, f"{figure.escape(name)} %{{y:.5g}} at %{{text}}"),
                    **figure.line(points, attrgetter("event.step"), partial(value_of, name=name)),
                    "mode": "lines+markers" if len(points) < 60 else "lines",
                    "marker": {"size": 5, "color": figure.color_of(index)},
                }
            )
        rows.append(Panel(name, traces))
    drawn = figure.panels(rows, "step")
    caption = f"{left_out} more metrics are not shown." if left_out else ""
    return None if drawn is None else Chart(title="Loss and metrics", caption=caption, figure=drawn)


def _points_of(history: History, name: str) -> Sequence[Point[Any]]:
    """The points that have this metric, of evaluations if there are any."""
    measured = [point for point in history.evaluations if value_of(point, name) is not None]
    return measured or [point for point in history.points if value_of(point, name) is not None]


def phases(histories: Sequence[History]) -> Chart | None:
    """Where the time of a step goes, and how much longer the slowest rank works than the median."""
    areas = [Panel(f"{figure.prefix(histories, each)}ms per step", _areas(each, histories)) for each in histories]
    slowdowns = _measured(histories, slowdown, "%{y:.2f} × the median: rank %{text}")
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
    traces = []
    for session in dict.fromkeys(each.session for each in history.measurements):
        measured = [each for each in history.measurements if each.session == session]
        for name, color in PHASE_COLORS.items():
            traces.append(
                {
                    "name": name,
                    "legendgroup": name,
                    "showlegend": True,
                    "mode": "lines",
                    "stackgroup": f"{figure.escape(history.label)} {session}",
                    "line": {"width": 0.5, "color": color},
                    "fillcolor": color,
                    "x": [each.at / size for each in measured],
                    "y": [1000.0 * each.event.phases.get(name, 0.0) for each in measured],
                    "text": [f"step {each.event.step:,}" for each in measured],
                    "hovertemplate": f"{name} %{{y:,.1f}} ms, %{{text}}<extra></extra>",
                }
            )
    return traces


def gpus(histories: Sequence[History]) -> Chart | None:
    """Memory of the fullest GPU, and the mean utilization."""
    memory = _measured(histories, _memory_gib, "%{y:.2f} GiB")
    utilization = _measured(histories, _utilization_percent, "%{y:.0f} %")
    drawn = figure.time_panels(
        histories,
        Panel("peak memory (GiB)", memory, {"rangemode": "tozero"}),
        Panel("utilization (%)", utilization, {"range": [0, 100]}),
    )
    caption = "Memory: of the rank with the most. Utilization: mean of the ranks."
    return None if drawn is None else Chart(title="GPUs", caption=caption, figure=drawn)


def _memory_gib(event: PhasesMeasured) -> float | None:
    return max(event.memory_bytes) / 2**30 if event.memory_bytes else None


def _utilization_percent(event: PhasesMeasured) -> float | None:
    known = [share for share in event.utilization or () if share is not None]
    return 100 * fmean(known) if known else None


def _measured(histories: Sequence[History], value: Callable[[PhasesMeasured], float | None], hover: str) -> list[Trace]:
    """One line over time for each run that has measured this value."""
    size, _ = time_unit(histories)
    traces = []
    for index, history in enumerate(histories):
        line = figure.line(
            [each for each in history.measurements if value(each.event) is not None],
            x=lambda each: each.at / size,
            y=lambda each: value(each.event),
            text=lambda each: f"{each.event.slowest_rank} at step {each.event.step:,}",
        )
        traces.append({**figure.of_run(histories, index, hover), **line})
    return traces
