"""Delivers the steps of a run to one logger, in a thread: earlier sessions from the ledger first, then what follows."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import dropwhile
from typing import Any

from elastic_ddp.config.environment import hide_credentials
from elastic_ddp.errors import format_exception
from elastic_ddp.formatting import first_line
from elastic_ddp.loggers.logger import LoggedRun, Logger
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry.event import Event
from elastic_ddp.telemetry.ledger import list_sessions, read_ledger
from elastic_ddp.telemetry.step_values import LoggedStep, StepValues, beginning

MAX_BACKLOG = 10_000
"""Number of events that may wait for a slow logger. If there are more, it gets them from the ledger later."""
RETRY_S, MAX_RETRY_S = 1.0, 60.0
"""Seconds before the first retry of a logger that failed, and at most."""


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

    @cached_property
    def first(self) -> str:
        """The name of the session with which the run began, which is its id."""
        return beginning(read_ledger(self.storage)) or self.name

    def describe(self) -> LoggedRun:
        """Returns the facts about the run."""
        return LoggedRun(
            name=self.config["name"],
            uri=self.storage.uri,
            id=self.first,
            config=self.config,
            session=self.name,
            session_number=len({*list_sessions(self.storage), self.name}),
        )


class Delivery:
    """Delivers each step once, in order, also if the logger fails.

    The ledger is the source. After a failure, or after more events than may wait, the thread asks the logger for its
    newest step and reads the ledger again. So pass only events that the ledger has stored. `name` is the logger's name
    in messages.
    """

    def __init__(self, name: str, logger: Logger, session: LoggedSession) -> None:
        self.name = name
        self.newest: int | None = None
        """Newest step that the logger has; None for none, or while it is not known."""
        self._logger = logger
        self._session = session
        self._changed = threading.Condition()
        self._backlog: deque[Event] = deque()
        self._is_incomplete = False
        """Whether events were dropped from the backlog."""
        self._status: str | None = None
        """How the session ended; None before."""
        self._is_abandoned = self._is_announced = False
        self._failed_step: int | None = None
        """The step after which the logger works again; None while it works."""
        self._thread = threading.Thread(target=self._deliver, name=f"logger-{name}", daemon=True)

    def start(self) -> None:
        """Starts the thread. The ledger must have the start of the session."""
        self._thread.start()

    def add(self, event: Event) -> None:
        """Adds an event that the ledger has stored. Never blocks."""
        with self._changed:
            if len(self._backlog) < MAX_BACKLOG:
                self._backlog.append(event)
            else:
                self._is_incomplete = True
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
        """Whether the logger has failed, and does not work again yet."""
        return self._failed_step is not None

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread. Returns whether the logger has all steps and is finished."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _deliver(self) -> None:
        retry_s = RETRY_S
        while True:
            failed_step = self._failed_step
            try:
                self._check()
                run = self._session.describe()
                self.newest = self._logger.start(run)
                self._announce()
                self._follow(run.id)
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

    def _follow(self, first_session: str) -> None:
        """Delivers all steps since a session that the logger lacks, until this session ends."""
        while True:
            with self._changed:
                self._backlog.clear()
                self._is_incomplete = False
            steps = StepValues()
            last_seq = -1
            for event in dropwhile(lambda event: event.session != first_session, read_ledger(self._session.storage)):
                if event.session == self._session.name:
                    last_seq = event.seq
                self._log(steps.add(event))
            while (new := self._next()) is not None:
                if new.seq > last_seq:
                    self._log(steps.add(new))
            if not self._is_incomplete:
                return

    def _next(self) -> Event | None:
        """Waits for the next event. Returns None at the end, or if events were dropped."""
        with self._changed:
            while True:
                self._check()
                if self._is_incomplete:
                    return None
                if self._backlog:
                    return self._backlog.popleft()
                if self._status is not None:
                    return None
                self._changed.wait()

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
            reason = first_line(hide_credentials(format_exception(error))).rstrip(".")
            self._session.notify(
                f"logger {self.name} failed, and training continues: {reason:.400}. Check it; the driver "
                "retries, and sends the steps that it lacks once it works"
            )
        self._failed_step = max(self._failed_step or 0, -1 if self.newest is None else self.newest)

    def _note_success(self) -> None:
        if self._failed_step is not None:
            self._session.notify(f"logger {self.name} works again")
        self._failed_step = None
