"""How long the controller waits after failed starts before it starts another worker."""

from __future__ import annotations

import time

MAX_START_BACKOFF_S = 60.0
"""Longest pause after failed starts: 2 s after the first, then twice as long after each further one."""


class StartBackoff:
    """Counts failed starts in a row.

    Attributes:
        until: the monotonic time, in seconds, before which no worker is started.
    """

    def __init__(self) -> None:
        self.until = 0.0
        self._num_failed = 0

    def add(self, num_failed: int) -> None:
        """Counts failed starts, and begins a pause if there are any."""
        if num_failed:
            self._num_failed += num_failed
            self.until = time.monotonic() + min(2.0 ** min(self._num_failed, 10), MAX_START_BACKOFF_S)

    def reset(self) -> None:
        """A start has succeeded."""
        self._num_failed = 0

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.until
