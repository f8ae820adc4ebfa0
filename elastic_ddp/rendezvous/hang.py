"""How a hang is told from slowness: workers count what they do, and one that hangs counts no more."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from elastic_ddp.errors import ElasticDDPError, StorageError, TrainFunctionError

Place = Literal[
    "start",
    "warm-up",
    "rendezvous",
    "hand-over",
    "between steps",
    "data",
    "forward",
    "backward",
    "reduction",
    "optimizer",
    "evaluation",
    "collective",
    "shares",
    "commit",
    "leaving",
]
"""Where the training thread of a worker may be."""
WAITING: tuple[Place, ...] = ("reduction", "rendezvous", "hand-over", "collective", "leaving", "shares")
"""Where it waits for its peers."""
MAY_BE_WAITING: tuple[Place, ...] = ("forward", "backward", "optimizer", "evaluation", "between steps")
"""Where it may do so too, and nobody can tell: a forward gathers parameters, or the user has a collective there."""
STORING: Place = "commit"
"""Where it waits for its storage."""


class ActivityReport(NamedTuple):
    """Where a worker is in its loop."""

    number: int
    """Grows whenever the worker goes from one place to the next, and with what it gets done in one."""
    place: Place
    worked_s: float = 0.0
    """Grows while that is at work which it waits for there."""


AT_THE_START = ActivityReport(0, "start")


def _nothing() -> float:
    return 0.0


class Activity:
    """A worker's side. Moving costs an assignment. The training thread moves it; any thread may ask where it is.

    Args:
        clock: Seconds that only go forward.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._at, self._worked_s = AT_THE_START, _nothing
        self._clock, self._moved_at = clock, clock()

    @property
    def now(self) -> ActivityReport:
        return self._at._replace(worked_s=self._worked_s())

    @property
    def still_s(self) -> float:
        """Seconds since it got anywhere. For the training thread."""
        return self._clock() - self._moved_at

    def enter(self, place: Place, worked_s: Callable[[], float] = _nothing) -> None:
        """Goes to a place.

        Args:
            worked_s: tells, from any thread, for how long that has been at work by now which is waited for there.
        """
        self._at, self._worked_s = ActivityReport(self._at.number + 1, place), worked_s
        self._moved_at = self._clock()

    def tick(self) -> None:
        """Some of what is done in this place is done."""
        self._at = self._at._replace(number=self._at.number + 1)
        self._moved_at = self._clock()

    @contextmanager
    def within(self, place: Place, worked_s: Callable[[], float] = _nothing) -> Iterator[None]:
        """A place for the time of a block, then the one before it."""
        before = self._at.place, self._worked_s
        self.enter(place, worked_s)
        try:
            yield
        except BaseException:
            moved_at = self._moved_at
            self.enter(*before)
            self._moved_at = moved_at  # what failed got nowhere
            raise
        self.enter(*before)


@dataclass
class _Seen:
    whereabouts: ActivityReport
    since_s: float


@dataclass(frozen=True)
class Verdict:
    """What is to become of a hang: one of these."""

    culprits: Mapping[str, str] = field(default_factory=dict)
    """Members that are given up, and how they are lost."""
    failure: str | None = None
    """How the generation breaks, if nobody is to blame."""
    end: ElasticDDPError | None = None
    """What the run ends with."""


class HangWatch:
    """The rendezvous' side: without Ray, clocks or threads.

    Args:
        timeout_s: for how long nobody may get anywhere.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._seen: dict[str, _Seen] = {}

    def begin(self, members: Iterable[str], now_s: float) -> None:
        """These are to be watched from now on."""
        self._seen = {member: _Seen(ActivityReport(-1, "start"), now_s) for member in members}

    def hear(self, member: str, whereabouts: ActivityReport, now_s: float) -> None:
        seen = self._seen.get(member)
        if seen is not None and seen.whereabouts != whereabouts:
            self._seen[member] = _Seen(whereabouts, now_s)

    def forget(self, member: str) -> None:
        """It is dead, or gone."""
        self._seen.pop(member, None)

    def is_hung(self, now_s: float) -> bool:
        """Whether none of them has got anywhere for the timeout."""
        return bool(self._seen) and all(now_s - each.since_s >= self.timeout_s for each in self._seen.values())

    def places(self) -> dict[str, Place]:
        """Where each was last."""
        return {member: seen.whereabouts.place for member, seen in self._seen.items()}

    def culprits(self, *, is_broken: bool) -> list[str]:
        """Those that others wait for; nobody, if none of them waits, or all do.

        Args:
            is_broken: the generation has ended, and all should have come to the rendezvous since.
        """
        waiting = ("rendezvous",) if is_broken else WAITING
        stuck = [member for member, place in self.places().items() if place not in waiting]
        return stuck if len(stuck) < len(self._seen) else []

    def judge(self, *, is_broken: bool) -> Verdict:
        """What is to become of those that hang, and of the run.

        Args:
            is_broken: as in `culprits`.
        """
        places, so_long = self.places(), f"for {self.timeout_s:g} s (hang_timeout_s)"
        where = ", ".join(sorted(set(places.values())))
        if culprits := self.culprits(is_broken=is_broken):
            return Verdict(
                {each: f"it hung in '{places[each]}' {so_long} while others waited for it" for each in culprits}
            )
        all_wait = all(place in WAITING for place in places.values())
        # Cut off, those who wait come to the rendezvous, and those who hang do not.
        some_may_wait = len(places) > 1 and any(place in MAY_BE_WAITING for place in places.values())
        nobody_came = is_broken and "rendezvous" not in places.values()  # though they were cut off
        if (all_wait or some_may_wait) and not nobody_came:
            return Verdict(
                failure=f"nobody got anywhere {so_long}, in '{where}', and nobody is to blame; the ledger's 'stacks' "
                "events say where everybody was. Raise hang_timeout_s if a step may take longer"
            )
        if not all_wait and all(place in (*WAITING, STORING) for place in places.values()):
            return Verdict(
                end=StorageError(
                    f"no worker's save got anywhere {so_long}: the storage does not answer; where exactly is in the "
                    "ledger's 'stacks' events. Mend it, and run the same command again"
                )
            )
        return Verdict(
            end=TrainFunctionError(
                f"all workers have been in '{where}' {so_long} and got nowhere; where exactly is in the ledger's "
                "'stacks' events. Raise hang_timeout_s if that may take longer"
            )
        )


def stacks() -> str:
    """The Python stacks of all threads of this process, the training thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()
    ordered = sorted(frames, key=lambda each: not names.get(each[0], "").startswith("TrainingThread"))
    parts = [f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in ordered]
    return "\n".join(parts)
