"""Figures of an event, from the log of completed steps: pure functions of plain values."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from peers.workload import StepEnd

SETTLED_STEPS = 40
NO_STEP_S = 20.0


@dataclass(frozen=True)
class Event:
    """A change of a run, after which it should train with `workers` workers."""

    at: float
    workers: int
    victim: int | None = None
    """Id of the killed process."""
    settled_steps: int = SETTLED_STEPS
    """Number of steps with all workers after which the run has settled."""


def is_settled(ends: Sequence[StepEnd], event: Event) -> bool:
    """Whether the expected number of workers completed all of the newest steps."""
    back = _back_at(ends, event)
    if back is None:
        return False
    steps: set[int] = set()
    for end in reversed(ends):
        if end.time < back or end.world_size != event.workers:
            return False
        steps.add(end.step)
        if len(steps) > event.settled_steps:
            return True
    return False


def has_begun(ends: Sequence[StepEnd], workers: int, settled_steps: int = SETTLED_STEPS) -> bool:
    """Whether a new run trains with the expected number of workers."""
    return is_settled(ends, Event(0.0, workers, settled_steps=settled_steps))


def _back_at(ends: Sequence[StepEnd], event: Event) -> float | None:
    """Returns when the first step ended with the expected number of workers, without the killed one."""
    known = {end.pid for end in ends if end.time < event.at}
    for end in ends:
        counts = event.victim is None or end.pid not in known
        if end.time >= event.at and end.world_size == event.workers and counts:
            return end.time
    return None


def measure(ends: Sequence[StepEnd], event: Event, *, now: float, ended: bool) -> dict[str, Any]:
    """Returns the figures of an event.

    `stall_s` is the longest time between two completed steps on any worker, from the last one before the event until
    the run has settled, minus a typical step. `changes` has the same for each change of the number of workers.
    `steps_done_twice` counts steps completed by more workers than the world size, or at two world sizes.
    """
    before = [end for end in ends if end.time < event.at]
    after = [end for end in ends if end.time >= event.at]
    typical = _typical_step_s(before)
    line = [before[-1], *after]
    figures: dict[str, Any] = {
        "recovered": is_settled(ends, event),
        "typical_step_s": typical,
        "steps_done_twice": _done_twice(ends, since=event.at),
        "changes": [
            {"from": one.world_size, "to": next_.world_size, "stall_s": next_.time - one.time - typical}
            for one, next_ in pairwise(line)
            if one.world_size != next_.world_size
        ],
    }
    if not figures["recovered"]:
        waited, silent = now - event.at, now - line[-1].time
        if ended:
            outcome = f"the run failed after {waited:.0f} s, {silent:.0f} s after its last step"
        elif silent > NO_STEP_S:
            outcome = f"no step for {silent:.0f} s"
        else:
            outcome = f"after {waited:.0f} s it still trains with {line[-1].world_size} of {event.workers} workers"
        return {**figures, "outcome": outcome}
    back = _back_at(ends, event)
    assert back is not None
    stall = max(next_.time - one.time for one, next_ in pairwise(line)) - typical
    return {**figures, "stall_s": stall, "all_at_work_after_s": back - event.at}


def _typical_step_s(ends: Sequence[StepEnd]) -> float:
    """Returns the median duration of the last steps."""
    first: dict[int, float] = {}
    for end in ends:
        first.setdefault(end.step, end.time)
    return statistics.median(b - a for a, b in pairwise(sorted(first.values())[-SETTLED_STEPS // 2 :]))


def _done_twice(ends: Sequence[StepEnd], *, since: float) -> int:
    by_step: dict[int, list[StepEnd]] = defaultdict(list)
    for end in ends:
        by_step[end.step].append(end)
    return sum(
        group[-1].time >= since and (len(group) > group[0].world_size or len({end.world_size for end in group}) > 1)
        for group in by_step.values()
    )
