"""A worker's connection to the store, its sockets, and the mailbox on top."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_ddp.distributed import torch_store as store_module
from elastic_ddp.distributed.process_group import ProcessGroup, is_peer_failure
from elastic_ddp.distributed.sockets import choose_interface, shut_down, use_interface_of
from elastic_ddp.distributed.torch_store import StoreConnection, StoreMailbox
from elastic_ddp.errors import PeerFailedError
from tests.ranks import empty_store, form, run_ranks

HOST = "127.0.0.1"
CPU = torch.device("cpu")


@pytest.fixture
def port() -> int:
    return empty_store().port


@pytest.fixture
def refused() -> Iterator[int]:
    """A port on which no process listens."""
    with socket.socket() as bound:
        bound.bind((HOST, 0))
        yield bound.getsockname()[1]


def test_connect_reconnects_only_after_the_store_moved_and_after_drop(port: int) -> None:
    moved = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    connection = StoreConnection()
    connection.connect_with_retry(lambda: (HOST, port))
    assert len(connection.sockets) == 1
    first = connection.connect(HOST, port)
    assert connection.connect(HOST, port) is first
    second = connection.connect(HOST, moved.port)
    assert second is not first and second.port == moved.port
    connection.drop()
    assert not connection.sockets
    assert connection.connect(HOST, moved.port) is not second


def test_a_retry_asks_for_the_current_address(monkeypatch: pytest.MonkeyPatch, port: int, refused: int) -> None:
    monkeypatch.setattr(store_module, "CONNECT_ATTEMPT_S", 1.0)
    addresses = iter([refused, port])
    StoreConnection().connect_with_retry(lambda: (HOST, next(addresses)))
    assert next(addresses, None) is None, "both addresses were tried"
    monkeypatch.setattr(store_module, "WARMUP_CONNECT_S", 0.0)
    with pytest.raises(dist.DistError):
        StoreConnection().connect_with_retry(lambda: (HOST, refused))


def test_a_dead_store_fails_at_once(monkeypatch: pytest.MonkeyPatch, port: int, refused: int) -> None:
    """Torch alone would retry for 15 s, on every rank and in every save after the rendezvous failed."""
    tried: list[int] = []
    make = dist.TCPStore

    def record(host: str, at: int, **options: Any) -> dist.TCPStore:
        tried.append(at)
        return make(host, at, **options)

    monkeypatch.setattr(dist, "TCPStore", record)
    connection = StoreConnection()
    for number in range(2):
        mailbox = StoreMailbox(connection, (HOST, refused), lambda: (HOST, port), f"saves{number}")
        mailbox.put("key", "text")
        assert mailbox.get("key") == "text"
    assert tried == [port, port]


def test_shutting_down_its_sockets_ends_a_wait_in_the_store(port: int) -> None:
    connection = StoreConnection()
    store = connection.connect(HOST, port)
    threading.Timer(0.1, shut_down, [connection.sockets]).start()
    with pytest.raises(dist.DistError) as caught:
        store.wait(["never"])
    assert is_peer_failure(caught.value)


def test_the_connection_has_tcp_keepalive(port: int) -> None:
    connection = StoreConnection()
    connection.connect(HOST, port)
    (key,) = connection.sockets
    with socket.socket(fileno=os.dup(key.descriptor)) as own:
        assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
        assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 5000


def test_connections_may_be_made_at_once_in_several_threads(port: int) -> None:
    """Each sees sockets of the others, which may be closed before it has set its own up."""

    def connect(_: int) -> None:
        connection = StoreConnection()
        for _ in range(4):
            connection.connect(HOST, port)
            connection.drop()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(connect, range(3)))


def go_through_generations(group: ProcessGroup) -> list[bool]:
    """Returns whether the connection stayed the same: after a planned change, an aborted group, a group that failed to
    form, and the group after that."""
    kept = []
    for number in range(2, 6):
        sockets = group.store.sockets
        if number == 2:
            group.barrier()
            group.close(intact=True)
        else:
            group.close(intact=False)
        if number == 4:
            with pytest.raises((PeerFailedError, dist.DistError)):
                form(group, number, on_forming=ProcessGroup.abort)
        else:
            group = form(group, number)
        kept.append(group.store.sockets == sockets)
    return kept


def test_a_worker_keeps_its_connection_until_a_group_fails_to_form() -> None:
    assert run_ranks(2, go_through_generations) == [[True, True, False, False]] * 2


GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
INTERFACES = {
    "lo": "127.0.0.1",
    "docker0": "172.17.0.1",
    "eth0": "203.0.113.7",
    "eth1": "198.51.100.7",
    "ib0": "10.9.0.7",
}


@pytest.mark.parametrize(
    ("chosen", "gloo", "nccl"),
    [
        ({}, "eth0", "=eth0"),
        ({GLOO: "eth0,eth1"}, "eth0,eth1", "=eth0,eth1"),
        ({NCCL: "ib"}, "ib0", "ib"),
        ({NCCL: "=eth1"}, "eth1", "=eth1"),
        ({NCCL: "eth"}, "eth0", "eth"),  # of several, the one with the node's address
        ({NCCL: "^docker,lo"}, "eth0", "^docker,lo"),
        ({NCCL: "^=eth0,lo,docker0"}, "eth1", "^=eth0,lo,docker0"),
        ({NCCL: "^=eth0,docker0"}, "eth1", "^=eth0,docker0"),  # `lo` is selected, too
        ({GLOO: "eth1", NCCL: "ib"}, "eth1", "ib"),
        ({NCCL: "wlan"}, None, "wlan"),
    ],
)
def test_gloo_and_nccl_use_the_same_interface(chosen: dict[str, str], gloo: str | None, nccl: str) -> None:
    """By default the one that has the node's address."""
    found = {**chosen, **choose_interface("203.0.113.7", INTERFACES, chosen)}
    assert (found.get(GLOO), found[NCCL]) == (gloo, nccl)


def test_an_address_of_no_interface_leaves_the_choice_to_the_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (GLOO, NCCL):
        monkeypatch.setenv(name, "")  # monkeypatch restores it
        monkeypatch.delenv(name)
    use_interface_of("203.0.113.7")
    assert not {GLOO, NCCL} & os.environ.keys()
    use_interface_of("127.0.0.1")
    assert (os.environ[GLOO], os.environ[NCCL]) == ("lo", "=lo")
