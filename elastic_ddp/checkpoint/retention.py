"""Which commits are kept, and what can be removed: pure functions of plain values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from elastic_ddp.checkpoint.manifest import Commit, attempt_of, attempt_prefix, committed_steps, manifest_key, set_aside
from elastic_ddp.checkpoint.metrics import Measurement, Mode, best_first


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which commits stay when a newer one is complete; the newest always does."""

    last: int
    """So many of the newest."""
    every_steps: int | None = None
    """And the first at or after every multiple of so many steps."""
    best: int = 0
    """And so many with the best value of `metric`."""
    metric: str | None = None
    mode: Mode = "min"

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ValueError(f"keep={self.last}: at least the newest commit has to stay; use 1 or more")

    @property
    def looks_back(self) -> bool:
        """Whether others than the newest can stay."""
        return self.every_steps is not None or self.best > 0


def kept(steps: Collection[int], complete: Mapping[int, Measurement | None], retention: Retention) -> set[int]:
    """The steps whose commits stay.

    Args:
        steps: those that have a manifest, up to the newest commit that counts. Commits of later steps were passed over
            when the run resumed: they push out no good ones.
        complete: those of them whose commits are complete, each with its value of the metric. At least one.
    """
    last = sorted(complete, reverse=True)[: retention.last]
    # Bad ones among the newest are for the next restore to set aside.
    staying = {step for step in steps if step >= last[-1]}
    if retention.every_steps is not None:
        staying |= _first_of_each(retention.every_steps, steps, complete)
    if retention.best:
        staying |= set(best_first(complete, retention.mode)[: retention.best])
    return staying


def _first_of_each(every_steps: int, steps: Collection[int], complete: Collection[int]) -> set[int]:
    """The first complete commit at or after every multiple but 0, and whatever is bad before it: that may be the one,
    of another version of this package for example."""
    found, served = set(), 0
    for step in sorted(steps):
        if step // every_steps > served:
            found.add(step)
            if step in complete:
                served = step // every_steps
    return found


@dataclass(frozen=True)
class Removable:
    """What can go, in this order: the oldest commits first."""

    manifests: list[str]
    """Of superseded commits."""
    dead: list[str]
    """Folders of attempts that nobody needs any more."""
    orphans: list[str]
    """Folders of other attempts that no manifest stands for. Somebody may be writing them."""


def removable(
    keys: Iterable[str], staying: Collection[int], read: Iterable[Commit], *, newest: int, dead_before: int = 0
) -> Removable:
    """What can go of a storage with these keys. What was set aside stays, for a person to look at.

    Args:
        keys: all there are.
        staying: see `kept`.
        read: commits whose manifests were read just now. A manifest that was not, or could not be, does not say which
            attempt is its own: no attempt at its step can go.
        newest: the step of the newest commit that counts. No manifest of a later one goes.
        dead_before: attempts at steps before it are dead, but for those that a manifest stands for.
    """
    keys, read = list(keys), list(read)
    steps = committed_steps(keys)
    going = {step for step in steps if step <= newest and step not in staying}
    claimed = set(steps) - going - {commit.step for commit in read}
    live = {commit.prefix for commit in read if commit.step not in going}
    for step, attempt in filter(None, map(set_aside, keys)):
        if attempt is None:
            claimed.add(step)
        else:
            live.add(attempt_prefix(step, attempt))
    attempts = {each for each in map(attempt_of, keys) if each and each[0] not in claimed and each[1] not in live}
    is_dead = {prefix: step in going or step < dead_before for step, prefix in attempts}
    return Removable(
        manifests=[manifest_key(step) for step in sorted(going)],
        dead=sorted(prefix for prefix in is_dead if is_dead[prefix]),
        orphans=sorted(prefix for prefix in is_dead if not is_dead[prefix]),
    )
