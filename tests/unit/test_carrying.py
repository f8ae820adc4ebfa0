"""Pieces of bytes that are carried between ranks."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import random
from contextlib import nullcontext
from typing import Any, Never
from unittest import mock

import pytest
import torch.distributed as dist

from elastic_ddp.parallel import carrying, cross_memory
from elastic_ddp.parallel.carrying import IN_FLIGHT, NEAR_IN_FLIGHT, Carrier
from elastic_ddp.parallel.process_group import ProcessGroup, is_lost_peer
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


def carry(group: ProcessGroup, blind_ranks: list[int]) -> tuple[int, dict[int, bool]]:
    """How many pieces may be in flight, and of all that this rank needs whether it had them in the end. Whoever had one
    first overwrites it as soon as it may."""
    if not blind_ranks:
        dist.broadcast = forbidden
        carrying.read, reads = counting(carrying.read)
    good: dict[int, bool] = {}
    going: list[Any] = []

    def take() -> None:
        number, data, carriage = going.pop(0)
        carriage.wait()
        good[number] = data == content(number)
        if users(number, group.world_size)[0] == group.rank:
            data[:] = bytes(len(data))

    with apart() if group.rank in blind_ranks else nullcontext(), Carrier.opened(group) as carrier:
        carrier.look_around()
        for number in range(PIECES):
            ranks = users(number, group.world_size)
            if group.rank in ranks:
                data = bytearray(content(number))
                if ranks[0] != group.rank:
                    data[:] = bytes(len(data))
                carriage = carrier.begin(number, memoryview(data), ranks[0], sorted(ranks))
                going.append((number, data, carriage))
                if len(going) >= carrier.in_flight:
                    take()
        while going:
            take()
        if not blind_ranks:
            awaited = [each for each in good if content(each) and users(each, group.world_size)[0] != group.rank]
            assert len(reads) == len(awaited) > 0
        return carrier.in_flight, good


def allowed(group: ProcessGroup) -> list[list[object]]:
    """Who may look into this rank before, while and after pieces are carried, as the kernel is told."""
    with mock.patch.object(cross_memory, "_let_look") as let_look:
        told = [[each.args[0].value for each in let_look.call_args_list]]
        with Carrier.opened(group) as carrier:
            carrier.look_around()
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
    results = run_ranks(3, carry, blind_ranks)
    in_flight = IN_FLIGHT if blind_ranks else NEAR_IN_FLIGHT
    for rank, (window, good) in enumerate(results):
        assert window == in_flight
        assert good == {number: True for number in range(PIECES) if rank in users(number, 3)}


def carry_what_cannot_be_read(group: ProcessGroup) -> dict[int, tuple[bool, bool]]:
    """Of the pieces that come to this rank, whether they are good in the end, and said to be there: every other one is
    where its source can read it and nobody else."""
    read = carrying.read
    reads = itertools.count()

    def read_some(pid: int, address: int, into: memoryview) -> None:
        if next(reads) % 2:
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        read(pid, address, into)

    carrying.read = read_some
    come: dict[int, tuple[bool, bool]] = {}
    with Carrier.opened(group) as carrier:
        carrier.look_around()
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
    return come


def test_a_piece_that_its_process_alone_can_read_is_said_not_to_have_come() -> None:
    for come in run_ranks(3, carry_what_cannot_be_read):
        expected = [(place % 2 == 0, place % 2 == 0) for place in range(len(come))]
        assert list(come.values()) == expected and len(come) > 3


def lose_the_source(group: ProcessGroup) -> None:
    """What a rank meets that is shown a piece, and does not find it there any more, nor its source."""
    store = group.store.at(group.assignment.store_host, group.assignment.store_port)
    memory = mmap.mmap(-1, 1 << 20)
    with Carrier.opened(group) as carrier, memoryview(memory) as data:
        carrier.look_around()
        carriage = carrier.begin(0, data, 0, [0, 1])
        if group.rank == 1:
            store.set("it is awaited", b"")
            store.get("the source is gone")
            with pytest.raises(RuntimeError) as error:
                carriage.wait()
            assert is_lost_peer(error.value), error.value
        else:
            store.get("it is awaited")
            carriage._messages[0].wait()  # type: ignore[attr-defined]
    memory.close()
    group.close(intact=False)
    store.set("the source is gone", b"")


def test_a_piece_that_is_gone_with_its_source_is_a_lost_peer() -> None:
    run_ranks(2, lose_the_source)
