"""The sockets of this process that torch opened, which has no other way to end a wait than to shut them."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

_SIOCGIFADDR = 0x8915
"""Of netdevice(7)."""
_spared: set[int] = set()


class Socket(NamedTuple):
    """One socket: its descriptor may be another's after it."""

    descriptor: int
    inode: int


Address = tuple[str, int]
"""A host's address and a port."""


class Ends(NamedTuple):
    """Where a socket is bound, and to whom it is connected; a listener to nobody."""

    here: Address
    there: Address | None


def tcp_sockets() -> dict[Socket, Ends]:
    """This process's sockets that listen or are connected."""
    found = {}
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode):
                each = Socket(descriptor, status.st_ino)
                with _opened(each) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        is_listener = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                        there = None if is_listener else connection.getpeername()[:2]
                        found[each] = Ends(connection.getsockname()[:2], there)
        except OSError:
            continue
    return found


def connections(port: int) -> frozenset[Socket]:
    """This process's sockets that are connected to a port."""
    return frozenset(each for each, ends in tcp_sockets().items() if ends.there is not None and ends.there[1] == port)


def shut_down(sockets: Iterable[Socket]) -> None:
    """Ends them, and whatever waits for them in any thread."""
    for each in sockets:
        if each.inode in _spared:
            continue
        try:
            with _opened(each) as connection:
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # closed already


def spare(connection: socket.socket) -> None:
    """Keeps a connection that may be opened while a group forms from being cut with the group."""
    _spared.add(os.fstat(connection.fileno()).st_ino)


def keep_alive(sockets: Iterable[Socket], *, idle_s: int, silent_s: int) -> None:
    """Has the system look after connections that are idle for long.

    Args:
        idle_s: after that it asks whether the peer is there, so that what stands between them does not forget them.
        silent_s: a peer that has not acknowledged for so long is gone.
    """
    for each in sockets:
        with _opened(each) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, idle_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silent_s * 1000)


@contextmanager
def _opened(each: Socket) -> Iterator[socket.socket]:
    """It, under a descriptor of our own. Raises OSError if it is gone."""
    with socket.socket(fileno=os.dup(each.descriptor)) as connection:
        if os.fstat(connection.fileno()).st_ino != each.inode:
            raise OSError("the descriptor is another's by now")
        yield connection


def use_interface_of(address: str) -> None:
    """Has gloo listen on the interface that has this address of the node; before a group is formed.

    By default it listens on the one that the host's name stands for, which on many hosts is the loopback, where others
    do not find it. What `GLOO_SOCKET_IFNAME` says counts. An address that no interface has changes nothing.
    """
    for _, interface in socket.if_nameindex():
        if _address_of(interface) == address:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _address_of(interface: str) -> str | None:
    """Its (first) IPv4 address, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
