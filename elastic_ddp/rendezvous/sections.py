"""Finds ranks that wait for each other at different places of the program. No Ray, no clock.

All ranks begin the same collectives in the same order. A rank numbers those that it begins in a generation, and knows
in which section of the program it begins each. Messages between two ranks have no numbers. If two ranks begin
collectives of one number in different sections, such as an evaluation and the reduction of a step, the ranks wait for
each other forever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from elastic_ddp.errors import TrainFunctionError

_SAME_CALLS = (
    "Make the same calls in the same order on every rank: let step.index decide, never run.rank, and leave the loop at "
    "the same step."
)


class Section(NamedTuple):
    """A section of the program on one rank, and the collectives that the rank has begun in it."""

    generation: int = 0
    """0 outside of generations."""
    name: str = ""
    first: int = 0
    """Number of collectives begun in the generation before this section."""
    last: int = 0
    """Number of collectives begun in the generation so far."""
    is_users: bool = False
    """Whether collectives in it are those of the training function."""


class RankReport(NamedTuple):
    """Where a rank is."""

    section: Section
    where: str
    """Place in the user's code."""


def differ(one: Section, other: Section) -> bool:
    """Whether ranks have begun a collective of the same number in these two sections, which are not the same."""
    return (
        one.generation == other.generation > 0
        and one.name != other.name
        and max(one.first, other.first) < min(one.last, other.last)
    )


def find_mismatch(
    reports: Mapping[int, RankReport], world_size: int, num_micro_batches: int
) -> TrainFunctionError | None:
    """Returns the error of ranks that wait for each other at different places; None if there are none.

    Ranks at the same place are compared by their numbers of collectives, once all have begun one of the same number: a
    report may be from an earlier section of the same name.
    """
    sections = {report.section for report in reports.values()}
    if not any(differ(one, other) for one in sections for other in sections):
        numbers = {rank: report.section.first for rank, report in sorted(reports.items())}
        has_begun = max(numbers.values(), default=0) < min((section.last for section in sections), default=0)
        if len({*numbers.values()}) > 1 and has_begun and len({section[:2] for section in sections}) == 1:
            return TrainFunctionError(
                f"ranks wait for each other in {next(iter(sections)).name}: they have run different numbers of "
                f"collectives before it, by rank: {numbers}. {_SAME_CALLS}"
            )
        return None
    ranks: dict[str, list[int]] = {}
    for rank, report in sorted(reports.items()):
        ranks.setdefault(report.section.name, []).append(rank)
    places = []
    for name, at in ranks.items():
        where = next((f", at {reports[rank].where}" for rank in at if reports[rank].where), "")
        listed = ", ".join(map(str, at[:8])) + (", …" if len(at) > 8 else "")
        places.append(f"rank{'s' if len(at) > 1 else ''} {listed} in {name}{where}")
    in_block = any(section.is_users and section.name.startswith("step ") for section in sections)
    if in_block and num_micro_batches % world_size:
        advice = (
            f"{world_size} workers have different numbers of the {num_micro_batches} micro-batches of a step. Set "
            "even_micro_batches = true if micro-batches run collectives of their own."
        )
    else:
        advice = _SAME_CALLS
    return TrainFunctionError(f"ranks wait for each other at different places: {'; '.join(places)}. {advice}")
