"""Failures of a run: whether it makes no progress, and how long it has fewer workers. No Ray, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_ddp.errors import ElasticDDPError, TrainFunctionError, WorkersFailedError
from elastic_ddp.rendezvous.heartbeat import BEATS_PER_TIMEOUT, IDLE_TIMEOUT_S, SILENT
from elastic_ddp.rendezvous.members import FormedGeneration, Member
from elastic_ddp.rendezvous.membership import Membership
from elastic_ddp.telemetry.event import EXITED

MAX_ATTEMPTS = 3
"""Number of failed generations in a row without progress after which the run ends."""
SETTLE_S = 2.0
"""How long after a failure it counts. Until then, other workers of a dying node may seem to live."""
REPORTS_WITHIN_S = 2.0
"""How old the newest report of rank 0 may be."""


@dataclass(kw_only=True)
class FailedAttempt:
    """The failure of a worker."""

    generation: int
    """Its generation; below 0 for a failed start."""
    member: str
    who: str
    """Its rank, node and process id."""
    node_id: str
    how: str
    at_s: float
    """Monotonic time of the failure."""
    is_hang: bool
    node_lives: bool
    """Whether its node has survived it. Only then the program may be the cause."""
    cause: str = ""
    """Ray's report about the end of the process."""


@dataclass
class Attempts:
    """Failures since the run last made progress.

    Failures of nodes do not count: three preemptions in one long step are no fault of the program.
    """

    furthest: float = 0.0
    """Steps done when the newest attempt failed; more if that is not known exactly."""
    failed: list[FailedAttempt] = field(default_factory=list)
    starting: dict[str, Member] = field(default_factory=dict)
    """Workers that have not joined the run yet."""
    num_failed_starts: int = 0
    _in_last_start: list[str] = field(default_factory=list)
    """Workers that were starting when the newest start failed: their failures count as the same attempt."""

    def record(self, membership: Membership, member: str, how: str, now_s: float, *, is_hang: bool = False) -> None:
        """Records that a member is failing, unless it or its node was to leave, or the run does not need it."""
        not_in_generation = self.starting | {known.id: known for known in membership.known()}
        starting = self.starting.pop(member, None)
        who = "a worker that starts"
        generation = membership.generation
        if membership.is_current(member):
            rank, failed = next(ranked for ranked in membership.ranks() if ranked[1].id == member)
            who = f"rank {rank}"
        elif (
            (starting is not None and starting.is_standby)
            or member not in not_in_generation
            or (membership.is_newcomer(member) and not membership.all_wait())
        ):
            return
        else:
            failed = not_in_generation[member]
            if member not in self._in_last_start:
                self._in_last_start = [*not_in_generation]
                self.num_failed_starts += 1
            generation = -self.num_failed_starts
        if failed.node_id in membership.draining or member in membership.leaving:
            return
        if generation < 0:  # members may have made steps and wait for it
            self._keep_without_progress(membership.waiting_step or 0, membership.generation)
        self.failed.append(
            FailedAttempt(
                generation=generation,
                member=member,
                who=f"{who} on {failed.process}",
                node_id=failed.node_id,
                how=how,
                at_s=now_s,
                is_hang=is_hang,
                node_lives=is_hang or "\n" in how,  # it has sent its stacks
            )
        )

    def explain(self, causes: Mapping[str, str]) -> None:
        """Takes what Ray reports about the end of workers."""
        for attempt in self.failed:
            attempt.cause = causes.get(attempt.member, attempt.cause)

    def generation_formed(self, formed: FormedGeneration, reported: int, steps_per_s: float) -> None:
        """The next generation begins. Rank 0 of the last one has reported that many steps and that speed."""
        step = formed.first_step
        slack = 0.0
        if step is None:  # no worker survived that knows what was done after the report
            step = reported
            slack = REPORTS_WITHIN_S * steps_per_s
        self._keep_without_progress(step, formed.number - 1, slack)

    def _keep_without_progress(self, step: int, generation: int, slack: float = 0.0) -> None:
        """Keeps only the failures of a generation if it has ended with more steps than the one before."""
        if step > self.furthest:
            self.failed = [attempt for attempt in self.failed if attempt.generation == generation]
            self.furthest = step + slack

    def verdict(
        self, step: int, membership: Membership, now_s: float, heartbeat_timeout_s: float = 0.0
    ) -> ElasticDDPError | None:
        """Returns the error that ends the run, if it makes no progress; the newest report of rank 0 is `step`."""
        if not self.failed:
            return None
        if membership.waiting_step is not None:
            step = membership.waiting_step
        starting = [member for member in self.starting.values() if membership.why_gone(member.id) is None]
        live_nodes = {member.node_id for member in (*membership.known(), *starting)}
        # Workers of a node that loses its power fall silent together, but starting workers have a longer timeout.
        silence_s = max(heartbeat_timeout_s, IDLE_TIMEOUT_S) * (1 + 1 / BEATS_PER_TIMEOUT) + SETTLE_S
        settled = [
            attempt
            for attempt in self.failed
            if now_s - attempt.at_s >= (silence_s if attempt.how.startswith(SILENT) else SETTLE_S)
        ]
        for attempt in settled:
            attempt.node_lives |= attempt.node_id in live_nodes
        counted = [attempt for attempt in settled if attempt.node_lives]
        if step > self.furthest or len({attempt.generation for attempt in counted}) < MAX_ATTEMPTS:
            return None
        newest = counted[-1]
        error = TrainFunctionError if newest.is_hang else WorkersFailedError
        advice = (
            "Raise hang_timeout_s if this may take longer, or do it on all ranks."
            if newest.is_hang
            else "Correct what ends the process, and run the same command again."
        )
        return error(
            f"the run failed {MAX_ATTEMPTS} times in a row without progress, after {step} steps. The last failure: "
            f"{newest.who}: {newest.how}{_unexplained(newest)}\n{advice}"
        )


@dataclass
class Shortfall:
    """The number of workers before the first failure since the run was at full strength, and the failure's time."""

    world_size: int = 0
    """0 at full strength."""
    since_s: float = 0.0
    """Monotonic time."""

    def failed(self, world_size: int, now_s: float) -> None:
        """A generation with this number of workers has failed."""
        if not self.world_size:
            self.world_size = world_size
            self.since_s = now_s

    def formed(self, generation: FormedGeneration, limit: int, now_s: float) -> float | None:
        """A generation has formed, and at most `limit` workers are wanted. Returns the seconds since the failure if the
        run is at full strength again."""
        is_full = len(generation.members) >= min(self.world_size, limit) and not generation.handover_only
        if not self.world_size or not is_full:
            return None
        self.world_size = 0
        return now_s - self.since_s


def _unexplained(attempt: FailedAttempt) -> str:
    """Returns what is known about an end without a stack."""
    if attempt.is_hang or "\n" in attempt.how:
        return ""
    if attempt.cause:
        return f". Ray reports: {attempt.cause}"
    if attempt.how != EXITED:
        return ""
    return ". It left no stack: SIGKILL ended it, for example because memory ran out, or it called os._exit."
