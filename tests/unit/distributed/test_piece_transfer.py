"""Pieces of bytes sent between ranks."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from elastic_ddp.distributed.process_group import ProcessGroup, is_peer_failure
from elastic_ddp.distributed.state_transfer import TransferWindow, begin_transfer
from tests.ranks import run_ranks, single_rank_group

NUM_PIECES = 40


def content(number: int) -> bytes:
    generator = random.Random(number)
    return generator.randbytes(generator.choice((0, 1, 1000, 300 << 10)))


def users(number: int, world_size: int) -> list[int]:
    """The ranks that need a piece; the first is the source."""
    generator = random.Random(f"users of {number}")
    return generator.sample(range(world_size), generator.randint(1, world_size))


def transfer_all(group: ProcessGroup, max_items: int, max_bytes: int) -> dict[int, bool]:
    """For each piece that this rank needs, whether it arrived. Sources overwrite a piece once its transfer is over."""
    arrived: dict[int, bool] = {}

    def finish(item: tuple[int, bytearray]) -> None:
        number, data = item
        arrived[number] = data == content(number)
        if users(number, group.world_size)[0] == group.rank:
            data[:] = bytes(len(data))

    window = TransferWindow(group, finish, max_items=max_items, max_bytes=max_bytes)
    for number in range(NUM_PIECES):
        source, *others = users(number, group.world_size)
        if group.rank in (source, *others):
            data = bytearray(content(number) if group.rank == source else len(content(number)))
            messages = begin_transfer(
                memoryview(data), group, tag=number, source=source, ranks=sorted((source, *others))
            )
            window.add((number, data), messages, len(data))
    window.drain()
    return arrived


@pytest.mark.parametrize(("max_items", "max_bytes"), [(8, 1 << 30), (1, 1 << 30), (100, 400 << 10)])
def test_every_piece_arrives_on_all_ranks_that_need_it(max_items: int, max_bytes: int) -> None:
    for rank, arrived in enumerate(run_ranks(3, transfer_all, max_items, max_bytes)):
        assert arrived == {number: True for number in range(NUM_PIECES) if rank in users(number, 3)}


def test_a_window_is_full_at_its_number_of_items_or_bytes() -> None:
    finished: list[str] = []
    window = TransferWindow(single_rank_group(), finished.append, max_items=3, max_bytes=100)
    for item, num_bytes in (("a", 40), ("b", 40), ("c", 0), ("d", 99)):
        window.add(item, [], num_bytes)
        assert finished == {"a": [], "b": [], "c": ["a"], "d": ["a", "b"]}[item]
    window.add("e", [], 100)
    assert finished == ["a", "b", "c", "d", "e"]
    window.add("f", [], 0)
    window.drain()
    assert finished[-1] == "f"


def wait_for_a_failed_peer(group: ProcessGroup, how: str, source: int) -> bool | None:
    """Whether rank 1 meets a peer failure while it waits for a piece from rank 0, or for rank 0 to receive one."""
    store = group.store.connect(group.assignment.store_host, group.assignment.store_port)
    if group.rank == 0:
        store.get("rank 1 waits")
        if how == "leaves":
            group.close(intact=False)
        store.get("rank 1 has waited")
        group.close(intact=False)
        return None
    if how == "aborted":
        threading.Timer(0.2, group.abort).start()
    [message] = begin_transfer(memoryview(bytearray(1 << 20)), group, tag=0, source=source, ranks=[0, 1])
    store.set("rank 1 waits", b"")
    caught: Any = None
    try:
        group.finish([message])
    except Exception as error:
        caught = error
    store.set("rank 1 has waited", b"")
    is_failure = caught is not None and is_peer_failure(caught)
    del caught
    group.close(intact=False)
    return is_failure


@pytest.mark.parametrize(("how", "source"), [("leaves", 1), ("aborted", 0)])
def test_a_failed_peer_ends_the_wait_for_its_piece(how: str, source: int) -> None:
    assert run_ranks(2, wait_for_a_failed_peer, how, source)[1]
