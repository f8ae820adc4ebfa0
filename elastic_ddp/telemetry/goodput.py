"""Where a run's wall time went, and its throughput at each world size, from the sessions of its ledger.

A session lasts from the call of `fit` (`session_started.at`) until its workers have exited (`session_ended`, or
`run_finished` or `run_failed` without one), or to its last event. Each second of it belongs to one part. Inside a
generation, members account for their time by phase (see `account`). The longest account counts; one that is longer than
its generation is scaled down.

useful: as accounted, without work that was discarded later. `goodput` is its share of the total.
redone: as accounted; useful time of steps after the one that the run resumed from; and, where all members failed, the
    time from the end of the account to the failure.
detection, hand_over, checkpoint: as accounted.
rendezvous: as accounted, and from the end of the account until the next generation forms, without waiting. Training
    functions that restart, as in a sharded run, restart in this time.
waiting: too few workers. `waited_s` before a generation forms; where all members failed, from the failure on; and after
    the last generation if it failed or changed membership and the run did not finish.
start_up: until the first generation forms; all of a session that forms none.
shut_down: after the account of the last generation.

All members failed if none of them reported the end of the generation or came to the rendezvous with an account, and
either the next generation starts without a state or the account ends more than a second before the failure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elastic_ddp.telemetry.event import MEMBERSHIP_CHANGED, STATE_TRANSFERRED
from elastic_ddp.telemetry.events import RunFinished, StepsCompleted
from elastic_ddp.telemetry.sessions import Generation, Session

PARTS = ("useful", "redone", "detection", "rendezvous", "hand_over", "checkpoint", "waiting", "start_up", "shut_down")
STALLS = ("detection_s", "rendezvous_s", "hand_over_s", "first_step_s")

_LAG_S = 1.0
"""How long before the recorded failure a survivor's account may end."""


def goodput(sessions: Sequence[Session]) -> dict[str, float | None]:
    """Returns the seconds of each part over all sessions, their `total`, and the useful share of it as `goodput`.

    Seconds are rounded to milliseconds. `goodput` is None if no worker accounted for its time.
    """
    parts = partition(sessions)
    total = math.fsum(parts.values())
    is_measured = total > 0 and any(generation.account for session in sessions for generation in session.generations)
    return {
        **{part: round(seconds, 3) for part, seconds in parts.items()},
        "total": round(total, 3),
        "goodput": round(parts["useful"] / total, 4) if is_measured else None,
    }


def partition(sessions: Sequence[Session]) -> dict[str, float]:
    """Returns the seconds of each part over all sessions."""
    return _account_for(sessions)[0]


def scaling(sessions: Sequence[Session]) -> list[dict[str, Any]]:
    """Returns one row for each world size at which steps were measured, the smallest first.

    It counts the part `useful` after the first step of each generation: no start-up, rendezvous or commit, and no wait
    for the first rows. Steps that a later generation or session repeated do not count either.

    Returns:
        world_size, steps, samples, seconds, samples_per_s, samples_per_s_per_worker, and efficiency: the samples per
        second and worker, relative to the first row.
    """
    samples = _sample_counts(sessions)
    totals: dict[int, np.ndarray] = {}
    between_s = 0.0
    for work in _account_for(sessions)[1]:
        if work.world_size is None:
            between_s = 0.0
        elif work.first_step < work.last_step <= max(samples):
            before, after = np.interp([work.first_step, work.last_step], [*samples], [*samples.values()])
            total = totals.setdefault(work.world_size, np.zeros(3))
            total += work.last_step - work.first_step, after - before, between_s + work.seconds
            between_s = 0.0
        else:  # an evaluation between two steps, for example
            between_s += work.seconds
    rows: list[dict[str, Any]] = []
    base = 0.0
    for world_size, total in sorted(totals.items()):
        steps, used, seconds = total.tolist()
        per_worker = used / seconds / world_size
        base = base or per_worker
        rows.append(
            {
                "world_size": world_size,
                "steps": round(steps),
                "samples": round(used),
                "seconds": round(seconds, 3),
                "samples_per_s": round(used / seconds, 3),
                "samples_per_s_per_worker": round(per_worker, 3),
                "efficiency": round(per_worker / base, 4),
            }
        )
    return rows


def _sample_counts(sessions: Sequence[Session]) -> dict[int, float]:
    """Returns how many samples the run had used, by number of steps done. It is the same in all sessions."""
    known = {0: 0.0}
    for event in (event for session in sessions for event in session.events):
        match event:
            case StepsCompleted(step=step, samples=samples) | RunFinished(steps=int(step), samples=int(samples)):
                known[step] = samples
    return dict(sorted(known.items()))


def stalls(session: Session) -> list[dict[str, float | None]]:
    """Returns what it cost to get to each generation of a session; None where it is not known.

    `detection_s` is of the failure that ended the previous generation. `rendezvous_s` is from the end of its account
    until the process group formed, without waiting. `hand_over_s` is as accounted. `first_step_s` is from the start of
    training to the end of the first step.
    """
    rows: list[dict[str, float | None]] = []
    detection_s = None
    between_s = 0.0
    for generation, accounted, rest in _intervals(session):
        costs = [detection_s, between_s + accounted.get("rendezvous", 0.0), accounted.get("hand_over", 0.0)]
        row = zip(STALLS, [*(costs if accounted else [None] * 3), generation.first_step_s], strict=True)
        rows.append({name: None if seconds is None else round(seconds, 3) for name, seconds in row})
        detection_s = accounted.get("detection", 0.0) if accounted else None
        between_s = rest.get("rendezvous", 0.0)
    return rows


def stall_parts(generation: Mapping[str, Any], phases: Mapping[str, float] | None) -> dict[str, float]:
    """Returns the seconds of each of the `STALLS` of a generation; of a first step, what exceeds a usual one.

    Args:
        generation: a row of the summary.
        phases: seconds of each phase of a usual step, as in the summary; None if they are not known.
    """
    parts = {name: generation[name] or 0.0 for name in STALLS}
    beyond_s = max(0.0, parts["first_step_s"] - sum(phases.values())) if phases else 0.0
    return {**parts, "first_step_s": beyond_s}


@dataclass
class _Work:
    """Useful seconds, and the steps done before and after them."""

    world_size: int | None
    """None for the first step of a generation, which waits for the first rows, and for the time after its last step."""
    first_step: int
    last_step: int
    seconds: float


def _account_for(sessions: Sequence[Session]) -> tuple[dict[str, float], list[_Work]]:
    """Returns the seconds of each part over all sessions, and the useful work, without work that was redone."""
    total = dict.fromkeys(PARTS, 0.0)
    work: list[_Work] = []
    for session in sessions:
        if session.first_step is not None:
            total["redone"] += _discard_after(session.first_step, work)
        total["start_up"] += session.generations[0].formed_at if session.generations else session.length_s
        for generation, accounted, rest in _intervals(session):
            total["redone"] += _discard_after(generation.first_step, work)
            work += _split_work(generation, accounted.pop("useful", 0.0))
            for part, seconds in (*accounted.items(), *rest.items()):
                total[part] += seconds
    return {**total, "useful": math.fsum(interval.seconds for interval in work)}, work


def _intervals(session: Session) -> Iterator[tuple[Generation, dict[str, float], dict[str, float]]]:
    """Yields each generation with the parts of its account, and the parts of the time from then until the
    next generation forms or the session ends."""
    for generation, following in zip(session.generations, [*session.generations[1:], None], strict=False):
        until = following.formed_at if following is not None else session.length_s
        length_s = until - generation.formed_at
        scale = min(1.0, length_s / generation.accounted_s) if generation.accounted_s else 1.0
        accounted = {phase: seconds * scale for phase, seconds in generation.account.items()}
        rest_s = max(0.0, length_s - sum(accounted.values()))
        if following is None and session.finished is not None and session.finished.status in ("finished", "left"):
            rest = {"shut_down": rest_s}
        else:
            rest = _rest(generation, following, until - rest_s, rest_s)
        yield generation, accounted, rest


def _rest(
    generation: Generation, following: Generation | None, accounted_until: float, rest_s: float
) -> dict[str, float]:
    """Returns the parts of the time after a generation's account, unless the run finished in it."""
    if generation.failed_at is not None and not generation.has_survivor:
        unaccounted_s = max(0.0, generation.failed_at - accounted_until)
        if unaccounted_s > _LAG_S or (following is not None and following.starts_without_state):  # all members failed
            redone_s = min(unaccounted_s, rest_s)
            return {"redone": redone_s, "waiting": rest_s - redone_s}
    if following is not None:
        waiting_s = min(following.waited_s, rest_s)
        return {"waiting": waiting_s, "rendezvous": rest_s - waiting_s}
    is_over = generation.failed_at is None and generation.ended_by not in (MEMBERSHIP_CHANGED, STATE_TRANSFERRED)
    return {"shut_down" if is_over else "waiting": rest_s}


def _split_work(generation: Generation, useful_s: float) -> list[_Work]:
    """Splits a generation's useful time at the accounts that have the number of steps done."""
    work: list[_Work] = []
    done = generation.first_step
    booked_s = 0.0
    scale = useful_s / generation.account["useful"] if generation.account.get("useful") else 0.0
    for seconds, step in sorted(generation.progress):
        step = max(step, done)
        until_s = min(seconds * scale, useful_s)
        if until_s > booked_s:
            work.append(_Work(generation.world_size if work else None, done, step, until_s - booked_s))
            booked_s = until_s
        done = step
    return [*work, _Work(None, done, done, useful_s - booked_s)]


def _discard_after(step: int, work: list[_Work]) -> float:
    """Removes the useful time of steps after the one that the run continues from. Returns the removed seconds."""
    removed_s = 0.0
    for interval in work:
        if interval.last_step > step:
            # The steps of an interval count as equally long.
            num_steps = interval.last_step - interval.first_step or 1
            kept_s = interval.seconds * max(0, step - interval.first_step) / num_steps
            removed_s += interval.seconds - kept_s
            interval.seconds = kept_s
            interval.last_step = max(step, interval.first_step)
    return removed_s
