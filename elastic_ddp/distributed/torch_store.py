"""A worker's connection to the TCP store in which the ranks of every generation rendezvous."""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from elastic_ddp.distributed.sockets import Socket, connections, keep_alive

Result = TypeVar("Result")

WARMUP_CONNECT_S = 60.0
"""Timeout for connecting while no other worker waits for this one."""
CONNECT_ATTEMPT_S = 15.0
"""Timeout of one attempt within that."""
FORMING_CONNECT_S = 7.0
"""Timeout for connecting while a generation forms. It outlasts one lost answer of a name server (5 s). It is short
because the rendezvous process, which hosts the store, may restart at another address."""
_RETRY_DELAY_S = 0.1


class StoreConnection:
    """A connection to the store, made while the worker warms up and kept from one generation to the next.

    For each new connection, torch resolves the store's host name and the store resolves the client's address. The
    resolution takes 5 s when one answer of the name server is lost.

    Attributes:
        sockets: the sockets of the connection. Shutting them down ends a wait in the store; then call `drop`.
    """

    def __init__(self) -> None:
        self.sockets: frozenset[Socket] = frozenset()
        self._address: tuple[str, int] | None = None
        self._store: dist.TCPStore | None = None

    def connect_with_retry(self, address: Callable[[], tuple[str, int]]) -> None:
        """Connects within `WARMUP_CONNECT_S`, before other workers wait for this one, or raises as `connect`.

        `address` returns the current address of the store, which changes when the rendezvous restarts.
        """
        deadline = time.monotonic() + WARMUP_CONNECT_S
        while True:
            try:
                self.connect(*address(), timeout_s=CONNECT_ATTEMPT_S)
                return
            except dist.DistError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_RETRY_DELAY_S)

    def connect(self, host: str, port: int, *, timeout_s: float = FORMING_CONNECT_S) -> dist.TCPStore:
        """Returns the store. Connects only if the address changed or the connection was dropped.

        Raises:
            torch.distributed.DistError: the store cannot be reached.
        """
        if self._store is None or self._address != (host, port):
            self.drop()
            try:  # torch would retry until its timeout if no process listens
                socket.create_connection((host, port), timeout=timeout_s).close()
            except OSError as error:
                raise dist.DistNetworkError(f"cannot connect to the store at {host}:{port}: {error}") from error
            before = connections(port)
            timeout = datetime.timedelta(seconds=timeout_s)
            self._store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
            self._address = host, port
            self.sockets = connections(port) - before
            keep_alive(self.sockets)
        return self._store

    def drop(self) -> None:
        """Drops the connection. The next `connect` makes a new one."""
        self.sockets = frozenset()
        self._address = None
        self._store = None


class StoreMailbox:
    """Messages that ranks leave for each other in the store, under keys with the prefix `name`. Use it from one thread.

    A wait of the training thread would block its connection, so messages need another one. `find` returns the current
    address of the store when `address` fails. A restarted rendezvous has an empty store.
    """

    def __init__(
        self, connection: StoreConnection, address: tuple[str, int], find: Callable[[], tuple[str, int]], name: str
    ) -> None:
        self._connection = connection
        self._address = address
        self._find = find
        self._name = name

    def put(self, key: str, text: str) -> None:
        self._run(lambda store: store.set(f"{self._name}/{key}", text))

    def get(self, key: str) -> str | None:
        """Returns the text under a key, or None. Does not wait for it."""
        key = f"{self._name}/{key}"
        return self._run(lambda store: store.get(key).decode() if store.check([key]) else None)

    def remove(self, key: str) -> None:
        self._run(lambda store: store.delete_key(f"{self._name}/{key}"))

    def _run(self, operation: Callable[[dist.TCPStore], Result]) -> Result:
        """Runs an operation on the store. Reconnects and retries once, in case the store moved."""
        try:
            return operation(self._connection.connect(*self._address, timeout_s=CONNECT_ATTEMPT_S))
        except dist.DistError:
            self._connection.drop()
            self._address = self._find()
            return operation(self._connection.connect(*self._address, timeout_s=CONNECT_ATTEMPT_S))
