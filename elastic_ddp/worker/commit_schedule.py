"""`CommitSchedule`: when a run commits. It knows the interval, requests, and the backoff after failed saves."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from elastic_ddp.checkpoint.interval import MeasuredInterval

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_ddp.config.run_config import CheckpointConfig

SAVE_BACKOFF_S, MAX_SAVE_BACKOFF_S = 5.0, 60.0
"""The backoff after a failed save. It doubles with every failure in a row."""


class CommitSchedule:
    """Decides on rank 0 when to commit. Every rank keeps its schedule up to date, because it may become rank 0.

    Args:
        settings: when to commit.
        total_steps: steps of the whole run.
        requested: returns the number of the newest request for a commit, or 0.
        clock: returns a time in seconds.
        steps_per_epoch: steps of an epoch.
    """

    def __init__(
        self,
        settings: CheckpointConfig,
        total_steps: int,
        requested: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        *,
        steps_per_epoch: int = 1,
    ) -> None:
        self._steps_per_epoch = steps_per_epoch
        self._settings = settings
        self._total_steps = total_steps
        self._requested = requested
        self._clock = clock
        self.interval = MeasuredInterval(settings.interval, settings.max_overhead)  # used if no fixed one is set
        self.step: int | None = None  # steps done when the current interval began; None before the first commit
        self.committed_step: int | None = None  # steps done in the newest commit that this worker knows of
        self._interval_began_at = clock()
        self._fulfilled = 0  # the newest request that a commit has fulfilled
        self._in_flight = 0  # the newest request that the running save will fulfill
        self._num_failures = 0  # failed saves in a row
        self._backoff_ends_at = -math.inf
        self._num_nodes = 1  # of the current generation
        self._is_exposed = False  # whether failures or drains have left the state on one node since the last commit
        self._has_seen_failure = False  # whether a worker failed while this process was in the run

    def should_commit(self, steps_done: int) -> bool:
        """Returns whether to commit after the current step."""
        settings = self._settings
        # The commit of the last step then waits for the metrics of the last evaluation.
        if steps_done == self._total_steps and settings.best_metric is not None:
            return self.is_requested
        interval_s = self.interval.seconds if settings.is_measured else settings.every_seconds
        steps_passed = settings.every_steps is not None and steps_done - (self.step or 0) >= settings.every_steps
        time_passed = interval_s is not None and self._clock() - self._interval_began_at >= interval_s
        is_due = steps_passed or time_passed or self._epochs_passed(steps_done)
        return is_due or self.is_requested or self._should_secure

    @property
    def _should_secure(self) -> bool:
        """Whether to commit because one node is left: its failure would cost more time than a save takes."""
        elapsed_s = self._clock() - self._interval_began_at
        return self._is_exposed and not self.in_backoff and self.interval.save_s < elapsed_s

    def _epochs_passed(self, steps_done: int) -> bool:
        """Returns whether `every_epochs` epochs have ended without a commit since."""
        if self._settings.every_epochs is None:
            return False
        steps = self._settings.every_epochs * self._steps_per_epoch
        return steps_done // steps > (self.step or 0) // steps

    @property
    def is_requested(self) -> bool:
        """Whether a request waits that the running save does not fulfill. False during the backoff."""
        return self._requested() > max(self._fulfilled, self._in_flight) and not self.in_backoff

    @property
    def in_backoff(self) -> bool:
        """Whether a save has failed a short time ago. Only the interval starts another save then."""
        return self._clock() < self._backoff_ends_at

    @property
    def interval_s(self) -> float | None:
        """The measured interval; None if the configuration sets a fixed one."""
        return round(self.interval.seconds, 3) if self._settings.is_measured else None

    def generation_formed(self, num_nodes: int) -> None:
        """A generation with workers on `num_nodes` nodes begins."""
        self._is_exposed = num_nodes == 1 and (self._is_exposed or self._num_nodes > 1)
        self._num_nodes = num_nodes

    def reset_timer(self, step: int) -> None:
        """Starts a new interval after `step` steps."""
        self._is_exposed = False
        self.step = step
        self._interval_began_at = self._clock()

    def skip(self, step: int) -> bool:
        """Skips a commit that is due while a save is running, unless it was requested, replaces a failed commit, or
        ends an epoch."""
        if self.is_requested or self._interval_began_at == -math.inf or self._epochs_passed(step):
            return False
        self.reset_timer(step)
        return True

    def save_started(self, request: int) -> None:
        """A save has started on rank 0. It fulfills requests up to `request`."""
        self._in_flight = request

    def save_succeeded(self, step: int, request: int, seconds: float) -> None:
        self.committed_step = step
        self._num_failures = 0
        self._backoff_ends_at = -math.inf
        self._fulfilled = max(self._fulfilled, request)
        self.interval.saved(seconds)

    def save_failed(self, *, counts: bool, retry_at_once: bool) -> None:
        """A save of this worker has failed. If it counts, the backoff begins."""
        self._in_flight = 0
        if retry_at_once:
            self.step = self.committed_step
            self._interval_began_at = -math.inf
        if counts:
            backoff_s = SAVE_BACKOFF_S * 2 ** min(self._num_failures, 30)
            self._num_failures += 1
            self._backoff_ends_at = self._clock() + min(backoff_s, MAX_SAVE_BACKOFF_S)

    def worker_failed(self) -> None:
        self._has_seen_failure = True
        self.interval.record_failure()

    def resume(self, step: int, record: Mapping[str, Any], *, after_failure: bool) -> None:
        """The run resumes from a commit. Only new processes count a failure of all workers with a state here."""
        self.reset_timer(step)
        self.committed_step = step
        self.interval.merge(record)
        if after_failure and not self._has_seen_failure:
            self.interval.record_failure()

    def start_over(self) -> None:
        self.step = None
        self.committed_step = None
        self._interval_began_at = self._clock()

    def set_newest(self, step: int | None) -> None:
        """Sets the newest commit in the storage. If it is not the expected one, a commit is due after the next step."""
        self.committed_step = step
        if self.step != step:
            self._interval_began_at = -math.inf if self.step is not None else self._interval_began_at
            self.step = step

    def to_record(self) -> dict[str, Any]:
        return self.interval.record() if self._settings.is_measured else {}
