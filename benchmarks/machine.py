"""The machine that a benchmark runs on: what it is, which CPU time its programs use, and signals to all of a side."""

from __future__ import annotations

import os
import platform
import signal
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any


def describe_machine() -> dict[str, Any]:
    versions = {name: version(name) for name in ("torch", "ray", "pyarrow")}
    return {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version(), **versions}


def busy_seconds() -> float:
    """Returns the CPU seconds that this machine has used, or that its host has stolen. Needs Linux."""
    user, nice, system, _, _, *interrupts_and_steal = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
    return (user + nice + system + sum(interrupts_and_steal)) / os.sysconf("SC_CLK_TCK")


def processes_below(root: int) -> dict[int, float]:
    """Returns the CPU seconds of a process and its descendants by process id, with ended children. Needs Linux."""
    parents, seconds = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # the process ended meanwhile
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)] = int(fields[1])
                seconds[int(folder.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    below = {root}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return {pid: seconds[pid] for pid in below if pid in seconds}


def signal_all(root: int, number: signal.Signals) -> None:
    """Sends a signal to a process and its descendants, until no new one has started meanwhile."""
    done: set[int] = set()
    while new := set(processes_below(root)) - done:
        for pid in new:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        done |= new


def kill_all(root: int) -> None:
    """Kills a process and its descendants."""
    signal_all(root, signal.SIGSTOP)  # stopped processes start no new ones
    signal_all(root, signal.SIGKILL)
