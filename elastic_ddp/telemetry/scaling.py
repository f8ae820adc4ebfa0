"""Throughput at each world size that a run had, from the events of its ledger: pure functions of plain values."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Any

from elastic_ddp.telemetry.event import Event
from elastic_ddp.telemetry.events import RunFinished, StepsCompleted
from elastic_ddp.telemetry.sessions import Generation, read_sessions


def scaling(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Returns one row for each world size at which steps were measured, the smallest first.

    The seconds are those of the phase `useful` after the first step of each generation: start-up, rendezvous, commits
    and the wait for the first rows do not count. Steps that a later generation or session repeated do not count either.

    Args:
        events: in the order of `read_ledger`.

    Returns:
        world_size, steps, samples, seconds, samples_per_s, samples_per_s_per_worker, and efficiency: the samples per
        second and worker, relative to those of the first row.
    """
    events = list(events)
    samples = _Interpolation((0, 0), *_sample_counts(events))
    totals: dict[int, tuple[float, ...]] = {}
    for generation, kept_until in _generations(events):
        seconds = _Interpolation(*_progress(generation))
        first, last = seconds.first, min(seconds.last, samples.last, kept_until)
        if last > first and seconds.at(last) > seconds.at(first):
            measured = (last - first, samples.at(last) - samples.at(first), seconds.at(last) - seconds.at(first))
            before = totals.get(generation.world_size, (0.0, 0.0, 0.0))
            totals[generation.world_size] = tuple(map(sum, zip(before, measured, strict=True)))
    rates = {world_size: count / spent_s for world_size, (_, count, spent_s) in sorted(totals.items())}
    base = next((rate / world_size for world_size, rate in rates.items()), None)
    return [
        {
            "world_size": world_size,
            "steps": round(totals[world_size][0]),
            "samples": round(totals[world_size][1]),
            "seconds": round(totals[world_size][2], 3),
            "samples_per_s": round(rate, 3),
            "samples_per_s_per_worker": round(rate / world_size, 3),
            "efficiency": round(rate / world_size / base, 4) if base else None,
        }
        for world_size, rate in rates.items()
    ]


def _generations(events: list[Event]) -> list[tuple[Generation, float]]:
    """Returns each generation, and the number of steps done from which on its work was repeated later."""
    found: list[tuple[Generation, float]] = []
    kept_until = math.inf
    for session in reversed(read_sessions(events)):
        for generation in reversed(session.generations):
            found.append((generation, kept_until))
            if generation.first_step is not None:
                kept_until = min(kept_until, generation.first_step)
        if session.first_step is not None:
            kept_until = min(kept_until, session.first_step)
    return found[::-1]


def _progress(generation: Generation) -> Iterator[tuple[int, float]]:
    """Yields steps done and useful seconds so far, from the end of the generation's first step on, if it is known."""
    begin = 0
    if generation.first_step is not None and generation.first_step_s is not None:
        begin = generation.first_step + 1
        yield begin, generation.first_step_s
    for seconds, step in sorted(generation.progress):
        if step > begin:
            begin = step
            yield step, seconds


def _sample_counts(events: list[Event]) -> Iterator[tuple[int, int]]:
    """Yields steps done and samples used so far. All sessions have the same count at the same step."""
    known: dict[int, int] = {}
    for event in events:
        if isinstance(event, StepsCompleted | RunFinished) and event.samples is not None:
            step = event.step if isinstance(event, StepsCompleted) else event.steps
            if step:
                known[step] = event.samples
    yield from sorted(known.items())


class _Interpolation:
    """A value by steps done, linear between the points that are known."""

    def __init__(self, *points: tuple[int, float]) -> None:
        self._steps = [step for step, _ in points]
        self._values = [value for _, value in points]
        self.first, self.last = (self._steps[0], self._steps[-1]) if points else (0, 0)

    def at(self, step: float) -> float:
        """Returns the value at a number of steps between `first` and `last`."""
        after = bisect_left(self._steps, step)
        if self._steps[after] == step:
            return self._values[after]
        share = (step - self._steps[after - 1]) / (self._steps[after] - self._steps[after - 1])
        return self._values[after - 1] + share * (self._values[after] - self._values[after - 1])
