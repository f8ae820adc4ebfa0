"""`LocalClient`: takes the place of the rendezvous in `ElasticTrainer.debug`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from elastic_ddp.distributed.assignment import Assignment
from elastic_ddp.distributed.hosted_store import HostedStore
from elastic_ddp.errors import WorkersFailedError
from elastic_ddp.rendezvous.client import RendezvousClient
from elastic_ddp.rendezvous.hang import Activity
from elastic_ddp.rendezvous.members import JoinRequest, Member
from elastic_ddp.rendezvous.messages import NO_SIGNALS, PlannedAssignment
from elastic_ddp.telemetry.event import STARTED, Event

_HOST = "127.0.0.1"


class LocalClient(RendezvousClient):
    """The client of a run's only worker, in the driver's process. It has no rendezvous, and no hang detection.

    `on_event` receives each event, with its time.
    """

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self.member = Member(id="debug", group_size=1, rank_in_group=0, node=_HOST, pid=os.getpid())
        self.activity = Activity()
        self.profile_requests = SimpleQueue()
        self.disconnected = False
        self.signals, self._num_joined = NO_SIGNALS, 0
        self._on_event, self._hosted = on_event, HostedStore(_HOST)

    def join(self, request: JoinRequest, *, failure: str | None = None, **_: Any) -> Assignment:
        """Returns the place in the next generation. Raises a WorkersFailedError after a failure: there is no peer."""
        if failure is not None:
            raise WorkersFailedError(f"a collective failed, and this is the only worker: {failure}")
        self._num_joined += 1
        return Assignment(
            generation=self._num_joined,
            rank=0,
            world_size=1,
            store_host=_HOST,
            store_port=self._hosted.port,
            source=None if request.step is None else 0,
            first_step=request.step,
            reason=STARTED,
        )

    def store_address(self) -> tuple[str, int]:
        return _HOST, self._hosted.port

    def record(self, event: Event) -> None:
        self._on_event(event if event.at is not None else replace(event, at=time.time()))

    def plan_join(self) -> PlannedAssignment | None:
        return None

    def progress(self, **newest: Any) -> None: ...

    def on_failure(self, abort: Callable[[], None] | None) -> None: ...

    def paused_heartbeats(self) -> AbstractContextManager[None]:
        return nullcontext()
