"""The run's append-only event log: JSON lines in the run's storage."""

from __future__ import annotations

import json
import logging
import math
import re
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from elastic_ddp.errors import StorageError, format_exception
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry.event import Event, parse

_log = logging.getLogger(__name__)
_SEGMENT_BYTES = 64 * 1024
_SEGMENT = re.compile(r"ledger/(?P<session>s[0-9]+[^/]*)-[0-9]{6}\.jsonl")


def new_session(number: int, clock: Callable[[], float] = time.time) -> str:
    """Returns a name for a driver's session that sorts by its number, such as `s000002-20261120T101500Z-3f9a1c`.

    The time is for people: the clocks of machines differ.
    """
    return f"s{number:06d}-{datetime.fromtimestamp(clock(), UTC):%Y%m%dT%H%M%SZ}-{uuid.uuid4().hex[:6]}"


def _number_of(session: str) -> int:
    """Returns the number in a name that `new_session` returned."""
    return int(session[1:].partition("-")[0])


class Ledger:
    """Appends the events of one session. Only the driver writes it, from one thread.

    Object storage has no append. Events are therefore kept in numbered segments of about 64 KiB, and a flush rewrites
    the newest segment. Flushed events stay readable if the driver dies.
    """

    def __init__(self, storage: Storage, session: str, clock: Callable[[], float] = time.time) -> None:
        self.session = session
        self._storage = storage
        self._clock = clock
        self._seq = self._number = 0
        """Numbers of the next event and of the newest segment."""
        self._segment = b""
        self._unwritten: dict[str, bytes] = {}
        """Segments to store, by key, oldest first."""
        self._failure: StorageError | None = None

    def append(self, event: Event) -> None:
        """Adds an event, and sets its `time`, `seq` and `session`; in memory until the next flush.

        Values become plain JSON: infinities and NaN the strings "Infinity", "-Infinity" and "NaN", other types
        their text.
        """
        entry = {"time": round(self._clock(), 6), "seq": self._seq, **event.to_json(), "session": self.session}
        line = json.dumps(plain(entry), separators=(",", ":")).encode() + b"\n"
        if self._segment and len(self._segment) + len(line) > _SEGMENT_BYTES:
            self._number += 1
            self._segment = b""
        self._seq += 1
        self._segment += line
        self._unwritten[f"ledger/{self.session}-{self._number:06d}.jsonl"] = self._segment

    def flush(self) -> None:
        """Stores the appended events. If the storage fails, logs that and keeps the events for a later flush."""
        try:
            for key, data in list(self._unwritten.items()):
                self._storage.write(key, data)
                del self._unwritten[key]
        except StorageError as error:
            if self._failure is None:  # one line for an outage
                _log.warning("ledger events stay in memory until the storage accepts them: %s", error)
            self._failure = error
        else:
            self._failure = None

    def close(self) -> None:
        """Flushes for the last time.

        Raises:
            StorageError: the storage still fails, so events are lost.
        """
        self.flush()
        if self._failure is not None:
            raise self._failure


def list_sessions(storage: Storage) -> list[str]:
    """Returns the names of all sessions with events, sorted."""
    matches = (_SEGMENT.fullmatch(key) for key in storage.list("ledger"))
    return sorted({match["session"] for match in matches if match})


def newest_number(storage: Storage) -> int:
    """Returns the number of the newest session with events; 0 without one."""
    return max(map(_number_of, list_sessions(storage)), default=0)


def read_ledger(storage: Storage) -> list[Event]:
    """Returns the events of all sessions, in the order of the sessions' numbers and then of `Event.seq`.

    A line that is no event is skipped, with a warning unless it is the last of its segment, which may be torn.
    """
    return LedgerReader(storage).read()


class LedgerReader:
    """Reads the ledger of a run that may be live. Each call of `read` returns the events that are new since the last.

    A read lists the ledger, and gets the newest known segment and later ones. So once a new session has events, what a
    replaced driver adds to an older one is not returned.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._segment = (0, "")
        """Number of the session and key of the newest segment that was read; it may grow."""
        self._last = ("", -1)
        """`session` and `seq` of the newest event that was returned."""

    def read(self) -> list[Event]:
        """Returns the new events, in the order of `read_ledger`. Raises StorageError if the storage fails."""
        matches = map(_SEGMENT.fullmatch, self._storage.list("ledger"))
        segments = sorted((_number_of(match["session"]), match[0]) for match in matches if match)
        unread = [segment for segment in segments if segment >= self._segment]
        parsed = [event for _, key in unread for event in _parse(key, self._storage.read(key))]
        session, seq = self._last
        events = [event for event in parsed if event.session != session or event.seq > seq]
        self._segment = max([self._segment, *unread])
        if events:
            self._last = (events[-1].session, events[-1].seq)
        return events


def _parse(key: str, data: bytes) -> list[Event]:
    events = []
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            events.append(parse(json.loads(line)))
        except (KeyError, TypeError, ValueError) as error:
            if number < len(lines):
                _log.warning("line %d of %s is skipped: %s", number, key, format_exception(error))
    return events


def plain(value: Any) -> Any:
    """Returns the value in strict JSON, which has no NaN; other types become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if getattr(value, "ndim", None) == 0:
        return plain(value.item())  # a scalar of numpy or torch
    return str(value)
