"""The interface of a logger, and the facts about the run that it receives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """The facts about a run that a logger receives."""

    name: str
    """Name of the run."""
    uri: str
    """The run's folder, `<storage>/<name>`."""
    id: str
    """A unique id, the same in all sessions that continue the run. A session that starts from step 0 after an earlier
    one, because there was no commit, has another id: its code and settings may differ, so it is another run for
    loggers."""
    config: Mapping[str, Any]
    """The configuration, as the ledger has it: of `env` and `runtime_env` the names only."""
    session: str
    """Name of the driver's session, such as `s000001-20261120T101500Z-3f9a1c`; it is unique."""
    session_number: int
    """Number of the session, from 1."""


class Logger(Protocol):
    """Receives the values of a run's logged steps, each step once, in order, also across failures and resumes.

    The driver calls the methods, all in one thread of this logger, so a slow logger does not slow the run. An exception
    does not end the run: the driver prints it once, and calls `start` again until the logger works.

    After the first `start` of a session, the driver prints the attribute `destination` if the logger has it: where the
    values go, such as a URL.
    """

    def start(self, run: LoggedRun) -> int | None:
        """Connects. Called at the start of each session, and after each exception.

        Returns:
            The newest step that this logger has already for `run.id`, or None for none. `log` is then called for each
            later step, from earlier sessions too. Read it from where the values are stored: only then each step is
            logged once, also if the driver was killed before, within or after `log`.
        """

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Logs all values of a step. Steps increase strictly.

        Args:
            step: number of steps done since the start of the run.
            values: `loss`, `epoch`, `samples`, `samples_per_s` and `world_size`, the means of what `step.log` got, and
                the results of evaluations, by their names. At some steps also `phases/…`, `gpu/…` and `commit/…`.
            time: when the step was done: Unix time in seconds.
        """

    def finish(self, status: str) -> None:
        """Stores what is still in memory. Called once at the end of the session.

        Args:
            status: `finished`, `left`, `stopped` or `failed`; see `RunResult`.
        """
