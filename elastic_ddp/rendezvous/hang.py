"""Finds workers that hang. Each worker counts the work that it completes; a count that stands still means a hang.

The places where workers wait show which worker causes the hang. No Ray, and clocks are arguments.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple, TypeAlias, get_args

from elastic_ddp.errors import ElasticDDPError, StorageError, TrainFunctionError, shorten
from elastic_ddp.rendezvous.user_place import Frame, collective_of, frames_of, user_place

Waiting = Literal["reduction", "rendezvous", "hand-over", "collective", "leaving", "shares"]
"""Places where the training thread of a worker waits for its peers."""
MaybeWaiting = Literal["forward", "backward", "optimizer", "evaluation", "between steps"]
"""Places where the thread may wait for peers: FSDP gathers parameters, or user code runs a collective."""
Place = Literal["start", "warm-up", "standby", "data", "commit", Waiting, MaybeWaiting]
"""Places of a worker's training thread."""
WAITING: tuple[Place, ...] = get_args(Waiting)
MAY_BE_WAITING: tuple[Place, ...] = get_args(MaybeWaiting)
STORING: Place = "commit"
"""The place where the thread waits for the storage."""
STANDBY: Place = "standby"
"""The place where the thread of a standby waits to replace another worker."""

_SAME_CALLS = (
    "Make the same calls in the same order on every rank: let step.index decide, never run.rank, and leave the loop at "
    "the same step."
)


class Section(NamedTuple):
    """A section of the program on one rank, and the collectives that the rank has begun in it."""

    generation: int = 0
    """0 outside of generations."""
    name: str = ""
    first: int = 0
    """Number of collectives begun in the generation before this section."""
    last: int = 0
    """Number of collectives begun in the generation so far."""
    is_users: bool = False
    """Whether the training function runs the collectives in it."""


class ActivityReport(NamedTuple):
    """A worker's place, and its progress there."""

    number: int
    """Increases whenever the worker enters a place or completes a part of its work there."""
    place: Place
    worked_s: float = 0.0
    """Seconds for which a background operation that it waits for has been active."""
    section: Section = Section()
    is_idle: bool = False
    """Whether it has made no progress for `IDLE_S`."""
    where: str = ""
    """Place in the user's code, if it is idle or a collective has failed there."""

    @property
    def progress(self) -> tuple[int, Place, float]:
        """The part of the report that changes whenever the worker makes progress."""
        return self[:3]


AT_THE_START = ActivityReport(0, "start")
IDLE_S = 1.0
"""How long a worker makes no progress before it is idle."""


def _zero() -> float:
    return 0.0


class Activity:
    """The work of a worker's training thread. Only that thread updates it; any thread may read it, without a lock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._report = AT_THE_START
        self._worked_s = _zero
        self._clock = clock
        self._progressed_at = clock()
        self._thread = threading.get_ident()
        self._section = Section()
        self._num_before = 0
        self._count: Callable[[], int | None] = lambda: None
        self._where = ""
        self._has_failed = False
        self.on_enter: Callable[[Place], None] = lambda place: None
        """Called with each place that is entered, in the training thread."""

    @property
    def now(self) -> ActivityReport:
        return self._report._replace(worked_s=self._worked_s())

    def report(self) -> ActivityReport:
        """Returns `now` with the section, and after `IDLE_S` with the place in the user's code. For another thread."""
        report = self.now
        section = self._section
        where = self._where
        number = self._count()
        if number is not None and section is self._section:  # otherwise the thread has begun another section meanwhile
            section = section._replace(last=number - self._num_before)
        is_idle = self._has_failed or self.idle_s >= IDLE_S
        if is_idle and not self._has_failed:
            frames = frames_of(sys._current_frames().get(self._thread))
            where = user_place(frames)
            if section.is_users and collective_of(frames) is None:
                section = section._replace(last=section.first)  # it computes, or waits for a message
        return report._replace(section=section, is_idle=is_idle, where=where)

    # Sections of the program. See `find_mismatch`.

    def begin_generation(self, number: int, count: Callable[[], int | None]) -> None:
        """Numbers collectives from here on. `count` returns how many the process group has begun."""
        num_before = count() or 0  # a report meanwhile must not mix the two
        self._count = count
        self._num_before = num_before
        self._where = ""
        self._has_failed = False
        self._section = Section(number, "the start of the generation")

    def begin(self, name: str, *, is_users: bool = False) -> None:
        """Begins a section of the program. `is_users` as in `Section`."""
        number = self._count()
        if number is not None:
            first = number - self._num_before
            self._section = Section(self._section.generation, name, first, first, is_users)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Begins a section for a block, and then the previous one again; not if the block fails."""
        before = self._section
        self.begin(name)
        yield
        self.begin(before.name, is_users=before.is_users)

    def end_generation(self) -> None:
        """Keeps the last section for reports, while the process group ends."""
        number = self._count()
        self._count = lambda: None
        if number is not None:
            self._section = self._section._replace(last=number - self._num_before)

    def failed_at(self, frames: list[Frame]) -> None:
        """Keeps the place in the user's code where a collective failed, until the next generation."""
        if not self._has_failed:
            self._where = user_place(frames)
            self._has_failed = True

    @property
    def idle_s(self) -> float:
        """Seconds since the last progress. For the training thread."""
        return self._clock() - self._progressed_at

    def enter(self, place: Place, worked_s: Callable[[], float] = _zero) -> None:
        """Enters a place. `worked_s` returns how long the awaited operation has been active; any thread may call it."""
        self._report = ActivityReport(self._report.number + 1, place)
        self._worked_s = worked_s
        self._progressed_at = self._clock()
        self.on_enter(place)

    def tick(self) -> None:
        """Reports progress in the current place."""
        self._report = self._report._replace(number=self._report.number + 1)
        self._progressed_at = self._clock()

    @contextmanager
    def within(self, place: Place, worked_s: Callable[[], float] = _zero) -> Iterator[None]:
        """Enters a place for a block, and then returns to the previous one."""
        before = self._report.place, self._worked_s
        self.enter(place, worked_s)
        try:
            yield
        except BaseException:
            progressed_at = self._progressed_at
            self.enter(*before)
            self._progressed_at = progressed_at  # a failed block made no progress
            raise
        self.enter(*before)


Consequence: TypeAlias = dict[str, str] | str | ElasticDDPError
"""The consequence of a hang: the members that count as failed, and how they failed; or why the generation ends, if no
single member is responsible; or the error that ends the run."""


class HangDetector:
    """Detects that no member of a generation makes progress for `timeout_s`, without Ray, clocks or threads."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._last: dict[str, tuple[ActivityReport, float]] = {}
        """The last report of each member, and when its progress began."""

    def begin(self, members: Iterable[str], now_s: float) -> None:
        """Starts to watch these members, and only these."""
        self._last = {member: (ActivityReport(-1, "start"), now_s) for member in members}

    def update(self, member: str, activity: ActivityReport, now_s: float) -> None:
        """Takes a member's report."""
        if member in self._last:
            before, since_s = self._last[member]
            self._last[member] = (activity, since_s if before.progress == activity.progress else now_s)

    def remove(self, member: str) -> None:
        """Stops watching a member that failed or left."""
        self._last.pop(member, None)

    def is_hung(self, now_s: float) -> bool:
        """Whether no member has made progress for the timeout."""
        return bool(self._last) and all(now_s - since_s >= self.timeout_s for _, since_s in self._last.values())

    def places(self) -> dict[str, Place]:
        """Returns the last reported place of each member."""
        return {member: activity.place for member, (activity, _) in self._last.items()}

    def idle(self, members: Sequence[str]) -> dict[int, ActivityReport]:
        """Returns the reports of members that have made no progress for a while, by their rank."""
        reports = {rank: self._last[member][0] for rank, member in enumerate(members) if member in self._last}
        return {rank: report for rank, report in reports.items() if report.is_idle}

    def decide(self, *, is_broken: bool) -> Consequence:
        """Decides on a hang. Members of a broken generation should have come to the rendezvous."""
        places = self.places()
        duration = f"for {self.timeout_s:g} s (hang_timeout_s)"
        waiting = ("rendezvous",) if is_broken else WAITING
        stuck = [member for member, place in places.items() if place not in waiting]
        if 0 < len(stuck) < len(places):
            culprits = {}
            for member in stuck:
                user_code = self._last[member][0].where
                at = f", at {user_code}," if user_code else ""
                culprits[member] = f"hung in '{places[member]}'{at} {duration} while others waited for it"
            return culprits
        where = ", ".join(sorted(set(places.values())))
        user_places = [
            f"rank {rank} at {report.where}" for rank, (report, _) in enumerate(self._last.values()) if report.where
        ]
        code = f"{shorten(user_places, 4, '; ')}. " if user_places else ""
        all_wait = all(place in WAITING for place in places.values())
        # After an abort, members that wait come to the rendezvous, and members that hang do not.
        some_may_wait = len(places) > 1 and any(place in MAY_BE_WAITING for place in places.values())
        none_came_after_abort = is_broken and "rendezvous" not in places.values()
        if (all_wait or some_may_wait) and not none_came_after_abort:
            return (
                f"no progress on any worker {duration}, in '{where}', and no single worker is responsible. "
                f"{code}`elastic-ddp stacks <storage>/<name>` shows where. Raise hang_timeout_s if a step may take "
                "longer."
            )
        if not all_wait and all(place in (*WAITING, STORING) for place in places.values()):
            return StorageError(
                f"no save made progress {duration}: the storage does not respond. `elastic-ddp stacks "
                "<storage>/<name>` shows where. Repair the storage and run the same command again."
            )
        return TrainFunctionError(
            f"all workers were in '{where}' without progress {duration}. {code}`elastic-ddp stacks "
            "<storage>/<name>` shows where. Raise hang_timeout_s if that may take longer."
        )


def differ(one: Section, other: Section) -> bool:
    """Whether ranks have begun a collective of the same number in these two sections, which are not the same."""
    return (
        one.generation == other.generation > 0
        and one.name != other.name
        and max(one.first, other.first) < min(one.last, other.last)
    )


def find_mismatch(
    reports: Mapping[int, ActivityReport], world_size: int, num_micro_batches: int
) -> TrainFunctionError | None:
    """Returns the error of ranks that wait for each other at different places; None if there are none.

    All ranks begin the same collectives in the same order. A rank numbers its collectives of a generation, and
    knows in which section of the program it begins each. Messages between two ranks have no numbers. If two ranks begin
    collectives of one number in different sections (an evaluation, and the reduction of a step), the ranks wait
    for each other forever.

    Ranks at the same place are compared by their numbers of collectives, once all have begun one of the same number: a
    report may be from an earlier section of the same name.
    """
    sections = {report.section for report in reports.values()}
    if not any(differ(one, other) for one in sections for other in sections):
        numbers = {rank: report.section.first for rank, report in sorted(reports.items())}
        has_begun = max(numbers.values(), default=0) < min((section.last for section in sections), default=0)
        if len({*numbers.values()}) > 1 and has_begun and len({section[:2] for section in sections}) == 1:
            return TrainFunctionError(
                f"ranks wait for each other in {next(iter(sections)).name}: they have run different numbers of "
                f"collectives before it, by rank: {numbers}. {_SAME_CALLS}"
            )
        return None
    ranks: dict[str, list[int]] = {}
    for rank, report in sorted(reports.items()):
        ranks.setdefault(report.section.name, []).append(rank)
    places = []
    for name, at in ranks.items():
        where = next((f", at {reports[rank].where}" for rank in at if reports[rank].where), "")
        places.append(f"rank{'s' if len(at) > 1 else ''} {shorten([*map(str, at)], 8)} in {name}{where}")
    in_block = any(section.is_users and section.name.startswith("step ") for section in sections)
    if in_block and num_micro_batches % world_size:
        advice = (
            f"{world_size} workers have different numbers of the {num_micro_batches} micro-batches of a step. Set "
            "even_micro_batches = true if micro-batches run collectives of their own."
        )
    else:
        advice = _SAME_CALLS
    return TrainFunctionError(f"ranks wait for each other at different places: {'; '.join(places)}. {advice}")


def stacks() -> str:
    """Returns the Python stacks of all threads of this process, the training thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = [(str(names.get(ident, ident)), frame) for ident, frame in sys._current_frames().items()]
    frames.sort(key=lambda named: not named[0].startswith("TrainingThread"))
    return "\n".join(f"Thread {name}:\n{''.join(traceback.format_stack(frame))}" for name, frame in frames)
