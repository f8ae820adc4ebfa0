"""Standbys: workers that have built everything and hold no resources, until one takes the place of another worker.

A standby takes over the placement group of the other worker, so it must be on the same node.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from elastic_ddp.ray_internals.worker_states import death_cause
from elastic_ddp.telemetry.event import EXITED

if TYPE_CHECKING:
    from ray.train.v2._internal.execution.worker_group import ActorMetadata
    from ray.train.v2._internal.execution.worker_group.worker import Worker
    from ray.util.placement_group import PlacementGroup

_log = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
"""How long a worker's process may take to start once it is placed. Ray may have to install its environment first."""
TAKE_PLACE_TIMEOUT_S = 1.0
"""How long a standby may take to answer. On a node that is cut off, a standby never answers."""


@dataclasses.dataclass
class StartingWorker:
    """A worker that is being started: its placement group, then its process, its context, its training function."""

    placement_group: PlacementGroup | None
    """None for a standby."""
    requested_at: float
    placed_at: float = 0.0
    actor: Any = None
    worker: Worker | None = None
    pending: Any = None
    """Reference of the call that the worker waits for."""
    launched: bool = False
    """Whether this call starts the worker's training function, the last stage."""

    def check_timeout(self) -> None:
        """Raises a TimeoutError if the worker's process has not started in time."""
        if self.actor is not None and time.monotonic() - self.placed_at >= START_TIMEOUT_S:
            raise TimeoutError(f"its process did not start within {START_TIMEOUT_S:g} s")


@dataclasses.dataclass
class _Standby:
    node_id: str
    node: str
    starting: StartingWorker
    is_running: bool = False
    """Whether it runs the training function; `starting.pending` then polls its status."""


class Standbys:
    """The standbys of a worker group.

    `start` creates the actor of a standby on the node of a worker. `advance` moves a starting worker forward without
    blocking, and returns whether it runs its training function.
    """

    def __init__(
        self, start: Callable[[ActorMetadata], StartingWorker], advance: Callable[[StartingWorker], bool]
    ) -> None:
        self._start = start
        self._advance = advance
        self._standbys: list[_Standby] = []

    def keep(self, num_per_node: int, nodes: Mapping[str, ActorMetadata], *, may_start: bool) -> None:
        """Ends the standbys on other nodes, and starts missing ones. `nodes` has a worker of each node."""
        for standby in list(self._standbys):
            if standby.node_id not in nodes:
                self._end(standby)
        missing = Counter(dict.fromkeys(nodes, num_per_node)) - Counter(each.node_id for each in self._standbys)
        for node_id in missing.elements() if may_start else ():
            self._standbys.append(_Standby(node_id, nodes[node_id].node_ip, self._start(nodes[node_id])))

    def advance(self) -> int:
        """Moves starting standbys forward. Returns how many standbys have failed."""
        num_failed = 0
        for standby in list(self._standbys):
            try:
                if not standby.is_running:
                    standby.starting.check_timeout()
                    standby.is_running = self._advance(standby.starting)
                    if not standby.is_running:
                        continue
                elif not ray.wait([standby.starting.pending], timeout=0)[0]:
                    continue
                elif not ray.get(standby.starting.pending).running:
                    raise RuntimeError("its training function has ended")
                standby.starting.pending = standby.starting.actor.poll_status.remote()
            except (RayError, TimeoutError, RuntimeError) as error:
                if not standby.is_running:  # otherwise the rendezvous reports it
                    _log.warning("a standby on %s failed to start: %s", standby.node, death_cause(error) or EXITED)
                self._end(standby)
                num_failed += 1
        return num_failed

    def take(self, other: ActorMetadata) -> Worker | None:
        """Gives the place of another worker to a standby on its node. Returns the standby; None if there is none."""
        for standby in [each for each in self._standbys if each.is_running and each.node_id == other.node_id]:
            answer = standby.starting.actor.take_place.remote(other.gpu_ids, other.pid)
            try:
                if ray.get(answer, timeout=TAKE_PLACE_TIMEOUT_S):
                    self._standbys.remove(standby)
                    worker = standby.starting.worker
                    assert worker is not None
                    worker.metadata = dataclasses.replace(worker.metadata, accelerator_ids=other.accelerator_ids)
                    return worker
                reason = "it has used CUDA on another GPU"
            except RayError:  # it has just died, or its node is cut off
                reason = "it did not answer"
            _log.warning("a standby on %s could not take the place of a worker: %s", standby.node, reason)
            self._end(standby)
        return None

    def clear(self) -> None:
        """Ends all standbys."""
        for standby in list(self._standbys):
            self._end(standby)

    def _end(self, standby: _Standby) -> None:
        self._standbys.remove(standby)
        ray.kill(standby.starting.actor)
