"""Restores of the newest commit that verifies, on one or several ranks."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from elastic_ddp.checkpoint import Commit, pieces
from elastic_ddp.checkpoint.pieces import Targets
from elastic_ddp.checkpoint.reader import allocate_state
from elastic_ddp.distributed.process_group import FORM_TIMEOUT_S, ProcessGroup
from elastic_ddp.errors import PeerFailedError, StorageError
from elastic_ddp.storage.folder import Entry
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker import shared_read
from elastic_ddp.worker.restore import restore
from tests.ranks import run_ranks, single_rank_group
from tests.single_rank_store import SingleRankStore
from tests.unit.checkpoint.test_checkpoint import corrupt, restored_step, save, step_of
from tests.unit.faulty_reads import CountingReads


def restore_in_pieces(group: ProcessGroup, uri: str) -> dict[str, Any]:
    """The step that this rank restores, the bytes that it reads for that, and the number of its pieces."""
    pieces.MAX_PIECE_BYTES = 128
    storage = CountingReads(uri)
    store = SingleRankStore(storage, keep=2)
    ticks: list[int] = []
    restored = restore(store, storage, group, tick=lambda: ticks.append(1))
    step = None if restored is None else step_of(restored[1])
    return {"step": step, "rejected": store.rejected, "num_bytes": storage.num_bytes, "num_pieces": len(ticks)}


def restore_on(storage: Storage) -> tuple[Commit, list[tuple[str, str]]]:
    """The commit that a single rank restores, and the rejected ones."""
    store = SingleRankStore(storage, keep=2)
    restored = restore(store, storage, single_rank_group())
    assert restored is not None and restored[0].step == step_of(restored[1])
    return restored[0], store.rejected


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_gets_the_state_and_every_byte_is_read_once(tmp_path: Path, world_size: int) -> None:
    [_, newest] = save(Storage(tmp_path), 1, 2)
    results = run_ranks(world_size, restore_in_pieces, str(tmp_path))
    assert [result["step"] for result in results] == [2] * world_size
    assert sum(result["num_bytes"] for result in results) == sum(stored.size for stored in newest.objects)
    assert all(result["num_bytes"] for result in results), "every rank reads a share"
    assert all(result["num_pieces"] == results[0]["num_pieces"] >= world_size for result in results)
    assert not any(result["rejected"] for result in results)


@pytest.mark.parametrize(
    ("which", "how"),
    [
        ("blocks", "flip"),
        ("blocks", "missing"),
        ("blocks", "short"),
        ("skeleton", "flip"),
        ("manifest", "short"),
        ("manifest", "missing"),
    ],
)
def test_a_commit_that_is_bad_for_one_rank_is_set_aside(tmp_path: Path, which: str, how: str) -> None:
    storage = Storage(tmp_path)
    [before, newest] = save(storage, 1, 2)
    key = {"blocks": newest.objects[0].key, "skeleton": newest.state.key, "manifest": newest.key}[which]
    corrupt(storage, key, how)
    objects = storage.list("step=2")
    results = run_ranks(2, restore_in_pieces, str(tmp_path))
    assert [result["step"] for result in results] == [1, 1]
    if (which, how) == ("manifest", "missing"):
        assert not results[0]["rejected"], "there is no such commit"
        return
    [(rejected, reason)] = results[0]["rejected"]
    assert rejected == newest.key and key in reason
    [aside] = storage.list("set-aside")
    name = "unknown-" if which == "manifest" else f"{newest.attempt}.json"
    assert aside.startswith(f"set-aside/2-{name}") and storage.list("commits") == [before.key]
    save(storage, 2, 3, keep=1)
    assert restored_step(storage) == 3 and set(objects) <= set(storage.list("step=2")), "its objects are kept"


# Memory of a rejected commit is freed at once, also without garbage collection, which training loops may disable.


def test_tensors_of_a_rejected_commit_are_freed_before_the_next_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(tmp_path)
    [_, newest] = save(storage, 1, 2)
    corrupt(storage, newest.objects[0].key, "flip")
    allocated: list[weakref.ref[Targets]] = []

    def checked_allocate(*args: Any) -> Any:
        assert not any(targets() for targets in allocated)
        tensors, targets = allocate_state(*args)
        allocated.append(weakref.ref(targets))
        return tensors, targets

    monkeypatch.setattr(shared_read, "allocate_state", checked_allocate)
    gc.disable()
    try:
        restored, _ = restore_on(storage)
    finally:
        gc.enable()
    assert restored.step == 1 and len(allocated) == 2


class ReadsAtOnce(Storage):
    """Requires that the skeleton is read while the objects are listed, and that no size is requested."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.both = threading.Barrier(2, timeout=30)

    def listing(self, prefix: str = "") -> dict[str, Entry]:
        if prefix.startswith("step="):
            self.both.wait()
        return super().listing(prefix)

    def read(self, key: str) -> bytes:
        if key.startswith("step="):
            self.both.wait()
        return super().read(key)

    def size(self, key: str) -> int:
        raise AssertionError(f"one more request for {key}")


def test_a_restore_makes_three_round_trips_before_its_first_piece(tmp_path: Path) -> None:
    save(Storage(tmp_path), 1, 2)
    assert restore_on(ReadsAtOnce(str(tmp_path)))[0].step == 2


class RemovedWhenListed(Storage):
    """The newest commit is removed when its objects are listed."""

    def listing(self, prefix: str = "") -> dict[str, Entry]:
        if prefix.startswith("step=2/"):
            self.delete("commits/2.json")
            self.delete_tree(prefix)
        return super().listing(prefix)


def test_a_commit_that_was_removed_since_it_was_listed_is_not_rejected(tmp_path: Path) -> None:
    save(Storage(tmp_path), 1, 2)
    commit, rejected = restore_on(storage := RemovedWhenListed(str(tmp_path)))
    assert commit.step == 1 and not rejected and storage.list("set-aside") == []


class BlockedReads(Storage):
    """Reads of all pieces but the first wait until they are released."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.in_progress = set[int]()
        self.released = threading.Event()

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        if not key.endswith(".bin") or start == 0:
            return super().read_into(key, start, buffer)
        self.in_progress.add(start)
        assert self.released.wait(60)
        num_bytes = super().read_into(key, start, buffer)
        self.in_progress.remove(start)
        return num_bytes


def test_no_read_is_in_progress_once_a_peer_failure_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read in progress would write into memory that the next restore uses."""
    monkeypatch.setattr("elastic_ddp.checkpoint.pieces.MAX_PIECE_BYTES", 64)
    monkeypatch.setattr(shared_read, "PIECES_IN_FLIGHT", 1)  # the first piece is finished before the others are read
    [commit] = save(Storage(tmp_path), 1)
    assert len(commit.objects) == 1
    storage = BlockedReads(str(tmp_path))

    def fail() -> None:
        while not storage.in_progress:
            time.sleep(0.001)
        threading.Timer(0.2, storage.released.set).start()
        raise PeerFailedError("a peer failed")

    with pytest.raises(PeerFailedError, match="a peer failed"):
        restore(SingleRankStore(storage, keep=2), storage, single_rank_group(), tick=fail)
    assert storage.released.is_set() and not storage.in_progress


class SlowReads(Storage):
    """Each read takes longer than a group may take to form."""

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        time.sleep(1.5 * FORM_TIMEOUT_S)
        return super().read_into(key, start, buffer)


def restore_slowly(group: ProcessGroup, uri: str) -> int | None:
    storage = SlowReads(uri) if group.rank == 0 else Storage(uri)
    restored = restore(SingleRankStore(storage, keep=2), storage, group)
    return None if restored is None else step_of(restored[1])


def test_ranks_wait_for_a_rank_whose_storage_is_slow(tmp_path: Path) -> None:
    save(Storage(tmp_path), 1)
    assert run_ranks(2, restore_slowly, str(tmp_path)) == [1, 1]


def test_a_rank_whose_fence_raises_removes_no_manifest(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    [_, newest] = save(storage, 1, 2)
    corrupt(storage, newest.objects[0].key, "flip")
    before = storage.list("commits")

    def fence() -> None:
        raise PeerFailedError("this worker was presumed dead")

    with pytest.raises(PeerFailedError, match="presumed dead"):
        restore(SingleRankStore(storage, keep=2), storage, single_rank_group(), fence=fence)
    assert storage.list("commits") == before


class RefusesDeletes(Storage):
    def delete_if(self, key: str, data: bytes) -> bool:
        raise StorageError("503 SlowDown")


def test_a_bad_commit_that_cannot_be_set_aside_is_rejected_again_later(tmp_path: Path) -> None:
    [_, newest] = save(Storage(tmp_path), 1, 2)
    corrupt(Storage(tmp_path), newest.objects[0].key, "flip")
    for storage in (RefusesDeletes(str(tmp_path)), Storage(tmp_path)):
        commit, [(key, reason)] = restore_on(storage)
        assert commit.step == 1 and key == newest.key
        assert ("503 SlowDown" in reason) == isinstance(storage, RefusesDeletes)
    assert storage.list("commits") == ["commits/1.json"]
    assert storage.list("set-aside") == [f"set-aside/2-{newest.attempt}.json"]


def test_if_no_commit_verifies_all_of_them_stay(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    for commit in save(storage, 1, 2):
        corrupt(storage, commit.objects[0].key, "flip")
    before = storage.list()
    results = run_ranks(2, restore_in_pieces, str(tmp_path))
    assert [result["step"] for result in results] == [None, None]
    assert [key for key, _ in results[0]["rejected"]] == ["commits/2.json", "commits/1.json"]
    assert storage.list() == before, "the next try does not start over"


def test_a_restore_without_commits_returns_none(tmp_path: Path) -> None:
    assert [result["step"] for result in run_ranks(2, restore_in_pieces, str(tmp_path))] == [None, None]
