"""Charts of what the run's time was spent on: goodput, stalls, commits."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from rich.filesize import decimal

from elastic_ddp.formatting import duration, first_line, plural
from elastic_ddp.report import figure
from elastic_ddp.report.figure import Chart, Panel, Trace
from elastic_ddp.report.history import History, time_unit
from elastic_ddp.report.marks import FAILED_COLOR
from elastic_ddp.telemetry.goodput import PARTS, stall_parts

_STALL_PARTS = {
    "detection_s": ("detection", FAILED_COLOR),
    "rendezvous_s": ("rendezvous", "#3b78c2"),
    "hand_over_s": ("hand-over", "#e08214"),
    "first_step_s": ("first step, beyond a usual one", "#8e6bbf"),
}
"""Name and color of each part of a stall."""
_GOODPUT = """useful: steps, evaluations and the training function's own code between them.
redone: steps that a failure undid or interrupted, which were done again.
detection: from a failure until the other workers detect it.
rendezvous: until the workers have formed a generation and its process group.
hand-over: until all workers have the state and training starts.
checkpoint: training waited for a commit. waiting: too few workers.
start-up: until the first generation of a session. shut-down: after the last one."""
_MAX_STALLS = 30


def where_the_time_went(histories: Sequence[History]) -> Chart | None:
    """The seconds of each part of the goodput."""
    seconds = [history.summary["goodput"] for history in histories]
    parts = [part for part in PARTS if any(round(each[part], 1) for each in seconds)]
    if not parts or all(each["goodput"] is None for each in seconds):
        return None
    traces = []
    for index, each in enumerate(seconds):
        total = each["total"] or 1.0
        shares = [100 * each[part] / total for part in parts]
        words = [f"{share:.1f} % · {duration(each[part])}" for share, part in zip(shares, parts, strict=True)]
        traces.append(
            {
                **figure.of_run(histories, index, "%{y}: %{text}"),
                "x": shares,
                "y": [part.replace("_", "-") for part in parts],
                "text": words,
                "textposition": "outside",
            }
        )
    drawn = figure.bars(traces, len(parts) * len(histories), "share of the time (%)")
    # The texts of long bars need the room beyond 100 %.
    drawn.update_xaxes(range=[0, 180], tickvals=[0, 50, 100])
    return Chart(title="Goodput: where the time went", caption=_GOODPUT, figure=drawn)


def stalls(histories: Sequence[History]) -> list[Chart]:
    """How long each change of the workers stopped training: a chart for each run."""
    charts = [(history, _stalls(history)) for history in histories]
    return [
        chart if len(histories) == 1 else replace(chart, title=f"{chart.title} of {history.label}")
        for history, chart in charts
        if chart is not None
    ]


def _stalls(history: History) -> Chart | None:
    phases = history.summary["phases"]
    found = [
        (row, stall_parts(row, phases))
        for before, row in pairwise(history.summary["generations"])
        if row["session"] == before["session"] and row["rendezvous_s"] is not None
    ]
    longest = sorted(range(len(found)), key=lambda index: -sum(found[index][1].values()))[:_MAX_STALLS]
    shown = [found[index] for index in sorted(longest)]
    if not shown:
        return None
    traces = [
        {
            "name": name,
            "marker": {"color": color},
            "y": list(range(len(shown))),
            "x": [costs[part] for _, costs in shown],
            "customdata": [
                figure.escape(f"{row['reason']}: {plural(row['world_size'], 'worker')} now") for row, _ in shown
            ],
            "hovertemplate": f"%{{customdata}}<br>{name} %{{x:.2f}} s<extra></extra>",
        }
        for part, (name, color) in _STALL_PARTS.items()
    ]
    ticks = [figure.escape(f"step {row['first_step']:,}, {_short(row['reason'])}") for row, _ in shown]
    drawn = figure.bars(traces, len(shown), "training stopped for (s)")
    drawn.update_layout(barmode="stack")
    drawn.update_xaxes(nticks=6, tickangle=0)
    drawn.update_yaxes(tickvals=list(range(len(shown))), ticktext=ticks)
    median = statistics.median(sum(costs.values()) for _, costs in found)
    caption = f"{plural(len(found), 'change')} of the workers, median {duration(median)} until training continued."
    caption += f" A usual step takes {duration(sum(phases.values()))}." if phases else ""
    caption += f" The {_MAX_STALLS} longest are shown." if len(found) > len(shown) else ""
    return Chart(title="Stalls", caption=caption, figure=drawn)


def _short(reason: str) -> str:
    """Returns "failed" for "worker failed": a phone has little room beside the bars."""
    return reason.removeprefix("workers ").removeprefix("worker ")


def commits(histories: Sequence[History]) -> Chart | None:
    """How long each commit took to become durable."""
    size, _ = time_unit(histories)
    traces: list[Trace] = []
    captions = []
    for index, history in enumerate(histories):
        done = [(each, decimal(each.event.num_bytes)) for each in history.commits]
        failed = [(each, first_line(each.event.error)) for each in history.failed_commits]
        for saves, symbol, color in ((done, "circle", figure.color_of(index)), (failed, "x", FAILED_COLOR)):
            traces.append(
                {
                    **figure.of_run(histories, index, "%{text}<br>%{y:.2f} s"),
                    "mode": "markers",
                    "marker": {"symbol": symbol, "size": 9, "color": color},
                    "x": [each.at / size for each, _ in saves],
                    "y": [each.event.seconds for each, _ in saves],
                    "text": [f"step {each.event.step:,}, {figure.escape(note)}" for each, note in saves],
                }
            )
        if done:
            waited_s = history.summary["goodput"]["checkpoint"]
            total_s = history.summary["goodput"]["total"] or 1.0
            typical = decimal(int(statistics.median(each.event.num_bytes for each in history.commits)))
            median_s = statistics.median(each.event.seconds for each in history.commits)
            captions.append(
                figure.prefix(histories, history)
                + f"{plural(len(done), 'commit')} of {typical}, each durable in {duration(median_s)} (median). "
                + f"Training waited {duration(waited_s)} for them, {waited_s / total_s:.1%} of the time."
            )
    drawn = figure.time_panels(histories, Panel("seconds until durable", traces, {"rangemode": "tozero"}))
    return None if drawn is None else Chart(title="Commits", caption="\n".join(captions), figure=drawn)
