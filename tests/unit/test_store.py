"""A worker's connection to the store of a run's generations, and the sockets that torch opened for it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_ddp.distributed import store as store_module
from elastic_ddp.distributed.process_group import ProcessGroup, is_peer_failure
from elastic_ddp.distributed.sockets import shut_down, use_interface_of
from elastic_ddp.distributed.store import StoreConnection, StoreMailbox
from elastic_ddp.errors import PeerFailedError
from tests.ranks import empty_store, run_ranks

HOST = "127.0.0.1"
CPU = torch.device("cpu")


@pytest.fixture
def port() -> int:
    return empty_store().port


@pytest.fixture
def refused() -> Iterator[int]:
    """A port at which nobody listens."""
    with socket.socket() as bound:
        bound.bind((HOST, 0))
        yield bound.getsockname()[1]


def test_it_is_made_once(port: int) -> None:
    connection = StoreConnection()
    connection.connect_with_retry(lambda: (HOST, port))
    assert len(connection.sockets) == 1
    found = connection.connect(HOST, port)
    assert connection.connect(HOST, port) is found


def test_it_is_made_again_where_the_store_is_by_now_and_after_it_was_dropped(port: int) -> None:
    moved = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    connection = StoreConnection()
    first = connection.connect(HOST, port)
    second = connection.connect(HOST, moved.port)
    assert second is not first and second.port == moved.port
    connection.drop()
    assert not connection.sockets
    assert connection.connect(HOST, moved.port) is not second


def test_a_store_that_has_moved_is_looked_for_again(monkeypatch: pytest.MonkeyPatch, port: int, refused: int) -> None:
    monkeypatch.setattr(store_module, "FIND_ONCE_S", 1.0)
    asked = iter([refused, port])
    StoreConnection().connect_with_retry(lambda: (HOST, next(asked)))
    assert next(asked, None) is None, "both were tried"
    monkeypatch.setattr(store_module, "FIND_S", 0.0)
    with pytest.raises(dist.DistError):
        StoreConnection().connect_with_retry(lambda: (HOST, refused))


def test_a_store_that_has_died_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, port: int, refused: int) -> None:
    """Torch would for 15 s, on every rank and in every save of a generation whose rendezvous has died."""
    tried: list[int] = []
    make = dist.TCPStore

    def record(host: str, at: int, **options: Any) -> dist.TCPStore:
        tried.append(at)
        return make(host, at, **options)

    monkeypatch.setattr(dist, "TCPStore", record)
    connection = StoreConnection()
    for number in range(2):
        mailbox = StoreMailbox(connection, (HOST, refused), lambda: (HOST, port), f"saves{number}")
        mailbox.put("word", "there")
        assert mailbox.get("word") == "there"
    assert tried == [port, port]


def test_a_wait_in_the_store_ends_when_its_sockets_are_shut(port: int) -> None:
    connection = StoreConnection()
    own = connection.connect(HOST, port)
    threading.Timer(0.1, shut_down, [connection.sockets]).start()
    with pytest.raises(dist.DistError) as caught:
        own.wait(["never"])
    assert is_peer_failure(caught.value)


def test_the_system_looks_after_a_connection_that_is_idle(port: int) -> None:
    connection = StoreConnection()
    connection.connect(HOST, port)
    (each,) = connection.sockets
    with socket.socket(fileno=os.dup(each.descriptor)) as own:
        assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
        assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 5000


def go_through_generations(group: ProcessGroup) -> list[bool]:
    """Whether the same connection is used: after a change, after peers were cut off, after a group that could not
    form, and after that."""
    kept = []
    for number in range(2, 6):
        sockets = group.store.sockets
        assignment = replace(group.assignment, generation=number)
        if number == 2:
            group.barrier()
            group.close(intact=True)
        else:
            group.close(intact=False)
        if number == 4:
            with pytest.raises((PeerFailedError, dist.DistError)):
                ProcessGroup.form(
                    assignment, store=group.store, device=CPU, timeout_s=60, on_forming=ProcessGroup.abort
                )
        else:
            group = ProcessGroup.form(assignment, store=group.store, device=CPU, timeout_s=60)
        kept.append(group.store.sockets == sockets)
    return kept


def test_a_worker_goes_from_generation_to_generation_with_one_connection() -> None:
    assert run_ranks(2, go_through_generations) == [[True, True, False, False]] * 2


def test_gloo_listens_where_the_nodes_address_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # to be as it was in the end
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    use_interface_of("203.0.113.7")
    assert "GLOO_SOCKET_IFNAME" not in os.environ, "no interface has it"
    use_interface_of("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    use_interface_of("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
