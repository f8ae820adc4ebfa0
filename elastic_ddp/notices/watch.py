"""Polls the metadata service and drains this machine's Ray nodes once for each notice."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from elastic_ddp.errors import format_exception
from elastic_ddp.notices.metadata import AWS, FAILURES, GCP, Notice, most_urgent

INTERVAL_S = 2.0
_RAY_S = 10.0
"""How long Ray may take to accept a drain, before it is asked again."""


class DrainError(Exception):
    """Ray did not accept a drain."""


class Watch:
    """Acts on each notice once, the most urgent first. A drain that fails is repeated while the notice holds."""

    def __init__(
        self,
        service: AWS | GCP,
        drain: Callable[[Notice], str],
        log: Callable[[str], None],
        *,
        drain_on_rebalance: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`drain` returns the ids of the drained nodes, or raises DrainError."""
        self._service = service
        self._drain = drain
        self._log = log
        self._clock = clock
        self._drain_on_rebalance = drain_on_rebalance
        self._handled: set[Notice] = set()
        self._problem: str | None = None

    def run(self) -> NoReturn:
        """Watches until the process ends."""
        while True:
            end = time.monotonic() + INTERVAL_S
            self.poll()
            time.sleep(max(0.0, end - time.monotonic()))

    def poll(self) -> None:
        """Reads the notices once, and handles new ones."""
        try:
            notices = self._service.poll()
        except FAILURES as error:
            self._report(
                f"the metadata service of {self._service.name} fails ({format_exception(error)}); it is polled again"
            )
            return
        self._handled.intersection_update(notices)
        notice = most_urgent(notices)
        self._report(None if notice is None or notice in self._handled else self._handle(notice))

    def _handle(self, notice: Notice) -> str | None:
        """Returns why the notice could not be handled."""
        if notice.is_advice and not self._drain_on_rebalance:
            self._log(f"{notice.text}; this node is not drained (--drain-on-rebalance)")
        else:
            try:
                nodes = self._drain(notice)
            except DrainError as error:
                return f"{notice.text}, but the drain fails ({error}); it is tried again"
            left = "" if notice.deadline is None else f", {notice.deadline - self._clock():.0f} s left"
            self._log(f"{notice.text}; draining Ray node {nodes}{left}")
        self._handled.add(notice)
        return None

    def _report(self, problem: str | None) -> None:
        """Logs a problem once, and its end."""
        if problem is not None and problem != self._problem:
            self._log(problem)
        elif problem is None and self._problem is not None:
            self._log(f"the metadata service of {self._service.name} and Ray respond")
        self._problem = problem


def drain_in_ray(notice: Notice) -> str:
    """Drains the Ray nodes of this machine. Returns their ids; raises DrainError."""
    deadline_ms = 0 if notice.deadline is None else round(notice.deadline * 1000)
    return _call_ray(notice.text, str(deadline_ms))


def find_ray_nodes() -> str:
    """Returns the ids of this machine's Ray nodes; raises DrainError if there is none."""
    return _call_ray()


def _call_ray(*arguments: str) -> str:
    """Runs `ray_internals.drain` in a process of its own, so that this one stays small and outlives a hanging call."""
    command = [sys.executable, "-m", "elastic_ddp.ray_internals.drain", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_RAY_S)
    except subprocess.TimeoutExpired:
        raise DrainError(f"Ray does not respond within {_RAY_S:g} s") from None
    if done.returncode != 0:
        raise DrainError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return ", ".join(done.stdout.split())
