"""`HostedStore`: the TCP store that the rendezvous hosts, in which the ranks of every generation meet."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist


class HostedStore:
    """A store that this process hosts, on a free port of this address only.

    A thread imports torch, which takes a second. Clients that connect meanwhile wait.
    """

    def __init__(self, host: str) -> None:
        listener = socket.create_server((host, 0))
        self.host = host
        self.port = int(listener.getsockname()[1])
        self._store = ThreadPoolExecutor(1, thread_name_prefix="store").submit(_open, host, self.port, listener)

    def list_keys(self) -> list[str]:
        return list(self._store.result().list_keys())

    def delete_key(self, key: str) -> None:
        self._store.result().delete_key(key)


def _open(host: str, port: int, listener: socket.socket) -> dist.TCPStore:
    import torch.distributed as dist

    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
