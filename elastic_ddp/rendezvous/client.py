"""A worker's line to the rendezvous: threads that carry messages out and signals in, beside the training loop."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from elastic_ddp.distributed.process_group import Assignment
from elastic_ddp.rendezvous.actor import RendezvousHandle
from elastic_ddp.rendezvous.hang import Activity, stacks
from elastic_ddp.rendezvous.heartbeat import Heartbeat
from elastic_ddp.rendezvous.members import JoinRequest, Member
from elastic_ddp.rendezvous.messages import NOTHING, Ended, PlannedAssignment, Signals
from elastic_ddp.telemetry.events import Event, StacksRecorded

_log = logging.getLogger(__name__)

_AGAIN_S = 1.0
"""How long until something is asked again that failed in the rendezvous."""
_OF_A_GENERATION: Any = {"broken": None, "reconfigure": False, "prospect": None}
"""Signals that mean one generation and no other."""


class RunStopped(BaseException):
    """Ends the user's function in a worker when the run stops. Not an Exception: `except Exception` lets it pass."""


@dataclass(frozen=True)
class _Question:
    """What the rendezvous is asked, in its turn among messages."""

    method: Any
    arguments: tuple[Any, ...]
    answer: Future[Any] = field(default_factory=Future)


class RendezvousClient:
    """Everything a worker says to the rendezvous, and hears from it.

    What is said is sent at once and in order. Within a step the training thread calls `record`, `progress`,
    `abort_when_broken` and the properties alone, which never wait; the rest waits for Ray.

    Args:
        rendezvous: the run's rendezvous actor.
        member: this worker.
        heartbeat_timeout_s: silence that the rendezvous takes for this worker's death.
    """

    def __init__(self, rendezvous: RendezvousHandle, member: Member, heartbeat_timeout_s: float) -> None:
        self.member = member
        self._rendezvous = rendezvous
        self._outbox: queue.SimpleQueue[Event | _Question | None] = queue.SimpleQueue()
        """Messages, questions, and None, which ends it."""
        self._progress: dict[str, Any] | None = None
        self.activity = Activity()
        """Where the training thread is, which tells it."""
        self._signals = Signals()
        self._generation = 0
        self._cut: Callable[[], None] | None = None
        self._closed = threading.Event()
        self.disconnected = False
        """Whether nothing comes in any more: Ray is gone from this node."""
        self._said = 0
        """Messages that were sent."""
        self._pulse = Heartbeat(lambda: ray.get(rendezvous.pulse_address.remote()), member.id, heartbeat_timeout_s)
        self._speaker = threading.Thread(target=self._speak, name="rendezvous-link-out", daemon=True)
        self._listener = threading.Thread(target=self._listen, name="rendezvous-link-in", daemon=True)
        self._speaker.start()
        self._listener.start()

    @property
    def stop_requested(self) -> bool:
        return self._signals.stop

    @property
    def reconfigure_requested(self) -> bool:
        """Whether the generation should end at its next step boundary."""
        return self._signals.reconfigure

    @property
    def prospect(self) -> PlannedAssignment | None:
        """This worker's place after that; None if it has none."""
        return self._signals.prospect

    def ask_for_prospect(self) -> PlannedAssignment | None:
        """The place that it would have if it joined now; None if that cannot be said."""
        prospect: PlannedAssignment | None = ray.get(self._rendezvous.prospect.remote(self.member))
        return prospect

    def store_address(self) -> tuple[str, int]:
        """Where members of a generation find each other, for now: it moves if the rendezvous is restarted."""
        address: tuple[str, int] = ray.get(self._rendezvous.store_address.remote())
        return address

    @property
    def commit_requested(self) -> int:
        """The number of a request to commit at the next step boundary; 0 for none."""
        return self._signals.commit

    def why_not_commit(self, generation: int) -> str | None:
        """Why what this worker has written in a generation may not be committed; None if it may. It may be asked at any
        time, also after `end`."""
        reason: str | None = self._ask(self._rendezvous.why_not_commit, self.member, generation)
        return reason

    def leave(self, why: str, within_s: float) -> None:
        """Asks to be let go at a step boundary."""
        self._insist(self._rendezvous.leave, self.member, within_s, why)

    def record(self, event: Event) -> None:
        """Queues an event for the ledger, with the current time as `at`. Never blocks."""
        self._outbox.put(replace(event, at=time.time()))

    def progress(self, **newest: Any) -> None:
        """How far training is; only the newest word is passed on. Costs an assignment."""
        self._progress = newest

    def join(
        self,
        *,
        step: int | None,
        between_steps: bool = True,
        failure: str | None = None,
        committed: int | None = None,
        account: dict[str, float] | None = None,
        resumable: bool = True,
        while_waiting: Callable[[PlannedAssignment], object] = lambda prospect: None,
    ) -> Assignment:
        """Waits for the next generation.

        Args:
            step, between_steps, committed, resumable: what this worker comes with, as in `JoinRequest`.
            lost: how its last generation broke, if it did.
            account: where its time in that went.
            while_waiting: told now and then of the place it may get.

        Raises:
            RunStopped: there will be none, for this worker.
        """
        arrival = JoinRequest(
            member=self.member, step=step, between_steps=between_steps, resumable=resumable, committed=committed
        )
        while True:
            answer: Assignment | Ended | PlannedAssignment | None
            answer = self._insist(self._rendezvous.join, arrival, self._generation, failure, account)
            if isinstance(answer, Ended):
                raise RunStopped(answer.reason)
            if isinstance(answer, PlannedAssignment):
                while_waiting(answer)
            elif answer is not None:
                self._generation = answer.generation
                self._progress = self._progress if answer.rank == 0 else None  # the first one's word is what counts
                self._signals = replace(self._signals, **_OF_A_GENERATION)  # said of the one before
                return answer

    def abort_when_broken(self, cut: Callable[[], None] | None) -> None:
        """What to call, from the link's thread, when a peer of this generation is lost or the run ends, while this
        worker may be stuck in a collective."""
        self._cut = cut
        if cut is not None and self._must_abort(self._signals):
            _try_to_abort(cut)

    def _must_abort(self, signals: Signals) -> bool:
        return signals.ended is not None or signals.broken == self._generation

    def end(self, **outcome: Any) -> bool:
        """Says that the run is over and how. Returns when the rendezvous has it, with all messages before it, whether
        that counts: a failure of a worker that has never trained does not, if others train."""
        counts: bool = self._ask(self._rendezvous.end, self.member, self._progress, outcome)
        return counts

    def close(self) -> None:
        """Ends the threads; what was said before has been delivered."""
        self._outbox.put(None)
        self._speaker.join()
        self._closed.set()
        self._listener.join()
        ray.get(self._rendezvous.retire.remote(self.member))
        self._pulse.stop()
        if remaining := self._drain():  # said after the end
            self._send(remaining)

    def _ask(self, method: Any, *arguments: Any) -> Any:
        """The answer of the rendezvous, which the link's thread asks for after all that was said before."""
        question = _Question(method, arguments)
        self._outbox.put(question)
        while self._speaker.is_alive():
            with suppress(TimeoutError):
                return question.answer.result(timeout=1.0)
        # It has ended: the link is closed, or the rendezvous is gone, which is raised here.
        return question.answer.result() if question.answer.done() else self._insist(method, *arguments)

    def _drain(self) -> list[Event]:
        """What waits to be sent, up to the end."""
        messages = []
        while not self._outbox.empty() and (message := self._outbox.get()) is not None:
            if isinstance(message, Event):
                messages.append(message)
        return messages

    def _speak(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                if isinstance(message, Event):
                    self._send([message])
                else:
                    message.answer.set_result(self._insist(message.method, *message.arguments))
            except ray.exceptions.RayError as error:
                if isinstance(message, _Question):
                    message.answer.set_exception(error)
                return  # the driver is gone, and this worker goes with it

    def _send(self, messages: list[Event]) -> None:
        """Returns when the rendezvous has them. Ray calls again if its process dies, and numbers tell that it did."""
        self._insist(self._rendezvous.take, messages, self._progress, self.member.id, self._said + 1)
        self._said += len(messages)

    def _insist(self, method: Any, *arguments: Any) -> Any:
        """Asks the rendezvous until it can do it: the disk of its node may be full for a while."""
        is_said = False
        while True:
            try:
                return ray.get(method.remote(*arguments))
            except ray.exceptions.RayTaskError:
                if not is_said:
                    _log.exception("the rendezvous cannot do what it is asked for; it is asked again every second")
                is_said = True
                if self._closed.wait(_AGAIN_S):
                    raise

    def _listen(self) -> None:
        cut_in = shown = 0
        while not self._closed.is_set():
            generation = self._generation
            try:
                signals: Signals = self._insist(
                    self._rendezvous.listen, self.member, generation, self._progress, self.activity.now
                )
            except ray.exceptions.RayError:
                self.disconnected = True
                return
            if generation != self._generation:
                signals = replace(signals, **_OF_A_GENERATION)
            self._signals = signals
            if signals.show_stacks not in (0, shown):
                shown = signals.show_stacks
                self.record(StacksRecorded(member=self.member.id, place=self.activity.now.place, stacks=stacks()))
            cut = self._cut
            if cut is not None and self._must_abort(signals) and (signals.ended is not None or cut_in < generation):
                cut_in = generation
                _try_to_abort(cut)
            if signals.ended is not None:
                return
            if signals != NOTHING:
                self._closed.wait(0.05)  # the rendezvous answers at once from here on


def _try_to_abort(cut: Callable[[], None]) -> None:
    """Whatever comes of it: the thread that does it has other things to do, and those that wait will tell."""
    try:
        cut()
    except Exception:
        _log.exception("a process group could not be cut")
