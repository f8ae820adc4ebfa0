"""The figures of the parts, and what is printed of them."""

from __future__ import annotations

import statistics
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from gpu_parts.train import Setting

TARGETS = {"native": 0.98, "canonical": 0.95}
MOST_MEMORY = {"native": 1.05}
MIB = 1 << 20


def summarize(turns: dict[str, list[dict[str, Any]]], setting: Setting) -> dict[str, Any]:
    """Returns the figures of each side from its turns, and those next to the plain side."""
    milliseconds = {
        label: [1000 * turn["seconds"] / len(turn["each_s"]) for turn in taken] for label, taken in turns.items()
    }
    figures: dict[str, Any] = {}
    for label, taken in turns.items():
        if not taken:
            continue
        step_ms = statistics.median(milliseconds[label])
        peaks = [turn["peak_bytes"] for turn in taken if turn["peak_bytes"] is not None]
        figures[label] = {
            "step_ms": step_ms,
            "step_ms_by_round": milliseconds[label],
            "steps_per_turn": len(taken[0]["each_s"]),
            **host_figures(taken),
            "bytes_per_s": 1000 * setting.bytes_per_step / step_ms,
            "peak_bytes": max(peaks, default=None),
            "reserved_bytes": taken[-1]["reserved_bytes"],
        }
        for other in ("plain", "plain, compiled"):
            pairs = [*zip(milliseconds.get(other, []), milliseconds[label], strict=False)]
            if pairs and (other == "plain" or "compiled" in label):
                figures[label][f"to {other}"] = statistics.median(theirs / own for theirs, own in pairs)
        if peaks and (plain := figures.get("plain", {}).get("peak_bytes")):
            figures[label]["peak_to_plain"] = max(peaks) / plain
            figures[label]["copies_beyond_plain"] = (max(peaks) - plain) / setting.parameter_bytes
    return figures


def host_figures(taken: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the median and the 90th percentile of single steps, and the CPU milliseconds of a step by thread."""
    each = sorted(1000 * step_s for turn in taken for step_s in turn["each_s"])
    threads: dict[str, float] = {}
    for turn in taken:
        for name, seconds in turn["cpu_s"].items():
            threads[name] = threads.get(name, 0.0) + 1000 * seconds / len(each)
    busiest = sorted(threads.items(), key=lambda item: -item[1])
    return {
        "single_step_ms": each[len(each) // 2],
        "single_step_ms_90": each[len(each) * 9 // 10],
        "cpu_ms_by_thread": {name: value for name, value in busiest if value > 0.01},
    }


# Tables.


def print_steps(title: str, figures: dict[str, Any]) -> None:
    table = Table(title=title, title_justify="left", caption_justify="left", box=None)
    table.add_column("", no_wrap=True)
    for heading in ("ms/step", "of plain", "of compiled", "target", "kB/s", "peak MiB", "of plain", "target", "copies"):
        table.add_column(heading, justify="right", no_wrap=True)
    for label, side in figures.items():
        ratios = [f"{side[key]:.3f}" if key in side else "" for key in ("to plain", "to plain, compiled")]
        peak = side["peak_bytes"]
        table.add_row(
            label,
            f"{side['step_ms']:.2f}",
            *ratios,
            f"{TARGETS[label]}" if label in TARGETS else "",
            f"{side['bytes_per_s'] / 1000:.1f}",
            f"{peak / MIB:.0f}" if peak else "",
            f"{side['peak_to_plain']:.3f}" if "peak_to_plain" in side else "",
            f"{MOST_MEMORY[label]}" if label in MOST_MEMORY else "",
            f"{side['copies_beyond_plain']:+.2f}" if "copies_beyond_plain" in side else "",
        )
    table.caption = "copies: peak memory beyond that of plain, in copies of the gradients"
    show(table)
    for label, side in figures.items():
        threads = ", ".join(f"{name} {value:.2f}" for name, value in [*side["cpu_ms_by_thread"].items()][:6])
        print(
            f"    {label}: single steps {side['single_step_ms']:.2f} ms, of ten one above "
            f"{side['single_step_ms_90']:.2f}; CPU ms a step by thread: {threads}",
            flush=True,
        )


def print_gaps(title: str, figures: dict[str, Any], untraced_ms: float | None) -> None:
    idle = "no device in this trace"
    if figures["idle_ms"] is not None:
        share = 100 * figures["idle_share"]
        idle = f"the device idles {figures['idle_ms']:.3f} ms of it, {share:.1f} %; {figures['kernels']:.0f} kernels"
    print(f"{title}: a traced step takes {figures['step_ms']:.2f} ms, {idle}", flush=True)
    if figures["busy_ms"] is not None and untraced_ms is not None:
        rest_ms = untraced_ms - figures["busy_ms"]
        print(f"    without the trace it takes {untraced_ms:.2f} ms, so the device idles {rest_ms:.3f} ms of that")
    for name, milliseconds in [*figures["kernels_ms"].items()][:6]:
        print(f"    {milliseconds:.3f} ms a step in {name[:110]}")
    for wait in figures["waits"][:6]:
        print(
            f"    {wait['call']} ({wait['thread']} thread): {wait['per_step']:.2f} a step, {wait['ms']:.3f} ms; the "
            f"device then idles {wait['idle_ms']:.3f} ms"
        )
    for wait in figures["waits_with_places"][:8]:
        print(f"    with stacks: {wait['call']} {wait['per_step']:.2f} a step, {wait['ms']:.3f} ms at {wait['place']}")
    for gap in figures["idle_places"][:6]:
        print(f"    with stacks: idle {gap['idle_ms']:.3f} ms in {gap['gaps']:.1f} gaps at {gap['place']}")


def print_save(title: str, saved: dict[str, Any], restored: dict[str, Any]) -> None:
    alone, held = statistics.median(saved["alone_s"]), statistics.median(saved["held_s"])
    beside = statistics.median(saved["beside_s"]) if saved["beside_s"] else alone
    read, load = statistics.median(restored["read_s"]), statistics.median(restored["load_s"])
    print(
        f"{title}: a commit of {saved['num_bytes'] / MIB:.0f} MiB holds up its step for {1000 * (held - alone):.1f} ms "
        f"({1000 * held:.1f} ms; {1000 * alone:.1f} ms without), steps beside the writing take {1000 * beside:.1f} ms, "
        f"the writing {1000 * statistics.median(saved['write_s']):.0f} ms. A restore reads for {1000 * read:.0f} ms "
        f"from the page cache, and loads for {1000 * load:.0f} ms.",
        flush=True,
    )


def show(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    sys.stdout.flush()
