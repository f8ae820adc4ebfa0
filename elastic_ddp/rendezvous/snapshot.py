"""What a rendezvous knows, on the disk of the driver's node: its process may die, and another go on from there.

A file with the state is replaced whenever that changes. Events are appended to another, each before the sender is told
that it arrived; a sender that hears nothing sends again, under the same number.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from elastic_ddp.rendezvous.membership import Membership


@dataclass
class State:
    """Everything that has to outlive the process."""

    membership: Membership
    stop: bool = False
    """The run was asked to commit and stop."""
    requests: int = 0
    """Requests to commit so far."""
    requests_met: int = 0
    """Those that were met. A commit meets all that had come when it began."""
    restored: int = 0
    """The newest generation in which nobody held a state, and that began from the newest commit therefore."""
    failed_saves: int = 0
    """Since the newest commit. Those who made them may be gone."""
    recorded_dismissals: int = 0
    stacks_requests: int = 0
    """Requests to say where all threads are so far."""

    @property
    def open_request(self) -> int:
        """The newest that was not met yet; 0 if there is none."""
        return self.requests if self.requests > self.requests_met else 0


_STATE = TypeAdapter(State)
_PASSING: Any = {"membership": {"_waiting"}}
"""Those who wait ask again."""


class Snapshot:
    """The two files. Without a folder nothing is kept.

    Args:
        folder: of this run alone, on a disk of this node.
    """

    def __init__(self, folder: str | None) -> None:
        self._state = Path(folder, "state.json") if folder is not None else None
        self._events = Path(folder, "events.jsonl") if folder is not None else None
        self._saved = b""

    def load(self) -> State | None:
        """The state that a process before this one left; None for the first."""
        if self._state is None or not self._state.exists():
            return None
        return _STATE.validate_json(self._state.read_bytes())

    def save(self, state: State) -> None:
        """Costs nothing if nothing changed."""
        if self._state is None or (data := _STATE.dump_json(state, exclude=_PASSING)) == self._saved:
            return
        temporary = self._state.with_suffix(".new")
        temporary.write_bytes(data)
        os.replace(temporary, self._state)
        self._saved = data

    def lines(self) -> list[dict[str, Any]]:
        """What was appended so far. The last line may be torn, and then was not acknowledged."""
        if self._events is None or not self._events.exists():
            return []
        whole, _, torn = self._events.read_bytes().rpartition(b"\n")
        if torn:
            self._events.write_bytes(whole + b"\n")
        return [json.loads(line) for line in whole.split(b"\n") if line]

    def replace(self, lines: list[dict[str, Any]]) -> None:
        """Puts these in the place of all that was appended so far."""
        if self._events is not None:
            temporary = self._events.with_suffix(".new")
            temporary.write_bytes(_as_bytes(lines))
            os.replace(temporary, self._events)

    def append(self, lines: list[dict[str, Any]]) -> None:
        """All of them or none, if the disk is full."""
        if self._events is not None and lines:
            data = _as_bytes(lines)
            with self._events.open("ab", buffering=0) as file:
                end = file.tell()
                try:
                    while data:
                        data = data[file.write(data) :]
                except OSError:
                    file.truncate(end)
                    raise


def _as_bytes(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line, default=str).encode() + b"\n" for line in lines)
