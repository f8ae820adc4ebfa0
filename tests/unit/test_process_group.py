"""Process groups that form after others could not."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_ddp.distributed import process_group
from elastic_ddp.distributed.process_group import SHORT_BYTES, Assignment, ProcessGroup, is_peer_failure
from elastic_ddp.distributed.store import StoreConnection
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def form_after_a_failure(group: ProcessGroup) -> str:
    """Rank 1 alone tries generation 2; both meet in generation 3. `run_ranks` closes that one."""
    group.barrier()
    group.close(intact=True)
    if group.rank == 1:
        with pytest.raises(RuntimeError) as caught:
            ProcessGroup.form(replace(group.assignment, generation=2), store=group.store, device=CPU, timeout_s=1)
        assert is_peer_failure(caught.value)
    again = ProcessGroup.form(replace(group.assignment, generation=3), store=group.store, device=CPU, timeout_s=20)
    return b"".join(again.all_gather_bytes(bytes([again.rank]))).hex()


def test_a_rank_that_could_not_form_one_group_meets_others_in_the_next() -> None:
    assert run_ranks(2, form_after_a_failure) == ["0001", "0001"]


class DiesOnceItIsKnown(dist.Store):
    """A store in which a rank publishes its address, and then dies before it connects to the others."""

    def __init__(self, prefix: str, store: Any) -> None:
        super().__init__()
        self._store = _PrefixStore(prefix, store)

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def wait(self, *arguments: Any) -> None:
        self._store.wait(*arguments)

    def get(self, key: str) -> bytes:
        raise RuntimeError("the power went out, and the network: connection closed by peer")


_PrefixStore = dist.PrefixStore


def lose_a_peer_that_has_published_its_address(group: ProcessGroup, victim: int) -> float:
    """Seconds until a rank knows. Afterwards both form another group, in which one of them is slow."""
    group.barrier()
    group.close(intact=True)
    process_group.FORM_S = 0.4  # in this process, which ends with the test
    begun = time.monotonic()
    forming: list[ProcessGroup] = []
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError) as caught:
        if group.rank == victim:
            patch.setattr(process_group.dist, "PrefixStore", DiesOnceItIsKnown)
        assignment = replace(group.assignment, generation=2)
        ProcessGroup.form(assignment, store=group.store, device=CPU, timeout_s=60, on_forming=forming.append)
    forming[0].close(intact=False)
    assert group.rank == victim or is_peer_failure(caught.value), caught.value
    seconds = time.monotonic() - begun
    group = ProcessGroup.form(replace(group.assignment, generation=3), store=group.store, device=CPU, timeout_s=60)
    if group.rank == 1:
        time.sleep(1.5 * process_group.FORM_S)
    group.all_gather_bytes(b"")
    return seconds


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_before_it_has_connected_does_not_hold_the_others_up(victim: int) -> None:
    seconds = run_ranks(2, lose_a_peer_that_has_published_its_address, victim)
    assert max(seconds) < 60


def cut_a_group_beside_which_others_were_busy(group: ProcessGroup) -> float:
    """Another thread opens connections while a group forms. Seconds until a collective knows that it was cut."""
    group.barrier()
    group.close(intact=True)
    listener = socket.create_server(("127.0.0.1", 0))
    pairs: list[tuple[socket.socket, socket.socket]] = []

    def connect() -> None:
        pairs.append((socket.create_connection(listener.getsockname()), listener.accept()[0]))

    def in_another_thread(*_: Any, **__: Any) -> None:
        thread = threading.Thread(target=connect)
        thread.start()
        thread.join()

    def init_process_group(*arguments: Any, **options: Any) -> None:
        in_another_thread()
        init(*arguments, **options)
        in_another_thread()

    init = dist.init_process_group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_group.dist, "init_process_group", init_process_group)
        group = ProcessGroup.form(replace(group.assignment, generation=2), store=group.store, device=CPU, timeout_s=60)
    begun = time.monotonic()
    if group.rank == 0:
        group.abort()
    with pytest.raises(RuntimeError) as caught:
        dist.barrier()
    seconds = time.monotonic() - begun
    assert is_peer_failure(caught.value)
    group.close(intact=False)
    assert len(pairs) == 2
    for one, other in pairs:
        one.sendall(b"sent")
        other.sendall(other.recv(4))
        assert one.recv(4) == b"sent"
    return seconds


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_other_threads_connect_to_while_a_group_forms_is_not_cut_with_it(world_size: int) -> None:
    assert max(run_ranks(world_size, cut_a_group_beside_which_others_were_busy)) < 30


def lose_a_peer_that_has_connected(group: ProcessGroup, victim: int) -> float:
    """Before it has said where it listens. Seconds until the other knows, which is told to cut. They meet again."""
    group.barrier()
    group.close(intact=True)
    forming: list[ProcessGroup] = []
    with pytest.MonkeyPatch.context() as patch, pytest.raises((RuntimeError, ValueError)) as caught:
        if group.rank == victim:
            patch.setattr(ProcessGroup, "_find_sockets", lambda *_: int("the power went out"))
        else:
            threading.Timer(1.0, lambda: forming[0].abort()).start()
        assignment = replace(group.assignment, generation=2)
        begun = time.monotonic()
        ProcessGroup.form(assignment, store=group.store, device=CPU, timeout_s=60, on_forming=forming.append)
    forming[0].close(intact=False)
    seconds = time.monotonic() - begun
    assert group.rank == victim or is_peer_failure(caught.value), caught.value
    group = ProcessGroup.form(replace(group.assignment, generation=3), store=group.store, device=CPU, timeout_s=60)
    group.all_gather_bytes(b"")
    return seconds


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_once_it_has_connected_does_not_hold_the_others_up(victim: int) -> None:
    assert max(run_ranks(2, lose_a_peer_that_has_connected, victim)) < 30


def wait_for_works_of_a_lost_peer(group: ProcessGroup) -> list[bool]:
    """As optimizers do that communicate behind their computing. Whether what they meet is known for a lost peer."""
    group.barrier()
    found = []
    for _ in range(2 if group.rank == 0 else 0):
        with pytest.raises(RuntimeError) as caught:
            work = dist.all_reduce(torch.ones(3), async_op=True)
            assert work is not None
            work.wait()
        found.append(is_peer_failure(caught.value))
    group.close(intact=False)
    ProcessGroup.form(replace(group.assignment, generation=2), store=group.store, device=CPU, timeout_s=60)
    return found


def test_who_waits_for_a_collective_himself_meets_a_lost_peer() -> None:
    assert run_ranks(2, wait_for_works_of_a_lost_peer) == [[True, True], []]


SIZES = (0, 1, SHORT_BYTES - 1, SHORT_BYTES, SHORT_BYTES + 1, 3 * SHORT_BYTES)


def bytes_of(rank: int, size: int) -> bytes:
    return bytes(rank + 1 + place % 100 for place in range(size))


def send_bytes(group: ProcessGroup) -> list[bool]:
    sources = [(size, source) for size in SIZES for source in range(group.world_size)]
    got = [
        group.broadcast_bytes(bytes_of(group.rank, size) if group.rank == source else None, source)
        for size, source in sources
    ]
    return [data == bytes_of(source, size) for data, (size, source) in zip(got, sources, strict=True)]


@pytest.mark.parametrize("world_size", [1, 3])
def test_bytes_of_any_length_come_to_every_rank(world_size: int) -> None:
    assert run_ranks(world_size, send_bytes) == [[True] * len(SIZES) * world_size] * world_size


def send_late(group: ProcessGroup) -> float:
    """What the last rank gets of the first, which sends it later than a group may take to form."""
    tensor = torch.zeros(1)
    if group.rank == 0:
        time.sleep(2 * process_group.FORM_S)
        group.begin_send(tensor + 7, group.world_size - 1, tag=1).wait()
    elif group.rank == group.world_size - 1:
        group.begin_receive(tensor, 0, tag=1).wait()
    return tensor.item()


def test_a_message_is_waited_for_as_long_as_a_collective() -> None:
    assert run_ranks(2, send_late) == [0, 7]


def test_a_users_error_that_tells_of_one_of_gloo_is_his() -> None:
    text = "[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5"
    for words in (f"the optimizer failed: {text}", "see gloo/transport/tcp/pair.cc:553"):
        assert not is_peer_failure(RuntimeError(words))
    assert is_peer_failure(RuntimeError(text))


def test_a_collective_after_the_group_was_aborted_is_a_lost_peer_and_a_users_words_are_not() -> None:
    """On a GPU the group is aborted from the thread that hears of a loss, and the next collective finds none."""
    with pytest.raises(ValueError, match="not been initialized") as caught:
        dist.barrier()
    assert is_peer_failure(caught.value)
    with pytest.raises(ValueError, match="not been initialized") as users:
        raise ValueError(str(caught.value))
    assert not is_peer_failure(users.value)


def test_a_group_that_was_never_formed_can_be_cut_also_on_a_gpu() -> None:
    assignment = Assignment(generation=1, rank=0, world_size=2, store_host="", store_port=0, reason="start")
    group = ProcessGroup(assignment, torch.device("cuda"), StoreConnection())
    group.abort()
    group.abort()


def test_the_backend_of_a_gpu_is_aborted_once() -> None:
    class Backend:
        aborted = 0

        def abort(self) -> None:
            self.aborted += 1

    assignment = Assignment(generation=1, rank=0, world_size=2, store_host="", store_port=0, reason="start")
    backend = Backend()
    group = ProcessGroup(assignment, torch.device("cuda"), StoreConnection(), _nccl=backend)
    group.abort()
    group.abort()
    assert backend.aborted == 1


def test_tensors_of_ranks_that_share_a_gpu_travel_through_the_host() -> None:
    assignment = Assignment(generation=1, rank=0, world_size=2, store_host="", store_port=0, reason="start")
    gpu = torch.device("cuda", 0)
    assert ProcessGroup(assignment, gpu, StoreConnection()).transfer_device == gpu
    assert ProcessGroup(assignment, gpu, StoreConnection(), shares_device=True).transfer_device == torch.device("cpu")
