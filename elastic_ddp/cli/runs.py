"""The arguments of commands that name a run: a live one, or one by its ledger."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elastic_ddp.errors import ConfigError, StorageError
from elastic_ddp.storage.lease import find_holder
from elastic_ddp.storage.storage import Storage
from elastic_ddp.telemetry import LedgerReader
from elastic_ddp.telemetry.event import Event
from elastic_ddp.telemetry.ledger import list_sessions

if TYPE_CHECKING:
    from elastic_ddp.driver.run_handle import RunHandle

LiveRun = Annotated[str, typer.Argument(metavar="RUN", help="A live run: its name, or <storage>/<name>.")]
RecordedRun = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="The run's folder, <storage>/<name>. The name is enough if one folder of the working directory has it.",
    ),
]


def get_run(run: str) -> RunHandle:
    """Returns a handle to a live run. Raises ConfigError if it is not live."""
    from elastic_ddp.driver import run_handle  # imports Ray

    return run_handle.get_run(run)


def folders_of(name: str) -> list[str]:
    """Returns the runs with this name in the folders of the working directory; none if it is a path."""
    if Path(name).name != name:
        return []
    return sorted(str(path) for path in Path().glob(f"*/{glob.escape(name)}") if list_sessions(Storage(path)))


class RunLedger:
    """The ledger of a run, by its folder or name. Raises ConfigError if there is none, or several of this name."""

    def __init__(self, run: str) -> None:
        self._open(run)
        if not self._first:
            matches = folders_of(run)
            if len(matches) != 1:
                found = " or ".join(matches) or "<storage>/<name>"
                raise ConfigError(f"{run}: there is no run in this folder. Use {found}.")
            self._open(matches[0])

    def _open(self, folder: str) -> None:
        self.storage = Storage(folder)
        self._reader = LedgerReader(self.storage)
        self._first = self._reader.read()
        sessions = [] if self._first else list_sessions(self.storage)
        if sessions:
            raise ConfigError(
                f"{self.storage.uri}/ledger/{sessions[-1]}-000000.jsonl is empty or damaged, so there is nothing to "
                "show. The commits are not affected: `elastic-ddp checkpoints ls` lists them, and the same command "
                "resumes the run."
            )

    def read(self) -> list[Event]:
        """Returns the events that are new since the last call."""
        events = self._first + self._reader.read()
        self._first = []
        return events

    def poll(self) -> tuple[list[Event], bool]:
        """Returns the events that are new since the last call, and whether the run has no driver any more.

        While the storage fails there are none, and the run has one.
        """
        try:
            is_over = self.is_driver_alive() is False  # before the events are read
            return self.read(), is_over
        except StorageError:
            return [], False

    def live_status(self, status: str) -> str:
        """Returns the status of a summary, of an unfinished run `running` or `dead` if that is known."""
        known = {True: "running", False: "dead", None: status}
        return known[self.is_driver_alive()] if status == "unfinished" else status

    def is_driver_alive(self) -> bool | None:
        """Whether the run has a driver that is alive; None if that is not known, as on another host."""
        driver = find_holder(self.storage)
        return False if driver is None else driver.is_alive()
