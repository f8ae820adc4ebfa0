"""Delivers the steps of a run to one logger, in a thread that reads them from the ledger."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any

from elastic_ddp.config.environment import hide_credentials
from elastic_ddp.errors import StorageError, format_exception
from elastic_ddp.formatting import first_line
from elastic_ddp.loggers.logger import LoggedRun, Logger
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry.event import Event
from elastic_ddp.telemetry.ledger import LedgerReader
from elastic_ddp.telemetry.step_values import LoggedStep, StepValues, beginning

READ_EVERY_S = 1.0
"""Seconds between two reads of the ledger: each of them lists its objects."""
RETRY_S, MAX_RETRY_S = 1.0, 60.0
"""Seconds before the first retry of a logger that failed, and at most; failed reads of the ledger wait the first."""


class Abandoned(Exception):
    """The session has ended, or another driver has taken over the run."""


@dataclass(frozen=True)
class LoggedSession:
    """The session of a driver whose steps loggers receive."""

    storage: Storage
    """The run's folder."""
    name: str
    config: Mapping[str, Any]
    """The configuration, as it is recorded."""
    notify: Callable[[str], None]
    """Shows a message at the driver's terminal."""
    is_replaced: Callable[[], bool]
    """Whether another driver has taken over the run, and its loggers."""

    def describe(self, events: Sequence[Event]) -> LoggedRun:
        """Returns the facts about the run, from all events of its ledger."""
        return LoggedRun(
            name=self.config["name"],
            uri=self.storage.uri,
            id=beginning(events) or self.name,
            config=self.config,
            session=self.name,
            session_number=len({*(event.session for event in events), self.name}),
        )


class Delivery:
    """Delivers each step once, in order, also if the logger fails.

    After a failure, the thread asks the logger for its newest step and reads the ledger from the start. `name` is the
    logger's name in messages.
    """

    def __init__(self, name: str, logger: Logger, session: LoggedSession) -> None:
        self.name = name
        self.newest: int | None = None
        """Newest step that the logger has; None for none, or while it is not known."""
        self._logger = logger
        self._session = session
        self._changed = threading.Condition()
        self._has_new = False
        """Whether the ledger may have events that the thread has not read."""
        self._is_unreadable = False
        """Whether the newest read of the ledger failed."""
        self._status: str | None = None
        """How the session ended; None before."""
        self._is_abandoned = self._is_announced = False
        self._failed_step: int | None = None
        """The step after which the logger works again; None while it works."""
        self._thread = threading.Thread(target=self._deliver, name=f"logger-{name}", daemon=True)

    def start(self) -> None:
        """Starts the thread. The ledger must have the start of the session."""
        self._thread.start()

    def notify(self) -> None:
        """Tells the thread that the ledger may have new events. Never blocks."""
        with self._changed:
            self._has_new = True
            self._changed.notify()

    def finish(self, status: str) -> None:
        """Lets the thread end once all steps are delivered. Does not wait."""
        with self._changed:
            self._status = status
            self._changed.notify()

    def abandon(self) -> None:
        """Delivers nothing more. A call of the logger that is in progress is not interrupted."""
        with self._changed:
            self._is_abandoned = True
            self._changed.notify()

    @property
    def is_failing(self) -> bool:
        """Whether the logger has failed, and does not work again yet, or the ledger cannot be read."""
        return self._failed_step is not None or self._is_unreadable

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread. Returns whether the logger has all steps and is finished."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _deliver(self) -> None:
        retry_s = RETRY_S
        while True:
            failed_step = self._failed_step
            try:
                self._follow()
                self._logger.finish(self._status or "")
                self._note_success()
                return
            except Abandoned:
                return
            except BaseException as error:  # client libraries raise SystemExit and KeyboardInterrupt, too
                self._note_failure(error)
            retry_s = RETRY_S if failed_step != self._failed_step else min(2 * retry_s, MAX_RETRY_S)
            try:
                self._wait(retry_s)
            except Abandoned:
                return

    def _follow(self) -> None:
        """Starts the logger, and delivers all steps that it lacks until the session ends."""
        reader, steps = LedgerReader(self._session.storage), StepValues()
        events, is_over = self._read(reader)
        while not is_over and all(event.session != self._session.name for event in events):
            more, is_over = self._read_new(reader)  # the storage has not taken the start of the session yet
            events += more
        run = self._session.describe(events)
        self.newest = self._logger.start(run)
        self._announce()
        events = [*dropwhile(lambda event: event.session != run.id, events)]
        while True:
            for event in events:
                self._log(steps.add(event))
            if is_over:
                return
            events, is_over = self._read_new(reader)

    def _read_new(self, reader: LedgerReader) -> tuple[list[Event], bool]:
        """Waits for new events, and reads them; at most once in `READ_EVERY_S`, and once when the session ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_new or self._is_abandoned or self._status is not None)
            self._changed.wait_for(lambda: self._is_abandoned or self._status is not None, READ_EVERY_S)
        return self._read(reader)

    def _read(self, reader: LedgerReader) -> tuple[list[Event], bool]:
        """Returns the new events, and whether they are the last of the session. Retries while the storage fails."""
        while True:
            self._check()
            with self._changed:  # before the read, which may miss later events
                self._has_new = False
                is_over = self._status is not None
            try:
                events = reader.read()
            except StorageError as error:
                if not self._is_unreadable:
                    self._session.notify(
                        f"logger {self.name} waits, and training continues: the driver cannot read the ledger, and "
                        f"retries: {_reason(error)}"
                    )
                self._is_unreadable = True
                self._wait(RETRY_S)
            else:
                self._is_unreadable = False
                return events, is_over

    def _wait(self, seconds: float) -> None:
        """Waits before a retry; only `RETRY_S` once the session has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_abandoned or self._status is not None, seconds)
            self._check()
            if self._status is not None:
                self._changed.wait_for(lambda: self._is_abandoned, RETRY_S)
                self._check()

    def _check(self) -> None:
        if self._is_abandoned or self._session.is_replaced():
            raise Abandoned

    def _log(self, step: LoggedStep | None) -> None:
        if step is None or (self.newest is not None and step.step <= self.newest):
            return
        self._check()
        self._logger.log(step.step, step.values, step.time)
        self.newest = step.step
        if self._failed_step is not None and step.step > self._failed_step:
            self._note_success()

    def _announce(self) -> None:
        """Prints once where the logger writes, if it has a `destination`."""
        destination = getattr(self._logger, "destination", None)
        if destination and not self._is_announced:
            self._session.notify(f"logging to {hide_credentials(str(destination))}")
        self._is_announced = True

    def _note_failure(self, error: BaseException) -> None:
        if self._failed_step is None:
            self._session.notify(
                f"logger {self.name} failed, and training continues: {_reason(error)}. Check it; the driver "
                "retries, and sends the steps that it lacks once it works"
            )
        self._failed_step = max(self._failed_step or 0, -1 if self.newest is None else self.newest)

    def _note_success(self) -> None:
        if self._failed_step is not None:
            self._session.notify(f"logger {self.name} works again")
        self._failed_step = None


def _reason(error: BaseException) -> str:
    """The error in one line of at most 400 characters."""
    return first_line(hide_credentials(format_exception(error))).rstrip(".")[:400]
