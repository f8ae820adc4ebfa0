"""Removing what a person does not want to keep of a run's commits, while nobody writes any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from elastic_ddp.checkpoint.catalog import CommitCatalog
from elastic_ddp.checkpoint.confirmed_read import check_answers
from elastic_ddp.checkpoint.housekeeping import (
    ORPHAN_AGE_S,
    abort_uploads,
    clocks,
    complete_commit,
    older_than,
    remove,
    unfinished,
    without_manifest,
)
from elastic_ddp.checkpoint.manifest import (
    Commit,
    attempt_of,
    attempt_prefix,
    committed_steps,
    manifest_key,
    set_aside,
    step_of_attempt,
)
from elastic_ddp.checkpoint.metrics import measurements
from elastic_ddp.checkpoint.record import different_runs
from elastic_ddp.checkpoint.retention import Retention, kept, removable
from elastic_ddp.errors import CheckpointError, ConfigError, StorageError, shorten
from elastic_ddp.storage.storage import Storage

Kind = Literal["commit", "set aside", "orphan"]


@dataclass(frozen=True)
class Removal:
    """Something that can go, with every byte."""

    what: Kind
    step: int
    manifest: str | None
    folders: tuple[str, ...]
    """Of its attempts."""
    num_bytes: int


def removals(
    storage: Storage,
    retention: Retention | None,
    *,
    orphan_age_s: float,
    with_set_aside: bool,
    now: Callable[[], float] | None = None,
) -> tuple[list[Removal], dict[int, StorageError]]:
    """What can go, in that order, and the steps of commits that stay although they are bad, or cannot be read, with the
    reason. The newest commit of which every byte verifies never goes, nor one that is newer, nor anything of a step
    that cannot be read: it may be good. Others that stay are not read.

    Args:
        storage: a folder of commits.
        retention: which commits stay; None for all.
        orphan_age_s: attempts that no manifest stands for can go if nothing of them was written for so long.
        with_set_aside: whether commits that were set aside can go.
        now: as for `older_than`.

    Raises:
        ConfigError: the best by a metric are to stay, of which no commit has a value; or a commit of another run would
            stay in place of this one's.
        StorageError: the storage is away.
    """
    uploads = unfinished(storage)
    sizes = storage.sizes()
    steps = committed_steps(sizes)
    complete, doubtful, bad = _complete(storage, steps, sizes)
    staying = _staying(steps, complete, doubtful, retention)
    if staying < set(steps):  # what is removed may be all that is good
        doubtful |= _verified(storage, complete)
        staying = _staying(steps, complete, doubtful, retention)
        _check_of_one_run(complete, staying)
    aside = {}
    if with_set_aside:
        aside = {key: each for key in sizes if (each := set_aside(key)) is not None and each[0] not in doubtful}
    keys = [*(sizes.keys() - aside.keys()), *(each.key for each in uploads if attempt_of(each.key) is not None)]
    going = removable(keys, staying, complete.values(), newest=max(steps, default=0))
    num_bytes = Counter[str]()
    for key, size in [*sizes.items(), *((each.key, each.num_bytes) for each in uploads)]:
        belongs = attempt_of(key)
        num_bytes[belongs[1] if belongs is not None else key] += size

    def removal(what: Kind, step: int, manifest: str | None, folders: list[str]) -> Removal:
        total = sum(num_bytes[each] for each in (manifest, *folders) if each is not None)
        return Removal(what, step, manifest, tuple(folders), total)

    found: list[Removal] = []
    for manifest in going.manifests:
        [step] = committed_steps([manifest])
        found.append(removal("commit", step, manifest, [each for each in going.dead if step_of_attempt(each) == step]))
    for manifest, (step, attempt) in aside.items():
        own = attempt_prefix(step, attempt) if attempt is not None else None
        found.append(removal("set aside", step, manifest, [each for each in going.orphans if each == own]))
    known = {folder for each in found for folder in each.folders}
    orphans = without_manifest(storage, [each for each in going.orphans if each not in known], steps)
    for folder in older_than(orphan_age_s, storage, orphans, now):
        found.append(removal("orphan", step_of_attempt(folder), None, [folder]))
    return found, doubtful | {step: error for step, error in bad.items() if step in staying}


def _complete(
    storage: Storage, steps: list[int], sizes: dict[str, int]
) -> tuple[dict[int, Commit], dict[int, StorageError], dict[int, StorageError]]:
    """The commits whose objects are all there, those whose manifest cannot be read, and bad ones, by step, newest
    first."""
    complete: dict[int, Commit] = {}
    unreadable: dict[int, StorageError] = {}
    bad: dict[int, StorageError] = {}
    for step in steps:
        try:
            complete[step] = complete_commit(storage, step, sizes)
        except CheckpointError as error:
            bad[step] = error
        except StorageError as error:
            check_answers(storage, manifest_key(step))
            unreadable[step] = error
        except FileNotFoundError:
            continue
    return complete, unreadable, bad


def _verified(storage: Storage, complete: dict[int, Commit]) -> dict[int, StorageError]:
    """Takes those out that are newer than the newest of which every byte verifies; returns them, and why."""
    doubtful: dict[int, StorageError] = {}
    for step, commit in [*complete.items()]:
        try:
            CommitCatalog(storage).verify(commit)
            break
        except CheckpointError as error:
            doubtful[step] = error
        except FileNotFoundError:
            pass
        del complete[step]
    return doubtful


def _staying(
    steps: list[int], complete: dict[int, Commit], doubtful: dict[int, StorageError], retention: Retention | None
) -> set[int]:
    """The steps whose commits stay."""
    if retention is None or not complete:
        return set(steps)
    metric = retention.metric or ""
    measured = {step: measurements(commit.record).get(metric) for step, commit in complete.items()}
    if retention.best and not any(measured.values()):
        names = sorted({name for commit in complete.values() for name in measurements(commit.record)})
        raise ConfigError(
            f"no commit has a value of {retention.metric!r}, so none is the best by it; nothing is removed. They "
            f"have {shorten(names, 10) if names else 'no metrics at all'}"
        )
    return kept(steps, measured, retention) | doubtful.keys()


def _check_of_one_run(complete: dict[int, Commit], staying: set[int]) -> None:
    """A run passes over another's commits, which somebody has put here: they are not what it goes on from."""
    for step in sorted(complete.keys() - staying):
        for newer in sorted(complete.keys() & staying):
            if names := different_runs(complete[step].record, complete[newer].record):
                raise ConfigError(
                    f"the commits of steps {step} and {newer} are of different runs, as they differ in "
                    f"{shorten(names, 5)}; nothing is removed, as those that stay may be the other run's. Move that "
                    f"run's commits away ({manifest_key(step)} or {manifest_key(newer)} and the folder beside it) first"
                )


def prune(storage: Storage, chosen: list[Removal], *, orphan_age_s: float = ORPHAN_AGE_S) -> None:
    """Removes what `removals` found, while nobody else writes there: no manifest ever lists what is gone. What no
    listing shows of attempts, as their objects were never finished, goes if it was begun so long ago.

    Raises:
        StorageError: the storage failed; calling both again removes the rest.
    """
    manifests = [each.manifest for each in chosen if each.manifest is not None]
    folders = [folder for each in chosen for folder in each.folders]
    abort_uploads(orphan_age_s, storage, unfinished(storage), folders)
    remove(storage, manifests, [*folders, *clocks(storage.list())])
