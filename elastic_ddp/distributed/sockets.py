"""The TCP sockets of this process. Shutting down a socket that torch opened is the only way to end a wait in torch."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple

_SIOCGIFADDR = 0x8915
"""The ioctl that returns an interface's address, from netdevice(7)."""
_exempt: set[int] = set()
"""Inodes of sockets that `shut_down` leaves open."""


class Socket(NamedTuple):
    """A socket of this process. The inode tells it from a later socket with the same descriptor."""

    descriptor: int
    inode: int


Address = tuple[str, int]
"""Host address and port."""


class Ends(NamedTuple):
    """The two ends of a socket. A listening socket has no remote end."""

    local: Address
    remote: Address | None


def tcp_sockets() -> dict[Socket, Ends]:
    """Returns this process's TCP sockets that listen or are connected."""
    sockets = {}
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # closed meanwhile, or not connected
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode):
                key = Socket(descriptor, status.st_ino)
                with _opened(key) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                        remote = None if listens else connection.getpeername()[:2]
                        sockets[key] = Ends(connection.getsockname()[:2], remote)
    return sockets


def connections(port: int) -> frozenset[Socket]:
    """Returns this process's sockets that are connected to a port."""
    return frozenset(key for key, ends in tcp_sockets().items() if ends.remote is not None and ends.remote[1] == port)


def shut_down(sockets: Iterable[Socket]) -> None:
    """Shuts sockets down. Every wait on them fails, in any thread of this process and in the peers."""
    for key in sockets:
        if key.inode in _exempt:
            continue
        with suppress(OSError), _opened(key) as connection:  # closed already
            connection.shutdown(socket.SHUT_RDWR)


def exempt(connection: socket.socket) -> None:
    """Makes `shut_down` leave a connection open, because it may be opened while a process group forms."""
    _exempt.add(os.fstat(connection.fileno()).st_ino)


def keep_alive(sockets: Iterable[Socket]) -> None:
    """Turns on TCP keepalive for connections that may be idle for a long time, so that firewalls keep them.

    The kernel probes the peer after 60 s without traffic, and closes the connection after 5 s without an
    acknowledgement. A socket that another thread has closed meanwhile is left out.
    """
    for key in sockets:
        with suppress(OSError), _opened(key) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 60)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5_000)


@contextmanager
def _opened(key: Socket) -> Iterator[socket.socket]:
    """Yields the socket under a duplicated descriptor. Raises OSError if the socket is closed."""
    with socket.socket(fileno=os.dup(key.descriptor)) as connection:
        if os.fstat(connection.fileno()).st_ino != key.inode:
            raise OSError("the descriptor belongs to another socket now")
        yield connection


def use_interface_of(address: str) -> None:
    """Makes gloo and NCCL use the network interface that has this address. Call it before a process group forms.

    By default gloo uses the interface of the host name, which often is the loopback interface, and NCCL the first one
    that it finds, perhaps a container bridge. See `choose_interface` for what the user can set.
    """
    os.environ.update(choose_interface(address, interface_addresses(), os.environ))


def choose_interface(
    address: str, interfaces: Mapping[str, str], environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Returns the variables to set, so that gloo and NCCL use the same network interface.

    Either of `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME`, set by the user, decides for both backends. By default
    both use the interface of `address`, the node's IPv4 address in Ray; if there is none, nothing is set. `interfaces`
    has the IPv4 address of each interface, by name.
    """
    gloo, nccl = (environment.get(f"{backend}_SOCKET_IFNAME") for backend in ("GLOO", "NCCL"))
    if gloo and nccl:
        return {}
    if gloo:
        return {"NCCL_SOCKET_IFNAME": f"={gloo}"}
    names = [name for name in interfaces if nccl is None or selects(nccl, name)]
    # The loopback interface last: `^docker0` selects it, and it reaches no other node.
    names.sort(key=lambda name: (interfaces[name] != address, interfaces[name].startswith("127.")))
    if not names or (not nccl and interfaces[names[0]] != address):
        return {}
    return {"GLOO_SOCKET_IFNAME": names[0]} | ({} if nccl else {"NCCL_SOCKET_IFNAME": f"={names[0]}"})


def selects(pattern: str, name: str) -> bool:
    """Returns whether a value of `NCCL_SOCKET_IFNAME` selects an interface.

    The value is a list of prefixes, after `^` to exclude, `=` for names.
    """
    excludes = pattern.startswith("^")
    choices = pattern.removeprefix("^").removeprefix("=").split(",")
    is_exact = pattern.removeprefix("^").startswith("=")
    return excludes != any(name == each if is_exact else name.startswith(each) for each in choices if each)


def interface_addresses() -> dict[str, str]:
    """Returns the IPv4 address of each interface that has one, by name."""
    found = {}
    for _, interface in socket.if_nameindex():
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:  # no IPv4 address
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
            found[interface] = socket.inet_ntoa(answer[20:24])
    return found
