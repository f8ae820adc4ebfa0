"""The events of the ledger, and what a run does after them, in words for terminals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from elastic_ddp.formatting import duration, first_line, last_line, plural
from elastic_ddp.telemetry import events
from elastic_ddp.telemetry.event import EXITED, MEMBERSHIP_CHANGED, PEER_FAILED, STATE_TRANSFERRED, Event

_STATUS = {"unfinished": "running or unfinished", "dead": "unfinished, its driver died"}
"""Words for a status; others stand for themselves. Commands find out whether a driver is `dead`."""


class RunState(NamedTuple):
    """A run's state in words, and whether the run continues by itself."""

    text: str
    is_live: bool


def describe_status(facts: Mapping[str, Any]) -> str:
    """Returns the status of a run in words. `facts` has its `status`, `steps` and `total_steps`."""
    status = str(facts["status"])
    if status != "left":
        return _STATUS.get(status, status)
    return f"left its loop at step {describe_steps(facts)}"


def describe_steps(facts: Mapping[str, Any]) -> str:
    """Returns the steps that are done, and the total if it is another: "345 of 480"."""
    steps = facts["steps"] or 0
    total = facts["total_steps"]
    return f"{steps:,}" if total in (None, steps) else f"{steps:,} of {total:,}"


def describe_outcome(facts: Mapping[str, Any]) -> str:
    """Returns the status in words, with the step if it is known: "stopped at step 345 of 480"."""
    status = describe_status(facts)
    if facts["status"] == "left" or facts["steps"] is None:
        return status
    return f"{status} at step {describe_steps(facts)}"


def workers_gone(summary: Mapping[str, Any]) -> str:
    """Returns how many workers failed and were drained; empty for none."""
    counts = {"failed": summary["workers_failed"], "drained": summary["workers_drained"]}
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)


def state_of(ledger: Sequence[Event], *, driver_is_dead: bool = False) -> RunState:
    """Returns the state after these events. `driver_is_dead`: the driver is known to be dead."""
    text = "starting"
    outcome = None
    generation = 0
    for event in ledger:
        match event:
            case events.SessionStarted():
                text = "starting"
                outcome = None
            case events.GenerationStarted():
                text = "training"
                generation = event.generation
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


def describe_event(event: Event, session: int | None = None) -> str | None:
    """Returns the line that the driver prints about an event, or None for most events.

    With the number of its session, `2.1` is the first generation of the second session.
    """
    of_session = "" if session is None else f"{session}."
    match event:
        case events.GenerationStarted():
            workers = plural(event.world_size, "worker")
            return f"[step {event.first_step}] generation {of_session}{event.generation} ({event.reason}): {workers}"
        case events.GenerationFormed(standing_by=number) if number:
            wait = "waits" if number == 1 else "wait"
            return (
                f"{plural(number, 'ready worker')} {wait}: even_micro_batches, or the size of the groups of hybrid "
                f"sharding, allows {event.world_size}"
            )
        case events.GenerationFormed(recovered_s=float(seconds)):
            standbys = sum(bool(member.get("standby")) for member in event.members)
            former = f", {plural(standbys, 'former standby')} among them" if standbys else ""
            return f"{plural(event.world_size, 'worker')} again, {duration(seconds)} after a failure{former}"
        case events.CommitSucceeded():
            return f"[step {event.step}] checkpoint committed in {event.seconds:.2f} s"
        case events.CommitFailed():
            return f"[step {event.step}] commit failed: {first_line(event.error)}"
        case events.CommitSkipped():
            return f"[step {event.step}] commit skipped: the previous one is still being written"
        case events.CommitRejected():
            return f"commit {event.key} skipped: {event.reason}"
        case events.CorruptionFound():
            return f"[step {event.step}] corruption: {event.text}; verify.action is {event.action}"
        case events.StepSkipped():
            scale = "" if event.loss_scale is None else f"; the loss scale is now {float(event.loss_scale):g}"
            return f"[step {event.step}] update skipped: {event.reason}{scale}"
        case events.EvaluationFinished():
            return f"[step {event.step}] {event.name} {float(event.value):.4f}"
        case events.HyperparametersDiffer():
            return _describe_hyperparameters(event)
        case events.WeightsLoaded():
            differences = {"missing": event.missing, "unexpected": event.unexpected, "converted": event.converted}
            counts = [f"{len(names)} {kind}" for kind, names in differences.items() if names]
            source = event.uri if event.step is None else f"step {event.step} of {event.uri}"
            return f"loaded weights from {', '.join([source, *counts])}"
        case events.Profiled():
            last = event.first_step + event.num_steps - 1
            ranks = plural(len(event.ranks), "rank")
            return f"[step {last + 1}] profiled steps {event.first_step}-{last} on {ranks}: {event.folder}"
        case events.Warned():
            return event.text
        case events.WorkerFailed():
            # A worker that reports this has only seen a connection break, perhaps to a worker whose function raised.
            what = "a connection between workers broke" if event.reported_by else PEER_FAILED
            return f"generation {of_session}{event.generation}: {what}: {first_line(event.error)}"
        case events.WorkerLeft():
            if event.kind == "drain":
                return "a worker was drained: it or its node is to stop"
            return "a worker left: the run was resized"
        case events.NewcomerFailed():
            is_crash = event.error.startswith(EXITED)  # with its stack below; otherwise it can be a traceback
            what = f"a standby on {event.standby} failed" if event.standby else "a worker failed before it trained"
            return f"{what}: {(first_line if is_crash else last_line)(event.error)}"
        case events.StartFailed():
            return f"workers failed to start, trying again: {last_line(event.error)}"
        case events.HangDetected():
            return f"hang: no progress on any worker for {event.seconds:g} s; their stacks are in the ledger"
        case events.RendezvousRestarted():
            return "the rendezvous process was restarted; training continued"
    return None


def _describe_hyperparameters(event: events.HyperparametersDiffer) -> str:
    used = "the values in the code are used from here on"
    if event.used == "saved":
        used = 'the saved values are used; to use the values in the code, set checkpoint.hyperparameters = "code"'
    lines = [f"  {each['name']}: {_short(each['saved'])} -> {_short(each['now'])}" for each in event.changes]
    return "\n".join([f"[step {event.step}] hyperparameters differ between the commit and the code; {used}:", *lines])


def _short(value: Any) -> Any:
    """Returns a hyperparameter with the first six digits of its numbers."""
    if isinstance(value, list):
        return f"[{', '.join(str(_short(item)) for item in value)}]"
    return f"{value:.6g}" if isinstance(value, float) else value
