"""The page of a report: one HTML file with Plotly's JavaScript in it, which makes no request."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from plotly.offline import get_plotlyjs

from elastic_ddp.config.settings import flatten
from elastic_ddp.errors import printable
from elastic_ddp.formatting import duration, format_time, plural
from elastic_ddp.report.costs import commits, stalls, where_the_time_went
from elastic_ddp.report.curves import gpus, metrics, phases
from elastic_ddp.report.figure import Chart, color_of
from elastic_ddp.report.history import History
from elastic_ddp.report.timeline import timeline
from elastic_ddp.telemetry.description import describe_outcome, describe_status, describe_steps, workers_gone

_MAX_MARKS, _MANY_MARKS = 200, 30
"""Events in the table; and from how many on it is folded."""
_MAX_NODES, _MAX_METRICS = 8, 20


def render_page(histories: Sequence[History]) -> str:
    """Returns the HTML of a report on one or several runs."""
    figures = charts(histories)
    # Plotly's JSON has no "<", so no tag and no comment can begin in it.
    drawn = ",".join(chart.figure.to_json() for chart in figures)
    scripts = [get_plotlyjs().replace("</script", "<\\/script"), f"const CHARTS = [{drawn}];", _asset("page.js")]
    hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts)
    # The browser runs these scripts only, and loads nothing: text of a ledger cannot do either.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src {hashes}"
    title = " and ".join(history.label for history in histories[:3])
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_text(policy)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{_text(title)}</title><style>{_asset('page.css')}</style></head><body><main>",
            _header(histories),
            _summary(histories),
            *(_section(number, chart) for number, chart in enumerate(figures)),
            _scaling(histories),
            _events(histories),
            _configuration(histories),
            "</main>",
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>",
        ]
    )


def charts(histories: Sequence[History]) -> list[Chart]:
    """Returns the charts that the ledgers have data for, in the order of the page."""
    first = (timeline, metrics, phases, where_the_time_went)
    made = [*(make(histories) for make in first), *stalls(histories), commits(histories), gpus(histories)]
    return [chart for chart in made if chart is not None]


def _asset(name: str) -> str:
    return files("elastic_ddp.report").joinpath(name).read_text()


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _header(histories: Sequence[History]) -> str:
    lines = []
    for index, history in enumerate(histories):
        dot = f'<span class="dot" style="background:{color_of(index)}"></span>'
        level = "h1" if len(histories) == 1 else "h2"
        lines.append(f"<{level}>{dot if len(histories) > 1 else ''}{_text(history.label)}</{level}>")
        lines.append(f'<p class="headline">{_text(headline(history.summary))}</p>')
        lines.append(f"<p>{_text(_when_and_where(history))}</p>" if history.began else "")
        if history.summary["error"] is not None:
            lines.append(f"<pre>{_text(history.summary['error'])}</pre>")
    heading = "" if len(histories) == 1 else f"<h1>{len(histories)} runs</h1>"
    return f"<header>{heading}{''.join(lines)}</header>"


def headline(summary: Mapping[str, Any]) -> str:
    """Returns what happened to a run, in one sentence."""
    sizes = [row["world_size"] for row in summary["generations"]]
    outcome = describe_outcome(summary).capitalize()
    parts = [f"{outcome} after {duration(summary['wall_seconds'])}{_on_workers(sizes)}"]
    parts.append(workers_gone(summary) or "no worker failed or drained")
    resumes = summary["sessions"] - 1
    if resumes > 0:
        parts.append("resumed once" if resumes == 1 else f"resumed {resumes:,} times")
    share = summary["goodput"]["goodput"]
    if share is not None:
        parts.append(f"goodput {share:.1%}")
    return f"{'; '.join(parts)}."


def _on_workers(sizes: list[int]) -> str:
    if not sizes:
        return ""
    low = min(sizes)
    high = max(sizes)
    return f" on {plural(high, 'worker')}" if low == high else f" on {low:,} to {plural(high, 'worker')}"


def _when_and_where(history: History) -> str:
    """Start, end and nodes of a run."""
    began, ended = (format_time(time, "%Y-%m-%d %H:%M:%S %Z") for time in (history.began, history.ended))
    nodes = ", ".join(history.nodes[:_MAX_NODES]) + (", …" if len(history.nodes) > _MAX_NODES else "")
    where = f"; {plural(len(history.nodes), 'node')}: {nodes}" if nodes else ""
    return f"{began} to {ended}{where}"


def _summary(histories: Sequence[History]) -> str:
    """The outcome of each run, with a column for each: a phone shows two."""
    metrics = list(dict.fromkeys(name for history in histories for name in history.summary["metrics"] or {}))
    columns = [_outcome(history.summary, metrics[:_MAX_METRICS]) for history in histories]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    headings = ["", *(history.label for history in histories)]
    table = _table(headings if len(histories) > 1 else [], rows, kind="summary")
    return f'<div class="wide">{table}</div>'


def _outcome(summary: Mapping[str, Any], metrics: Sequence[str]) -> dict[str, Any]:
    """The rows of the summary for one run."""
    values = summary["metrics"] or {}
    share = summary["goodput"]["goodput"]
    return {
        "status": describe_status(summary),
        "steps": describe_steps(summary),
        "final loss": _number(summary["loss"]["last"]),
        **{name: _number(values.get(name)) for name in metrics},
        "samples/s": _number(summary["samples_per_second"]),
        "time": duration(summary["wall_seconds"]),
        "goodput": None if share is None else f"{share:.1%}",
        "commits": f"{summary['commits']:,}",
        "weights (SHA-256)": (summary["weights_sha256"] or "")[:12],
    }


def _number(value: Any) -> str:
    return f"{value:,.5g}" if isinstance(value, int | float) else str(value or "")


def _section(number: int, chart: Chart) -> str:
    caption = f"<p>{_text(chart.caption)}</p>" if chart.caption else ""
    place = f'<div class="chart" id="chart-{number}" style="height:{chart.figure.layout.height}px"></div>'
    return f"<section><h2>{_text(chart.title)}</h2>{caption}{place}</section>"


def _scaling(histories: Sequence[History]) -> str:
    parts = []
    for history in histories:
        cells = [
            [
                row["world_size"],
                f"{row['samples_per_s']:,.1f}",
                f"{row['samples_per_s_per_worker']:,.1f}",
                f"{row['efficiency']:.0%}",
            ]
            for row in history.summary["scaling"]
        ]
        if len(cells) > 1:
            table = _table(["workers", "samples/s", "per worker", "efficiency"], cells, kind="numbers")
            parts.append(_titled(history, histories, table))
    text = "Without start-up and repeated steps. Efficiency: samples/s per worker, relative to the fewest workers."
    return f"<section><h2>Scaling</h2><p>{text}</p>{''.join(parts)}</section>" if parts else ""


def _events(histories: Sequence[History]) -> str:
    zones = list(dict.fromkeys(format_time(history.began, "%Z") for history in histories if history.began))
    parts = [_titled(history, histories, _events_of(history, "/".join(zones))) for history in histories]
    return f"<section><h2>Events</h2>{''.join(parts)}</section>"


def _events_of(history: History, zone: str) -> str:
    if not history.marks:
        return "<p>No worker joined, failed or left.</p>"
    is_one_day = format_time(history.began, "%j") == format_time(history.ended, "%j")
    form = "%H:%M:%S" if is_one_day else "%m-%d %H:%M:%S"
    rows = [
        [format_time(mark.time, form), duration(mark.at), "" if mark.step is None else f"{mark.step:,}", mark.text]
        for mark in history.marks[:_MAX_MARKS]
    ]
    more = len(history.marks) - len(rows)
    table = _table([f"clock ({zone})", "in the run", "step", "event"], rows, kind="events")
    table += f"<p>and {more:,} more</p>" if more else ""
    if len(rows) > _MANY_MARKS:
        table = f"<details><summary>{len(history.marks):,} events</summary>{table}</details>"
    return table


def _configuration(histories: Sequence[History]) -> str:
    """The settings and versions of one run; of several, those that differ, and the others below."""
    settings = [
        flatten(history.config) | {f"version of {name}": value for name, value in history.summary["versions"].items()}
        for history in histories
    ]
    given = (name for each in settings for name, value in each.items() if value is not None)
    names = [name for name in dict.fromkeys(given) if name != "name"]
    differing = [name for name in names if len({str(each.get(name)) for each in settings}) > 1]
    equal = [[name, settings[0].get(name, "")] for name in names if name not in differing]
    parts = ["<section><h2>Configuration and versions</h2>"]
    if differing:
        rows = [[name, *(each.get(name, "") for each in settings)] for name in differing]
        parts.append(_table(["setting", *(history.label for history in histories)], rows, kind="settings"))
    elif len(histories) > 1:
        parts.append("<p>All settings and versions are equal.</p>")
    summary = "equal in all runs" if len(histories) > 1 else "all settings and versions"
    table = _table(["setting", "value"], equal, kind="settings")
    parts.append(f"<details><summary>{summary}</summary>{table}</details></section>")
    return "".join(parts)


def _text(value: Any) -> str:
    return "" if value is None else html.escape(printable(str(value)))


def _titled(history: History, histories: Sequence[History], table: str) -> str:
    return (f"<h3>{_text(history.label)}</h3>" if len(histories) > 1 else "") + table


def _table(headings: Sequence[str], rows: Iterable[Sequence[Any]], *, kind: str) -> str:
    def line(cells: Sequence[Any], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{_text(cell)}</{tag}>" for cell in cells) + "</tr>"

    lines = "".join(line(row, "td") for row in rows)
    return f'<table class="{kind}"><thead>{line(headings, "th")}</thead><tbody>{lines}</tbody></table>'
