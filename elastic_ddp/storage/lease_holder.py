"""A driver: who and where it is, and whether it lives, as far as that can be seen from here."""

from __future__ import annotations

import getpass
import os
import shlex
import socket
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Driver:
    """A driver and where it is. `str` of it is for people."""

    session: str = ""
    host: str = "a host that its lease does not name"
    pid: int = 0
    user: str = "somebody"
    command: str = ""
    since: str = "a time unknown"
    """By the clock of its host."""
    ray_address: str | None = None
    """None until it is known."""
    boot_id: str = ""
    """Of its host's kernel; empty if unknown."""
    pid_namespace: int = 0
    """The inode of the namespace that `pid` belongs to."""
    started: int | None = None
    """When its process began, in clock ticks since boot: what tells it from a later one with its pid."""

    def __str__(self) -> str:
        ray = f"Ray at {self.ray_address}" if self.ray_address else "not on Ray yet"
        command = f", started with `{self.command}`" if self.command else ""
        return f"pid {self.pid} of {self.user} on {self.host}, since {self.since}, {ray}{command}"

    @classmethod
    def this_process(cls, session: str) -> Driver:
        """This process."""
        boot_id, pid_namespace = _whereabouts_of_pids()
        return cls(
            session=session,
            host=socket.gethostname(),
            pid=os.getpid(),
            user=_user(),
            command=shlex.join(sys.orig_argv),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            boot_id=boot_id,
            pid_namespace=pid_namespace,
            started=started(os.getpid()),
        )

    def is_alive(self) -> bool | None:
        """Whether its process lives; None where that cannot be seen from here."""
        boot_id, pid_namespace = _whereabouts_of_pids()
        if not boot_id or (self.boot_id, self.pid_namespace) != (boot_id, pid_namespace):
            return None
        begun = started(self.pid)
        if begun is None:
            try:
                os.kill(self.pid, 0)
            except PermissionError:  # other users' processes may be hidden
                return None
            except ProcessLookupError:
                pass
            return False  # or a zombie
        if begun != self.started:
            return False
        # A lease of this very process may be one that could not be released: a notebook would wait for itself.
        return None if self.pid == os.getpid() else True


def _whereabouts_of_pids() -> tuple[str, int]:
    """The boot of this machine, and the namespace in it, that pids here belong to; an empty boot if unknown."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot_id, os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return "", 0


def started(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; None if it is dead or cannot be seen."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    state, *rest = stat.rpartition(b")")[2].split()  # a process may have any name
    return None if state in (b"Z", b"X") else int(rest[18])


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # containers run as users that have no name
        return f"user {os.getuid()}"
