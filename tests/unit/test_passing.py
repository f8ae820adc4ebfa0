"""Pieces of a commit on their way between ranks that read it together."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
from collections.abc import Callable, Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from elastic_ddp.checkpoint.confirmed_read import confirmed_piece
from elastic_ddp.checkpoint.planning import BlockPlanner
from elastic_ddp.checkpoint.reader import Piece, Reading, Targets
from elastic_ddp.distributed import piece_transfer
from elastic_ddp.distributed.piece_transfer import Carrier
from elastic_ddp.distributed.process_group import ProcessGroup, is_peer_failure
from elastic_ddp.errors import CheckpointError, PeerFailedError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker import restore as restoring
from elastic_ddp.worker.restore import _Passing, _Piece, restore
from tests.ranks import apart, run_ranks
from tests.single_rank_store import SingleRankStore
from tests.unit.test_checkpoint import save, step_of
from tests.unit.test_restore import restore_on


def pieces_at_once(group: ProcessGroup, uri: str, is_apart: bool, is_local: bool) -> int:
    """How many a rank asks for."""
    with (
        apart() if is_apart else nullcontext(),
        mock.patch.object(Storage, "is_local", is_local),
        mock.patch.object(restoring, "Reading", wraps=restoring.Reading) as reading,
    ):
        restore_on(group, uri, 128)
    [(_, _, parallel)] = [each.args for each in reading.call_args_list]
    return parallel


@pytest.mark.parametrize(
    ("world_size", "is_apart", "is_local", "parallel"),
    [(1, False, True, 8), (2, False, True, 4), (3, False, True, 2), (3, True, True, 8), (3, False, False, 8)],
)
def test_ranks_of_one_machine_ask_its_disk_for_few_pieces_at_once(
    tmp_path: Path, world_size: int, is_apart: bool, is_local: bool, parallel: int
) -> None:
    save(Storage(tmp_path), 1, 2)
    assert run_ranks(world_size, pieces_at_once, str(tmp_path), is_apart, is_local) == [parallel] * world_size


def shown_early(group: ProcessGroup, uri: str) -> tuple[list[int], list[int]]:
    """The pieces that a rank has read, and those that it showed as soon as it had."""
    own, early = set[int](), set[int]()
    begin, show = Carrier.begin, Carrier.show

    def noted_begin(self: Carrier, number: int, data: memoryview, source: int, ranks: Any) -> Any:
        if source == group.rank:
            own.add(number)
        return begin(self, number, data, source, ranks)

    def noted_show(self: Carrier, number: int, data: memoryview) -> None:
        if threading.current_thread() is not threading.main_thread():
            early.add(number)
        show(self, number, data)

    with mock.patch.object(Carrier, "begin", noted_begin), mock.patch.object(Carrier, "show", noted_show):
        restore_on(group, uri, 1)
    return sorted(own), sorted(early)


def test_a_piece_is_shown_when_it_is_read_and_not_when_it_is_its_turn(tmp_path: Path) -> None:
    save(Storage(tmp_path), 1)
    for own, early in run_ranks(2, shown_early, str(tmp_path)):
        assert own == early != []


class OneBadPiece(Storage):
    """The first piece of an object is bad, and known to be when those behind it are read."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.others = threading.Semaphore(0)

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        count = super().read_into(key, start, buffer)
        if key.endswith(".bin") and start == 0:
            for _ in range(3):
                assert self.others.acquire(timeout=60)
            self.others.release(3)  # it is read twice
            buffer[0] ^= 1
        elif key.endswith(".bin"):
            self.others.release()
        return count


def copy_beside_a_bad_piece(group: ProcessGroup, uri: str) -> tuple[int | None, int]:
    """The step that is restored, and how many pieces could not be copied, none of which lies in its tensors."""
    store = group.store.connect(group.assignment.store_host, group.assignment.store_port)
    read, close, unread = piece_transfer.read, Reading.close, []

    def read_if_there(pid: int, address: int, into: memoryview) -> None:
        store.get("the bad piece is known")
        try:
            read(pid, address, into)
        except OSError:
            unread.append(address)
            raise

    def close_and_tell(reading: Reading[Any]) -> None:
        close(reading)
        if group.rank == 0:
            store.set("the bad piece is known", b"")

    piece_transfer.read = read_if_there
    storage = OneBadPiece(uri) if group.rank == 0 else Storage(uri)
    with (
        mock.patch.object(Reading, "close", close_and_tell),
        mock.patch.object(Targets, "_place_in_tensors", return_value=None),
        mock.patch.object(Piece, "empty", lambda piece: memoryview(mmap.mmap(-1, piece.end - piece.start))),
        mock.patch("elastic_ddp.checkpoint.reader.PIECE_BYTES", 1),
    ):
        found = restore(SingleRankStore(storage, keep=2), storage, group)
    return None if found is None else step_of(found[1]), len(unread)


def test_what_is_shown_stays_when_a_piece_before_it_turns_out_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else others would copy from memory that is gone, and read all of it again."""
    monkeypatch.setattr("elastic_ddp.checkpoint.writer.BlockPlanner", lambda: BlockPlanner(8))
    save(Storage(tmp_path), 1)
    assert run_ranks(2, copy_beside_a_bad_piece, str(tmp_path)) == [(None, 0)] * 2


def num_checked(group: ProcessGroup, uri: str, is_apart: bool) -> tuple[int, int]:
    """How many pieces come to a rank from others, and how many of these it checks."""
    come = 0
    begin = Carrier.begin

    def counted(self: Carrier, number: int, data: memoryview, source: int, ranks: Any) -> Any:
        nonlocal come
        come += source != group.rank and len(data) > 0
        return begin(self, number, data, source, ranks)

    with mock.patch.object(Carrier, "begin", counted), mock.patch.object(restoring, "check") as check:
        restore_on(group, uri, 128, is_apart)
    return come, check.call_count


@pytest.mark.parametrize("is_apart", [False, True])
def test_what_comes_over_the_network_is_checked_again_and_a_copy_is_not(tmp_path: Path, is_apart: bool) -> None:
    save(Storage(tmp_path), 1)
    for come, checked in run_ranks(2, num_checked, str(tmp_path), is_apart):
        assert come > 0 and checked == (come if is_apart else 0)


def most_begun(group: ProcessGroup, uri: str, is_apart: bool) -> int:
    """How many pieces have been begun at once."""
    begun, most = 0, 0
    begin = Carrier.begin

    def counted(self: Carrier, *piece: Any) -> Any:
        nonlocal begun, most
        begun += 1
        most = max(most, begun)
        return begin(self, *piece)

    def tick() -> None:
        nonlocal begun
        begun -= 1

    with (
        apart() if is_apart else nullcontext(),
        mock.patch.object(Carrier, "begin", counted),
        mock.patch("elastic_ddp.checkpoint.reader.PIECE_BYTES", 1),
    ):
        restore(SingleRankStore(Storage(uri), keep=2), Storage(uri), group, tick=tick)
    return most


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_no_more_pieces_are_begun_at_once_than_there_is_memory_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, is_apart: bool
) -> None:
    monkeypatch.setattr("elastic_ddp.checkpoint.writer.BlockPlanner", lambda: BlockPlanner(8))
    save(Storage(tmp_path), 1)
    most = run_ranks(world_size, most_begun, str(tmp_path), is_apart)
    if world_size > 1 and is_apart:
        assert most == [piece_transfer.IN_FLIGHT] * world_size
    else:  # what need not be waited for is let go at once
        assert all(1 <= each <= piece_transfer.IN_FLIGHT for each in most)


class FakeCarriage:
    """Notes when it is waited for."""

    came_over_network = False

    def __init__(self, number: int, noted: list[str], are_ready: Collection[int] = ()) -> None:
        self.number, self.noted, self.are_ready = number, noted, are_ready

    def is_ready(self) -> bool:
        return self.number in self.are_ready

    def wait(self) -> bool:
        self.noted.append(f"wait {self.number}")
        return self.number not in (3, 4)


def passed(monkeypatch: pytest.MonkeyPatch, are_ready: Collection[int] = ()) -> list[str]:
    """What is waited for, and read again, where four of eight pieces come to a rank and four go from it."""
    noted: list[str] = []
    monkeypatch.setattr(restoring, "IN_FLIGHT", 4)
    carrier = mock.Mock()
    carrier.begin = lambda number, data, source, ranks: FakeCarriage(number, noted, are_ready)
    passing = _Passing(
        carrier, mock.Mock(), mock.Mock(), 0, lambda piece: noted.append(f"read {piece.start}"), lambda: None
    )
    for number in range(8):
        passing.begin(_Piece(Piece("object", number, number + 1, ()), number, [0, 1]), memoryview(b"x"))
    passing.end()
    return noted


def test_what_comes_to_a_rank_is_waited_for_before_what_goes_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else ranks that share pieces would work in turns: each would wait until others have what it read."""
    noted = passed(monkeypatch)
    there = [f"wait {number}" for number in (1, 3, 5, 0, 7, 2, 4, 6)]
    assert [each for each in noted if each.startswith("wait")] == there
    assert noted[2] == "read 3" and noted[-2] == "read 4" and len(noted) == 10


def test_what_has_come_is_taken_before_what_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = passed(monkeypatch, are_ready=[2, 3, 7])
    there = [f"wait {number}" for number in (2, 3, 1, 5, 7, 0, 4, 6)]
    assert [each for each in noted if each.startswith("wait")] == there


def restore_where_memory_cannot_be_read(group: ProcessGroup, uri: str) -> dict[str, Any]:
    """What a rank restores that can copy only some of what others show to it."""
    read, chance = piece_transfer.read, random.Random(group.rank)

    def read_some(pid: int, address: int, into: memoryview) -> None:
        if len(into) > 16 and chance.random() < 0.5:  # but for marks
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        read(pid, address, into)

    piece_transfer.read = read_some
    return restore_on(group, uri, 1)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_where_some_memory_cannot_be_read_every_rank_gets_the_state_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    monkeypatch.setattr("elastic_ddp.checkpoint.writer.BlockPlanner", lambda: BlockPlanner(8))
    [newest] = save(Storage(tmp_path), 1)
    results = run_ranks(world_size, restore_where_memory_cannot_be_read, str(tmp_path))
    assert [each["step"] for each in results] == [1] * world_size
    size = sum(item.size for item in newest.objects)
    assert size < sum(each["num_bytes"] for each in results) < world_size * size, "what could not be copied is read"


def restore_what_is_bad(group: ProcessGroup, uri: str) -> dict[str, Any]:
    def read_marks(pid: int, address: int, into: memoryview) -> None:
        if len(into) > 16:
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        read(pid, address, into)

    read, piece_transfer.read = piece_transfer.read, read_marks
    if group.rank == 0:
        return restore_on(group, uri, 1)
    again = []

    def read_in_time(storage: Storage, piece: Piece, targets: Any) -> memoryview:
        if threading.current_thread() is not threading.main_thread():
            return confirmed_piece(storage, piece, targets)
        again.append(piece)
        raise CheckpointError("it is bad")

    with mock.patch.object(restoring, "confirmed_piece", read_in_time):
        found = restore_on(group, uri, 1)
    assert len(again) == 2, "once for each commit"
    return found


def test_what_is_found_bad_when_it_is_read_again_is_not_used(tmp_path: Path) -> None:
    save(Storage(tmp_path), 1, 2)
    results = run_ranks(2, restore_what_is_bad, str(tmp_path))
    assert [each["step"] for each in results] == [None, None]
    assert [reason for _, reason in results[0]["rejected"]] == ["it is bad"] * 2


def test_pieces_are_shorter_where_ranks_of_a_machine_wait_for_each_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_ddp.checkpoint.writer.BlockPlanner", lambda: BlockPlanner(8))
    save(Storage(tmp_path), 1)
    one, near, far = (
        [each["pieces"] for each in run_ranks(world_size, restore_on, str(tmp_path), 256, is_apart)]
        for world_size, is_apart in ((1, False), (2, False), (2, True))
    )
    assert one * 2 == far and near[0] == near[1] > far[0]


def restore_over_a_bad_connection(group: ProcessGroup, uri: str, what: str) -> str:
    """What becomes of it on a rank where bytes come as others than were sent, and on another one."""
    if group.rank == 1 and what == "address":
        begin_all_gather = group.begin_all_gather

        def gather_another(data: bytes) -> Callable[[], list[bytes]]:
            gathered = begin_all_gather(data)
            is_place = len(data) == piece_transfer._PLACE.size + group.world_size
            return lambda: [bytes([each[0] ^ is_place]) + each[1:] for each in gathered()]

        group.begin_all_gather = gather_another  # type: ignore[method-assign]
    if group.rank == 1 and what == "over the group":
        begin = Carrier.begin

        def begin_another(self: Carrier, number: int, data: memoryview, source: int, ranks: Any) -> Any:
            carriage = begin(self, number, data, source, ranks)
            wait = carriage.wait

            def wait_for_another() -> bool:
                is_there = wait()
                if source != group.rank:
                    data[0] ^= 1
                return is_there

            carriage.wait = wait_for_another  # type: ignore[method-assign]
            return carriage

        Carrier.begin = begin_another  # type: ignore[method-assign]
    broadcast = group.broadcast_bytes
    if group.rank == 1 and what == "skeleton":
        group.broadcast_bytes = lambda data: broadcast(data).replace(b"0.1", b"0.2")  # type: ignore[assignment]
    store = SingleRankStore(Storage(uri), keep=2)
    try:
        with apart() if what == "over the group" else nullcontext():
            restore(store, Storage(uri), group)
    except PeerFailedError as error:
        group.close(intact=False)
        return f"{error}; rejected: {store.rejected}"
    except RuntimeError as error:
        assert is_peer_failure(error)
        group.close(intact=False)
        return "lost the other"
    return "restored"


@pytest.mark.parametrize("what", ["address", "over the group", "skeleton"])
def test_what_is_garbled_between_ranks_is_a_lost_peer_and_no_word_on_the_commit(tmp_path: Path, what: str) -> None:
    save(Storage(tmp_path), 1, 2)
    before = Storage(tmp_path).list()
    first, second = run_ranks(2, restore_over_a_bad_connection, str(tmp_path), what)
    assert "came as something else" in second and "rejected: []" in second
    if what == "over the group":
        assert first == second
    else:
        assert first == "lost the other" or "does not do so any more" in first
    assert Storage(tmp_path).list() == before
