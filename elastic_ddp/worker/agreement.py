"""Errors that every rank raises if one rank meets them, and events that all ranks know."""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import CheckpointError, ConfigError, PeerFailedError, StorageError
from elastic_ddp.telemetry.event import AgreedEvent, Event

KINDS: tuple[type[Exception], ...] = (ConfigError, StorageError, CheckpointError, PeerFailedError)
"""The errors that ranks agree on. If ranks report different errors, all raise the one that comes first here:
configuration and storage errors, then a damaged commit. Last come bytes that changed between ranks: a failed read can
cause them."""

KEPT = 64
"""Number of newest events that a rank keeps. Rank 0 may die with several unsent events."""

E = TypeVar("E", bound=Exception)


def agree_on_error(error: Exception | None, group: ProcessGroup, data: bytes = b"") -> list[bytes]:
    """Returns the data of every rank, in rank order, or raises the same error on every rank. Collective.

    Args:
        error: this rank's error, of one of `KINDS`, or None.
        data: this rank's message to the others if no rank has an error.

    Raises:
        Exception: an error of the first of `KINDS` that some rank met, with the text of the first such rank.
    """
    message = b"\n" + data if error is None else f"{_kind(error)}\n{error}".encode(errors="backslashreplace")
    answers = [answer.partition(b"\n")[::2] for answer in group.all_gather_bytes(message)]
    for kind in KINDS:
        for name, text in answers:
            if name.decode() == kind.__name__:
                raise kind(text.decode()) from None
    return [text for _, text in answers]


@contextmanager
def errors_on_all_ranks(group: ProcessGroup) -> Iterator[None]:
    """A block that every rank enters. If some rank raises one of `KINDS` in it, every rank raises the same error."""
    error: Exception | None = None
    try:
        yield
    except KINDS as raised:
        traceback.clear_frames(raised.__traceback__)  # contextlib keeps the frames while the ranks agree
        error = without_traceback(raised)
    agree_on_error(error, group)


def without_traceback(error: E) -> E:
    """Returns `error` without the frames that raised it, which would keep the tensors of a commit in memory."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _kind(error: Exception) -> str:
    """The name of the most derived kind that `error` is an instance of."""
    return next(kind.__name__ for kind in reversed(KINDS) if isinstance(error, kind))


class AgreedEvents:
    """Records every fact that all ranks know, for example the loss of a step, exactly once.

    Rank 0 reports the event. The other ranks keep it, because one of them may become rank 0 after rank 0 died with
    unsent events. The rendezvous drops events that it already has.
    """

    def __init__(self, record: Callable[[Event], object]) -> None:
        self._record = record
        self.newest: deque[AgreedEvent] = deque(maxlen=KEPT)
        """The newest events, oldest first."""

    def record(self, event: AgreedEvent, *, is_rank_0: bool) -> None:
        """Takes an event. Every rank calls it."""
        event = replace(event, at=time.time())
        self.newest.append(event)
        if is_rank_0:
            self._record(event)

    def report_again(self) -> None:
        """Reports the newest events again. A new rank 0 calls this, because the former rank 0 may have died."""
        for event in self.newest:
            self._record(event)
