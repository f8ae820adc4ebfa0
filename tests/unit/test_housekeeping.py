"""What a saver removes after its commits, and what stays."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from elastic_ddp.checkpoint import CheckpointStore, Commit, Retention
from elastic_ddp.checkpoint.housekeeping import ORPHAN_AGE_S
from elastic_ddp.checkpoint.manifest import attempt_prefix, manifest_key
from elastic_ddp.checkpoint.prune import prune, removals
from elastic_ddp.checkpoint.store import SupersededError
from elastic_ddp.checkpoint.writer import StateWriter
from elastic_ddp.errors import CheckpointError, PeerFailedError, StorageError
from elastic_ddp.storage.folder import Upload
from elastic_ddp.storage.local import TEMPORARY_PREFIX
from elastic_ddp.storage.storage import Storage
from tests.single_rank_store import SingleRankStore
from tests.unit.faulty_reads import UnreadableObject
from tests.unit.test_checkpoint import corrupt, keys_of


class ClockedStorage(Storage):
    """A storage whose clock is wrong by years and can be advanced. It records what is read."""

    def __init__(self, uri: str | Path) -> None:
        super().__init__(uri)
        self.later_s = 0.0
        self.read_keys: list[str] = []

    def last_modified(self, prefix: str) -> float | None:
        at = super().last_modified(prefix)
        return None if at is None else at - 1e9

    def now(self) -> float:
        return super().now() + self.later_s

    def read(self, key: str, max_bytes: int | None = None) -> bytes:
        data = super().read(key, max_bytes)
        self.read_keys.append(key)
        return data


@pytest.fixture(params=["local", "memory", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> ClockedStorage:
    if request.param == "s3":
        return ClockedStorage(f"{request.getfixturevalue('s3')}/runs/one")
    return ClockedStorage(f"memory://{uuid.uuid4().hex}" if request.param == "memory" else tmp_path / "run")


def save(store: SingleRankStore, step: int, value: float | None = None, measured_at: int | None = None) -> Commit:
    at = step if measured_at is None else measured_at
    metrics = {} if value is None else {"loss": {"value": value, "step": at}}
    return store.save({"user": {"step": step}}, step=step, record={"metrics": metrics})


def steps_in(storage: Storage) -> list[int]:
    return sorted(int(key.split("/")[1].removesuffix(".json")) for key in storage.list("commits"))


def write_orphan(storage: Storage, step: int) -> str:
    prefix = attempt_prefix(step, uuid.uuid4().hex)
    storage.write(f"{prefix}/0-0.bin", b"half")
    return prefix


def test_every_kth_and_the_best_commits_stay_and_nothing_else(storage: ClockedStorage) -> None:
    store = SingleRankStore(storage, keep=Retention(last=2, every_steps=10, best=2, metric="loss"))
    losses = {3: 0.9, 6: 0.2, 9: 0.8, 12: 0.7, 15: 0.1, 18: 0.5, 21: 0.6, 24: 0.4, 27: 0.3}
    commits = {step: save(store, step, value) for step, value in losses.items()}
    assert steps_in(storage) == [6, 12, 15, 21, 24, 27]
    assert storage.list() == sorted(key for step in (6, 12, 15, 21, 24, 27) for key in keys_of(commits[step]))


def test_a_repeated_evaluation_counts_only_for_the_first_commit_that_has_it(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    store = SingleRankStore(storage, keep=Retention(last=1, best=2, metric="loss"))
    for step, (value, at) in {10: (0.1, 10), 20: (0.1, 10), 30: (0.1, 10), 40: (0.9, 40), 50: (0.9, 40)}.items():
        save(store, step, value, at)
    assert steps_in(storage) == [10, 40, 50]


def test_a_new_saver_process_keeps_the_same_commits(tmp_path: Path) -> None:
    storage, keep = Storage(tmp_path), Retention(last=1, every_steps=10, best=1, metric="loss", mode="max")
    for step in range(3, 40, 3):
        save(SingleRankStore(storage, keep=keep), step, 1.0 if step == 6 else 0.5)
    assert steps_in(storage) == [6, 12, 21, 30, 39]


def test_manifests_of_older_kept_commits_are_read_once(tmp_path: Path) -> None:
    storage = ClockedStorage(tmp_path)
    keep = Retention(last=1, every_steps=1)
    for step in range(1, 6):
        save(SingleRankStore(storage, keep=keep), step)
    store = SingleRankStore(storage, keep=keep)
    storage.read_keys.clear()
    save(store, 6)
    assert sorted(storage.read_keys) == [manifest_key(step) for step in range(1, 7)]
    storage.read_keys.clear()
    save(store, 7)
    save(store, 8)
    assert storage.read_keys == [manifest_key(7), manifest_key(8)], "the newest manifests are read again"
    assert steps_in(storage) == list(range(1, 9))


def test_a_bad_commit_does_not_count_as_the_kth_or_the_best(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    keep = Retention(last=3, every_steps=10, best=1, metric="loss")
    bad = save(SingleRankStore(storage, keep=keep), 10, 0.1)
    save(SingleRankStore(storage, keep=keep), 12, 0.3)
    corrupt(storage, bad.objects[0].key if bad.objects else bad.state.key, "missing")
    for step in range(13, 19):
        save(SingleRankStore(storage, keep=keep), step, 0.5)
    assert steps_in(storage) == [10, 12, 16, 17, 18], "12 is the first that can be used, and the best"


def test_a_step_that_is_committed_again_counts_with_its_new_value(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    store = SingleRankStore(storage, keep=Retention(last=1, best=1, metric="loss"))
    for bad in [save(store, 20, 1.0), save(store, 25, 3.0)]:
        store.set_aside(bad.key, bad.attempt)

    def is_over() -> None:
        if storage.list("commits"):
            raise PeerFailedError("the generation is over, and nothing is tidied")

    anew = {"metrics": {"loss": {"value": 9.0, "step": 20}}}
    store.save({"user": {}}, step=20, record=anew, fence=is_over)
    save(store, 30, 8.0)
    assert steps_in(storage) == [30], "20 was the best before it was set aside"


def test_the_fence_is_called_again_right_before_commits_are_removed(tmp_path: Path) -> None:
    storage = ClockedStorage(tmp_path)
    store, asked = SingleRankStore(storage, keep=1), 0

    def fence() -> None:
        nonlocal asked
        asked += 1
        if asked > 1 and manifest_key(30) in storage.read_keys:  # after the manifests were read
            raise PeerFailedError("the generation is over")

    for step in (20, 30):
        asked = 0
        store.save({"user": {}}, step=step, record={}, fence=fence)
    assert steps_in(storage) == [20, 30]


class StaleStorage(Storage):
    """A stale storage: its listing of the whole folder lacks the key `without`."""

    without = ""

    def sizes(self, prefix: str = "") -> dict[str, int]:
        found = super().sizes(prefix)
        if not prefix and self.without:
            found.pop(self.without)
        return found


@pytest.mark.parametrize("what", ["manifest", "object"])
def test_a_stale_listing_removes_no_good_commit(tmp_path: Path, what: str) -> None:
    storage, keep = StaleStorage(tmp_path), Retention(last=1, best=1, metric="loss")
    best = save(SingleRankStore(storage, keep=keep), 10, 0.1)
    save(SingleRankStore(storage, keep=keep), 20, 0.5)
    assert steps_in(storage) == [10, 20]
    storage.without = best.key if what == "manifest" else best.state.key
    save(SingleRankStore(storage, keep=keep), 30, 0.6)
    assert manifest_key(10) in storage.list("commits")
    storage.without = ""
    store = SingleRankStore(storage, keep=keep)
    store.verify(best)
    save(store, 40, 0.7)
    assert steps_in(storage) == [10, 40]


def test_a_bad_commit_stays_and_does_not_count_as_the_best(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage, keep = ClockedStorage(tmp_path), Retention(last=1, best=1, metric="loss")
    best = save(SingleRankStore(storage, keep=keep), 10, 0.1)
    save(SingleRankStore(storage, keep=keep), 20, 0.3)
    corrupt(storage, best.state.key, "missing")
    store = SingleRankStore(storage, keep=keep)
    for step in (30, 40, 50):
        save(store, step, 0.5)
    assert steps_in(storage) == [10, 20, 50], "20 is the best of the good ones"
    warnings = [text for text in caplog.messages if text.startswith("step 10 and all attempts at it stay")]
    assert len(warnings) == 1 and best.state.key in warnings[0]


class Held(ClockedStorage):
    """A folder in it cannot be removed, as under a legal hold."""

    held = ""

    def delete_tree(self, prefix: str) -> None:
        if self.held and prefix.startswith(self.held):
            raise StorageError(f"cannot delete {prefix}")
        super().delete_tree(prefix)


def test_a_folder_that_cannot_be_removed_does_not_stop_other_removals(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = Held(tmp_path)
    storage.held = "step=1/"
    store = SingleRankStore(storage, keep=2)
    write_orphan(storage, 90)
    for step in range(1, 9):
        storage.later_s = 2 * ORPHAN_AGE_S * (step == 8)
        save(store, step)
    assert steps_in(storage) == [7, 8]
    assert {key.split("/")[0] for key in storage.list() if key.startswith("step=")} == {"step=1", "step=7", "step=8"}
    assert "cannot delete step=1/" in caplog.text


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (Retention(last=1, every_steps=20), [10, 20, 40, 50]),
        (Retention(last=1, best=1, metric="loss"), [10, 30, 50]),
        (Retention(last=5), [10, 20, 30, 40, 50]),
        (Retention(last=2), [40, 50]),
    ],
    ids=str,
)
def test_an_unreadable_manifest_stays_with_its_step_and_the_rest_is_tidied(
    tmp_path: Path, keep: Retention, left: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    before = SingleRankStore(Storage(tmp_path), keep=9)
    commits = {step: save(before, step, value) for step, value in {10: 0.1, 20: 0.5, 30: 0.2, 40: 0.6}.items()}
    storage = UnreadableObject(str(tmp_path), commits[10].key)
    beside, dead = write_orphan(storage, 10), write_orphan(storage, 25)
    store = SingleRankStore(storage, keep=keep)
    save(store, 50, 0.7)
    assert steps_in(storage) == left and not storage.list(dead)
    at_step_10 = [*keys_of(commits[10])[1:], f"{beside}/0-0.bin"] if 10 in left else []
    assert storage.list("step=10") == sorted(at_step_10)
    assert ("step 10 and all attempts at it stay: cannot read" in caplog.text) == (10 in left)
    caplog.clear()
    save(store, 60, 0.8)
    assert "commits/10.json" not in caplog.text, "this saver does not read it again"


@pytest.mark.parametrize(
    ("keep", "left"),
    [(Retention(last=2), [30, 35, 40]), (Retention(last=1, best=1, metric="loss"), [10, 35, 40])],
    ids=str,
)
def test_a_commit_of_another_run_stays_and_displaces_none_of_this_run(
    tmp_path: Path, keep: Retention, left: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    def put(step: int, value: float, batch: int) -> None:
        metrics = {"loss": {"value": value, "step": step}}
        record = {"metrics": metrics, "identity": {"global_batch_size": batch}}
        store.save({"user": {"step": step}}, step=step, record=record)

    storage = Storage(tmp_path)
    store = SingleRankStore(storage, keep=9)
    for step, value, batch in ((10, 0.5, 64), (20, 0.7, 64), (30, 0.8, 64), (35, 0.1, 32)):
        put(step, value, batch)
    store = SingleRankStore(storage, keep=keep)
    put(40, 0.9, 64)
    assert steps_in(storage) == left
    assert "step 35 and all attempts at it stay: commits/35.json belongs to another run" in caplog.text
    store.verify(next(commit for step, commit in store.all_commits() if step == 35 and isinstance(commit, Commit)))


def written(storage: Storage, step: int) -> dict[str, Any]:
    """Writes a state, and returns the arguments of `complete` for it."""
    attempt, writer = uuid.uuid4().hex, StateWriter()
    writer.stage({"user": {"step": step}, "model": {"w": torch.full((64,), float(step))}}, rank=0, world_size=1)
    part = writer.write(storage, attempt_prefix(step, attempt))
    return {"step": step, "attempt": attempt, "parts": [part], "kinds": writer.kinds, "record": {}}


def test_an_unreadable_commit_stays_while_newer_ones_are_committed(tmp_path: Path) -> None:
    before = SingleRankStore(Storage(tmp_path), keep=9)
    for step in (10, 20, 30):
        save(before, step)
    storage = UnreadableObject(str(tmp_path), manifest_key(30))
    store = SingleRankStore(storage, keep=Retention(last=2))
    save(store, 40)
    assert steps_in(storage) == [20, 30, 40]
    for step in (50, 60):
        save(store, step)
    assert steps_in(storage) == [30, 50, 60]


def test_a_commit_of_another_run_at_the_same_step_is_set_aside(tmp_path: Path) -> None:
    store = SingleRankStore(Storage(tmp_path), keep=9)
    store.save({"user": {"step": "theirs"}}, step=10, record={"identity": {"global_batch_size": 32}})
    store.save({"user": {"step": "ours"}}, step=10, record={"identity": {"global_batch_size": 64}})
    newest = store.latest()
    assert newest is not None and store.load(newest)["user"]["step"] == "ours"
    assert len(Storage(tmp_path).list("set-aside")) == 1


@pytest.mark.parametrize(
    "keep",
    [
        pytest.param(Retention(last=2), id="the-last", marks=pytest.mark.chaos),
        pytest.param(Retention(last=2, every_steps=1000), id="and-others"),
    ],
)
@pytest.mark.parametrize("at", range(10))
def test_a_late_commit_of_a_worker_that_left_never_lists_missing_objects(
    storage: ClockedStorage, at: int, keep: Retention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It commits step 4 at any moment of the commit of step 6 by another worker."""
    late_store, other = CheckpointStore(storage, keep=keep), CheckpointStore(storage, keep=keep)
    other.complete(**written(storage, 2), fence=lambda: None)
    late, mine = written(storage, 4), written(storage, 6)
    moments, outcome = itertools.count(), []

    def meanwhile() -> None:
        if next(moments) == at:
            outcome.append(None)
            with suppress(SupersededError):
                late_store.complete(**late, fence=lambda: None, is_current=lambda: False)

    for name in ("sizes", "list", "size", "read", "create", "uploads"):
        plain = getattr(storage, name)

        def asked(*arguments: Any, plain: Any = plain, **options: Any) -> Any:
            meanwhile()
            return plain(*arguments, **options)

        monkeypatch.setattr(storage, name, asked)
    other.complete(**mine, fence=meanwhile)
    assert outcome, "the commit has so many operations"
    for step, commit in CheckpointStore(storage, keep=keep).all_commits():
        assert isinstance(commit, Commit), step
        CheckpointStore(storage, keep=keep).verify(commit)
    other.complete(**written(storage, 8), fence=lambda: None)
    assert all(isinstance(commit, Commit) for _, commit in CheckpointStore(storage, keep=keep).all_commits())


def test_an_unreadable_newest_commit_displaces_no_readable_one(tmp_path: Path) -> None:
    before = SingleRankStore(Storage(tmp_path), keep=9)
    for step in (10, 20):
        save(before, step)
    storage = UnreadableObject(str(tmp_path), manifest_key(30))
    save(SingleRankStore(storage, keep=1), 30)
    assert steps_in(storage) == [20, 30]


class UnreadableStorage(Storage):
    """Lists objects, and refuses all reads."""

    def read(self, key: str, max_bytes: int | None = None) -> bytes:
        return self.refuse(key)

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        return self.refuse(key)

    def refuse(self, key: str) -> NoReturn:
        self.size(key)  # raises FileNotFoundError for a missing object
        raise StorageError("403") from PermissionError("403")


def test_if_no_manifest_can_be_read_nothing_is_removed_and_an_error_is_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = SingleRankStore(Storage(tmp_path), keep=9)
    for step in (10, 20):
        save(store, step)
    orphan = write_orphan(Storage(tmp_path), 5)
    save(SingleRankStore(UnreadableStorage(tmp_path), keep=1), 30)
    assert "superseded commits stay until the next commit: StorageError: 403" in caplog.text
    with pytest.raises(StorageError, match="403"):
        removals(UnreadableStorage(tmp_path), Retention(last=1), orphan_age_s=0, with_set_aside=True)
    assert steps_in(Storage(tmp_path)) == [10, 20, 30] and Storage(tmp_path).list(orphan)


KILLED = """
import os, signal, sys
import torch
from elastic_ddp.storage import local
from elastic_ddp.storage.storage import Storage
from tests.single_rank_store import SingleRankStore

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

setattr(local.os, sys.argv[2], die)
SingleRankStore(Storage(sys.argv[1]), keep=2).save({"model": {"w": torch.ones(1 << 16)}}, step=5, record={})
"""


def left_by_a_kill_before(function: str, folder: Path) -> list[Path]:
    subprocess.run([sys.executable, "-c", KILLED, folder, function], check=False, cwd=Path(__file__).parents[2])
    left = [path for path in folder.rglob("*") if path.name.startswith(TEMPORARY_PREFIX)]
    assert left, "it was killed before it had created an object"
    return left


def test_temporary_files_of_a_killed_saver_are_removed(tmp_path: Path) -> None:
    left_by_a_kill_before("replace", tmp_path)
    storage = Storage(tmp_path)
    assert storage.list() == [] and sum(upload.num_bytes for upload in storage.uploads()) >= 1 << 18
    save(SingleRankStore(storage, keep=1), 6)
    assert storage.uploads() == [] and storage.list("step=5") == []
    assert not (tmp_path / "step=5").exists()


def test_an_unfinished_manifest_is_removed_once_it_is_old(tmp_path: Path) -> None:
    [manifest] = left_by_a_kill_before("link", tmp_path)
    assert manifest.parent.name == "commits"
    store = SingleRankStore(Storage(tmp_path), keep=1)
    save(store, 6)
    assert manifest.exists(), "a process may be writing it"
    at = time.time() - ORPHAN_AGE_S - 60
    os.utime(manifest, (at, at))
    save(store, 7)
    assert not manifest.exists()


def test_prune_finds_temporary_files_of_a_killed_saver(tmp_path: Path) -> None:
    left_by_a_kill_before("replace", tmp_path)
    storage = Storage(tmp_path)
    [found], _ = removals(storage, None, orphan_age_s=0, with_set_aside=False)
    assert (found.what, found.step) == ("orphan", 5) and found.num_bytes >= 1 << 18
    prune(storage, [found], orphan_age_s=0)
    assert storage.uploads() == [] and not (tmp_path / "step=5").exists()


class Uploading(ClockedStorage):
    """A storage with unfinished uploads, as on S3."""

    def __init__(self, uri: str | Path, keys: list[str]) -> None:
        super().__init__(uri)
        self._begun = {key: Upload(key, "id", self.now()) for key in keys}

    def uploads(self, prefix: str = "") -> list[Upload]:
        return [*self._begun.values()]

    def abort(self, upload: Upload) -> None:
        del self._begun[upload.key]


def test_an_unfinished_set_aside_upload_protects_nothing_and_expires(tmp_path: Path) -> None:
    """Manifests above 16 MiB are uploaded to S3 in parts."""
    attempt = uuid.uuid4().hex
    storage = Uploading(tmp_path, [f"set-aside/4-{attempt}.json", "foreign/object"])
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
    storage = Uploading(tmp_path, [f"{commit.prefix}/9-0.bin" for commit in commits])
    chosen, _ = removals(storage, Retention(last=1), orphan_age_s=ORPHAN_AGE_S, with_set_aside=False)
    assert [removal.step for removal in chosen] == [1]
    prune(storage, chosen)
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


def test_clock_objects_of_a_killed_saver_are_removed(storage: ClockedStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "delete_tree", lambda *_: None)  # the process is killed before
        storage.now()
    assert len(storage.list()) == 1
    commit = save(SingleRankStore(storage, keep=1), 1)
    assert storage.list() == sorted(keys_of(commit))


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
        found = SingleRankStore(storage, keep=1).all_commits()
        assert [step for step, _ in found] == [3, 2, 1][: max(1, 3 - at)], "the oldest is removed first"
        assert all(isinstance(commit, Commit) for _, commit in found)
    assert storage.remaining >= 0, "it has no further removal"
    assert not storage.list("step=1") and not storage.list("step=2")


def restored_step_of(storage: Storage) -> int | None:
    found = SingleRankStore(storage, keep=1).load_latest()
    return None if found is None else found[0].step


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


def test_a_storage_without_modification_times_keeps_its_orphans(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Undated(Storage):
        def last_modified(self, prefix: str) -> float | None:
            raise StorageError("there are no modification times")

    storage = Undated(tmp_path)
    orphan = write_orphan(storage, 9)
    save(SingleRankStore(storage, keep=1), 1)
    with caplog.at_level(logging.WARNING):
        save(SingleRankStore(storage, keep=1), 2)
    assert storage.list(orphan) and "there are no modification times" in caplog.text
    assert steps_in(storage) == [2], "superseded commits are removed"
