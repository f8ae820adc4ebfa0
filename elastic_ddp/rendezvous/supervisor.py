"""Supervises the workers of a run: ends hangs, late starts and runs without progress, and instructs the controller."""

from __future__ import annotations

import time
from typing import Any

from elastic_ddp.errors import ElasticDDPError
from elastic_ddp.rendezvous.coordinator import Coordinator
from elastic_ddp.rendezvous.messages import WorkerDirectives
from elastic_ddp.rendezvous.requests import Requests
from elastic_ddp.telemetry import events

START_TIMEOUT_S = 120.0
"""Minimum time in which a worker must get ready to train; `hang_timeout_s` if that is longer."""
STACKS_WITHIN_S = 2.0
"""How long hanging workers have to record their stacks."""


class Supervisor:
    """Checks workers on each tick, and on each call of the controller."""

    def __init__(self, coordinator: Coordinator, requests: Requests) -> None:
        self._coordinator = coordinator
        self._membership = coordinator.membership
        self._attempts = coordinator.state.attempts
        self._hangs = coordinator.hangs
        self._requests = requests
        self._not_joined: dict[str, float] = {}
        """Workers that were started and have not joined, and since when."""
        self._stacks: tuple[int, float] | None = None
        """The request for the stacks of members that hang, and its time."""

    def supervise(
        self, started: list[str], starting: int, draining: dict[str, float], died: dict[str, str]
    ) -> WorkerDirectives | None:
        """Returns what the controller does about its workers; None if the run is over and all members have left.

        Args:
            started: ids of the running workers.
            starting: number of workers that are starting.
            draining: seconds until Ray removes a node, by Ray's node id.
            died: what Ray reports about the end of processes, by worker.
        """
        coordinator, membership = self._coordinator, self._membership
        self._attempts.explain(died)
        self._check_started(started)
        coordinator.record_dismissals()
        membership.update_workers(started, starting)
        for node_id, seconds in draining.items():
            self._requests.drain_node(node_id, seconds, "Ray")
        if coordinator.is_over and not membership.known():
            return None
        failed = membership.failed()
        newcomers = [worker for worker in started if membership.is_newcomer(worker)]
        first = coordinator.event_log.last(events.FirstStep)
        has_stepped = first is not None and first.generation == membership.generation
        return WorkerDirectives(
            failed={worker: failed[worker] for worker in started if worker in failed},
            newcomers=newcomers,
            dismissed=[worker for worker in started if worker in membership.dismissed],
            leaving=membership.leaving,
            avoid=list(membership.draining),
            limit=membership.limit,
            is_over=coordinator.is_over,
            is_steady=not (newcomers or coordinator.is_over) and membership.is_training() and has_stepped,
        )

    def _check_started(self, started: list[str]) -> None:
        """Marks running workers as failed that have not joined within the start timeout."""
        now_s = time.monotonic()
        timeout_s = max(self._hangs.timeout_s, START_TIMEOUT_S)
        not_joined = [worker for worker in started if not self._membership.has_joined(worker)]
        self._not_joined = {worker: self._not_joined.get(worker, now_s) for worker in not_joined}
        for worker, since_s in self._not_joined.items():
            if now_s - since_s >= timeout_s:
                self._coordinator.mark_failed(
                    worker,
                    f"not ready to train {timeout_s:g} s after its start (hang_timeout_s): it hangs in an import or "
                    "while it builds the model. Raise hang_timeout_s if that may take longer.",
                )

    def tick(self) -> None:
        """Forms a generation that is due, interrupts overdue steps, and ends hangs."""
        coordinator, membership, now_s = self._coordinator, self._membership, time.monotonic()
        coordinator.form()
        coordinator.plan(now_s)
        if membership.interrupt_if_overdue(now_s):
            coordinator.record(events.DrainOverdue(generation=membership.generation))
            coordinator.notify_members()
        coordinator.check_sections()
        self._check_for_hang(now_s)
        error = self._attempts.verdict(
            coordinator.event_log.step, membership, now_s, coordinator.options.heartbeat_timeout_s
        )
        if error is not None:
            self._fail_with_commit(error)
        coordinator.save()

    def _fail_with_commit(self, error: ElasticDDPError) -> None:
        """Ends the run, once members that wait for others have committed their state."""
        membership = self._membership
        if membership.all_wait() and not membership.has_committed():
            if self._membership.wanted.commits.open:
                self._coordinator.apply_request()
            else:
                self._requests.checkpoint()
        current = membership.current
        if not (membership.is_training() and current is not None and current.handover_only):
            self._coordinator.fail(error)

    def _check_for_hang(self, now_s: float) -> None:
        """On a hang, first asks all members for their stacks, then decides."""
        for member in self._hangs.places():
            if self._membership.why_gone(member) is not None:
                self._hangs.remove(member)
        if self._membership.all_wait():  # waiting for workers is not a hang
            self._hangs.begin(self._hangs.places(), now_s)
        if self._coordinator.event_log.ended is not None or not self._hangs.is_hung(now_s):
            self._stacks = None
        elif self._stacks is None:
            self._stacks = (self._requests.request_stacks(), now_s)
        elif now_s - self._stacks[1] >= STACKS_WITHIN_S:
            answers = self._requests.answers(self._stacks[0]) or []
            self._stacks = None
            for each in answers:
                if each["rank"] is not None and "stacks" in (each["answer"] or {}):
                    self._coordinator.record(events.StacksRecorded(member=each["id"], **each["answer"]))
            self._end_hang(now_s)

    def _end_hang(self, now_s: float) -> None:
        coordinator, membership, places = self._coordinator, self._membership, self._hangs.places()
        consequence = self._hangs.decide(is_broken=membership.failure is not None)
        culprits = consequence if isinstance(consequence, dict) else {}
        facts: Any = {"places": places, "culprits": [*culprits], "seconds": self._hangs.timeout_s}
        coordinator.record(events.HangDetected(generation=membership.generation, **facts))
        self._hangs.begin(places, now_s)  # the other members get another timeout
        for member, how in culprits.items():
            coordinator.mark_failed(member, how, is_hang=True)
        if isinstance(consequence, str):
            membership.break_generation(consequence)
            coordinator.record_failure(consequence)
        if isinstance(consequence, ElasticDDPError):
            coordinator.fail(consequence)
        coordinator.form()
