"""Which commits stay, and what can be removed: pure functions of plain values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from elastic_ddp.checkpoint.manifest import (
    Commit,
    attempt_of,
    attempt_prefix,
    committed_steps,
    manifest_key,
    parse_set_aside,
)
from elastic_ddp.checkpoint.metrics import Measurement, Mode, best_first


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which commits stay when a newer one is complete. The newest always does."""

    last: int
    """Number of newest commits."""
    every_steps: int | None = None
    """Also the first commit at or after each multiple of this many steps."""
    best: int = 0
    """Also this many commits with the best values of `metric`."""
    metric: str | None = None
    mode: Mode = "min"

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ValueError(f"keep={self.last}: the newest commit always stays; use 1 or more")

    @property
    def keeps_older(self) -> bool:
        """Whether commits other than the newest can stay."""
        return self.every_steps is not None or self.best > 0


def kept(steps: Collection[int], complete: Mapping[int, Measurement | None], retention: Retention) -> set[int]:
    """Returns the steps whose commits stay.

    Args:
        steps: steps with a manifest, up to the newest commit of this run. It excludes later ones, rejected at a
            restore: they must not displace good commits.
        complete: the steps of complete commits, each with its value of the metric; at least one.
    """
    last = sorted(complete, reverse=True)[: retention.last]
    # Bad commits among the newest stay: the next restore sets them aside.
    staying = {step for step in steps if step >= last[-1]}
    if retention.every_steps is not None:
        staying |= _first_of_each(retention.every_steps, steps, complete)
    if retention.best:
        staying |= set(best_first(complete, retention.mode)[: retention.best])
    return staying


def _first_of_each(every_steps: int, steps: Collection[int], complete: Collection[int]) -> set[int]:
    """Returns the first complete commit at or after each multiple but 0, and any bad ones between.

    A bad commit may be the one to keep: another version of this package may have written it.
    """
    staying, newest_multiple = set(), 0
    for step in sorted(steps):
        if step // every_steps > newest_multiple:
            staying.add(step)
            if step in complete:
                newest_multiple = step // every_steps
    return staying


@dataclass(frozen=True)
class Removable:
    """What can be removed, in this order; the oldest first."""

    manifests: list[str]
    """Manifests of superseded commits."""
    dead: list[str]
    """Folders of attempts that are superseded, or that can no longer be committed."""
    orphans: list[str]
    """Folders of other attempts without a manifest. A worker may still be writing them."""


def removable(
    keys: Iterable[str], staying: Collection[int], read: Iterable[Commit], *, newest: int, dead_before: int = 0
) -> Removable:
    """Returns what can be removed from a folder of commits. Commits that were set aside stay.

    Args:
        keys: all keys in the folder.
        staying: see `kept`.
        read: commits whose manifests were just read. No attempt at the step of another manifest is removable: any of
            them may be the committed one.
        newest: the step of the newest commit of this run. Manifests of later steps stay.
        dead_before: attempts at earlier steps are dead, except those with a manifest.
    """
    keys, read = list(keys), list(read)
    steps = committed_steps(keys)
    superseded = {step for step in steps if step <= newest and step not in staying}
    protected_steps = set(steps) - superseded - {commit.step for commit in read}
    protected = {commit.prefix for commit in read if commit.step not in superseded}
    for step, attempt in filter(None, map(parse_set_aside, keys)):
        if attempt is None:
            protected_steps.add(step)
        else:
            protected.add(attempt_prefix(step, attempt))
    attempts = {attempt for attempt in map(attempt_of, keys) if attempt is not None}
    is_dead = {
        prefix: step in superseded or step < dead_before
        for step, prefix in attempts
        if step not in protected_steps and prefix not in protected
    }
    return Removable(
        manifests=[manifest_key(step) for step in sorted(superseded)],
        dead=sorted(prefix for prefix in is_dead if is_dead[prefix]),
        orphans=sorted(prefix for prefix in is_dead if not is_dead[prefix]),
    )
