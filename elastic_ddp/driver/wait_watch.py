"""Determines the resources that a run with too few workers lacks, and when the driver prints them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress

import ray

from elastic_ddp.config.capacity import ClusterUse, explain_wait
from elastic_ddp.config.run_config import RunConfig
from elastic_ddp.ray_internals.nodes import read_cluster_use

CHECK_S = 5.0
"""How often the cluster is read while the run waits."""
REPEAT_S = 600.0
"""How often the same line is printed again."""
LATE_S = 30.0
"""How long Ray may take to start workers whose resources are free."""


class WaitWatch:
    """Knows what a run waits for."""

    def __init__(
        self,
        config: RunConfig,
        read: Callable[[str, Collection[str]], ClusterUse] = read_cluster_use,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reason: str | None = None
        """What the run waits for; None if it does not wait, or if its workers are starting."""
        self._config, self._read, self._clock = config, read, clock
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
        if now - self._checked_at >= CHECK_S:
            self._checked_at, is_late = now, now - self._since >= LATE_S
            with suppress(ray.exceptions.RayError):  # the cluster does not answer just now
                use = self._read(self._config.name, draining)
                needs, least = self._config.resources_per_worker, self._config.min_workers
                self.reason = explain_wait(use, needs, least, is_late=is_late)
        if self.reason is None or (self.reason == self._printed and now - self._printed_at < REPEAT_S):
            return None
        self._printed, self._printed_at = self.reason, now
        return self.reason
