"""Restores from a storage that damages bytes in transit, cannot read an object, or does not answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import PeerFailedError, StorageError
from elastic_ddp.storage.folder import Entry
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.restore import restore
from tests.ranks import run_ranks, single_rank_group
from tests.single_rank_store import SingleRankStore
from tests.unit.checkpoint.test_checkpoint import make_state, save, step_of
from tests.unit.faulty_reads import (
    FlippedFirstReads,
    FlippedReads,
    Outage,
    Unlisted,
    UnreadableObject,
    UnreadableObjects,
)


def save_in_many_objects(uri: Path, *steps: int) -> list[Any]:
    """Commits with several objects each, so that each rank reads some."""
    store = SingleRankStore(Storage(uri), keep=2)
    store._writer._blocks._object_bytes = 64
    commits = [store.save(make_state(step), step=step, record={}) for step in steps]
    assert len(commits[-1].objects) > 2
    return commits


class UnlistedOnce(Storage):
    """The first listing of an attempt is empty, as on a stale mount."""

    was_listed = False

    def listing(self, prefix: str = "") -> dict[str, Entry]:
        if prefix.startswith("step=2/") and not self.was_listed:
            self.was_listed = True
            return {}
        return super().listing(prefix)


def test_bytes_damaged_in_transit_are_read_again(tmp_path: Path) -> None:
    [_, newest] = save(Storage(tmp_path), 1, 2)
    objects = [newest.objects[0].key, newest.state.key, newest.key]
    for storage in [*(FlippedReads(str(tmp_path), key, times=1) for key in objects), UnlistedOnce(str(tmp_path))]:
        store = SingleRankStore(storage, keep=2)
        restored = restore(store, storage, single_rank_group())
        assert restored is not None and step_of(restored[1]) == 2 and not store.rejected
        store.verify(newest)
    assert Storage(tmp_path).list("set-aside") == []


def restore_with_flipped_reads(group: ProcessGroup, uri: str) -> int | None:
    storage = FlippedFirstReads(uri) if group.rank == 1 else Storage(uri)
    restored = restore(SingleRankStore(storage, keep=2), storage, group)
    return None if restored is None else step_of(restored[1])


def test_all_ranks_wait_for_a_rank_that_reads_again(tmp_path: Path) -> None:
    save_in_many_objects(tmp_path, 1)
    assert run_ranks(2, restore_with_flipped_reads, str(tmp_path)) == [1, 1]


def test_a_rejected_commit_stays_if_the_next_restore_can_use_it(tmp_path: Path) -> None:
    [_, newest] = save(Storage(tmp_path), 1, 2)

    class PeerFails(FlippedReads):
        """A peer fails while the older commit is read."""

        def read_into(self, key: str, start: int, buffer: memoryview) -> int:
            if key.startswith("step=1/"):
                raise PeerFailedError("a peer failed")
            return super().read_into(key, start, buffer)

    storage = PeerFails(str(tmp_path), newest.objects[0].key, times=2)
    store = SingleRankStore(storage, keep=2)
    with pytest.raises(PeerFailedError):
        restore(store, storage, single_rank_group())
    assert [key for key, _ in store.rejected] == [newest.key]
    restored = restore(store, storage, single_rank_group())
    assert restored is not None and restored[0] == newest and store.rejected == []
    assert storage.list("commits") == ["commits/1.json", newest.key] and not storage.list("set-aside")


def restore_beside_an_unreadable_object(group: ProcessGroup, uri: str, key: str, rank: int) -> dict[str, Any]:
    """What this rank restores if `rank` cannot read an object."""
    storage = UnreadableObject(uri, key) if group.rank == rank else Storage(uri)
    restored = restore(store := SingleRankStore(storage, keep=2), storage, group)
    return {"step": None if restored is None else step_of(restored[1]), "rejected": store.rejected}


@pytest.mark.parametrize(("which", "rank"), [("skeleton", 0), ("blocks", 0), ("blocks", 1)])
def test_a_commit_with_an_unreadable_object_is_set_aside_and_the_one_before_used(
    tmp_path: Path, which: str, rank: int
) -> None:
    [_, newest] = save_in_many_objects(tmp_path, 1, 2)
    objects = Storage(tmp_path).list("step=2")
    key = {"skeleton": newest.state.key, "blocks": newest.objects[rank].key}[which]
    results = run_ranks(2, restore_beside_an_unreadable_object, str(tmp_path), key, rank)
    assert [result["step"] for result in results] == [1, 1]
    [(rejected, reason)] = results[0]["rejected"]
    assert rejected == newest.key and f"cannot read {key!r}" in reason and "although the storage answers" in reason
    assert Storage(tmp_path).list("set-aside") == [f"set-aside/2-{newest.attempt}.json"]
    assert Storage(tmp_path).list("step=2") == objects, "moving the manifest back restores the commit"


def test_a_commit_with_an_unreadable_manifest_stays_and_the_one_before_is_used(tmp_path: Path) -> None:
    [_, newest] = save(Storage(tmp_path), 1, 2)
    before = Storage(tmp_path).list()
    results = run_ranks(2, restore_beside_an_unreadable_object, str(tmp_path), newest.key, 0)
    assert [result["step"] for result in results] == [1, 1]
    assert [key for key, _ in results[0]["rejected"]] == [newest.key]
    assert Storage(tmp_path).list() == before
    again = run_ranks(2, restore_beside_an_unreadable_object, str(tmp_path), "none", 0)
    assert [result["step"] for result in again] == [2, 2]


def test_a_step_with_an_unreadable_commit_is_committed_again(tmp_path: Path) -> None:
    [_, newest] = save(Storage(tmp_path), 1, 2)
    store = SingleRankStore(UnreadableObject(str(tmp_path), newest.objects[0].key), keep=2)
    again = store.save(make_state(3), step=2, record={})
    assert again.attempt != newest.attempt and store.latest() == again
    assert Storage(tmp_path).list("set-aside") == [f"set-aside/2-{newest.attempt}.json"]


@pytest.mark.parametrize(
    ("fails", "step"),
    [
        (lambda number: number == 0, 2),
        (lambda number: number == 1, 2),
        (lambda number: number in (0, 1), None),
        (lambda number: number in (0, 2), None),
        (lambda number: True, None),
    ],
    ids=["first read", "none after it", "and the listing", "and the manifest", "all"],
)
def test_an_outage_of_the_storage_rejects_no_commit(
    tmp_path: Path, fails: Callable[[int], bool], step: int | None
) -> None:
    save(Storage(tmp_path), 1, 2)
    storage = Outage(str(tmp_path), fails)
    store = SingleRankStore(storage, keep=2)
    if step is None:
        with pytest.raises(StorageError, match=r"^connection reset$"):
            restore(store, storage, single_rank_group())
    else:
        restored = restore(store, storage, single_rank_group())
        assert restored is not None and restored[0].step == step
    assert store.rejected == []


def restore_in_an_outage(group: ProcessGroup, uri: str, kind: type[Storage], rank: int) -> str:
    storage = kind(uri) if group.rank == rank else Storage(uri)
    store = SingleRankStore(storage, keep=2)
    with pytest.raises(StorageError) as caught:
        restore(store, storage, group)
    assert not store.rejected
    return str(caught.value)


def test_an_outage_on_one_rank_is_raised_on_all_and_rejects_no_commit(tmp_path: Path) -> None:
    save_in_many_objects(tmp_path, 1, 2)
    before = Storage(tmp_path).list()
    for kind, rank in ((UnreadableObjects, 1), (UnreadableObjects, 0), (Unlisted, 0)):
        assert run_ranks(2, restore_in_an_outage, str(tmp_path), kind, rank) == ["connection reset"] * 2
    assert Storage(tmp_path).list() == before
