"""A driver's view of its cluster: whether Ray's GCS responds, and what a run with too few workers waits for."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Collection
from contextlib import suppress

import ray

from elastic_ddp.config.capacity import ClusterUse, explain_wait
from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.ray_internals import check_port
from elastic_ddp.ray_internals.nodes import read_cluster_use

CONTACT_S = 3.0
"""How often the GCS is contacted."""
CONNECT_WITHIN_S = 2.0
TIMEOUT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""The environment variable that sets how long Ray's processes wait for the GCS; by default 60 s."""
GIVE_UP_AFTER, END_BEFORE = 0.7, 0.85
"""Shares of Ray's timeout after which the driver gives up, and stops waiting for a commit."""
READ_S = 5.0
"""How often the cluster is read while the run waits."""
REPEAT_S = 600.0
"""How often the same line is printed again."""
LATE_S = 30.0
"""How long Ray may take to start workers whose resources are free."""


class GcsWatch:
    """Watches whether Ray's GCS responds. The GCS is the head node's process that keeps the state of the cluster.

    Training does not need the GCS: workers, controller and rendezvous send messages to each other directly. But each
    process of Ray ends itself, and the driver with it, if the GCS is not back within a minute.

    `is_away`: whether the last contact failed.
    `is_lost`: whether contacts have failed for `patience_s`; stays True. Ray's processes still live then.
    """

    def __init__(
        self,
        address: str,
        contact: Callable[[str, float], None] = check_port,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self.is_away = False
        self.is_lost = False
        self._timeout_s = float(os.environ.get(TIMEOUT_VARIABLE, "60"))
        self.patience_s = GIVE_UP_AFTER * self._timeout_s
        self._contact = contact
        self._clock = clock
        self._contacted_at = self._responded_at = clock()

    @property
    def is_over(self) -> bool:
        """Whether Ray's processes, and so this one, are about to end themselves."""
        return self._clock() - self._responded_at >= END_BEFORE * self._timeout_s

    def check(self) -> str | None:
        """Contacts the GCS if a contact is due. Returns the line to print if it has gone away or come back."""
        now = self._clock()
        if self.is_lost or now - self._contacted_at < CONTACT_S:
            return None
        self._contacted_at = now
        was_away = self.is_away
        try:
            self._contact(self.address, CONNECT_WITHIN_S)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # this process has too many open files
                return None
            self.is_away = True
            self.is_lost = now - self._responded_at >= self.patience_s
        else:
            self.is_away = False
            self._responded_at = now
        if self.is_away == was_away:
            return None
        if not self.is_away:
            return f"Ray's GCS at {self.address} responds again"
        return (
            f"Ray's GCS at {self.address} does not respond. Training continues; if it does not return within "
            f"{self.patience_s:g} s, the run commits and ends."
        )


class WaitWatch:
    """Determines the resources that a run with too few workers lacks, and when the driver prints them."""

    def __init__(
        self,
        config: RunConfig,
        read: Callable[[str, Collection[str]], ClusterUse] = read_cluster_use,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reason: str | None = None
        """The missing resources, as a line; None if the run does not wait, or if its workers are starting."""
        self._config = config
        self._read = read
        self._clock = clock
        self._since: float | None = None
        self._checked_at = self._printed_at = float("-inf")
        self._printed: str | None = None

    def update(self, num_workers: int, draining: Collection[str]) -> str | None:
        """Takes the number of live workers and the ids of draining nodes. Returns the line to print now, if any."""
        now = self._clock()
        if num_workers >= self._config.min_workers:
            self.reason = self._since = self._printed = None
            return None
        self._since = now if self._since is None else self._since
        if now - self._checked_at >= READ_S:
            self._checked_at = now
            config = self._config
            is_late = now - self._since >= LATE_S
            with suppress(ray.exceptions.RayError):  # the cluster does not answer just now
                use = self._read(config.name, draining)
                self.reason = explain_wait(use, config.resources_per_worker, config.min_workers, is_late=is_late)
        if self.reason is None or (self.reason == self._printed and now - self._printed_at < REPEAT_S):
            return None
        self._printed = self.reason
        self._printed_at = now
        return self.reason
