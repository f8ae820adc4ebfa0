"""The store in which the ranks of a run's generations find each other, and a worker's connection to it."""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from elastic_ddp.distributed.sockets import Socket, connections, keep_alive

Result = TypeVar("Result")

FIND_S, FIND_ONCE_S = 60.0, 15.0
"""How long the store may take to be found before others wait for this worker, and how long each time it is tried."""
CONNECT_S = 7.0
"""The same while others wait: longer than one answer of a name server that is lost, and no longer, since the rendezvous
that hosts it may have died meanwhile, and its next one has another address."""
_LOOK_AGAIN_S = 0.1
_IDLE_S, _SILENT_S = 60, 5


class StoreConnection:
    """A worker's connection to the store, made in its warm-up and kept from one generation to the next.

    Torch asks a name server for the name of the store's host, for its log, and the store for that of who connects: with
    every connection, and that takes five seconds where one answer is lost, and ten where none comes.

    Attributes:
        sockets: of it. Whoever shuts them ends a wait in the store, and has to `drop` the connection.
    """

    def __init__(self) -> None:
        self.sockets: frozenset[Socket] = frozenset()
        self._address: tuple[str, int] | None = None
        self._store: dist.TCPStore | None = None

    def connect_with_retry(self, address: Callable[[], tuple[str, int]]) -> None:
        """Connects before others wait for this worker.

        Args:
            address: tells where it is, as far as that is known: it moves if the rendezvous is restarted.

        Raises:
            torch.distributed.DistError: it is not there, or cannot be reached.
        """
        end = time.monotonic() + FIND_S
        while True:
            try:
                self.connect(*address(), within_s=FIND_ONCE_S)
                return
            except dist.DistError:
                if time.monotonic() >= end:
                    raise
                time.sleep(_LOOK_AGAIN_S)

    def connect(self, host: str, port: int, *, within_s: float = CONNECT_S) -> dist.TCPStore:
        """The store, connected to once more if it has moved or the connection was dropped.

        Raises:
            torch.distributed.DistError: it cannot be reached.
        """
        if self._store is None or self._address != (host, port):
            self.drop()
            _knock(host, port, within_s)
            before = connections(port)
            timeout = datetime.timedelta(seconds=within_s)
            self._store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
            self._address = host, port
            self.sockets = connections(port) - before
            keep_alive(self.sockets, idle_s=_IDLE_S, unacknowledged_s=_SILENT_S)
        return self._store

    def drop(self) -> None:
        """Whatever has become of the connection, it is not used again."""
        self.sockets, self._address, self._store = frozenset(), None, None


def _knock(host: str, port: int, within_s: float) -> None:
    """Torch tries for all of its time to connect to a store that has died with its process: a DistNetworkError at once.
    Nobody is told of a store that does not listen yet. One that lives looks up who knocks as it does who comes."""
    try:
        socket.create_connection((host, port), timeout=within_s).close()
    except OSError as error:
        raise dist.DistNetworkError(f"the store at {host}:{port} is not there: {error}") from error


class StoreMailbox:
    """Word that ranks leave for each other in the store. For one thread.

    Args:
        connection: to the store, and not the training thread's, whose waits would hold it up.
        address: of the store, as far as that is known.
        find: tells where it is if it is not there any more: it moves if the rendezvous is restarted, and what was in it
            is lost.
        name: under which keys begin.
    """

    def __init__(
        self, connection: StoreConnection, address: tuple[str, int], find: Callable[[], tuple[str, int]], name: str
    ) -> None:
        self._connection, self._address, self._find, self._name = connection, address, find, name

    def put(self, key: str, text: str) -> None:
        self._do(lambda store: store.set(f"{self._name}/{key}", text))

    def get(self, key: str) -> str | None:
        """What is there, if anything is. It waits for nothing."""
        key = f"{self._name}/{key}"
        return self._do(lambda store: store.get(key).decode() if store.check([key]) else None)

    def remove(self, key: str) -> None:
        self._do(lambda store: store.delete_key(f"{self._name}/{key}"))

    def _do(self, operation: Callable[[dist.TCPStore], Result]) -> Result:
        """Tried once more where the store has moved."""
        try:
            return operation(self._connection.connect(*self._address, within_s=FIND_ONCE_S))
        except dist.DistError:
            self._connection.drop()
            self._address = self._find()
            return operation(self._connection.connect(*self._address, within_s=FIND_ONCE_S))
