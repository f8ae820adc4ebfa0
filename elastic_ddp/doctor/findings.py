"""What a check reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from elastic_ddp.errors import shorten

Verdict = Literal["ok", "warn", "fail"]
ALL = "all"
"""In place of a node's name: the finding is about all nodes."""


@dataclass(frozen=True)
class Finding:
    """One row of the report."""

    check: str
    verdict: Verdict
    text: str
    """What was found; of a problem also the rule, and what to change."""
    node: str = ALL


def ok_unless(problems: Sequence[Finding], check: str, text: str) -> list[Finding]:
    """Returns the problems, or one finding with this text if there are none."""
    return [*problems] or [Finding(check, "ok", text)]


def differing(values: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Returns the value that most nodes have, and the values of the other nodes. `values` is not empty."""
    counts = Counter(values.values())
    common = max(counts, key=lambda value: counts[value])
    return common, {node: value for node, value in values.items() if value != common}


def slow(speeds: Mapping[str, float], below: float) -> dict[str, float]:
    """Returns the ratio to the upper quartile, for each speed that is below this part of it.

    Not to the median: where one of three nodes has slow links, two of three links are slow.
    """
    if not speeds:
        return {}
    quartile = sorted(speeds.values())[len(speeds) * 3 // 4]
    return {name: speed / quartile for name, speed in speeds.items() if speed < below * quartile}


def names(nodes: Iterable[str]) -> str:
    return shorten([*nodes], 5)
