"""What Linux knows about another process of this machine."""

from __future__ import annotations

from pathlib import Path


def process_state(pid: int) -> str:
    """Returns the state of a process as in `ps`: T and t if it is stopped, Z and X if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def has_ended(pid: int) -> bool:
    """Returns whether a process has ended. It stays in the list of processes until its parent asks for it."""
    return process_state(pid) in "ZX"
