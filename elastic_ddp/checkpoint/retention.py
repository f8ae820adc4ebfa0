"""The choice of the commits that stay and of the objects to remove: pure functions of plain values."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from elastic_ddp.checkpoint.manifest import (
    Commit,
    attempt_of,
    attempt_prefix,
    committed_steps,
    manifest_key,
    parse_set_aside,
)
from elastic_ddp.checkpoint.record import Measurement, Mode, best_first, measurements
from elastic_ddp.storage.folder import Entry, Upload
from elastic_ddp.storage.local import is_temporary


@dataclass(frozen=True, kw_only=True)
class Retention:
    """The rule for which commits stay when a newer commit is complete. The newest commit always stays."""

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
        steps: steps with a manifest, up to the newest commit of this run. Later commits that a restore rejected are
            excluded, so that they do not displace intact commits.
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
    """Returns the first complete commit at or after each multiple but 0, and any bad commits between.

    A bad commit may be worth keeping: another version of this package may have written it.
    """
    staying = set()
    newest_multiple = 0
    for step in sorted(steps):
        if step // every_steps > newest_multiple:
            staying.add(step)
            if step in complete:
                newest_multiple = step // every_steps
    return staying


Kind = Literal["commit", "set aside", "orphan"]


@dataclass(frozen=True)
class Removal:
    """A commit or an attempt to remove, with all its bytes."""

    what: Kind
    step: int
    manifest: str | None
    folders: tuple[str, ...]
    """The folders of the commit's attempts."""
    num_bytes: int


@dataclass(frozen=True)
class Removals:
    """Superseded commits, the oldest first, commits that were set aside, and orphans.

    An orphan is an attempt without a manifest.
    """

    items: list[Removal]
    uploads: list[Upload]
    """Unfinished writes to these attempts, and old unfinished writes of the run."""
    committed: set[int]
    """The steps with a manifest in the listing."""


def plan_removals(
    listing: Mapping[str, Entry],
    uploads: Iterable[Upload],
    staying: Collection[int],
    read: Iterable[Commit],
    *,
    newest: int,
    written_before: float,
    over_before: int = 0,
    with_set_aside: bool = False,
) -> Removals:
    """Returns what no commit needs. A worker may still write to an orphan, unless it is old, or its step is over.

    Args:
        listing: all objects in the folder, by key.
        uploads: unfinished writes to it.
        staying: see `kept`.
        read: commits whose manifests were just read. All attempts at the step of another manifest stay: any of them
            may be the committed one.
        newest: the step of the newest commit of this run. Manifests of later steps stay.
        written_before: orphans and uploads go if their last write is not after this time, by the storage's clock.
        over_before: orphans of earlier steps than this go at any age.
        with_set_aside: whether commits that were set aside go. Otherwise they protect their objects.
    """
    steps = committed_steps(listing)
    superseded = [step for step in reversed(steps) if step <= newest and step not in staying]
    committed = {commit.step: commit.prefix for commit in read if commit.step not in superseded}
    protected = {*committed.values()}
    protected_steps = {*steps} - {*superseded, *committed}
    aside: dict[str, tuple[int, str]] = {}
    for key in listing:
        entry = parse_set_aside(key)
        if entry is not None:
            step, attempt = entry
            folder = attempt_prefix(step, attempt or "unknown")
            if with_set_aside and step not in protected_steps:
                aside[key] = step, folder
            elif attempt is None:
                protected_steps.add(step)
            else:
                protected.add(folder)
    num_bytes = Counter[str]()
    attempts = defaultdict[int, set[str]](set)
    written_at = defaultdict[str, float](float)
    unfinished = [(upload.key, Entry(upload.num_bytes, upload.started_at)) for upload in uploads]
    for key, found in [*listing.items(), *unfinished]:
        step_of_key, name = attempt_of(key) or (None, key)
        num_bytes[name] += found.size
        written_at[name] = max(written_at[name], math.inf if found.written_at is None else found.written_at)
        if step_of_key is not None and step_of_key not in protected_steps and name not in protected:
            attempts[step_of_key].add(name)

    def removal(what: Kind, step: int, manifest: str | None, folders: set[str]) -> Removal:
        total = sum(num_bytes[name] for name in (manifest, *folders) if name is not None)
        return Removal(what, step, manifest, tuple(sorted(folders)), total)

    items = [removal("commit", step, manifest_key(step), attempts.pop(step, set())) for step in superseded]
    for key, (step, folder) in aside.items():
        own = attempts[step] & {folder}
        attempts[step] -= own
        items.append(removal("set aside", step, key, own))
    for step, folders in sorted(attempts.items()):
        old = [name for name in sorted(folders) if step < over_before or written_at[name] <= written_before]
        items += [removal("orphan", step, None, {name}) for name in old]
    going = {folder for item in items for folder in item.folders}
    return Removals(items, [each for each in uploads if _is_dead(each, going, written_before)], set(steps))


def _is_dead(upload: Upload, going: Collection[str], written_before: float) -> bool:
    """Returns whether an upload belongs to an attempt that goes, or is an old upload of a run."""
    _, folder = attempt_of(upload.key) or (None, None)
    is_own = folder is not None or parse_set_aside(upload.key) is not None or is_temporary(upload.key)
    return folder in going or (is_own and upload.started_at <= written_before)


def best_commit(commits: Iterable[Commit], metric: str, mode: Mode) -> tuple[Commit, float] | None:
    """Returns the commit with the best value of a metric, and the value; None if no commit has one."""
    by_step = {commit.step: commit for commit in commits}
    measured = {step: measurements(commit.record).get(metric) for step, commit in by_step.items()}
    for step in best_first(measured, mode):
        measurement = measured[step]
        assert measurement is not None
        return by_step[step], measurement.value
    return None
