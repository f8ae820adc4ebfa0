"""A rendezvous in a thread of this process, called like the actor, for clients and drivers without Ray."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import ray

from elastic_ddp.rendezvous.actor import Rendezvous
from elastic_ddp.rendezvous.messages import RendezvousOptions
from elastic_ddp.telemetry.event import Event

LIMIT_S = 20.0


class InProcessRendezvous:
    """A handle of the rendezvous.

    Attributes:
        actor: the rendezvous.
        has_ended: set once the run has an outcome.
    """

    def __init__(self, options: RendezvousOptions) -> None:
        self.actor = Rendezvous("test", 100, options)
        self.has_ended = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._closed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # cancels remaining tasks
            runner.run(self._closed.wait())

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(
            remote=lambda *arguments: asyncio.run_coroutine_threadsafe(self._call(method, arguments), self._loop)
        )

    async def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        answer = await getattr(self.actor, method)(*arguments)
        if self.actor._coordinator.event_log.outcome is not None:
            self.has_ended.set()
        return answer

    def ask(self, method: str, *arguments: Any) -> Any:
        return get(getattr(self, method).remote(*arguments))

    def events(self, name: str) -> list[Event]:
        """Returns the undelivered events of a name."""
        return [event for event in self.actor._coordinator.event_log._events if event.event == name]

    def close(self) -> None:
        if self.actor._heartbeats._server is not None:
            self._loop.call_soon_threadsafe(self.actor._heartbeats._server.close)
        self._loop.call_soon_threadsafe(self._closed.set)
        self._thread.join(LIMIT_S)


def get(answer: Any, timeout: float | None = None) -> Any:
    """Acts as `ray.get`."""
    try:
        return answer.result(LIMIT_S if timeout is None else timeout)
    except TimeoutError:
        raise ray.exceptions.GetTimeoutError from None


FAKE_RAY = SimpleNamespace(get=get, exceptions=ray.exceptions)
"""The part of Ray that clients and drivers use."""
