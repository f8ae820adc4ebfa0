"""Reading the memory of other processes on this machine."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest

from elastic_ddp.distributed import cross_memory
from elastic_ddp.distributed.cross_memory import Board, BoardElsewhere, Mark, address_of, read, readable
from tests.ranks import PROCESSES

SIZE = 40 << 20


def hold(results: Connection, ends: Connection) -> None:
    """Tells where `SIZE` bytes are, and what marks the process, until it is to end."""
    data = bytearray(random.Random(0).randbytes(SIZE))
    with readable(), Mark.of_this_process() as mark:
        results.send((mark.to_bytes(), address_of(memoryview(data))))
        ends.recv()


def tell(results: Connection, ends: Connection) -> None:
    """Has a board, on which it tells what it is told to. Its mark is gone at None, and another one there at the next;
    at the third it ends."""
    board = Board(1000)
    with readable():
        for _ in range(2):
            with Mark.of_this_process() as mark:
                results.send((mark.to_bytes(), board.address))
                while (told := ends.recv()) is not None:
                    board.tell(*told)
                    results.send(None)
            results.send(None)
        ends.recv()


def test_what_a_process_tells_on_its_board_is_found_as_long_as_its_mark_is_there() -> None:
    answer, results = PROCESSES.Pipe(duplex=False)
    ends, end = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=tell, args=(results, ends))
    process.start()
    marks = []
    for _ in range(2):
        mark, address = answer.recv()
        marks.append(Mark.from_bytes(mark))
        board = BoardElsewhere(marks[-1], address)
        for place, number in ((0, 1), (999, -1), (7, 2**63 - 1), (8, -(2**63))):
            end.send((place, number))
            answer.recv()
            assert board.look(place) == number
        assert board.look(998) == 0
        end.send(None)
        answer.recv()
        assert board.look(998) is None
    assert marks[0].address == marks[1].address and marks[0].content != marks[1].content, "the place is used again"
    end.send(None)
    process.join()
    assert board.look(0) is None


def test_a_number_that_is_being_told_is_not_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel copies bytes, and may find some of a number's before the others."""
    board = BoardElsewhere(Mark(1, 2, b"m" * 16), 4096)

    class Torn:
        def __init__(self, *found: bytes, count: int = 32) -> None:
            self.found, self.count = found, count

        def process_vm_readv(self, pid: int, here: Any, ones: Any, there: Any, threes: Any, flags: Any) -> int:
            assert [each.start for each in there] == [4096 + 5 * 8, 4096 + 5 * 8, 2]
            board._found[:] = b"".join(self.found) + b"m" * 16
            return self.count

    none, whole = bytes(8), (0x7F0102030405).to_bytes(8, "little")
    part = whole[:3] + bytes(5)
    for first, second, number in ((none, whole, 0), (part, whole, 0), (none, part, 0), (whole, whole, 0x7F0102030405)):
        monkeypatch.setattr(cross_memory, "_libc_at_once", Torn(first, second))
        assert board.look(5) == number
    monkeypatch.setattr(cross_memory, "_libc_at_once", Torn(whole, whole, count=16))
    assert board.look(5) is None, "the mark was not read"


def test_a_board_that_is_not_there_is_not_found() -> None:
    with other_process() as (mark, _):
        assert BoardElsewhere(mark, 0).look(0) is None
        assert BoardElsewhere(replace(mark, pid=os.getpid()), mark.address).look(0) is None


@contextmanager
def other_process() -> Iterator[tuple[Mark, int]]:
    answer, results = PROCESSES.Pipe(duplex=False)
    ends, end = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=hold, args=(results, ends))
    process.start()
    try:
        mark, address = answer.recv()
        yield Mark.from_bytes(mark), address
    finally:
        end.send(None)
        process.join()


def test_what_another_process_has_is_read_from_any_place_on() -> None:
    content = random.Random(0).randbytes(SIZE)
    with other_process() as (mark, address):
        assert mark.pid != os.getpid() and mark.is_found()
        for start, size in ((0, SIZE), (4097, 3), (SIZE - 1, 1), (5, 17 << 20)):
            into = bytearray(size + 2)
            read(mark.pid, address + start, memoryview(into)[1:-1])
            assert into == b"\0" + content[start : start + size] + b"\0"
        read(mark.pid, address, memoryview(bytearray()))
    assert not mark.is_found()
    with pytest.raises(ProcessLookupError):
        read(mark.pid, address, memoryview(bytearray(1)))


def test_memory_that_is_not_there_is_an_error_also_behind_what_is() -> None:
    with other_process() as (mark, _):
        with pytest.raises(OSError, match="Bad address"):
            read(mark.pid, 0, memoryview(bytearray(1)))
        page = os.sysconf("SC_PAGE_SIZE")
        with pytest.raises(OSError, match="Bad address"):
            read(mark.pid, mark.address // page * page, memoryview(bytearray(1 << 30)))


def test_another_process_of_the_same_number_is_not_taken_for_the_one_that_is_meant() -> None:
    with other_process() as (mark, address):
        assert not replace(mark, pid=os.getpid()).is_found(), "other memory, or none"
        assert not replace(mark, content=os.urandom(16)).is_found()
        assert not replace(mark, address=address).is_found()


def test_where_the_kernel_or_a_sandbox_has_no_such_call_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        """The C library of another system."""

    with other_process() as (mark, address):
        monkeypatch.setattr(cross_memory, "_libc", Elsewhere())
        assert not mark.is_found()
        with pytest.raises(OSError, match="not implemented"):
            read(mark.pid, address, memoryview(bytearray(1)))
        with readable():
            pass  # there is nothing to ask for


def test_a_process_can_be_read_only_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int | None]] = []

    class Recording:
        def prctl(self, option: int, who: ctypes.c_ulong) -> None:
            asked.append((option, who.value))

    monkeypatch.setattr(cross_memory, "_libc", Recording())
    with pytest.raises(KeyboardInterrupt), readable():
        assert asked == [(0x59616D61, 2**64 - 1)]
        raise KeyboardInterrupt
    assert asked[1:] == [(0x59616D61, 0)]
