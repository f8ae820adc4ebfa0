"""Throughput at each world size that a run had, from the sessions of its ledger."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from elastic_ddp.telemetry.events import RunFinished, StepsCompleted
from elastic_ddp.telemetry.sessions import Generation, Session


def scaling(sessions: Sequence[Session]) -> list[dict[str, Any]]:
    """Returns one row for each world size at which steps were measured, the smallest first.

    It counts the phase `useful` after the first step of each generation: no start-up, rendezvous or commit, and no wait
    for the first rows. Steps that a later generation or session repeated do not count either.

    Returns:
        world_size, steps, samples, seconds, samples_per_s, samples_per_s_per_worker, and efficiency: the samples per
        second and worker, relative to the first row.
    """
    samples = _sample_counts(sessions)
    totals: dict[int, np.ndarray] = {}
    kept_until = math.inf  # steps done from which on later work repeated this work
    for session in reversed(sessions):
        for generation in reversed(session.generations):
            seconds = dict(_progress(generation))
            first = min(seconds, default=0)
            last = min(max(seconds, default=0), max(samples), kept_until)
            if last > first:
                used, spent_s = (_at(last, known) - _at(first, known) for known in (samples, seconds))
                if used > 0 and spent_s > 0:
                    measured = np.array([last - first, used, spent_s])
                    totals[generation.world_size] = totals.get(generation.world_size, 0) + measured
            kept_until = min(kept_until, generation.first_step)
        if session.first_step is not None:
            kept_until = min(kept_until, session.first_step)
    rows: list[dict[str, Any]] = []
    base = None
    for world_size, total in sorted(totals.items()):
        steps, used, spent_s = total.tolist()
        per_worker = used / spent_s / world_size
        base = base or per_worker
        rows.append(
            {
                "world_size": world_size,
                "steps": round(steps),
                "samples": round(used),
                "seconds": round(spent_s, 3),
                "samples_per_s": round(used / spent_s, 3),
                "samples_per_s_per_worker": round(per_worker, 3),
                "efficiency": round(per_worker / base, 4),
            }
        )
    return rows


def _progress(generation: Generation) -> Iterator[tuple[int, float]]:
    """Yields steps done and useful seconds so far, from the end of the generation's first step on, if it is known."""
    begin = 0
    if generation.first_step_s is not None:
        begin = generation.first_step + 1
        yield begin, generation.first_step_s
    for seconds, step in sorted(generation.progress):
        if step > begin:
            begin = step
            yield step, seconds


def _sample_counts(sessions: Sequence[Session]) -> dict[int, float]:
    """Returns how many samples the run had used, by number of steps done. It is the same in all sessions."""
    known = {0: 0.0}
    for event in (event for session in sessions for event in session.events):
        match event:
            case StepsCompleted(step=step, samples=int(samples)) | RunFinished(steps=int(step), samples=int(samples)):
                known[step] = samples
    return dict(sorted(known.items()))


def _at(step: float, known: Mapping[int, float]) -> float:
    """Returns a value by steps done, linear between the steps at which it is known."""
    return float(np.interp(step, [*known], [*known.values()]))
