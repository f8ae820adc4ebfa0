"""What a saver removes after its commits, and what stays."""

from __future__ import annotations

import itertools
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from elastic_ddp.checkpoint import CheckpointStore, Commit, CommitCatalog, Retention
from elastic_ddp.checkpoint.housekeeping import ORPHAN_AGE_S, plan_prune
from elastic_ddp.checkpoint.manifest import attempt_prefix, manifest_key
from elastic_ddp.checkpoint.store import SupersededError
from elastic_ddp.checkpoint.writer import StateWriter
from elastic_ddp.errors import PeerFailedError, StorageError
from elastic_ddp.storage.folder import Entry
from elastic_ddp.storage.storage import Storage
from tests.single_rank_store import SingleRankStore
from tests.unit.checkpoint.housekeeping_helpers import ClockedStorage, open_storage, save, steps_in, write_orphan
from tests.unit.checkpoint.test_checkpoint import corrupt, keys_of
from tests.unit.faulty_reads import UnreadableObject


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> ClockedStorage:
    return open_storage(request, tmp_path)


def test_every_kth_and_the_best_commits_stay_and_nothing_else(storage: ClockedStorage) -> None:
    store = SingleRankStore(storage, keep=Retention(last=2, every_steps=10, best=2, metric="loss"))
    losses = {3: 0.9, 6: 0.2, 9: 0.8, 12: 0.7, 15: 0.1, 18: 0.5, 21: 0.6, 24: 0.4, 27: 0.3}
    commits = {step: save(store, step, value) for step, value in losses.items()}
    assert steps_in(storage) == [6, 12, 15, 21, 24, 27]
    assert storage.list() == sorted(key for step in (6, 12, 15, 21, 24, 27) for key in keys_of(commits[step]))


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

    def listing(self, prefix: str = "") -> dict[str, Entry]:
        sizes = super().listing(prefix)
        if not prefix and self.without:
            sizes.pop(self.without)
        return sizes


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
    assert ("step 10 and all attempts at it stay: commits/10.json cannot be read" in caplog.text) == (10 in left)
    caplog.clear()
    save(store, 60, 0.8)
    assert "commits/10.json stay" not in caplog.text, "warned once"


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


def test_an_unreadable_commit_stays_although_the_storage_fails_while_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = SingleRankStore(Storage(tmp_path), keep=9)
    for step in (10, 20):
        save(before, step)
    storage = UnreadableObject(str(tmp_path), manifest_key(20))
    store = SingleRankStore(storage, keep=Retention(last=2))
    save(store, 30)
    plain: Any = CommitCatalog.complete_at

    def fail(self: CommitCatalog, step: int, **options: Any) -> Any:
        if "listed" in options:  # by the housekeeping
            raise StorageError("503 SlowDown")
        return plain(self, step, **options)

    with monkeypatch.context() as patch:
        patch.setattr(CommitCatalog, "complete_at", fail)
        save(store, 40)
    save(store, 50)
    assert steps_in(storage) == [20, 40, 50]


def test_a_commit_that_could_not_be_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = SingleRankStore(Storage(tmp_path), keep=9)
    for step in (20, 30):
        save(before, step)
    storage = UnreadableObject(str(tmp_path), manifest_key(30))
    store = SingleRankStore(storage, keep=Retention(last=2))
    save(store, 40)
    assert steps_in(storage) == [20, 30, 40]
    monkeypatch.setattr(UnreadableObject, "read", Storage.read)
    save(store, 50)
    assert steps_in(storage) == [40, 50]


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
@pytest.mark.parametrize("at", range(9))
def test_a_late_commit_of_a_worker_that_left_never_lists_missing_objects(
    tmp_path: Path, at: int, keep: Retention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It commits step 4 at any moment of the commit of step 6 by another worker."""
    storage = Storage(tmp_path)
    late_store, other = CheckpointStore(storage, keep=keep), CheckpointStore(storage, keep=keep)
    other.complete(**written(storage, 2), fence=lambda: None)
    late, mine = written(storage, 4), written(storage, 6)
    moments, outcome = itertools.count(), []

    def meanwhile() -> None:
        if next(moments) == at:
            outcome.append(None)
            with suppress(SupersededError):
                late_store.complete(**late, fence=lambda: None, is_current=lambda: False)

    for name in ("listing", "list", "size", "read", "create", "uploads"):
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

    def read(self, key: str) -> bytes:
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
        plan_prune(UnreadableStorage(tmp_path), Retention(last=1), orphan_age_s=0, with_set_aside=True)
    assert steps_in(Storage(tmp_path)) == [10, 20, 30] and Storage(tmp_path).list(orphan)
