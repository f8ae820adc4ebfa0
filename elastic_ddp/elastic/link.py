"""A worker's line to the rendezvous: threads that carry messages out and signals in, beside the training loop."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import ray

from elastic_ddp.elastic.membership import Member
from elastic_ddp.elastic.rendezvous import Ended, RendezvousHandle, Signals
from elastic_ddp.errors import WorkersLostError
from elastic_ddp.parallel.process_group import Assignment

REPLACED_WITHIN_S = 20.0
"""How long a worker that lost a peer waits for Ray Train to notice by itself."""


class RunStopped(BaseException):
    """Ends the user's function in a worker when the run stops. Not an Exception: `except Exception` lets it pass."""


class RendezvousLink:
    """Everything a worker says to the rendezvous, and hears from it.

    What is said is sent at once and in order. `join`, `end` and `close` wait for Ray, the others never do.

    Args:
        rendezvous: the run's rendezvous actor.
        member: this worker.
    """

    def __init__(self, rendezvous: RendezvousHandle, member: Member) -> None:
        self.member = member
        self._rendezvous = rendezvous
        self._outbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        """None ends it."""
        self._progress: dict[str, Any] | None = None
        self._signals = Signals(stop=False, ended=None)
        self._generation = 0
        self._cut: Callable[[], None] | None = None
        self._closed = threading.Event()
        self._speaker = threading.Thread(target=self._speak, name="rendezvous-link-out", daemon=True)
        self._listener = threading.Thread(target=self._listen, name="rendezvous-link-in", daemon=True)
        self._speaker.start()
        self._listener.start()

    @property
    def stop_requested(self) -> bool:
        return self._signals.stop

    def say(self, event: str, **fields: Any) -> None:
        """Queues an event for the run's record. Costs a queue's put."""
        self._outbox.put({"event": event, "time": time.time(), **fields})

    def progress(self, **newest: Any) -> None:
        """How far training is; only the newest word is passed on. Costs an assignment."""
        self._progress = newest

    def join(self, lost: str | None = None) -> Assignment:
        """Waits for the next generation.

        Args:
            lost: how the last one broke, if it did.

        Raises:
            RunStopped: there will be none, for this worker.
        """
        while True:
            answer: Assignment | Ended | None
            answer = ray.get(self._rendezvous.join.remote(self.member, self._generation, lost))
            if isinstance(answer, Ended):
                raise RunStopped(answer.reason)
            if answer is not None:
                self._generation = answer.generation
                return answer

    def wait_to_be_replaced(self, lost: str) -> None:
        """After a peer was lost: waits until this worker's group is replaced, which ends the process, or the run ends.

        Raises:
            WorkersLostError: nothing of the kind happened for a while. The connection broke but no process did.
        """
        self.say("worker_lost", generation=self._generation, reported_by=self.member.id, error=lost)
        deadline = time.monotonic() + REPLACED_WITHIN_S
        while time.monotonic() < deadline:
            if self._signals.ended is not None:
                return
            self._closed.wait(0.1)
        raise WorkersLostError(f"the connection to a peer broke, but no worker seems to be dead: {lost}")

    def cut_when_over(self, cut: Callable[[], None] | None) -> None:
        """What to call, from the link's thread, when the run ends while this worker may be stuck in a collective."""
        self._cut = cut

    def end(self, **outcome: Any) -> None:
        """Says that the run is over and how. Returns when the rendezvous has it, with all messages before it."""
        self._finish_speaking()
        ray.get(self._rendezvous.end.remote(self._progress, outcome))

    def close(self) -> None:
        """Ends the threads; what was said before has been delivered."""
        self._finish_speaking()
        self._closed.set()
        self._listener.join()
        if remaining := self._drain():  # said after the end
            ray.get(self._rendezvous.take.remote(remaining, self._progress))

    def _finish_speaking(self) -> None:
        self._outbox.put(None)
        self._speaker.join()

    def _drain(self) -> list[dict[str, Any]]:
        """What waits to be sent, up to the end."""
        messages = []
        while not self._outbox.empty() and (message := self._outbox.get()) is not None:
            messages.append(message)
        return messages

    def _speak(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                ray.get(self._rendezvous.take.remote([message], self._progress))
            except ray.exceptions.RayError:
                return  # the driver is gone, and this worker goes with it

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                self._signals = ray.get(self._rendezvous.listen.remote(self.member, self._progress))
            except ray.exceptions.RayError:
                return
            if self._signals.ended is not None:
                if self._cut is not None:
                    self._cut()
                return
            if self._signals.stop:
                self._closed.wait(0.1)  # the rendezvous answers at once from here on
