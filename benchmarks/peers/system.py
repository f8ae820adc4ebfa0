"""A way to train, seen from outside: what `benchmarks/elasticity.py` does to all of them alike."""

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
    """What is to be known of a system beside its figures."""

    name: str
    settings: str
    """Those that matter here, in a line."""
    not_kept: str
    """What a change of membership costs beside time, in a line."""
    remarks: Mapping[str, str] = field(default_factory=dict)
    """By event, a few words."""


class System(ABC):
    """One run of a system, in a folder of its own. `stop` ends every process of it, whatever state it is in."""

    about: ClassVar[About]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._spawned: list[subprocess.Popen[bytes]] = []
        self._lost: set[int] = set()

    @abstractmethod
    def start(self, num_workers: int) -> None:
        """Starts a run that may have up to three workers, with so many, or with room for so many."""

    @abstractmethod
    def add_worker(self) -> None:
        """Gives the run room for one more, or starts one, whichever is how it is done there."""

    def kill_worker(self, rank: int) -> int:
        """Ends the process of a rank as a crash would (SIGKILL). Returns its process id."""
        pid = next(end.pid for end in reversed(self.step_ends()) if end.rank == rank)
        os.kill(pid, signal.SIGKILL)
        return pid

    @abstractmethod
    def drain_worker(self) -> None:
        """Takes the worker that was added last away with notice, as a cloud does with a machine. Returns when that is
        done, or has been asked for."""

    @abstractmethod
    def newest_machine(self) -> set[int]:
        """Forgets the machine that was added last, and returns the processes on it."""

    def lose_machine(self, how: signal.Signals) -> None:
        """All of the machine that was added last, its worker and what looks after it, in one moment: it dies, and its
        sockets with it (SIGKILL), or falls silent with its sockets open, as if frozen or cut off (SIGSTOP)."""
        self._lost |= (pids := self.newest_machine())
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, how)

    def resize(self, num_workers: int) -> None:
        """Asks for another number of workers, where there is such a thing."""
        raise NotImplementedError

    def step_ends(self) -> list[StepEnd]:
        return read_steps(self.folder)

    def ended(self) -> bool:
        """Whether every process that was started for it has ended by itself."""
        return all(process.poll() is not None for process in self._spawned)

    def spawn(self, command: list[str], **environment: str) -> subprocess.Popen[bytes]:
        """Starts a process of the run, whose output goes to the folder's log."""
        path = os.pathsep.join(filter(None, [BENCHMARKS, os.environ.get("PYTHONPATH")]))
        # One thread for a worker, as Ray gives it; torchrun with one worker leaves it as many as there are cores.
        marked = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "FOLDER": str(self.folder), _MARK: str(self.folder)}
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **marked, **environment})
        self._spawned.append(process)
        return process

    def stop(self) -> None:
        """Kills what was spawned and everything that came of it, also what was left without a parent."""
        for pid in self._lost:
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
    """Processes that were started with this in their environment. Needs Linux."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with suppress(OSError):  # it is gone meanwhile, or not ours
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.add(int(folder.name))
    return found


def tree(root: int) -> set[int]:
    """A process and all that came of it. Needs Linux."""
    below: dict[int, set[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it is gone meanwhile
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            below.setdefault(parent, set()).add(int(stat.parent.name))
    found, new = {root}, {root}
    while new:
        new = set().union(*(below.get(pid, set()) for pid in new)) - found
        found |= new
    return found


def module(name: str, *arguments: str) -> list[str]:
    """The command that runs one of these files as a program."""
    return [sys.executable, "-m", f"peers.{name}", *arguments]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port: int = listener.getsockname()[1]
        return port
