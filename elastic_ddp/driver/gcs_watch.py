"""Watches whether Ray's GCS responds: the process on the head node that keeps the state of the cluster.

Training does not need it: workers, controller and rendezvous talk to each other directly. But each process of Ray ends
itself, and the driver with it, if the GCS is not back within a minute.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable

from elastic_ddp.ray_internals import check_port

CHECK_S = 3.0
"""How often the GCS is contacted."""
CONNECT_WITHIN_S = 2.0
RECONNECT_TIMEOUT = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""The environment variable that says how long Ray's processes wait for the GCS; by default 60 s."""
GIVE_UP_AFTER, END_BEFORE = 0.7, 0.85
"""The driver gives up after the first share of that time, and waits for a commit until the second."""


class GcsWatch:
    """Contacts the GCS at `address`, host:port.

    `is_away` is whether the last contact failed; `is_lost`, which stays true, whether contacts have failed for
    `patience_s`. Ray's processes still live then.
    """

    def __init__(
        self,
        address: str,
        contact: Callable[[str, float], None] = check_port,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self.is_away = self.is_lost = False
        self._timeout_s = float(os.environ.get(RECONNECT_TIMEOUT, "60"))
        self.patience_s = GIVE_UP_AFTER * self._timeout_s
        self._contact, self._clock = contact, clock
        self._contacted_at = self._responded_at = clock()

    @property
    def is_over(self) -> bool:
        """Whether Ray's processes, and so this one, are about to end themselves."""
        return self._clock() - self._responded_at >= END_BEFORE * self._timeout_s

    def check(self) -> str | None:
        """Contacts the GCS if that is due. Returns the line to print if it has gone away or come back."""
        now = self._clock()
        if self.is_lost or now - self._contacted_at < CHECK_S:
            return None
        self._contacted_at, was_away = now, self.is_away
        try:
            self._contact(self.address, CONNECT_WITHIN_S)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # this process has too many open files
                return None
            self.is_away, self.is_lost = True, now - self._responded_at >= self.patience_s
        else:
            self.is_away, self._responded_at = False, now
        if self.is_away == was_away:
            return None
        if not self.is_away:
            return f"Ray's GCS at {self.address} responds again"
        return (
            f"Ray's GCS at {self.address} does not respond. Training continues; if it does not return within "
            f"{self.patience_s:g} s, the run commits and ends."
        )
