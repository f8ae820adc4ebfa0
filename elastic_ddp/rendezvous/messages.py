"""Messages of the rendezvous to members, driver and controller, its options, and the requests of users."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from elastic_ddp.telemetry.event import Event


@dataclass(frozen=True)
class Ended:
    """The answer to a join request of a member that gets no further generation."""

    reason: str


class PlannedAssignment(NamedTuple):
    """The place that a member would get if a generation formed now."""

    rank: int
    world_size: int
    step: int
    """Steps done by the newest report of rank 0."""


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """A request to profile steps of a generation."""

    generation: int
    ranks: tuple[int, ...]
    """The ranks that profile. They start at the same step."""
    num_steps: int
    memory: bool
    """Whether to record memory, too."""
    folder: str
    """Folder for the traces, in the run's storage."""


@dataclass(frozen=True, kw_only=True)
class MemberRequest:
    """A request to members."""

    number: int
    profile: ProfileRequest | None = None
    """None for a request for stacks."""


@dataclass(frozen=True)
class Signals:
    """Signals for a member of a generation."""

    stop: bool = False
    """Commit and stop at the next step boundary."""
    ended: str | None = None
    """Why the run is over for this member, at any place of the program; None otherwise."""
    failed_generation: int | None = None
    """Number of the member's generation if one of its members failed: abort its collectives."""
    reconfigure: bool = False
    """End the generation at the next step boundary: workers wait to join, or must leave."""
    planned: PlannedAssignment | None = None
    """The member's place in the next generation; None if it has none."""
    commit: int = 0
    """Number of a request to commit at the next step boundary; 0 for none."""
    verify: int = 0
    """Number of a request for a verified step; 0 for none."""
    requests: tuple[MemberRequest, ...] = ()
    """Requests to the member that it has not received yet."""


NO_SIGNALS = Signals()


class DriverUpdate(NamedTuple):
    """The driver's news on each poll."""

    events: list[Event]
    progress: dict[str, Any]
    """The newest progress report of rank 0."""
    outcome: dict[str, Any] | None
    """How the run ended; None while it runs."""
    num_alive: int
    """Number of members that train, or wait to."""
    stopping: bool
    """Whether the run was asked to stop."""
    is_saving: bool = False
    """Whether a member is writing a checkpoint."""
    draining: tuple[str, ...] = ()
    """Ids of nodes that the run avoids."""


class WorkerDirectives(NamedTuple):
    """Instructions to the controller. Workers are named by the ids of their actors."""

    failed: dict[str, str]
    """Failed members, and how they failed."""
    newcomers: list[str]
    """Workers that have never trained, while others have. The failure of a newcomer costs only its start."""
    dismissed: list[str]
    """Members that left because they were asked to."""
    leaving: list[str]
    """Members that must leave; replacements may start."""
    avoid: list[str]
    """Ray's ids of nodes on which no worker may start."""
    limit: int
    """Maximum number of workers."""
    is_over: bool
    """Whether the run has ended or is stopping, so that workers return."""
    is_steady: bool = False
    """Whether all workers train and have completed a step."""


@dataclass
class Numbered:
    """Numbered requests of one kind."""

    newest: int = 0
    fulfilled: int = 0
    """The newest fulfilled request. All requests before it are fulfilled, too."""

    @property
    def open(self) -> int:
        """The newest request if it is not fulfilled yet, otherwise 0."""
        return self.newest if self.newest > self.fulfilled else 0


@dataclass
class Wanted:
    """The requests of users that are in force. `Requests` adds them, and `Coordinator` fulfills them."""

    num_workers: int | None = None
    """The number of workers of the newest resize; None for as many as fit."""
    stop: bool = False
    """Whether the run must commit and stop."""
    commits: Numbered = field(default_factory=Numbered)
    """A commit fulfills all requests made before it started."""
    verified_steps: Numbered = field(default_factory=Numbered)
    finding: str = ""
    """The finding of the newest requested verified step; "" if all bits were equal."""


@dataclass(frozen=True, kw_only=True)
class RendezvousOptions:
    """The part of a run's configuration that its rendezvous needs."""

    min_workers: int
    max_workers: int
    heartbeat_timeout_s: float
    hang_timeout_s: float = 600.0
    num_micro_batches: int = 1
    """Number of micro-batches in a step."""
    even_micro_batches: bool = False
    """Whether each worker must have the same number of micro-batches."""
    shard_size: int | None = None
    """A generation's size is a multiple of it; 0 for the number of workers on the node with the most, None for any."""
    can_verify: bool = True
    """Whether the run's gradients have bits that a verified step can compare."""
    max_failed_saves: int = 3
    """Number of consecutive saves that may fail, on any rank."""
    snapshot_folder: str | None = None
    """A folder on the driver's node for the state that outlives the rendezvous process; None to keep none."""
    last_commit: int | None = None
    """Steps done in the commit that the run resumes from; None if there is none."""
    driver: dict[str, Any] = field(default_factory=dict)
    """Host, process id and job of the driver, and the run's URI, for `status`."""

    @property
    def may_stand_by(self) -> bool:
        """Whether workers may have to wait because a generation cannot have every size."""
        return self.even_micro_batches or self.shard_size is not None
