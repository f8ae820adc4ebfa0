"""What the rendezvous says to members, to the driver and to the controller."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from elastic_ddp.telemetry.events import Event


@dataclass(frozen=True)
class Ended:
    """What a member gets instead of a generation when there is none to come."""

    reason: str


class PlannedAssignment(NamedTuple):
    """A member's place in a generation that was not formed yet, as things stand."""

    rank: int
    world_size: int
    step: int
    """Steps done a while ago."""


@dataclass(frozen=True)
class Signals:
    """What a member should know, whenever it asks."""

    stop: bool = False
    """Commit and stop at the next step boundary."""
    ended: str | None = None
    """The run is over for this member, wherever it is, and why."""
    broken: int | None = None
    """The generation that lost a member: who is in it leaves what it does."""
    reconfigure: bool = False
    """End the generation at the next step boundary: others wait to join, or are to go."""
    prospect: PlannedAssignment | None = None
    """Its place after that; None if it has none."""
    commit: int = 0
    """The number of a request to commit at the next step boundary; 0 for none."""
    show_stacks: int = 0
    """The number of a request to record where all threads are; 0 for none."""


NOTHING = Signals()


class DriverUpdate(NamedTuple):
    """What the driver hears."""

    events: list[Event]
    progress: dict[str, Any]
    """The newest."""
    outcome: dict[str, Any] | None
    """How the run ended, once it has."""
    num_alive: int
    """Members that train or wait to."""
    stopping: bool
    """Whether the run was asked to stop."""
    is_saving: bool = False
    """Whether one of them has begun a save that has not ended."""


class WorkerDirectives(NamedTuple):
    """What the controller hears, about workers by the ids of their actors."""

    failed: dict[str, str]
    """Members that are dead or presumed so, and why."""
    newcomers: list[str]
    """Workers that have never trained, while others do: if they are lost, that costs nothing but their start."""
    dismissed: list[str]
    """Members that were let go in peace."""
    leaving: list[str]
    """Members that are to go, and whose places others may take."""
    avoid: list[str]
    """Nodes that no worker is to be started on, by Ray's name."""
    limit: int
    """Workers that there may be."""
    is_over: bool
    """Whether the run has ended, or is to stop: then workers return."""


@dataclass(frozen=True, kw_only=True)
class RendezvousOptions:
    """What of a run's configuration concerns its rendezvous."""

    min_workers: int
    max_workers: int
    heartbeat_timeout_s: float
    hang_timeout_s: float = 600.0
    max_failed_saves: int = 3
    """Saves in a row that may fail, whoever makes them."""
    memory: str | None = None
    """A folder on the driver's node, for what has to outlive the rendezvous' process."""
    last_commit: int | None = None
    """Steps done in the commit that it goes on from; None if there is none."""
    driver: dict[str, Any] = field(default_factory=dict)
    """Where the driver is, for people."""
