"""A worker's client for the rendezvous: threads that send events and receive signals, beside the training loop."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import ray

from elastic_ddp.distributed.assignment import Assignment
from elastic_ddp.rendezvous.actor import RendezvousHandle
from elastic_ddp.rendezvous.hang import Activity, stacks
from elastic_ddp.rendezvous.heartbeat import Heartbeat
from elastic_ddp.rendezvous.members import JoinRequest, Member
from elastic_ddp.rendezvous.messages import NO_SIGNALS, Ended, MemberRequest, PlannedAssignment, Signals
from elastic_ddp.telemetry.event import Event

_log = logging.getLogger(__name__)

_RETRY_S = 1.0
"""Seconds between attempts of a call that fails in the rendezvous."""
_OF_A_GENERATION: Any = {"failed_generation": None, "reconfigure": False, "planned": None}
"""Signals that apply to one generation only, and their defaults."""


class RunStopped(BaseException):
    """Ends the user's function in a worker when the run stops. Not an Exception, so `except Exception` does not
    catch it."""


class RendezvousClient:
    """A worker's connection to the rendezvous.

    Events are sent in order, without delay. Inside a step the training thread calls only `record`, `progress`,
    `set_abort` and the attributes, which never block; the other methods wait for Ray.
    """

    def __init__(self, rendezvous: RendezvousHandle, member: Member, heartbeat_timeout_s: float) -> None:
        self.member = member
        self._rendezvous = rendezvous
        self._progress: dict[str, Any] | None = None
        self.activity = Activity()
        """The work of the training thread, which updates it."""
        self.signals = NO_SIGNALS
        """The newest signals for this worker."""
        self._generation = 0
        self.profile_requests: SimpleQueue[MemberRequest] = SimpleQueue()
        """Requests to profile steps."""
        self._received = 0
        """Number of the newest request to this worker."""
        self._abort: Callable[[], None] | None = None
        self._closed = threading.Event()
        self.disconnected = False
        """Whether Ray on this node is gone, so that no signals arrive any more."""
        self._num_sent = 0
        self.heartbeat = Heartbeat(
            lambda: ray.get(rendezvous.heartbeat_address.remote(member)), member.id, heartbeat_timeout_s
        )
        self._sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rendezvous-sender")
        self._receiver = threading.Thread(target=self._receive_signals, name="rendezvous-receiver", daemon=True)
        self._receiver.start()

    def plan_join(self) -> PlannedAssignment | None:
        """Returns the place that this worker would get if it joined now; None if that is not known."""
        return self._call(self._rendezvous.plan_join, self.member)

    def store_address(self) -> tuple[str, int]:
        """Returns the address of the generations' store. It changes when the rendezvous restarts."""
        return self._call(self._rendezvous.store_address)

    def why_not_commit(self, generation: int) -> str | None:
        """Returns why this worker may not commit what it wrote in a generation; None if it may."""
        return self._call_in_order(self._rendezvous.why_not_commit, self.member, generation)

    def leave(self, why: str, within_s: float) -> None:
        """Asks to leave the run at a step boundary, within a number of seconds."""
        self._call(self._rendezvous.leave, self.member, within_s, why)

    def exclude(self, within_s: float) -> None:
        """Keeps the run off this worker's device, because it computes wrong values; see `Requests.exclude`."""
        self._call_in_order(self._rendezvous.exclude, self.member, within_s)

    def record(self, event: Event) -> None:
        """Queues an event for the ledger, with the current time as `at` if it has none. Never blocks."""
        self._sender.submit(self._send, event if event.at is not None else replace(event, at=time.time()))

    def progress(self, **newest: Any) -> None:
        """Sets this worker's progress report; only the newest one is sent. Never blocks."""
        self._progress = newest

    def join(
        self,
        request: JoinRequest,
        *,
        while_waiting: Callable[[PlannedAssignment], object] = lambda planned: None,
    ) -> Assignment:
        """Waits for the next generation and returns this worker's place in it.

        Calls `while_waiting` now and then with the place that this worker may get. Raises RunStopped if it gets no
        further generation. This client fills in `after` and `activity` of the request.
        """
        while True:
            answer: Assignment | Ended | PlannedAssignment | None
            request = replace(request, after=self._generation, activity=self.activity.report())
            answer = self._call(self._rendezvous.join, request)
            if isinstance(answer, Ended):
                raise RunStopped(answer.reason)
            if isinstance(answer, PlannedAssignment):
                while_waiting(answer)
            elif answer is not None:
                self._generation = answer.generation
                self._progress = self._progress if answer.rank == 0 else None  # rank 0 alone reports progress
                self.signals = replace(self.signals, **_OF_A_GENERATION)
                return answer

    def set_abort(self, abort: Callable[[], None] | None) -> None:
        """Sets the function that aborts this worker's collectives; None for none. A client thread calls it when a
        member of the current generation fails or the run ends."""
        self._abort = abort
        if abort is not None and self._must_abort(self.signals):
            _try_to_abort(abort)

    def _must_abort(self, signals: Signals) -> bool:
        return signals.ended is not None or signals.failed_generation == self._generation

    def end(self, **outcome: Any) -> bool:
        """Reports how the run ended, after all events before it. Returns False if the run continues: this worker
        failed before it ever trained, and others train."""
        return self._call_in_order(self._rendezvous.end, self.member, self._progress, outcome)

    def close(self) -> None:
        """Retires this worker after all events, and ends the signals and heartbeats. The sender thread remains for the
        events of a save that still runs."""
        self._call_in_order(self._rendezvous.retire, self.member)
        self._closed.set()
        self._receiver.join()
        self.heartbeat.stop()

    def _call_in_order(self, method: Any, *arguments: Any) -> Any:
        """Calls the rendezvous after all events before, on the sender thread. Returns its answer."""
        return self._sender.submit(self._call, method, *arguments).result()

    def _send(self, event: Event) -> None:
        """Sends an event with its number: Ray repeats the call if the rendezvous process dies."""
        self._num_sent += 1
        try:
            self._call(self._rendezvous.report, event, self._progress, self.member.id, self._num_sent, time.time())
        except Exception:  # no caller waits for the result
            _log.exception("the event %r was not sent to the rendezvous", event.event)

    def _call(self, method: Any, *arguments: Any) -> Any:
        """Calls the rendezvous until it succeeds: the disk of its node may be full for a while."""
        for attempt in itertools.count():
            try:
                return ray.get(method.remote(*arguments))
            except ray.exceptions.RayTaskError:
                if attempt == 0:
                    _log.exception("a call of the rendezvous failed; retrying every %g s", _RETRY_S)
                if self._closed.wait(_RETRY_S):
                    raise

    def answer(self, number: int, **answer: Any) -> None:
        """Answers a `MemberRequest`, with facts or an `error`. For any thread but the training thread: it blocks."""
        self._call(self._rendezvous.answer, self.member, number, answer)

    def _receive_signals(self) -> None:
        aborted = 0
        while not self._closed.is_set():
            generation = self._generation
            try:
                activity = self.activity.report()
                poll = self._rendezvous.poll_signals
                signals: Signals = self._call(poll, self.member, generation, self._progress, activity, self._received)
                for request in signals.requests:
                    self._received = request.number
                    if request.profile is not None:
                        self.profile_requests.put(request)
                    else:
                        self.answer(request.number, place=self.activity.now.place, stacks=stacks())
            except ray.exceptions.RayError:
                self.disconnected = True
                return
            if generation != self._generation:
                signals = replace(signals, **_OF_A_GENERATION)
            self.signals = signals
            abort = self._abort
            if abort is not None and self._must_abort(signals) and (signals.ended is not None or aborted < generation):
                aborted = generation
                _try_to_abort(abort)
            if signals.ended is not None:
                return
            if signals != NO_SIGNALS:
                self._closed.wait(0.05)  # the rendezvous does not hold such a call


def _try_to_abort(abort: Callable[[], None]) -> None:
    """Calls it, and logs any error: this thread must go on."""
    try:
        abort()
    except Exception:
        _log.exception("the collectives of a failed generation could not be aborted")
