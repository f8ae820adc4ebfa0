"""The results of all parts as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from peers import report

from fsdp_parts.memory import TARGET
from fsdp_parts.stalls import TITLES, rows_of


def markdown(results: dict[str, Any]) -> str:
    makers: dict[str, Callable[[Any], str]] = {"memory": memory, "stalls": stalls, "cost": cost}
    sections = []
    for part, make in makers.items():
        if part in results:
            parameters = results[part]["parameters"] / 1e6
            sections.append(f"## {part}, {parameters:g} M parameters\n\n{make(results[part]['figures'])}")
    return "\n".join(sections)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def memory(figures: list[dict[str, Any]]) -> str:
    """The target is met if measured and expected differ by at most `TARGET`."""
    rows = []
    for setting in figures:
        mirror = "on" if setting["mirror"] else "off"
        for each in setting["points"]:
            ratio = each["measured"] / each["expected"]
            sizes = [
                f"{each[side] / 2**20:.1f} ({each[side] / setting['shard']:.2f})" for side in ("measured", "expected")
            ]
            met = "yes" if abs(ratio - 1) <= TARGET else "missed"
            rows.append([str(setting["world_size"]), mirror, each["point"], *sizes, f"{ratio:.3f}", met])
    headings = ["ranks", "mirrors", "live tensors", "measured, MiB (shards of parameters)", "formula", "ratio"]
    return table([*headings, f"within {100 * TARGET:g} %"], rows)


def stalls(figures: dict[str, Any]) -> str:
    summary = table(["stall, s", *TITLES.values()], rows_of(figures))
    return f"{summary}\n{report.markdown(figures, TITLES)}"


def cost(figures: dict[str, Any]) -> str:
    rows = [
        [f"mirrors {name}", *(f"{1000 * figures[name][key]:.1f}" for key in ("step_s", "vote_s", "vote_and_peer_s"))]
        for name in ("on", "off")
    ]
    ratios = report.spread(figures["ratios_by_turn"])
    headings = ["ms per step", "step", "the vote", "the vote, and the wait for the peer to arrive"]
    return f"{table(headings, rows)}\nOn, of off: {figures['ratio']:.3f}; by turn: {ratios}.\n"
