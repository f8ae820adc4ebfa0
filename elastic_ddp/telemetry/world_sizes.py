"""Throughput at each world size that a run had, from the events of its ledger: pure functions of plain values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

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
    samples = _sample_counts(events)
    totals: dict[int, list[float]] = {}
    for generation, kept_until in _generations(events):
        seconds = dict(_progress(generation))
        first, last = min(seconds, default=0), min(max(seconds, default=0), max(samples), kept_until)
        if last > first:
            used, spent_s = (_at(last, known) - _at(first, known) for known in (samples, seconds))
            if used > 0 and spent_s > 0:
                before = totals.get(generation.world_size, [0.0, 0.0, 0.0])
                totals[generation.world_size] = [*map(sum, zip(before, (last - first, used, spent_s), strict=True))]
    rates = {world_size: count / spent_s for world_size, (_, count, spent_s) in sorted(totals.items())}
    base = next((rate / world_size for world_size, rate in rates.items()), 0.0)
    return [
        {
            "world_size": world_size,
            "steps": round(totals[world_size][0]),
            "samples": round(totals[world_size][1]),
            "seconds": round(totals[world_size][2], 3),
            "samples_per_s": round(rate, 3),
            "samples_per_s_per_worker": round(rate / world_size, 3),
            "efficiency": round(rate / world_size / base, 4),
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


def _sample_counts(events: list[Event]) -> dict[int, float]:
    """Returns how many samples the run had used, by number of steps done. It is the same in all sessions."""
    known = {0: 0.0}
    for event in events:
        if isinstance(event, StepsCompleted | RunFinished) and event.samples is not None:
            step = event.step if isinstance(event, StepsCompleted) else event.steps
            if step:
                known[step] = event.samples
    return dict(sorted(known.items()))


def _at(step: float, known: Mapping[int, float]) -> float:
    """Returns a value by steps done, linear between the steps at which it is known."""
    return float(np.interp(step, [*known], [*known.values()]))
