"""The charts of a report, in the order of the page."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_ddp.report.costs import commits, stalls, where_the_time_went
from elastic_ddp.report.curves import gpus, metrics, phases
from elastic_ddp.report.figure import Chart
from elastic_ddp.report.history import History
from elastic_ddp.report.timeline import timeline


def charts(histories: Sequence[History]) -> list[Chart]:
    """Returns the charts that the ledgers have data for."""
    first = (timeline, metrics, phases, where_the_time_went)
    made = [*(make(histories) for make in first), *stalls(histories), commits(histories), gpus(histories)]
    return [chart for chart in made if chart is not None]
