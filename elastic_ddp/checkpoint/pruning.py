"""Removing what a person does not want to keep of a run's commits, while nobody writes any."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from elastic_ddp.checkpoint.housekeeping import (
    ORPHAN_AGE_S,
    abort_uploads,
    clocks,
    complete_commit,
    older_than,
    remove,
    unfinished,
)
from elastic_ddp.checkpoint.manifest import attempt_of, attempt_prefix, committed_steps, set_aside, step_of_attempt
from elastic_ddp.checkpoint.metrics import measurements, measurements_of
from elastic_ddp.checkpoint.retention import Retention, kept, removable
from elastic_ddp.errors import ConfigError, UnreadableError, some
from elastic_ddp.storage import Storage

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
    storage: Storage, retention: Retention | None, *, orphan_age_s: float, with_set_aside: bool
) -> tuple[list[Removal], dict[int, UnreadableError]]:
    """What can go, in that order, and the steps whose manifest cannot be read, with the reason. The newest commit that
    is complete never goes, nor one that is newer, nor anything of a step whose manifest cannot be read: it may be good.

    Args:
        storage: a folder of commits.
        retention: which commits stay; None for all.
        orphan_age_s: attempts that no manifest stands for can go if nothing of them was written for so long.
        with_set_aside: whether commits that were set aside can go.

    Raises:
        ConfigError: the best by a metric are to stay, of which no commit has a value.
        StorageError: the storage is away.
    """
    uploads = unfinished(storage)
    sizes = storage.sizes()
    steps = committed_steps(sizes)
    complete, unreadable = {}, {}
    for step in steps:
        try:
            if (commit := complete_commit(storage, step, sizes)) is not None:
                complete[step] = commit
        except UnreadableError as error:
            unreadable[step] = error
    staying = set(steps)
    if retention is not None and complete:
        measured = {step: measurements_of(retention.metric, commit.record) for step, commit in complete.items()}
        if retention.best and not any(measured.values()):
            names = sorted({name for commit in complete.values() for name in measurements(commit.record)})
            raise ConfigError(
                f"no commit has a value of {retention.metric!r}, so none is the best by it; nothing is removed. They "
                f"have {some(names, 10) if names else 'no metrics at all'}"
            )
        staying = kept(steps, measured, retention) | unreadable.keys()
    aside = {}
    if with_set_aside:
        aside = {key: each for key in sizes if (each := set_aside(key)) is not None and each[0] not in unreadable}
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
    for folder in older_than(orphan_age_s, storage, [each for each in going.orphans if each not in known]):
        found.append(removal("orphan", step_of_attempt(folder), None, [folder]))
    return found, unreadable


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
