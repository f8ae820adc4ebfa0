"""Results as a Markdown table and as a plot."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

EVENTS = {
    "add": "a worker is added (2, then 3)",
    "kill": "a worker is killed (SIGKILL, 3 and then 3 again)",
    "drain": "a worker is drained (3, then 2)",
    "resize": "the run is resized (3, then 2)",
    "node": "a machine dies and its sockets close (3, then 2)",
    "silence": "a machine freezes with open sockets (3, then 2)",
}
OURS = "elastic_ddp"
_MIN_BAR_S = 0.01
"""Length of the shortest bar."""


def stalls(results: dict[str, Any], system: str, event: str) -> list[float]:
    return [
        figures["stall_s"] for figures in results["systems"][system]["events"].get(event, []) if figures["recovered"]
    ]


def ratio_to_ours(results: dict[str, Any], system: str, event: str) -> float | None:
    """Returns the ratio of the median stalls, or None if one was not measured."""
    if OURS not in results["systems"]:
        return None
    theirs, ours = stalls(results, system, event), stalls(results, OURS, event)
    if not theirs or not ours:
        return None
    return statistics.median(theirs) / max(_MIN_BAR_S, statistics.median(ours))


def spread(values: list[float], digits: int = 2) -> str:
    """Formats the median, the minimum and the maximum."""
    low, middle, high = (f"{value:.{digits}f}" for value in (min(values), statistics.median(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def markdown(results: dict[str, Any], titles: Mapping[str, str] = EVENTS) -> str:
    lines = []
    for event, title in titles.items():
        rows = [
            f"| {system} | {_row(results, system, event, facts['events'][event])} |"
            for system, facts in results["systems"].items()
            if facts["events"].get(event)
        ]
        if rows:
            columns = "recovered | stall, s | ratio to elastic_ddp | steps repeated | all workers train after, s | |"
            headings = f"| {title} | {columns}"
            lines += [headings, "|---|---|---|---|---|---|---|", *rows, ""]
    for system, facts in results["systems"].items():
        lines.append(f"- **{system}**. Not kept: {facts['not_kept']}. Settings: {facts['settings']}.")
    return "\n".join(lines) + "\n"


def _row(results: dict[str, Any], system: str, event: str, repeats: list[dict[str, Any]]) -> str:
    recovered = [figures for figures in repeats if figures["recovered"]]
    cells = [f"{len(recovered)} of {len(repeats)}"]
    if recovered:
        ratio = ratio_to_ours(results, system, event)
        cells += [
            spread(stalls(results, system, event)),
            "" if system == OURS or ratio is None else f"{ratio:.1f}",
            spread([figures["steps_done_twice"] for figures in recovered], 0),
            spread([figures["all_at_work_after_s"] for figures in recovered], 1),
        ]
    else:
        cells += ["never", "", "", ""]
    failed = dict.fromkeys(figures["outcome"] for figures in repeats if not figures["recovered"])
    remark = results["systems"][system]["remarks"].get(event)
    return " | ".join([*cells, "; ".join([*failed, *([remark] if remark else [])])])


def plot(results: dict[str, Any], folder: Path) -> None:
    """Draws `elasticity.png` and `.svg`: the stalls by event and system, with the ratio to elastic_ddp."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    systems = list(results["systems"])
    events = [event for event in EVENTS if any(facts["events"].get(event) for facts in results["systems"].values())]
    figure, axes = pyplot.subplots(
        len(events), 1, sharex=True, squeeze=False, figsize=(9, (0.32 * len(systems) + 0.7) * len(events) + 0.5)
    )
    for axis, event in zip(axes[:, 0], events, strict=True):
        axis.set_title(EVENTS[event], loc="left", fontsize=10)
        for row, system in enumerate(systems):
            _bar(axis, row, results, system, event)
        axis.set_yticks(range(len(systems)), systems, fontsize=9)
        axis.set_ylim(len(systems) - 0.4, -0.6)
        axis.set_xscale("log")
        axis.set_xlim(_MIN_BAR_S, 2000)
        axis.grid(axis="x", alpha=0.3)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("stall, s (median, min to max; log scale); steps repeated; ratio to elastic_ddp")
    figure.tight_layout()
    for kind in ("png", "svg"):
        figure.savefig(folder / f"elasticity.{kind}", dpi=150)
    pyplot.close(figure)


def _bar(axis: Any, row: int, results: dict[str, Any], system: str, event: str) -> None:
    repeats = results["systems"][system]["events"].get(event, [])
    values = [max(_MIN_BAR_S, value) for value in stalls(results, system, event)]
    failures = sum(not figures["recovered"] for figures in repeats)
    if not values:
        label = f"never, in {failures} of {failures}" if failures else "not measured"
        axis.text(_MIN_BAR_S * 1.1, row, label, va="center", fontsize=8, style="italic")
        return
    middle = statistics.median(values)
    color = "tab:green" if system == OURS else "tab:gray"
    axis.barh(row, middle, color=color, xerr=[[middle - min(values)], [max(values) - middle]], error_kw={"lw": 1})
    twice = statistics.median(figures["steps_done_twice"] for figures in repeats if figures["recovered"])
    ratio = ratio_to_ours(results, system, event)
    label = f" {middle:.2f} s, {twice:.0f} steps repeated"
    if system != OURS and ratio is not None:
        label += f", {ratio:.1f} ×"
    if failures:
        label += f"; {failures} of {len(repeats)} never"
    axis.text(max(values) * 1.05, row, label, va="center", fontsize=8)
