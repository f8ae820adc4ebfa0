"""Temporary folders of this node, which a killed process leaves behind only until another one creates its own."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "elastic_ddp-tmp-"


class TemporaryFolder:
    """A new folder in the folder for temporary files, locked as long as this process lives. `close` removes it.

    Creating one removes the folders of processes that have ended without removing them.

    Attributes:
        path: the folder.
    """

    def __init__(self, name: str) -> None:
        _remove_abandoned()
        # The folder gets its name once it is locked, so no other process takes it for abandoned.
        new = tempfile.mkdtemp(prefix=f".{PREFIX}")
        lock = os.open(new, os.O_RDONLY)
        self._locks = [lock]
        with suppress(OSError):  # a file system without locks, on which no folder counts as abandoned
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = os.path.join(os.path.dirname(new), f"{PREFIX}{name}-{new.rpartition('-')[2]}")
        os.rename(new, self.path)

    def close(self) -> None:
        """Removes the folder. Callable more than once, and from several threads at a time."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(IndexError):
            os.close(self._locks.pop())  # one thread gets it: the number of a closed descriptor is soon another file's


def _remove_abandoned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or removed meanwhile
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
