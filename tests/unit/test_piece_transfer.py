"""Pieces of bytes that are carried between ranks."""

from __future__ import annotations

import datetime
import errno
import itertools
import mmap
import os
import random
import signal
import threading
import time
from contextlib import nullcontext
from typing import Any, Never
from unittest import mock

import pytest
import torch.distributed as dist

from elastic_ddp.distributed import cross_memory, piece_transfer
from elastic_ddp.distributed.cross_memory import BoardElsewhere
from elastic_ddp.distributed.piece_transfer import IN_FLIGHT, Carrier
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import PeerFailedError
from tests.ranks import apart, run_ranks

PIECES = 40


def content(number: int) -> bytes:
    generator = random.Random(number)
    return generator.randbytes(generator.choice((0, 1, 1000, 3 << 20)))


def users(number: int, world_size: int) -> list[int]:
    """The ranks that need a piece; the first has it."""
    generator = random.Random(f"users of {number}")
    return generator.sample(range(world_size), generator.randint(1, world_size))


def forbidden(*args: Any, **more: Any) -> Never:
    raise AssertionError("that is not the way")


def carry(group: ProcessGroup, blind_ranks: list[int]) -> dict[int, bool]:
    """Of all pieces that this rank needs, whether it had them in the end. Whoever had one first overwrites it as soon
    as it may."""
    if not blind_ranks:
        dist.broadcast = dist.isend = dist.irecv = forbidden
        piece_transfer.read, reads = counting(piece_transfer.read)
    elif group.rank in blind_ranks:
        piece_transfer.read = BoardElsewhere.look = forbidden  # type: ignore[assignment, method-assign]
    good: dict[int, bool] = {}
    going: list[Any] = []

    def take() -> None:
        number, data, carriage = going.pop(0)
        carriage.wait()
        good[number] = data == content(number)
        if users(number, group.world_size)[0] == group.rank:
            data[:] = bytes(len(data))

    with apart() if group.rank in blind_ranks else nullcontext(), Carrier.opened(group) as carrier:
        carrier.look_around(PIECES)
        for number in range(PIECES):
            ranks = users(number, group.world_size)
            if group.rank in ranks:
                data = bytearray(content(number))
                if ranks[0] != group.rank:
                    data[:] = bytes(len(data))
                carriage = carrier.begin(number, memoryview(data), ranks[0], sorted(ranks))
                going.append((number, data, carriage))
                if len(going) >= IN_FLIGHT:
                    take()
        while going:
            take()
        if not blind_ranks:
            awaited = [each for each in good if content(each) and users(each, group.world_size)[0] != group.rank]
            assert len(reads) == len(awaited) > 0
        group.barrier()
        return good


def allowed(group: ProcessGroup) -> list[list[object]]:
    """Who may look into this rank before, while and after pieces are carried, as the kernel is told."""
    with mock.patch.object(cross_memory, "_let_look") as let_look:
        told = [[each.args[0].value for each in let_look.call_args_list]]
        with Carrier.opened(group) as carrier:
            carrier.look_around(PIECES)
            told.append([each.args[0].value for each in let_look.call_args_list])
        told.append([each.args[0].value for each in let_look.call_args_list])
    return told


@pytest.mark.parametrize("world_size", [1, 2])
def test_others_may_look_into_a_rank_only_while_pieces_are_carried(world_size: int) -> None:
    anybody, nobody = 2**64 - 1, 0
    told = [[], [anybody], [anybody, nobody]] if world_size > 1 else [[], [], []]
    assert run_ranks(world_size, allowed) == [told] * world_size


def counting(read: Any) -> tuple[Any, list[int]]:
    reads: list[int] = []

    def counted(pid: int, address: int, into: memoryview) -> None:
        read(pid, address, into)
        reads.append(pid)

    return counted, reads


@pytest.mark.parametrize("blind_ranks", [[], [1], [0, 1, 2]])
def test_every_piece_comes_to_all_that_need_it_from_memory_to_memory_or_not(blind_ranks: list[int]) -> None:
    for rank, good in enumerate(run_ranks(3, carry, blind_ranks)):
        assert good == {number: True for number in range(PIECES) if rank in users(number, 3)}


def carry_what_cannot_be_read(group: ProcessGroup) -> dict[int, tuple[bool, bool]]:
    """Of the pieces that come to this rank, whether they are good in the end, and said to be there: every other one is
    where its source can read it and nobody else."""
    read = piece_transfer.read
    reads = itertools.count()

    def read_some(pid: int, address: int, into: memoryview) -> None:
        if next(reads) % 2:
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        read(pid, address, into)

    piece_transfer.read = read_some
    come: dict[int, tuple[bool, bool]] = {}
    with Carrier.opened(group) as carrier:
        carrier.look_around(PIECES)
        for number in range(PIECES):
            ranks = users(number, group.world_size)
            if group.rank not in ranks:
                continue
            data = bytearray(content(number) if ranks[0] == group.rank else len(content(number)))
            is_there = carrier.begin(number, memoryview(data), ranks[0], sorted(ranks)).wait()
            if ranks[0] == group.rank:
                assert is_there
                data[:] = bytes(len(data))
            elif data:
                come[number] = (data == content(number), is_there)
        group.barrier()
    return come


def test_a_piece_that_its_process_alone_can_read_is_said_not_to_have_come() -> None:
    for come in run_ranks(3, carry_what_cannot_be_read):
        expected = [(place % 2 == 0, place % 2 == 0) for place in range(len(come))]
        assert list(come.values()) == expected and len(come) > 3


def copy_what_is_gone(group: ProcessGroup) -> bool | None:
    """Whether a piece is said to have come that was shown, and then let go."""
    store = group.store.connect(group.assignment.store_host, group.assignment.store_port)
    memory = mmap.mmap(-1, 1 << 20)
    is_there = None
    with Carrier.opened(group) as carrier, memoryview(memory) as data:
        carrier.look_around(PIECES)
        carriage = carrier.begin(0, data, 0, [0, 1])
        if group.rank == 1:
            while not carriage.is_ready():
                time.sleep(0.001)
            store.set("it is shown", b"")
            store.get("it is gone")
            is_there = carriage.wait()
        else:
            store.get("it is shown")
            carriage._kept.release()  # type: ignore[attr-defined]
    if group.rank == 0:
        memory.close()
        store.set("it is gone", b"")
    return is_there


def test_a_piece_that_is_gone_has_not_come() -> None:
    assert run_ranks(2, copy_what_is_gone) == [None, False]


def lose_a_peer(group: ProcessGroup, how: str, waits_for: str) -> str | None:
    """What a rank meets that waits for a piece, or for another rank to copy one, which does not do so."""
    store = group.store.connect(group.assignment.store_host, group.assignment.store_port)
    source = 0 if waits_for == "the source" else 1
    said = None
    with Carrier.opened(group) as carrier:
        carrier.look_around(PIECES)
        assert carrier.are_all_near
        if group.rank == 1:
            if how == "is cut off":
                threading.Timer(0.2, group.abort).start()
            elif how == "is silent":
                group._timeout = datetime.timedelta(seconds=0.3)
            carriage = carrier.begin(0, memoryview(bytearray(b"piece")), source, [0, 1])
            store.set("it waits", b"")
            with pytest.raises(PeerFailedError) as error:
                carriage.wait()
            said = str(error.value)
            store.set("it has waited", b"")
        elif how in ("is cut off", "is silent"):
            store.get("it has waited")
        else:
            store.get("it waits")
            if how == "ends":
                os.kill(os.getpid(), signal.SIGKILL)
    if group.rank == 0 and how == "fails":
        store.get("it has waited")  # its process is still there, as that of a worker that waits for another generation
    group.close(intact=False)
    return said


@pytest.mark.parametrize("waits_for", ["the source", "who copies"])
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("fails", "does not do so any more"),
        ("is cut off", "a peer was lost"),
        ("is silent", "told nothing of a piece for 0.3 s"),
    ],
)
def test_who_waits_for_a_rank_that_does_not_come_has_lost_it(how: str, says: str, waits_for: str) -> None:
    first, second = run_ranks(2, lose_a_peer, how, waits_for)
    assert first is None and says in second


@pytest.mark.parametrize("waits_for", ["the source", "who copies"])
def test_who_waits_for_a_process_that_ends_has_lost_it(waits_for: str) -> None:
    with pytest.raises(AssertionError) as error:
        run_ranks(2, lose_a_peer, "ends", waits_for)
    assert str(error.value) == "rank 0: it died", "and nothing else fails"


def carry_twice(group: ProcessGroup) -> list[bytes]:
    """What comes under a number that had another piece before."""
    come = []
    with Carrier.opened(group) as carrier:
        for content in (b"first", b"other"):
            carrier.look_around(1)
            data = bytearray(content if group.rank == 0 else len(content))
            carriage = carrier.begin(0, memoryview(data), 0, [0, 1])
            assert carriage.wait() and carriage.is_ready()
            come.append(bytes(data))
            group.barrier()
    return come


def test_what_was_told_of_pieces_before_is_not_taken_for_others() -> None:
    assert run_ranks(2, carry_twice) == [[b"first", b"other"]] * 2
