"""Commits that several ranks read together."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from zlib_ng import zlib_ng

from elastic_ddp.checkpoint import Commit, CommitCatalog, pieces
from elastic_ddp.checkpoint.reader import allocate_state
from elastic_ddp.checkpoint.targets import Targets
from elastic_ddp.distributed.process_group import FORM_TIMEOUT_S, ProcessGroup
from elastic_ddp.errors import CheckpointError, ConfigError, PeerFailedError, StorageError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker import shared_read
from elastic_ddp.worker.agreed_errors import agree_on_error
from elastic_ddp.worker.restore import restore
from tests.ranks import run_ranks, single_rank_group
from tests.single_rank_store import SingleRankStore
from tests.unit.test_checkpoint import corrupt, make_state, restored_step, save, step_of


class Counting(Storage):
    """Counts bytes of blocks that are read."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.num_bytes = 0

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        count = super().read_into(key, start, buffer)
        self.num_bytes += count
        return count


def restore_on(group: ProcessGroup, uri: str, piece_bytes: int) -> dict[str, Any]:
    """What a rank restores, and how many bytes it read for that."""
    pieces.MAX_PIECE_BYTES = piece_bytes
    storage = Counting(uri)
    store = SingleRankStore(storage, keep=2)
    counted: list[int] = []
    found = restore(store, storage, group, tick=lambda: counted.append(1))
    step = None if found is None else step_of(found[1])
    return {"step": step, "rejected": store.rejected, "num_bytes": storage.num_bytes, "pieces": len(counted)}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_gets_the_state_and_every_byte_leaves_the_storage_once(tmp_path: Path, world_size: int) -> None:
    [_, newest] = save(Storage(tmp_path), 1, 2)
    results = run_ranks(world_size, restore_on, str(tmp_path), 128)
    assert [each["step"] for each in results] == [2] * world_size
    assert sum(each["num_bytes"] for each in results) == sum(item.size for item in newest.objects)
    assert all(each["num_bytes"] for each in results), "they share the work"
    assert all(each["pieces"] == results[0]["pieces"] >= world_size for each in results), "all of them, wherever from"
    assert not any(each["rejected"] for each in results)


@pytest.mark.parametrize("which", ["blocks", "skeleton", "manifest"])
@pytest.mark.parametrize("how", ["flip", "missing", "short"])
def test_what_one_rank_finds_bad_no_rank_uses_and_it_is_set_aside(tmp_path: Path, which: str, how: str) -> None:
    storage = Storage(tmp_path)
    [before, newest] = save(storage, 1, 2)
    key = {"blocks": newest.objects[0].key, "skeleton": newest.state.key, "manifest": newest.key}[which]
    corrupt(storage, key, how)
    kept = storage.list("step=2")
    results = run_ranks(2, restore_on, str(tmp_path), 128)
    assert [each["step"] for each in results] == [1, 1]
    if (which, how) == ("manifest", "missing"):
        assert not results[0]["rejected"]
        return
    [(rejected, reason)] = results[0]["rejected"]
    assert rejected == newest.key and key in reason
    [aside] = storage.list("set-aside")
    name = "unknown-" if which == "manifest" else f"{newest.attempt}.json"
    assert aside.startswith(f"set-aside/2-{name}") and storage.list("commits") == [before.key]
    save(storage, 2, 3, keep=1)
    assert restored_step(storage) == 3 and set(kept) <= set(storage.list("step=2")), "it is there to be looked at"


def test_where_all_ranks_find_bad_pieces_the_commit_before_is_used(tmp_path: Path) -> None:
    """And none takes what came from another as what had been good there."""
    storage = Storage(tmp_path)
    [_, newest] = save(storage, 1, 2)
    for item in newest.objects:
        storage.write(item.key, bytes(byte ^ 1 for byte in storage.read(item.key)))
    results = run_ranks(2, restore_on, str(tmp_path), 128)
    assert [each["step"] for each in results] == [1, 1]


def agree_on_errors(group: ProcessGroup, errors: list[Exception | None]) -> str | list[bytes]:
    try:
        return agree_on_error(errors[group.rank], group, f"data of {group.rank}".encode())
    except Exception as error:
        return repr(error)


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([None, None, None], [b"data of 0", b"data of 1", b"data of 2"]),
        ([None, CheckpointError("bad\nin two lines"), None], r"CheckpointError('bad\nin two lines')"),
        ([CheckpointError("bad"), StorageError("down"), ConfigError("full")], "ConfigError('full')"),
        ([PeerFailedError("changed"), CheckpointError("bad"), CheckpointError("worse")], "CheckpointError('bad')"),
    ],
)
def test_all_ranks_raise_the_same_error_or_get_all_data(errors: list[Exception | None], expected: Any) -> None:
    assert run_ranks(3, agree_on_errors, errors) == [expected] * 3


@pytest.mark.parametrize("which", ["blocks", "skeleton"])
def test_what_a_bad_commit_held_is_let_go_before_another_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """Also where nobody collects garbage, as training loops may have it."""
    storage = Storage(tmp_path)
    [_, newest] = save(storage, 1, 2)
    if which == "blocks":
        corrupt(storage, newest.objects[0].key, "flip")
    else:
        skeleton = b'{"model": {"kind": "none"}}'
        storage.write(newest.state.key, skeleton)
        state = newest.state.model_copy(update={"size": len(skeleton), "crc32": zlib_ng.crc32(skeleton)})
        storage.write(newest.key, newest.model_copy(update={"state": state}).to_bytes())
    filled: list[weakref.ref[Targets]] = []

    def counted(*args: Any) -> Any:
        assert not any(each() for each in filled)
        found = allocate_state(*args)
        filled.append(weakref.ref(found[1]))
        return found

    monkeypatch.setattr(shared_read, "allocate_state", counted)
    gc.disable()
    try:
        found = restore(SingleRankStore(storage, keep=2), storage, single_rank_group())
    finally:
        gc.enable()
    assert found is not None and found[0].step == 1 and len(filled) == 2


def test_a_commit_whose_skeleton_is_bad_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(tmp_path)
    [_, newest] = save(storage, 1, 2)
    corrupt(storage, newest.state.key, "flip")
    whole, looked_at = CommitCatalog.complete_skeleton, list[weakref.ref[Commit]]()

    def noted(catalog: CommitCatalog, commit: Commit) -> bytes:
        looked_at.append(weakref.ref(commit))
        return whole(catalog, commit)

    monkeypatch.setattr(CommitCatalog, "complete_skeleton", noted)
    gc.disable()
    try:
        found = restore(SingleRankStore(storage, keep=2), storage, single_rank_group())
        assert found is not None and [each() for each in looked_at] == [None, found[0]]
    finally:
        gc.enable()


class Flaky(Storage):
    """Of objects that begin so, as many readings as are told have a bit of theirs flipped on the way."""

    def __init__(self, uri: str, prefix: str, times: int) -> None:
        super().__init__(uri)
        self.prefix, self.times = prefix, times

    def flip(self, key: str, data: memoryview) -> None:
        if key.startswith(self.prefix) and self.times:
            self.times -= 1
            data[len(data) // 2] ^= 0x10

    def read(self, key: str, max_bytes: int | None = None) -> bytes:
        data = bytearray(super().read(key, max_bytes))
        self.flip(key, memoryview(data))
        return bytes(data)

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        count = super().read_into(key, start, buffer)
        self.flip(key, buffer)
        return count


class LateToList(Storage):
    """Once, an attempt's objects are not listed yet."""

    was_asked = False

    def sizes(self, prefix: str = "") -> dict[str, int]:
        if prefix.startswith("step=2/") and not self.was_asked:
            self.was_asked = True
            return {}
        return super().sizes(prefix)


def test_what_is_damaged_on_the_way_alone_is_read_again(tmp_path: Path) -> None:
    [_, newest] = save(Storage(tmp_path), 1, 2)
    objects = [newest.objects[0].key, newest.state.key, newest.key]
    for storage in [*(Flaky(str(tmp_path), key, times=1) for key in objects), LateToList(str(tmp_path))]:
        store = SingleRankStore(storage, keep=2)
        found = restore(store, storage, single_rank_group())
        assert found is not None and step_of(found[1]) == 2 and not store.rejected
        store.verify(newest)
    assert Storage(tmp_path).list("set-aside") == []


class AskedAtOnce(Storage):
    """Lists an attempt's objects once its skeleton is asked for, and gives that when they are. It is asked for no
    sizes besides."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.both = threading.Barrier(2, timeout=30)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        if prefix.startswith("step="):
            self.both.wait()
        return super().sizes(prefix)

    def read(self, key: str, max_bytes: int | None = None) -> bytes:
        if key.startswith("step="):
            self.both.wait()
        return super().read(key, max_bytes)

    def size(self, key: str) -> int:
        raise AssertionError(f"one more look at {key}")


def test_before_the_first_piece_a_storage_is_waited_for_three_times(tmp_path: Path) -> None:
    save(Storage(tmp_path), 1, 2)
    found = restore(SingleRankStore(storage := AskedAtOnce(str(tmp_path)), keep=2), storage, single_rank_group())
    assert found is not None and step_of(found[1]) == 2


class Removed(Storage):
    """A commit is gone when its objects are looked for."""

    def sizes(self, prefix: str = "") -> dict[str, int]:
        if prefix.startswith("step=2/"):
            self.delete("commits/2.json")
            self.delete_tree(prefix)
        return super().sizes(prefix)


def test_a_commit_that_was_removed_since_it_was_listed_is_no_bad_one(tmp_path: Path) -> None:
    save(Storage(tmp_path), 1, 2)
    store = SingleRankStore(storage := Removed(str(tmp_path)), keep=2)
    found = restore(store, storage, single_rank_group())
    assert found is not None and step_of(found[1]) == 1 and not store.rejected
    assert storage.list("set-aside") == []


class BadAtFirst(Storage):
    """Whatever is read of objects is bad the first time."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.known: set[tuple[str, int]] = set()

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        count = super().read_into(key, start, buffer)
        if (key, start) not in self.known:
            self.known.add((key, start))
            buffer[0] ^= 1
        return count


def restore_where_one_rank_reads_badly(group: ProcessGroup, uri: str) -> int | None:
    storage = BadAtFirst(uri) if group.rank == 1 else Storage(uri)
    found = restore(SingleRankStore(storage, keep=2), storage, group)
    return None if found is None else step_of(found[1])


def test_all_ranks_wait_for_one_that_reads_again(tmp_path: Path) -> None:
    store = SingleRankStore(Storage(tmp_path), keep=2)
    store._writer._blocks._object_bytes = 64  # several objects, and so pieces
    assert len(store.save(make_state(1), step=1, record={}).objects) > 2
    assert run_ranks(2, restore_where_one_rank_reads_badly, str(tmp_path)) == [1, 1]


def test_a_commit_that_one_restore_passed_over_stays_if_the_next_one_uses_it(tmp_path: Path) -> None:
    [_, newest] = save(Storage(tmp_path), 1, 2)

    class Broken(Flaky):
        """A peer is lost while the commit before is read."""

        def read_into(self, key: str, start: int, buffer: memoryview) -> int:
            if key.startswith("step=1/"):
                raise PeerFailedError("a peer was lost")
            return super().read_into(key, start, buffer)

    storage = Broken(str(tmp_path), newest.objects[0].key, times=2)
    store = SingleRankStore(storage, keep=2)
    with pytest.raises(PeerFailedError):
        restore(store, storage, single_rank_group())
    assert [key for key, _ in store.rejected] == [newest.key]
    found = restore(store, storage, single_rank_group())
    assert found is not None and found[0] == newest and store.rejected == []
    assert storage.list("commits") == ["commits/1.json", newest.key] and not storage.list("set-aside")


class Held(Storage):
    """Ends no read of blocks but that of the first piece until it is let go."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.under_way = set[int]()
        self.go = threading.Event()

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        if not key.endswith(".bin") or start == 0:
            return super().read_into(key, start, buffer)
        self.under_way.add(start)
        assert self.go.wait(60)
        count = super().read_into(key, start, buffer)
        self.under_way.remove(start)
        return count


def test_who_loses_a_peer_reads_nothing_any_more_when_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore that comes after it is not held up, and memory is not read into behind its back."""
    monkeypatch.setattr("elastic_ddp.checkpoint.pieces.MAX_PIECE_BYTES", 64)
    monkeypatch.setattr(shared_read, "PIECES_IN_FLIGHT", 1)  # the first piece is waited for before others are
    [commit] = save(Storage(tmp_path), 1)
    assert len(commit.objects) == 1
    storage = Held(str(tmp_path))

    def lose() -> None:
        while not storage.under_way:
            time.sleep(0.001)
        threading.Timer(0.2, storage.go.set).start()
        raise PeerFailedError("a peer was lost")

    with pytest.raises(PeerFailedError, match="a peer was lost"):
        restore(SingleRankStore(storage, keep=2), storage, single_rank_group(), tick=lose)
    assert storage.go.is_set() and not storage.under_way


def test_who_may_not_do_that_any_more_removes_no_manifest(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    [_, newest] = save(storage, 1, 2)
    corrupt(storage, newest.objects[0].key, "flip")
    before = storage.list("commits")

    def fence() -> None:
        raise PeerFailedError("this worker was presumed dead")

    with pytest.raises(PeerFailedError, match="presumed dead"):
        restore(SingleRankStore(storage, keep=2), storage, single_rank_group(), fence=fence)
    assert storage.list("commits") == before


class Slow(Storage):
    """Takes longer for anything in the commit than a group may take to form."""

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        time.sleep(1.5 * FORM_TIMEOUT_S)
        return super().read_into(key, start, buffer)


def restore_slowly(group: ProcessGroup, uri: str) -> int | None:
    storage = Slow(uri) if group.rank == 0 else Storage(uri)
    found = restore(SingleRankStore(storage, keep=2), storage, group)
    return None if found is None else step_of(found[1])


def test_ranks_wait_for_one_whose_storage_is_slow(tmp_path: Path) -> None:
    save(Storage(tmp_path), 1)
    assert run_ranks(2, restore_slowly, str(tmp_path)) == [1, 1]


class Busy(Storage):
    def delete_if(self, key: str, data: bytes) -> bool:
        raise StorageError("503 SlowDown")


def test_a_bad_commit_that_cannot_be_set_aside_holds_nobody_up_and_is_found_again(tmp_path: Path) -> None:
    [_, newest] = save(Storage(tmp_path), 1, 2)
    corrupt(Storage(tmp_path), newest.objects[0].key, "flip")
    for storage in (Busy(str(tmp_path)), Storage(tmp_path)):
        store = SingleRankStore(storage, keep=2)
        found = restore(store, storage, single_rank_group())
        assert found is not None and found[0].step == 1
        [(key, reason)] = store.rejected
        assert key == newest.key and ("cannot be set aside: 503 SlowDown" in reason) == (type(storage) is Busy)
    assert storage.list("commits") == ["commits/1.json"]
    assert storage.list("set-aside") == [f"set-aside/2-{newest.attempt}.json"]


def test_where_none_verifies_all_stay_where_they_are(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    for commit in save(storage, 1, 2):
        corrupt(storage, commit.objects[0].key, "flip")
    before = storage.list()
    results = run_ranks(2, restore_on, str(tmp_path), 128)
    assert [each["step"] for each in results] == [None, None]
    assert [key for key, _ in results[0]["rejected"]] == ["commits/2.json", "commits/1.json"]
    assert storage.list() == before, "the next try finds them, too, and does not start over"


def test_a_run_without_commits_has_none(tmp_path: Path) -> None:
    assert [each["step"] for each in run_ranks(2, restore_on, str(tmp_path), 128)] == [None, None]


class BadSector(Storage):
    """Whatever asks for one object that is there fails, as with a worn medium or with rights that are missing."""

    def __init__(self, uri: str, key: str) -> None:
        super().__init__(uri)
        self.key = key

    def read(self, key: str, max_bytes: int | None = None) -> bytes:
        self.meet(key)
        return super().read(key, max_bytes)

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        self.meet(key)
        return super().read_into(key, start, buffer)

    def meet(self, key: str) -> None:
        if key == self.key and self.size(key):
            raise StorageError(f"cannot read {key!r}: Permission denied") from PermissionError("Permission denied")


def restore_beside_a_bad_sector(group: ProcessGroup, uri: str, key: str, rank: int) -> dict[str, Any]:
    storage = BadSector(uri, key) if group.rank == rank else Storage(uri)
    found = restore(store := SingleRankStore(storage, keep=2), storage, group)
    return {"step": None if found is None else step_of(found[1]), "rejected": store.rejected}


@pytest.mark.parametrize(("which", "rank"), [("skeleton", 0), ("blocks", 0), ("blocks", 1)])
def test_a_commit_with_an_unreadable_object_is_set_aside_and_the_one_before_used(
    tmp_path: Path, which: str, rank: int
) -> None:
    store = SingleRankStore(Storage(tmp_path), keep=2)
    store._writer._blocks._object_bytes = 64  # several objects, and so pieces
    newest = [store.save(make_state(step), step=step, record={}) for step in (1, 2)][-1]
    objects = Storage(tmp_path).list("step=2")
    key = {"skeleton": newest.state.key, "blocks": newest.objects[rank].key}[which]
    results = run_ranks(2, restore_beside_a_bad_sector, str(tmp_path), key, rank)
    assert [each["step"] for each in results] == [1, 1]
    [(rejected, reason)] = results[0]["rejected"]
    assert rejected == newest.key and f"cannot read {key!r}" in reason and "although the storage answers" in reason
    assert Storage(tmp_path).list("set-aside") == [f"set-aside/2-{newest.attempt}.json"]
    assert Storage(tmp_path).list("step=2") == objects, "moving the manifest back restores the commit"


def test_a_commit_whose_manifest_cannot_be_read_stays_and_the_one_before_is_used(tmp_path: Path) -> None:
    [_, newest] = save(Storage(tmp_path), 1, 2)
    before = Storage(tmp_path).list()
    results = run_ranks(2, restore_beside_a_bad_sector, str(tmp_path), newest.key, 0)
    assert [each["step"] for each in results] == [1, 1]
    assert [key for key, _ in results[0]["rejected"]] == [newest.key]
    assert Storage(tmp_path).list() == before
    assert [each["step"] for each in run_ranks(2, restore_beside_a_bad_sector, str(tmp_path), "none", 0)] == [2, 2]


def test_a_step_whose_commit_cannot_be_read_is_committed_again(tmp_path: Path) -> None:
    [_, newest] = save(Storage(tmp_path), 1, 2)
    store = SingleRankStore(BadSector(str(tmp_path), newest.objects[0].key), keep=2)
    again = store.save(make_state(3), step=2, record={})
    assert again.attempt != newest.attempt and store.latest() == again
    assert Storage(tmp_path).list("set-aside") == [f"set-aside/2-{newest.attempt}.json"]


class Away(Storage):
    """At some operations, which are counted from the first reading of an object on."""

    def __init__(self, uri: str, is_away: Callable[[int], bool]) -> None:
        super().__init__(uri)
        self.is_away = is_away
        self.numbers: Iterator[int] | None = None

    def meet(self, key: str = "") -> None:
        if self.numbers is None and key.startswith("step="):
            self.numbers = itertools.count()
        if self.numbers is not None and self.is_away(next(self.numbers)):
            raise StorageError("connection reset")

    def sizes(self, prefix: str = "") -> dict[str, int]:
        self.meet()
        return super().sizes(prefix)

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        self.meet(key)
        return super().read_into(key, start, buffer)


@pytest.mark.parametrize(
    ("is_away", "step"),
    [
        (lambda number: number == 0, 2),
        (lambda number: number == 1, 2),
        (lambda number: number in (0, 1), None),
        (lambda number: number in (0, 2), None),
        (lambda number: True, None),
    ],
)
def test_an_outage_of_the_storage_rejects_no_commit(
    tmp_path: Path, is_away: Callable[[int], bool], step: int | None
) -> None:
    save(Storage(tmp_path), 1, 2)
    storage = Away(str(tmp_path), is_away)
    store = SingleRankStore(storage, keep=2)
    if step is None:
        with pytest.raises(StorageError, match=r"^connection reset$"):
            restore(store, storage, single_rank_group())
    else:
        found = restore(store, storage, single_rank_group())
        assert found is not None and found[0].step == step
    assert store.rejected == []


class Down(Storage):
    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        raise StorageError("connection reset")


class NotListed(Storage):
    def sizes(self, prefix: str = "") -> dict[str, int]:
        raise StorageError("connection reset")


def restore_in_an_outage(group: ProcessGroup, uri: str, down: type[Storage], rank: int) -> str:
    storage = down(uri) if group.rank == rank else Storage(uri)
    store = SingleRankStore(storage, keep=2)
    with pytest.raises(StorageError) as caught:
        restore(store, storage, group)
    assert not store.rejected
    return str(caught.value)


def test_an_outage_on_one_rank_is_raised_on_all_and_never_taken_for_a_bad_commit(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    store = SingleRankStore(storage, keep=2)
    store._writer._blocks._object_bytes = 64  # several objects, and so pieces
    store.save(make_state(1), step=1, record={})
    before = storage.list()
    for down, rank in ((Down, 1), (Down, 0), (NotListed, 0)):
        assert run_ranks(2, restore_in_an_outage, str(tmp_path), down, rank) == ["connection reset"] * 2
    assert storage.list() == before
