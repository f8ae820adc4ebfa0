"""Leftovers of failed, killed and late saves are removed, and nothing that is still needed."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_ddp.checkpoint import Commit, Retention
from elastic_ddp.checkpoint.housekeeping import ORPHAN_AGE_S, plan_prune, remove
from elastic_ddp.checkpoint.manifest import attempt_prefix, manifest_key
from elastic_ddp.checkpoint.writer import StateWriter
from elastic_ddp.errors import CheckpointError, PeerFailedError, StorageError
from elastic_ddp.storage.folder import Entry, Upload
from elastic_ddp.storage.local import TEMPORARY_PREFIX
from elastic_ddp.storage.storage import Storage
from tests.single_rank_store import SingleRankStore
from tests.unit.checkpoint.housekeeping_helpers import ClockedStorage, open_storage, save, steps_in, write_orphan
from tests.unit.checkpoint.test_checkpoint import corrupt


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> ClockedStorage:
    return open_storage(request, tmp_path)


KILLED = """
import os, signal, sys
import torch
from elastic_ddp.storage import local
from elastic_ddp.storage.storage import Storage
from tests.single_rank_store import SingleRankStore

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

local.os.replace = die
SingleRankStore(Storage(sys.argv[1]), keep=2).save({"model": {"w": torch.ones(1 << 16)}}, step=5, record={})
"""


def test_temporary_files_of_a_killed_saver_are_removed(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False, cwd=Path(__file__).parents[3])
    storage = Storage(tmp_path)
    assert storage.list() == [] and sum(upload.num_bytes for upload in storage.uploads()) >= 1 << 18
    save(SingleRankStore(storage, keep=1), 6)
    assert storage.uploads() == [] and not (tmp_path / "step=5").exists()


def left_by_a_kill(folder: Path, key: str) -> Path:
    """Writes the temporary file of an object."""
    temporary = (folder / key).parent / f"{TEMPORARY_PREFIX}0123"
    temporary.parent.mkdir(parents=True)
    temporary.write_bytes(b"half")
    return temporary


def test_an_unfinished_manifest_is_removed_once_it_is_old(tmp_path: Path) -> None:
    manifest = left_by_a_kill(tmp_path, manifest_key(5))
    store = SingleRankStore(Storage(tmp_path), keep=1)
    save(store, 6)
    assert manifest.exists(), "a process may be writing it"
    at = time.time() - ORPHAN_AGE_S - 60
    os.utime(manifest, (at, at))
    save(store, 7)
    assert not manifest.exists()


def test_prune_finds_temporary_files_of_a_killed_saver(tmp_path: Path) -> None:
    left_by_a_kill(tmp_path, f"{attempt_prefix(5, uuid.uuid4().hex)}/0-0.bin")
    storage = Storage(tmp_path)
    going, _ = plan_prune(storage, None, orphan_age_s=0)
    [orphan] = going.items
    assert (orphan.what, orphan.step, orphan.num_bytes) == ("orphan", 5, 4)
    remove(storage, going)
    assert storage.uploads() == [] and not (tmp_path / "step=5").exists()


class Uploading(ClockedStorage):
    """A storage with unfinished uploads, as on S3."""

    def __init__(self, uri: str | Path, keys: list[str], begun_at: float) -> None:
        super().__init__(uri)
        self._begun = {key: Upload(key, "id", begun_at) for key in keys}

    def uploads(self, prefix: str = "") -> list[Upload]:
        return [*self._begun.values()]

    def abort(self, upload: Upload) -> None:
        del self._begun[upload.key]


def test_an_unfinished_set_aside_upload_protects_nothing_and_expires(tmp_path: Path) -> None:
    """Manifests above 16 MiB are uploaded to S3 in parts."""
    attempt = uuid.uuid4().hex
    storage = Uploading(tmp_path, [f"set-aside/4-{attempt}.json", "foreign/object"], time.time() - 1e9)
    storage.write(f"{attempt_prefix(4, attempt)}/0-0.bin", b"half")
    store = SingleRankStore(storage, keep=1)
    save(store, 6)
    assert not storage.list("step=4"), "it was not set aside"
    assert len(storage.uploads()) == 2
    storage.later_s = ORPHAN_AGE_S + 60
    save(store, 7)
    assert [upload.key for upload in storage.uploads()] == ["foreign/object"]


def test_prune_aborts_uploads_to_the_folders_that_it_removes(tmp_path: Path) -> None:
    store = SingleRankStore(Storage(tmp_path), keep=9)
    commits = [save(store, step) for step in (1, 2)]
    storage = Uploading(tmp_path, [f"{commit.prefix}/9-0.bin" for commit in commits], time.time())
    going, _ = plan_prune(storage, Retention(last=1))
    assert [removal.step for removal in going.items] == [1]
    remove(storage, going)
    assert [upload.key for upload in storage.uploads()] == [f"{commits[1].prefix}/9-0.bin"], (
        "a process may be writing it"
    )


def test_an_orphan_of_a_later_step_expires_by_the_clock_of_the_storage(storage: ClockedStorage) -> None:
    store = SingleRankStore(storage, keep=1)
    orphan = write_orphan(storage, 50)
    save(store, 1)
    storage.later_s = ORPHAN_AGE_S - 60
    save(store, 2)
    assert storage.list(orphan), "a process may be writing it"
    storage.later_s = ORPHAN_AGE_S + 60
    save(store, 3)
    assert not storage.list("step=50") and restored_step_of(storage) == 3


class Interrupted(Storage):
    """Fails at one of its removals, and at all later ones."""

    remaining = 1000

    def delete(self, key: str) -> None:
        self._count()
        super().delete(key)

    def delete_tree(self, prefix: str) -> None:
        self._count()
        super().delete_tree(prefix)

    def _count(self) -> None:
        self.remaining -= 1
        if self.remaining < 0:
            raise StorageError("the storage is down")


def test_an_interrupted_removal_leaves_no_manifest_with_missing_objects(tmp_path: Path) -> None:
    for at in range(5):
        storage = Interrupted(tmp_path / str(at))
        for step in (1, 2):
            save(SingleRankStore(storage, keep=2), step)
        storage.remaining = at
        save(SingleRankStore(storage, keep=1), 3)
        commits = SingleRankStore(storage, keep=1).all_commits()
        assert [step for step, _ in commits] == [3, 2, 1][: max(1, 3 - at)], "the oldest is removed first"
        assert all(isinstance(commit, Commit) for _, commit in commits)
    assert storage.remaining >= 0, "it has no further removal"
    assert not storage.list("step=1") and not storage.list("step=2")


def restored_step_of(storage: Storage) -> int | None:
    newest = SingleRankStore(storage, keep=1).load_latest()
    return None if newest is None else newest[0].step


def test_the_newest_object_of_an_attempt_determines_its_age(tmp_path: Path) -> None:
    storage = ClockedStorage(tmp_path)
    orphan = write_orphan(storage, 50)
    old = tmp_path / orphan / "0-0.bin"
    os.utime(old, (1e9 + 5, 1e9 + 5))
    storage.write(f"{orphan}/1-0.bin", b"of a slower rank")
    save(SingleRankStore(storage, keep=1), 1)
    assert len(storage.list(orphan)) == 2
    (tmp_path / orphan / "1-0.bin").unlink()
    save(SingleRankStore(storage, keep=1), 2)
    assert not storage.list(orphan)


def test_an_attempt_at_the_same_step_stays_until_the_next_commit(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    orphan, earlier = write_orphan(storage, 5), write_orphan(storage, 4)
    save(SingleRankStore(storage, keep=1), 5)
    assert storage.list(orphan) and not storage.list(earlier)
    save(SingleRankStore(storage, keep=1), 6)
    assert not storage.list(orphan)


def test_a_rejected_commit_keeps_its_objects_at_any_age(tmp_path: Path) -> None:
    storage = ClockedStorage(tmp_path)
    bad = save(SingleRankStore(storage, keep=1), 9)
    storage.write(manifest_key(9), b"{}")
    storage.later_s = 10 * ORPHAN_AGE_S
    save(SingleRankStore(storage, keep=1), 3)
    assert storage.list(bad.prefix) and steps_in(storage) == [3, 9]


def begun(storage: Storage, step: int) -> Callable[..., Commit]:
    """Writes all of a commit but its manifest; returns a function that completes it."""
    writer, attempt = StateWriter(), uuid.uuid4().hex
    writer.stage({"user": {"step": step}}, rank=0, world_size=1)
    part = writer.write(storage, attempt_prefix(step, attempt))

    def complete(**options: Any) -> Commit:
        options = {"fence": lambda: None, **options}
        store = SingleRankStore(storage, keep=1)
        return store.complete(step=step, attempt=attempt, parts=[part], kinds=writer.kinds, record={}, **options)

    return complete


def test_a_late_save_of_an_older_step_commits_nothing(storage: ClockedStorage) -> None:
    late = begun(storage, 4)
    save(SingleRankStore(storage, keep=1), 6)
    with pytest.raises(CheckpointError, match=r"step 4 are missing: step=4/.* is missing"):
        late()
    assert steps_in(storage) == [6] and not storage.list("step=4")


def test_a_storage_that_lost_an_object_gets_no_manifest(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    complete = begun(storage, 4)
    corrupt(storage, storage.list("step=4")[0], "short")
    with pytest.raises(CheckpointError, match=r"step=4/.* bytes; \d+ were committed"):
        complete()
    assert storage.list() == []


def test_a_save_that_outlives_its_generation_removes_nothing(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    save(SingleRankStore(storage, keep=1), 1)
    outlived = begun(storage, 5)
    theirs = begun(storage, 3)  # of a later generation, which has restored step 1
    assert outlived(is_current=lambda: False).step == 5
    assert theirs().step == 3
    assert steps_in(storage) == [3, 5], "the later generation has removed step 1"


def test_a_saver_that_is_fenced_after_its_commit_removes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = Storage(tmp_path)
    save(SingleRankStore(storage, keep=1), 1)
    orphan = write_orphan(storage, 2)
    asked: list[bool] = []

    def fence() -> None:
        asked.append(manifest_key(5) in storage.list("commits"))
        if asked[-1]:
            raise PeerFailedError("this worker was presumed dead")

    complete = begun(storage, 5)
    with caplog.at_level(logging.WARNING):
        assert complete(fence=fence).step == 5
    assert asked == [False, True], "before the manifest, and before removals"
    assert steps_in(storage) == [1, 5] and storage.list(orphan)
    assert (
        "superseded commits stay until the next commit: PeerFailedError: this worker was presumed dead" in caplog.text
    )


def test_attempts_that_begin_after_the_listing_are_not_removed(tmp_path: Path) -> None:
    """The fence is called after the listing, which so has no attempts of a newer driver."""
    storage = Storage(tmp_path)
    written: list[str] = []

    def fence() -> None:
        if storage.list("commits"):
            written.append(write_orphan(storage, 2))  # of a driver that takes over right after the fence

    begun(storage, 5)(fence=fence)
    assert written and [storage.list(prefix) for prefix in written] == [[f"{prefix}/0-0.bin"] for prefix in written]


def test_a_storage_without_modification_times_keeps_its_orphans(tmp_path: Path) -> None:
    class Undated(Storage):
        def listing(self, prefix: str = "") -> dict[str, Entry]:
            return {key: entry._replace(written_at=None) for key, entry in super().listing(prefix).items()}

    storage = Undated(tmp_path)
    orphan = write_orphan(storage, 9)
    for step in (1, 2):
        save(SingleRankStore(storage, keep=1), step)
    assert storage.list(orphan)
    assert steps_in(storage) == [2], "superseded commits are removed"
