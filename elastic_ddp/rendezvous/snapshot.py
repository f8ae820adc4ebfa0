"""The rendezvous state on the disk of the driver's node. A new rendezvous process resumes from it.

One file holds the state and is replaced on every change. Events are appended to another file before the sender gets
its acknowledgement; a sender without acknowledgement sends again, with the same number.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from elastic_ddp.rendezvous.attempts import Attempts, Shortfall
from elastic_ddp.rendezvous.membership import Membership


@dataclass
class State:
    """The state that outlives the rendezvous process."""

    membership: Membership
    restored: int = 0
    """The newest generation in which no member held a state, so that it started from the newest commit."""
    failed_saves: int = 0
    """Number of failed saves since the newest commit, on any rank."""
    recorded_dismissals: set[str] = field(default_factory=set)
    """Dismissed members that have a `worker_left` event."""
    member_requests: int = 0
    """Number of requests to members so far; see `Requests`."""
    attempts: Attempts = field(default_factory=Attempts)
    """Failures since the run last made progress."""
    shortfall: Shortfall = field(default_factory=Shortfall)


_STATE = TypeAdapter(State)
_EXCLUDED: Any = {"membership": {"_waiting"}}
"""Waiting members repeat their requests, so the file does not hold them."""


class Snapshot:
    """The two files, in a folder on this node for this run alone; without a folder it keeps nothing.

    The driver removes the folder when the run is over, which may be before the rendezvous process has ended.
    """

    def __init__(self, folder: str | None) -> None:
        self._state = Path(folder, "state.json") if folder is not None else None
        self._events = Path(folder, "events.jsonl") if folder is not None else None
        self._saved = b""

    def load(self) -> State | None:
        """Returns the state of the previous rendezvous process; None in the first one."""
        if self._state is None or not self._state.exists():
            return None
        return _STATE.validate_json(self._state.read_bytes())

    def save(self, state: State) -> None:
        """Replaces the state file if the state has changed."""
        if self._state is not None:
            data = _STATE.dump_json(state, exclude=_EXCLUDED)
            if data != self._saved:
                with _unless_removed(self._state):
                    _replace(self._state, data)
                    self._saved = data

    def lines(self) -> list[dict[str, Any]]:
        """Returns all lines appended so far. A torn last line was never acknowledged, and is removed."""
        if self._events is None or not self._events.exists():
            return []
        complete, _, torn = self._events.read_bytes().rpartition(b"\n")
        if torn:
            self._events.write_bytes(complete + b"\n")
        return [json.loads(line) for line in complete.split(b"\n") if line]

    def replace(self, lines: list[dict[str, Any]]) -> None:
        """Replaces all lines appended so far."""
        if self._events is not None:
            with _unless_removed(self._events):
                _replace(self._events, b"".join(map(_as_bytes, lines)))

    def append(self, line: dict[str, Any]) -> None:
        """Appends a line. Raises OSError and leaves no part of it if the disk is full."""
        if self._events is not None:
            data = _as_bytes(line)
            with _unless_removed(self._events), self._events.open("ab", buffering=0) as file:
                end = file.tell()
                try:
                    while data:
                        data = data[file.write(data) :]
                except OSError:
                    file.truncate(end)
                    raise


@contextmanager
def _unless_removed(file: Path) -> Iterator[None]:
    """Ignores that the folder of the file has been removed."""
    try:
        yield
    except FileNotFoundError:
        if file.parent.exists():
            raise


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def _as_bytes(line: dict[str, Any]) -> bytes:
    return json.dumps(line, default=str).encode() + b"\n"
