"""Removes commits and leftovers that a user does not want to keep, while no run is live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from elastic_ddp.checkpoint.catalog import CommitCatalog
from elastic_ddp.checkpoint.confirmed_read import check_answers
from elastic_ddp.checkpoint.housekeeping import (
    ORPHAN_AGE_S,
    abort_uploads,
    clock_folders,
    complete_commit,
    older_than,
    remove,
    unfinished_uploads,
    without_manifest,
)
from elastic_ddp.checkpoint.manifest import (
    Commit,
    attempt_of,
    attempt_prefix,
    committed_steps,
    manifest_key,
    parse_set_aside,
    step_of_attempt,
)
from elastic_ddp.checkpoint.metrics import measurements
from elastic_ddp.checkpoint.record import different_runs
from elastic_ddp.checkpoint.retention import Retention, kept, removable
from elastic_ddp.errors import CheckpointError, ConfigError, StorageError, shorten
from elastic_ddp.storage.folder import Upload
from elastic_ddp.storage.storage import Storage

Kind = Literal["commit", "set aside", "orphan"]


@dataclass(frozen=True)
class Removal:
    """Something that can be removed, with all its bytes."""

    what: Kind
    step: int
    manifest: str | None
    folders: tuple[str, ...]
    """The folders of its attempts."""
    num_bytes: int


def removals(
    storage: Storage,
    retention: Retention | None,
    *,
    orphan_age_s: float,
    with_set_aside: bool,
    now: Callable[[], float] | None = None,
) -> tuple[list[Removal], dict[int, StorageError]]:
    """Returns what can be removed, in that order, and the doubtful commits that stay: by step, with the reason.

    The newest commit of which every byte verifies stays, and so do newer ones and all at a step that cannot be read.

    Args:
        storage: a folder of commits.
        retention: which commits stay; None for all.
        orphan_age_s: attempts without a manifest can be removed after so many seconds without a write.
        with_set_aside: whether commits that were set aside can be removed.
        now: as for `older_than`.

    Raises:
        ConfigError: the best commits by a metric are to stay, and none has a value; or a commit of another run would
            stay in place of one of this run.
        StorageError: the storage is unavailable.
    """
    uploads = unfinished_uploads(storage)
    sizes = storage.sizes()
    steps = committed_steps(sizes)
    complete, doubtful, bad = _complete(storage, steps, sizes)
    staying = _staying(steps, complete, doubtful, retention)
    if staying < set(steps):  # verify what stays: the rest may be all that is good
        doubtful |= _drop_unverified(storage, complete)
        staying = _staying(steps, complete, doubtful, retention)
        _check_same_run(complete, staying)
    aside = {}
    if with_set_aside:
        parsed = {key: parse_set_aside(key) for key in sizes}
        aside = {key: entry for key, entry in parsed.items() if entry is not None and entry[0] not in doubtful}
    keys = [*(sizes.keys() - aside.keys()), *(upload.key for upload in uploads if attempt_of(upload.key) is not None)]
    superseded = removable(keys, staying, complete.values(), newest=max(steps, default=0))
    entries: list[tuple[Kind, int, str | None, list[str]]] = []
    for manifest in superseded.manifests:
        [step] = committed_steps([manifest])
        at_step = [folder for folder in superseded.dead if step_of_attempt(folder) == step]
        entries.append(("commit", step, manifest, at_step))
    for manifest, (step, attempt) in aside.items():
        own = attempt_prefix(step, attempt) if attempt is not None else None
        entries.append(("set aside", step, manifest, [folder for folder in superseded.orphans if folder == own]))
    known = {folder for *_, folders in entries for folder in folders}
    orphans = without_manifest(storage, [folder for folder in superseded.orphans if folder not in known], steps)
    for folder in older_than(orphan_age_s, storage, orphans, now):
        entries.append(("orphan", step_of_attempt(folder), None, [folder]))
    stays_bad = {step: error for step, error in bad.items() if step in staying}
    return _with_sizes(entries, sizes, uploads), doubtful | stays_bad


def _with_sizes(
    entries: list[tuple[Kind, int, str | None, list[str]]], sizes: Mapping[str, int], uploads: Sequence[Upload]
) -> list[Removal]:
    """Returns removals with the bytes of their manifests, folders, and unfinished uploads to these."""
    num_bytes = Counter[str]()
    for key, size in [*sizes.items(), *((upload.key, upload.num_bytes) for upload in uploads)]:
        attempt = attempt_of(key)
        num_bytes[attempt[1] if attempt is not None else key] += size
    return [
        Removal(what, step, manifest, tuple(folders), sum(num_bytes[name] for name in (manifest, *folders) if name))
        for what, step, manifest, folders in entries
    ]


def _complete(
    storage: Storage, steps: list[int], sizes: dict[str, int]
) -> tuple[dict[int, Commit], dict[int, StorageError], dict[int, StorageError]]:
    """Returns complete commits, unreadable ones and bad ones, by step, newest first."""
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


def _drop_unverified(storage: Storage, complete: dict[int, Commit]) -> dict[int, StorageError]:
    """Drops commits newer than the newest of which every byte verifies. Returns why, by step."""
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
    """Returns the steps whose commits stay."""
    if retention is None or not complete:
        return set(steps)
    metric = retention.metric or ""
    measured = {step: measurements(commit.record).get(metric) for step, commit in complete.items()}
    if retention.best and not any(measured.values()):
        names = sorted({name for commit in complete.values() for name in measurements(commit.record)})
        raise ConfigError(
            f"no commit has a value of the metric {retention.metric!r}; nothing is removed. Metrics in the commits: "
            f"{shorten(names, 10) if names else 'none'}"
        )
    return kept(steps, measured, retention) | doubtful.keys()


def _check_same_run(complete: dict[int, Commit], staying: set[int]) -> None:
    """Raises ConfigError if a commit of another run would stay in place of one of this run."""
    for step in sorted(complete.keys() - staying):
        for newer in sorted(complete.keys() & staying):
            if names := different_runs(complete[step].record, complete[newer].record):
                raise ConfigError(
                    f"the commits of steps {step} and {newer} belong to different runs: they differ in "
                    f"{shorten(names, 5)}. Nothing is removed. Move the other run's commit away first: "
                    f"{manifest_key(step)} or {manifest_key(newer)}, and its step folder"
                )


def prune(storage: Storage, chosen: list[Removal], *, orphan_age_s: float = ORPHAN_AGE_S) -> None:
    """Removes what `removals` returned, and unfinished uploads older than `orphan_age_s`.

    No other process may write to the folder meanwhile. At no moment does a manifest list missing objects.

    Raises:
        StorageError: the storage failed; call both functions again to remove the rest.
    """
    manifests = [item.manifest for item in chosen if item.manifest is not None]
    folders = [folder for item in chosen for folder in item.folders]
    abort_uploads(orphan_age_s, storage, unfinished_uploads(storage), folders)
    remove(storage, manifests, [*folders, *clock_folders(storage.list())])
