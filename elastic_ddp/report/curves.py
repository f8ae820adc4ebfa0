"""Charts of what ranks measured: loss and metrics, phases of a step, GPUs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from elastic_ddp.report.figure import (
    RUN_COLORS,
    Chart,
    broken,
    escape,
    hover_end,
    of_run,
    panels,
    thin,
    time_panels,
    time_unit,
    y_axis,
)
from elastic_ddp.report.history import History, Point

PHASE_COLORS = ("#e08214", "#3b78c2", "#7fb2e5", "#d4a72c", "#2a9d6e", "#9a9a9a", "#a05cc4", "#c2476b")


def metrics(histories: Sequence[History]) -> Chart | None:
    """The training loss and each metric, over steps."""
    points = [point for history in histories for point in history.points]
    found = ["loss"] if any(point.loss is not None for point in points) else []
    for history in histories:
        found += [name for point in (*history.evaluations, *history.points) for name in point.metrics]
    names = list(dict.fromkeys(found))
    data: list[dict[str, Any]] = []
    for row, name in enumerate(names):
        for index, history in enumerate(histories):

            def value(point: Point, name: str = name) -> float | None:
                return point.loss if name == "loss" else point.metrics.get(name)

            measured = [point for point in history.evaluations if value(point) is not None]
            points = measured or [point for point in history.points if value(point) is not None]
            line = broken(thin(points, value))
            data.append(
                {
                    **of_run(histories, index),
                    "showlegend": row == 0 and len(histories) > 1,
                    "mode": "lines+markers" if len(line) < 60 else "lines",
                    "marker": {"size": 5, "color": RUN_COLORS[index % len(RUN_COLORS)]},
                    "yaxis": y_axis(row),
                    "x": [None if point is None else point.step for point in line],
                    "y": [None if point is None else value(point) for point in line],
                    "hovertemplate": f"{escape(name)} %{{y:.5g}} at step %{{x:,}}{hover_end(histories)}",
                }
            )
    if not names:
        return None
    return Chart(title="Loss and metrics", caption="", data=data, layout=panels(names, "step"))


def phases(histories: Sequence[History]) -> Chart | None:
    """Where the time of a step goes, and how much longer the slowest rank works than the median."""
    size, _ = time_unit(histories)
    with_phases = [history for history in histories if history.measurements]
    names = list(
        dict.fromkeys(name for each in with_phases for point in each.measurements for name in point.event.phases)
    )
    if not names:
        return None
    data: list[dict[str, Any]] = []
    titles: list[str] = []
    for history in with_phases:
        points = history.measurements
        for index, name in enumerate(names):
            data.append(
                {
                    "name": escape(name.replace("_", " ")),
                    "legendgroup": escape(name),
                    "showlegend": history is with_phases[0],
                    "mode": "lines",
                    "stackgroup": f"run {len(titles)}",
                    "line": {"width": 0.5, "color": PHASE_COLORS[index % len(PHASE_COLORS)]},
                    "yaxis": y_axis(len(titles)),
                    "x": [point.at / size for point in points],
                    "y": [1000 * point.event.phases.get(name, 0.0) for point in points],
                    "text": [f"step {point.event.step:,}" for point in points],
                    "hovertemplate": f"{escape(name.replace('_', ' '))} %{{y:,.1f}} ms, %{{text}}<extra></extra>",
                }
            )
        titles.append("ms per step" if len(histories) == 1 else f"{history.label}: ms per step")
    ratios = [_straggling(history, index, histories, size) for index, history in enumerate(histories)]
    if any(trace["x"] for trace in ratios):
        data += [{**trace, "yaxis": y_axis(len(titles))} for trace in ratios]
        titles.append("work of the slowest rank, of the median")
    caption = "Averages over ranks. Work is all but communication; if it takes one rank longer, the others wait for it."
    return Chart(title="Phases of a step", caption=caption, data=data, layout=time_panels(titles, histories))


def _straggling(history: History, index: int, histories: Sequence[History], size: float) -> dict[str, Any]:
    points = [point for point in history.measurements if len(point.event.work_s) > 1 and min(point.event.work_s) > 0]
    slowest = [max(range(len(point.event.work_s)), key=point.event.work_s.__getitem__) for point in points]
    ratios = [max(point.event.work_s) / statistics.median(point.event.work_s) for point in points]
    return {
        **of_run(histories, index),
        "showlegend": False,
        "mode": "lines",
        "x": [point.at / size for point in points],
        "y": ratios,
        "text": [f"rank {rank} at step {point.event.step:,}" for rank, point in zip(slowest, points, strict=True)],
        "hovertemplate": "%{y:.2f} × the median: %{text}" + hover_end(histories),
    }


def gpus(histories: Sequence[History]) -> Chart | None:
    """Memory of the fullest GPU, and the mean utilization."""
    size, _ = time_unit(histories)
    data: list[dict[str, Any]] = []
    titles: list[str] = []
    for title, value, hover in (
        ("peak memory (GiB)", _memory, "%{y:.2f} GiB"),
        ("utilization (%)", _utilization, "%{y:.0f} %"),
    ):
        traces = []
        for index, history in enumerate(histories):
            known = [(point, y) for point in history.measurements if (y := value(point.event)) is not None]
            trace = {**of_run(histories, index), "mode": "lines", "yaxis": y_axis(len(titles))}
            trace |= {"x": [point.at / size for point, _ in known], "y": [y for _, y in known]}
            trace |= {"showlegend": not titles and len(histories) > 1, "hovertemplate": hover + hover_end(histories)}
            traces += [trace] if known else []
        if traces:
            titles.append(title)
            data += traces
    if not data:
        return None
    layout = time_panels(titles, histories)
    for row, title in enumerate(titles):
        layout[y_axis(row).replace("y", "yaxis")] |= {"range": [0, 100]} if "%" in title else {"rangemode": "tozero"}
    return Chart(
        title="GPUs",
        caption="Memory: of the rank with the most. Utilization: mean of the ranks.",
        data=data,
        layout=layout,
    )


def _memory(event: Any) -> float | None:
    return max(event.memory_bytes) / 2**30 if event.memory_bytes else None


def _utilization(event: Any) -> float | None:
    known = [share for share in event.utilization or () if share is not None]
    return 100 * statistics.fmean(known) if known else None
