"""Saves of several ranks in the background."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path
from typing import Any, Never
from unittest import mock

import pytest
import torch

from elastic_ddp.checkpoint import Commit
from elastic_ddp.checkpoint import saver as saver_module
from elastic_ddp.checkpoint.saver import RankFailedError, Saver, is_of_storage
from elastic_ddp.checkpoint.writer import HostMemoryError, StateWriter
from elastic_ddp.errors import CheckpointError, PeerFailedError, StorageError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.tensors import host_memory
from tests.saving import Ranks, check_commits
from tests.single_rank_store import SingleRankStore
from tests.unit.checkpoint.test_checkpoint import keys_of, make_state, restored_step


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_parts_of_all_ranks_become_one_commit(tmp_path: Path, world_size: int) -> None:
    storage = Storage(tmp_path)
    ranks = Ranks(lambda rank: storage, world_size)
    for step in (1, 2, 3):
        ranks.begin(step)
        commit = ranks.wait()
        assert isinstance(commit, Commit) and restored_step(storage) == step
    writers = {item.key.rpartition("/")[2].split("-")[0] for item in commit.objects}
    assert writers == {str(rank) for rank in range(world_size)}
    assert storage.list("step=3") == sorted(keys_of(commit)[1:])
    assert not ranks.mailbox.messages
    of_user = {
        block.object for name, tensor in commit.tensors.items() if name.startswith("user.") for block in tensor.blocks
    }
    assert {commit.objects[place].key.rpartition("/")[2][0] for place in of_user} == {"0"}


class Slow(Storage):
    """Writes once `go` is set."""

    def __init__(self, uri: Path) -> None:
        super().__init__(uri)
        self.go = threading.Event()

    def write(self, key: str, data: bytes | memoryview) -> None:
        assert self.go.wait(60)
        super().write(key, data)


def test_training_continues_while_a_save_is_written(tmp_path: Path) -> None:
    slow = Slow(tmp_path)
    ranks = Ranks(lambda rank: slow if rank == 1 else Storage(tmp_path), 2)
    state = make_state(5)
    ranks.begin(5, state=state)
    state["model"]["weight"].zero_()  # as in the next step
    assert ranks.savers[0].is_busy and ranks.savers[1].is_busy and restored_step(Storage(tmp_path)) is None
    slow.go.set()
    assert isinstance(ranks.wait(), Commit) and restored_step(Storage(tmp_path)) == 5
    assert not ranks.savers[0].is_busy


def test_the_next_save_waits_for_the_one_before(tmp_path: Path) -> None:
    slow = Slow(tmp_path)
    ranks = Ranks(lambda rank: slow, 1)
    ranks.begin(5)
    threading.Timer(0.2, slow.go.set).start()
    ranks.begin(6)
    assert len(ranks.ended) == 1, "the first save has ended"
    assert isinstance(ranks.wait(), Commit) and restored_step(Storage(tmp_path)) == 6


class Failing(Storage):
    def write(self, key: str, data: bytes | memoryview) -> None:
        raise StorageError("no space left")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failed_write_of_a_rank_fails_the_save_and_leaves_nothing(tmp_path: Path, failing: int) -> None:
    storage = Storage(tmp_path)
    ranks = Ranks(lambda rank: Failing(tmp_path) if rank == failing else storage, 3)
    SingleRankStore(storage, keep=2).save(make_state(1), step=1, record={"step": 1})
    before = storage.list()
    ranks.begin(2)
    error = ranks.wait()
    assert isinstance(error, StorageError) and "no space left" in str(error)
    assert failing == 0 or f"rank {failing} could not write its share of step 2" in str(error)
    assert restored_step(storage) == 1
    ranks.savers[failing] = Saver(storage, SingleRankStore(storage, keep=2), of_rank_0=frozenset({"user"}))
    ranks.begin(3)
    assert isinstance(ranks.wait(), Commit) and restored_step(storage) == 3
    assert set(before) < set(storage.list()) and not storage.list("step=2")


@pytest.mark.parametrize("of_state", [True, False], ids=["what it was to save", "the storage"])
def test_errors_of_the_state_and_of_the_storage_are_distinguished(tmp_path: Path, of_state: bool) -> None:
    ranks = Ranks(lambda rank: Failing(tmp_path) if rank == 1 else Storage(tmp_path), 2)
    if of_state:
        ranks.savers[1]._writer.write = mock.Mock(side_effect=ValueError("no such dtype"))  # type: ignore[method-assign]
    ranks.begin(2)
    error = ranks.wait()
    assert is_of_storage(error) is not of_state
    assert ("ValueError: no such dtype" if of_state else "no space left") in str(error)


def test_a_rank_without_heartbeats_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_module, "SILENT_RANK_S", 0.1)
    ranks = Ranks(lambda rank: Storage(tmp_path), 2)
    ranks.begin(2, of=[0])
    error = ranks.wait()
    assert isinstance(error, RankFailedError) and "rank 1 sent no heartbeat for 0.1 s before it had written" in str(
        error
    )


def no_memory(groups: Any) -> Never:
    raise RuntimeError("CUDA error: out of memory")


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_save_without_host_memory_fails_and_the_next_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad_rank: int
) -> None:
    ranks = Ranks(lambda rank: Storage(tmp_path), 2)
    state = {**make_state(1), "large": {"x": torch.ones(1000)}}
    held = weakref.ref(state["large"]["x"])
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "Memory", no_memory)
        attempt = ranks.begin(1, of=[bad_rank], state=state)
    ranks.begin(1, of=[1 - bad_rank], state=state, attempt=attempt)
    error = ranks.wait()
    assert not is_of_storage(error), "the storage is not at fault"
    assert "this rank's share of the state: RuntimeError: CUDA error: out of mem" in str(error)
    assert isinstance(error, CheckpointError if bad_rank else HostMemoryError)
    assert Storage(tmp_path).list("commits") == []
    del state
    assert held() is None
    ranks.begin(2)
    assert isinstance(ranks.wait(), Commit)
    check_commits(Storage(tmp_path), 2)


class FullAtFirst(Storage):
    """Is full until `has_room` is set."""

    has_room = False

    def write(self, key: str, data: Any) -> None:
        if not self.has_room:
            raise StorageError("no space left on device")
        super().write(key, data)


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_long_reports_are_sent_in_chunks_and_removed_also_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad_rank: int
) -> None:
    monkeypatch.setattr(saver_module, "CHUNK_CHARACTERS", 100)
    bad = FullAtFirst(str(tmp_path))
    ranks = Ranks(lambda rank: bad if rank == bad_rank else Storage(tmp_path), 3)
    ranks.begin(1)
    assert isinstance(ranks.wait(), StorageError) and not ranks.mailbox.messages
    bad.has_room = True
    ranks.begin(2)
    assert isinstance(ranks.wait(), Commit) and not ranks.mailbox.messages


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_the_error_of_a_rank_is_reported_although_another_rank_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad_rank: int
) -> None:
    """An error counts as a failed save, a failed rank does not."""
    monkeypatch.setattr(saver_module, "SILENT_RANK_S", 0.1)
    ranks = Ranks(lambda rank: Failing(tmp_path) if rank == bad_rank else Storage(tmp_path), 3)
    ranks.begin(1, of=[0, 1])
    error = ranks.wait()
    assert is_of_storage(error) and "no space left" in str(error)


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_late_writes_of_other_ranks_are_removed_after_a_failed_save(tmp_path: Path, bad_rank: int) -> None:
    """They would stay until the next commit, on a disk that may be full."""
    failed = threading.Event()

    class Full(Storage):
        def write(self, key: str, data: Any) -> None:
            failed.set()
            raise StorageError("no space left on device")

    class Late(Storage):
        def write(self, key: str, data: Any) -> None:
            assert failed.wait(60)
            time.sleep(0.3)  # time in which rank 0 could discard the attempt
            super().write(key, data)

    ranks = Ranks(lambda rank: Full(str(tmp_path)) if rank == bad_rank else Late(str(tmp_path)), 3)
    ranks.begin(1)
    error = ranks.wait()
    assert isinstance(error, StorageError) and "no space left" in str(error)
    assert Storage(tmp_path).list() == []


@pytest.mark.usefixtures("quick_ranks")
def test_a_failed_rank_fails_the_save(tmp_path: Path) -> None:
    ranks = Ranks(lambda rank: Storage(tmp_path), 3)
    ranks.begin(2, of=[0, 2])  # rank 1 fails before it has written anything
    for rank in (0, 2):
        ranks.savers[rank].generation_broke()
    error = ranks.wait()
    assert isinstance(error, RankFailedError) and "rank 1 failed before it had written its share of step 2" in str(
        error
    )
    assert Storage(tmp_path).list() == []


@pytest.mark.usefixtures("quick_ranks")
def test_a_save_whose_ranks_all_survive_outlives_its_generation(tmp_path: Path) -> None:
    slow = Slow(tmp_path)
    ranks = Ranks(lambda rank: slow if rank == 1 else Storage(tmp_path), 2)
    ranks.begin(2)
    for saver in ranks.savers:
        saver.generation_broke()
    assert not ranks.savers[0].wait(within_s=0.5), "rank 1 still writes, and sends heartbeats"
    slow.go.set()
    assert isinstance(ranks.wait(), Commit) and restored_step(Storage(tmp_path)) == 2


def test_a_fenced_save_commits_nothing(tmp_path: Path) -> None:
    def fence() -> None:
        raise PeerFailedError("generation 3 has ended")

    ranks = Ranks(lambda rank: Storage(tmp_path), 2)
    ranks.begin(2, fence=fence)
    assert isinstance(ranks.wait(), PeerFailedError)
    assert Storage(tmp_path).list() == []


class LostResponse(Storage):
    def create(self, key: str, data: bytes, **options: Any) -> None:
        super().create(key, data, **options)
        raise StorageError("connection reset")


def test_a_commit_whose_response_was_lost_remains(tmp_path: Path) -> None:
    ranks = Ranks(lambda rank: LostResponse(tmp_path), 2)
    ranks.begin(2)
    assert isinstance(ranks.wait(), StorageError)
    assert restored_step(Storage(tmp_path)) == 2, "its manifest is stored"


def test_registered_tensors_of_different_size_on_a_rank_are_refused(tmp_path: Path) -> None:
    ranks = Ranks(lambda rank: Storage(tmp_path), 2)
    attempt = ranks.begin(2, of=[0], state={"model": {"w": torch.ones(8)}, "user": {"log": torch.zeros(9)}})
    ranks.begin(2, of=[1], attempt=attempt, state={"model": {"w": torch.ones(8)}, "user": {"log": torch.zeros(3)}})
    outcome = ranks.wait()
    assert isinstance(outcome, CheckpointError)
    assert "36 bytes of tensors on rank 0 and 12 on rank 1" in str(outcome)


def test_a_state_that_cannot_be_saved_is_refused_at_once(tmp_path: Path) -> None:
    ranks = Ranks(lambda rank: Storage(tmp_path), 1)
    with pytest.raises(CheckpointError, match=r"user\.rng: a Generator cannot be saved"):
        ranks.begin(1, state={"user": {"rng": torch.Generator()}})
    assert not ranks.savers[0].is_busy and gc.isenabled()


def test_a_save_succeeds_if_its_thread_priority_cannot_be_lowered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(which: int, who: int, priority: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("elastic_ddp.checkpoint.background_thread.os.setpriority", refuse)
    ranks = Ranks(lambda rank: Storage(tmp_path), 2)
    ranks.begin(5)
    assert isinstance(ranks.wait(), Commit) and restored_step(Storage(tmp_path)) == 5


def test_garbage_collection_is_paused_while_training_waits_for_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, enabled, stage = Ranks(lambda rank: Storage(tmp_path), 1), [], StateWriter.stage

    def watched(writer: StateWriter, *arguments: Any, **options: Any) -> None:
        enabled.append(gc.isenabled())
        stage(writer, *arguments, **options)

    monkeypatch.setattr(StateWriter, "stage", watched)
    ranks.begin(1)
    assert isinstance(ranks.wait(), Commit) and enabled == [False] and gc.isenabled()
