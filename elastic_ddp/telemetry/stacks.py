"""The stacks of a run's workers: of live workers, or of its last hang in the ledger."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elastic_ddp.telemetry.event import Event
from elastic_ddp.telemetry.events import GenerationFormed, HangDetected, SessionStarted, StacksRecorded

_THREAD = re.compile(r"^Thread (.+):$", re.MULTILINE)


def parse_stacks(text: str) -> list[dict[str, str]]:
    """Returns the `name` and the `stack` of each thread, from what a worker reports."""
    _, *parts = _THREAD.split(text)
    return [{"name": name, "stack": stack.strip("\n")} for name, stack in zip(parts[::2], parts[1::2], strict=True)]


def stacks_of_answers(answers: Iterable[Mapping[str, Any]], within_s: float) -> dict[str, Any]:
    """Returns `workers` and `missing`, as `RunHandle.stacks` does, from the answers that came within some seconds."""
    workers, missing = [], []
    for worker in answers:
        facts = {name: worker[name] for name in ("rank", "node", "pid", "id")}
        answer = worker["answer"]
        if answer is None:
            silent = f"no answer within {within_s:g} s: the process is stopped, or native code holds Python's lock"
            missing.append(facts | {"reason": silent})
        elif "error" in answer:
            missing.append(facts | {"reason": answer["error"]})
        else:
            workers.append(facts | {"place": answer["place"], "threads": parse_stacks(answer["stacks"])})
    return {"workers": workers, "missing": missing}


def stacks_of_last_hang(events: Sequence[Event]) -> dict[str, Any] | None:
    """Returns the stacks of the last hang in a ledger; None if there was none.

    The dict has `workers` and `missing` as for live workers, and `time`, `seconds` and `culprits` of the hang.
    """
    facts: dict[str, Any] | None = None
    members: dict[str, Mapping[str, Any]] = {}
    stacks: dict[str, StacksRecorded] = {}
    for event in events:
        match event:
            case HangDetected():
                facts = _stacks_of_hang(event, members, stacks)
                stacks = {}
            case SessionStarted():
                stacks = {}
            case StacksRecorded():
                stacks[event.member] = event
            case GenerationFormed():
                members = {member["id"]: member for member in event.members}
    return facts


def _stacks_of_hang(
    hang: HangDetected, members: Mapping[str, Mapping[str, Any]], stacks: Mapping[str, StacksRecorded]
) -> dict[str, Any]:
    workers, missing = [], []
    for member, place in hang.places.items():
        known = members.get(member, {})
        facts = {"rank": known.get("rank"), "node": known.get("node"), "pid": known.get("pid"), "id": member}
        if member in stacks:
            recorded = stacks[member]
            workers.append(facts | {"place": recorded.place, "threads": parse_stacks(recorded.stacks)})
        else:
            missing.append(facts | {"place": place, "reason": "it recorded no stacks"})
    of_hang = {"time": hang.moment, "seconds": hang.seconds, "culprits": [*hang.culprits]}
    return {"workers": workers, "missing": missing, **of_hang}
