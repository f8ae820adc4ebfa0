"""The interface through which `benchmarks/elasticity.py` controls every system."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from peers.workload import StepEnd, read_steps

BENCHMARKS = str(Path(__file__).resolve().parents[1])
_MARK = "ELASTICITY_BENCHMARK"


@dataclass(frozen=True, kw_only=True)
class About:
    """Facts about a system beside its figures."""

    name: str
    settings: str
    """Relevant settings, in one line."""
    not_kept: str
    """What a membership change loses beside time, in one line."""
    remarks: Mapping[str, str] = field(default_factory=dict)
    """A remark for each event."""


class System(ABC):
    """One run of a system, in its own folder. `stop` kills all its processes."""

    about: ClassVar[About]
    max_workers: ClassVar[int] = 3

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._spawned: list[subprocess.Popen[bytes]] = []
        self._stopped_pids: set[int] = set()

    @abstractmethod
    def start(self, num_workers: int) -> None:
        """Starts a run of up to `max_workers` workers with this many workers, or with CPUs for them."""

    @abstractmethod
    def add_worker(self) -> None:
        """Starts one more worker, or adds a CPU so that the system starts it."""

    def kill_worker(self, rank: int) -> int:
        """Kills the process of a rank with SIGKILL. Returns its process id."""
        pid = next(end.pid for end in reversed(self.step_ends()) if end.rank == rank)
        os.kill(pid, signal.SIGKILL)
        return pid

    @abstractmethod
    def drain_worker(self) -> None:
        """Removes the newest worker with notice, as a cloud does. Returns when the worker is gone or has the notice."""

    @abstractmethod
    def newest_machine(self) -> set[int]:
        """Removes the newest machine from the books, and returns the ids of its processes."""

    def stop_machine(self, how: signal.Signals) -> None:
        """Sends a signal to all processes of the newest machine: SIGKILL closes its sockets, and SIGSTOP leaves them
        open, as on a frozen or disconnected machine."""
        self._stopped_pids |= (pids := self.newest_machine())
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, how)

    def resize(self, num_workers: int) -> None:
        """Asks for another number of workers, if the system supports that."""
        raise NotImplementedError

    def step_ends(self) -> list[StepEnd]:
        return read_steps(self.folder)

    def ended(self) -> bool:
        """Whether all spawned processes have exited."""
        return all(process.poll() is not None for process in self._spawned)

    def spawn(self, command: list[str], **environment: str) -> subprocess.Popen[bytes]:
        """Starts a process of the run with its output in the folder's log."""
        path = os.pathsep.join(filter(None, [BENCHMARKS, os.environ.get("PYTHONPATH")]))
        # One thread for each worker, as with Ray; torchrun with one worker would use all cores.
        marked = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "FOLDER": str(self.folder), _MARK: str(self.folder)}
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **marked, **environment})
        self._spawned.append(process)
        return process

    def stop(self) -> None:
        """Kills all spawned processes and their descendants, also orphaned ones."""
        for pid in self._stopped_pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        mark = f"{_MARK}={self.folder}".encode()
        while alive := _processes_with(mark):
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self._spawned:
                process.poll()
        for process in self._spawned:
            process.wait()


def _processes_with(mark: bytes) -> set[int]:
    """Returns the processes with this entry in their environment. Needs Linux."""
    pids = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with suppress(OSError):  # it has exited, or belongs to another user
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    pids.add(int(folder.name))
    return pids


def tree(root: int) -> set[int]:
    """Returns a process and its descendants. Needs Linux."""
    children: dict[int, set[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has exited
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, set()).add(int(stat.parent.name))
    pids, new = {root}, {root}
    while new:
        new = set().union(*(children.get(pid, set()) for pid in new)) - pids
        pids |= new
    return pids


def module(name: str, *arguments: str) -> list[str]:
    """Returns the command that runs one of these files as a program."""
    return [sys.executable, "-m", f"peers.{name}", *arguments]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port: int = listener.getsockname()[1]
        return port
