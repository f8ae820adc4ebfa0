"""The phases of a step, and the event that combines what all ranks measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from statistics import fmean
from typing import Any, Literal, get_args

from elastic_ddp.telemetry.event import Event
from elastic_ddp.telemetry.events import GenerationFormed, PhasesMeasured

StepPhase = Literal["data", "forward", "backward", "communication", "optimizer", "other"]
"""The activities of a rank from the end of one step to the end of the next:

data: waiting for the next micro-batch.
forward: the code in the loop over `micro_batches()`, up to `step.backward`.
backward: `step.backward`, without communication.
communication: waiting for other ranks, without the communication that overlaps with the backward.
optimizer: the step of optimizers and schedulers.
other: code after the last micro-batch or outside of `with step`, evaluations, and waiting for commits.
"""
STEP_PHASES: tuple[StepPhase, ...] = get_args(StepPhase)
PHASE_COLORS = {
    "data": "#d55e00",
    "forward": "#7cc4f0",
    "backward": "#0b62a4",
    "communication": "#ecd03f",
    "optimizer": "#009e73",
    "other": "#b3b3b3",
}
"""Colors in charts and on the terminal. People with color blindness can tell them apart."""
MIN_STEPS = 20
"""Steps that a verdict on the newest steps needs."""
_WINDOW_S = 30.0
"""Length of the newest steps. Data comes in chunks: it may be late in one of a hundred steps, and then by seconds."""
MAX_EVENTS = 300
"""Number of events that the newest steps may need, with a step of 10 ms and 10 steps in an event."""


def combine(
    parts: Sequence[Mapping[str, Any]], *, generation: int, micro_batches: Sequence[int]
) -> PhasesMeasured | None:
    """Returns the event for what the ranks measured, in rank order, or None if no step was measured on each.

    Args:
        parts: what `PhaseClock.take` returned on every rank.
        generation: number of the generation.
        micro_batches: number of micro-batches of each rank in a step.
    """
    if not all(part["num_steps"] for part in parts):
        return None
    seconds = [part["phases"] for part in parts]
    in_other = [part["in_other"] for part in parts]
    slowest = max(range(len(parts)), key=lambda rank: parts[rank]["work_s"] / micro_batches[rank])
    waits: list[Mapping[str, float]] = [part["data_s"] for part in parts]
    steps = set(waits[0]).intersection(*waits)  # the devices of some ranks may be behind
    memory = [part["memory_bytes"] for part in parts]
    utilization = [part["utilization"] for part in parts]
    return PhasesMeasured(
        generation=generation,
        step=parts[0]["step"],
        num_steps=parts[0]["num_steps"],
        phases={phase: round(sum(own[phase] for own in seconds) / len(parts), 6) for phase in STEP_PHASES},
        late_data_s=round(fmean(max(own[step] for own in waits) for step in steps), 6) if steps else 0.0,
        in_other={name: round(sum(own[name] for own in in_other) / len(parts), 6) for name in in_other[0]},
        work_s=[part["work_s"] for part in parts],
        micro_batches=list(micro_batches),
        slowest_rank=slowest,
        slowest=seconds[slowest],
        memory_bytes=None if None in memory else memory,
        utilization=None if set(utilization) == {None} else utilization,
    )


def newest(events: Sequence[PhasesMeasured]) -> PhasesMeasured | None:
    """Returns the average over the newest steps of one generation: at least `MIN_STEPS`, and 30 seconds.

    Over fewer if the generation has not more, and None without any. `events` are in the order of the ledger.
    """
    chosen: list[PhasesMeasured] = []
    num_steps = 0
    seconds = 0.0
    for event in reversed(events):
        is_other = chosen and (event.generation, event.session) != (chosen[0].generation, chosen[0].session)
        if is_other or (num_steps >= MIN_STEPS and seconds >= _WINDOW_S):
            break
        chosen.append(event)
        num_steps += event.num_steps
        seconds += event.num_steps * sum(event.phases.values())
    return _average(chosen) if chosen else None


def nodes_of(events: Iterable[Event], measured: PhasesMeasured) -> list[str]:
    """Returns the address of each rank's node in the generation that was measured; empty if that is not known."""
    key = measured.generation, measured.session
    for event in events:
        if isinstance(event, GenerationFormed) and (event.generation, event.session) == key:
            return [member["node"] for member in event.members]
    return []


def mean_phases(events: Sequence[PhasesMeasured]) -> dict[str, float]:
    """Returns the seconds of each phase in one step, averaged over all steps measured. `events` are at least one."""
    total = sum(event.num_steps for event in events)
    return {
        phase: round(sum(event.phases.get(phase, 0.0) * event.num_steps for event in events) / total, 6)
        for phase in STEP_PHASES
    }


def _average(events: Sequence[PhasesMeasured]) -> PhasesMeasured:
    """Returns the average over the steps of events of one generation, the newest first."""
    total = sum(event.num_steps for event in events)

    def mean(values: Iterable[float]) -> float:
        return round(sum(value * event.num_steps for value, event in zip(values, events, strict=True)) / total, 6)

    average = replace(
        events[0],
        num_steps=total,
        phases=mean_phases(events),
        late_data_s=mean(event.late_data_s for event in events),
        in_other={name: mean(event.in_other[name] for event in events) for name in events[0].in_other},
        work_s=[mean(seconds) for seconds in zip(*(event.work_s for event in events), strict=True)],
    )
    slowest = max(enumerate(average.micro_batch_s), key=itemgetter(1), default=(None, 0.0))[0]
    of_slowest = [replace(event, phases=event.slowest) for event in events if event.slowest_rank == slowest]
    return replace(average, slowest_rank=slowest, slowest=mean_phases(of_slowest) if of_slowest else {})
