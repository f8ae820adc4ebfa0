"""A driver process: its identity, and whether this machine can see that it is alive."""

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
    """A driver and where it runs. `str` describes it for messages."""

    session: str = ""
    host: str = "an unknown host"
    pid: int = 0
    user: str = "an unknown user"
    command: str = ""
    since: str = "an unknown time"
    """Start time by the clock of its host, in ISO format."""
    ray_address: str | None = None
    """None until it has connected to Ray."""
    boot_id: str = ""
    """Boot id of its host's kernel; empty if unknown."""
    pid_namespace: int = 0
    """Inode of the namespace of `pid`."""
    started: int | None = None
    """Start of the process in clock ticks since boot, which tells it from a later process with the same pid."""

    def __str__(self) -> str:
        ray = f"Ray at {self.ray_address}" if self.ray_address else "not connected to Ray"
        command = f", started with `{self.command}`" if self.command else ""
        return f"pid {self.pid} of {self.user} on {self.host}, since {self.since}, {ray}{command}"

    @classmethod
    def this_process(cls, session: str = "") -> Driver:
        """Describes the current process."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # users in containers may have no name
            user = f"user {os.getuid()}"
        boot_id, pid_namespace = _pid_scope()
        return cls(
            session=session,
            host=socket.gethostname(),
            pid=os.getpid(),
            user=user,
            command=shlex.join(sys.orig_argv),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            boot_id=boot_id,
            pid_namespace=pid_namespace,
            started=started(os.getpid()),
        )

    def is_alive(self) -> bool | None:
        """Returns whether the process is alive; None if this process cannot see that."""
        if not self.boot_id or (self.boot_id, self.pid_namespace) != _pid_scope():
            return None
        started_at = started(self.pid)
        if started_at is None:
            try:
                os.kill(self.pid, 0)
            except PermissionError:  # processes of other users may be hidden
                return None
            except ProcessLookupError:
                pass
            return False  # dead, or a zombie
        if started_at != self.started:
            return False
        # This process may have failed to release an earlier lease, for example in a notebook.
        return None if self.pid == os.getpid() else True


def started(pid: int) -> int | None:
    """Returns when a process started, in clock ticks since boot; None if it is dead or cannot be seen."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    state, *rest = stat.rpartition(b")")[2].split()  # the process name before it may contain any character
    return None if state in (b"Z", b"X") else int(rest[18])


def _pid_scope() -> tuple[str, int]:
    """Returns the boot id and the pid namespace in which this process's pids are valid; an empty id if unknown."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot_id, os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return "", 0
