"""What the log of completed steps says of an event. Pure: from plain values to plain values."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from peers.workload import StepEnd

SETTLED_STEPS = 40
STANDS_STILL_S = 20.0


@dataclass(frozen=True)
class Event:
    """Something that was done to a run, after which it should train with `workers` again."""

    at: float
    workers: int
    victim: int | None = None
    """The process that was killed."""


def is_settled(ends: Sequence[StepEnd], event: Event) -> bool:
    """Whether the newest steps were all made by as many workers as there should be."""
    back = _back_at(ends, event)
    if back is None:
        return False
    steps: set[int] = set()
    for end in reversed(ends):
        if end.time < back or end.world_size != event.workers:
            return False
        steps.add(end.step)
        if len(steps) > SETTLED_STEPS:
            return True
    return False


def has_begun(ends: Sequence[StepEnd], workers: int) -> bool:
    """The same for a run that has just been started."""
    return is_settled(ends, Event(0.0, workers))


def _back_at(ends: Sequence[StepEnd], event: Event) -> float | None:
    """When the first step was made by as many workers as there should be, none of them the one that was killed."""
    known = {end.pid for end in ends if end.time < event.at}
    for end in ends:
        is_one_of_them = event.victim is None or end.pid not in known
        if end.time >= event.at and end.world_size == event.workers and is_one_of_them:
            return end.time
    return None


def measure(ends: Sequence[StepEnd], event: Event, *, now: float, ended: bool) -> dict[str, Any]:
    """The figures of an event.

    `stall_s` is the longest time between two completed steps, of whichever workers, from the last one before the event
    until the run is settled, less a usual step. `changes` has the same for every change of the number of workers.
    `steps_done_twice` counts steps that more workers completed than there were, or workers of two world sizes.
    """
    before = [end for end in ends if end.time < event.at]
    after = [end for end in ends if end.time >= event.at]
    usual = _usual_step_s(before)
    line = [before[-1], *after]
    figures: dict[str, Any] = {
        "recovered": is_settled(ends, event),
        "usual_step_s": usual,
        "steps_done_twice": _done_twice(ends, since=event.at),
        "changes": [
            {"from": one.world_size, "to": next_.world_size, "stall_s": next_.time - one.time - usual}
            for one, next_ in pairwise(line)
            if one.world_size != next_.world_size
        ],
    }
    if not figures["recovered"]:
        waited, silent = now - event.at, now - line[-1].time
        if ended:
            outcome = f"the run failed after {waited:.0f} s, {silent:.0f} s after its last step"
        elif silent > STANDS_STILL_S:
            outcome = f"no step for {silent:.0f} s, then given up"
        else:
            outcome = f"after {waited:.0f} s it still trains with {line[-1].world_size} of {event.workers} workers"
        return {**figures, "outcome": outcome}
    back = _back_at(ends, event)
    assert back is not None
    stall = max(next_.time - one.time for one, next_ in pairwise(line)) - usual
    return {**figures, "stall_s": stall, "all_at_work_after_s": back - event.at}


def _usual_step_s(ends: Sequence[StepEnd]) -> float:
    """The median of the last steps."""
    first: dict[int, float] = {}
    for end in ends:
        first.setdefault(end.step, end.time)
    return statistics.median(b - a for a, b in pairwise(sorted(first.values())[-SETTLED_STEPS // 2 :]))


def _done_twice(ends: Sequence[StepEnd], *, since: float) -> int:
    by_step: dict[int, list[StepEnd]] = defaultdict(list)
    for end in ends:
        by_step[end.step].append(end)
    return sum(
        each[-1].time >= since and (len(each) > each[0].world_size or len({end.world_size for end in each}) > 1)
        for each in by_step.values()
    )
