"""What a run does, from the events of its ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from elastic_ddp.telemetry import events
from elastic_ddp.telemetry.description import describe_status
from elastic_ddp.telemetry.event import MEMBERSHIP_CHANGED, PEER_FAILED, STATE_TRANSFERRED, Event


class RunState(NamedTuple):
    """A run's state in words, and whether the run continues by itself."""

    text: str
    is_live: bool


def state_of(ledger: Sequence[Event], *, driver_is_dead: bool = False) -> RunState:
    """Returns the state after these events. `driver_is_dead`: the driver is known to be dead."""
    text, outcome, generation = "starting", None, 0
    for event in ledger:
        match event:
            case events.SessionStarted():
                text, outcome = "starting", None
            case events.GenerationStarted():
                text, generation = "training", event.generation
            case events.EvaluationFinished():
                text = "training"
            case events.WorkerFailed():
                text = PEER_FAILED
            case events.GenerationEnded(reason=reason) if event.generation == generation:  # a worker may report it late
                text = "changing workers" if reason in (MEMBERSHIP_CHANGED, STATE_TRANSFERRED) else text
            case events.EvaluationStarted():
                text = f"evaluating ({event.name})"
            case events.RunFinished():
                outcome = describe_status(vars(event))
    if outcome is not None:
        return RunState(outcome, is_live=False)
    if driver_is_dead:
        return RunState("its driver died; the same command resumes it", is_live=False)
    return RunState(text, is_live=True)
