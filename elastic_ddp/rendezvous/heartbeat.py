"""How a death is noticed: every worker holds a connection to the rendezvous, over which it says again and again that it
lives. A process that dies closes it, at once; one that is stopped, or cut off, falls silent.

The pulse has a thread of its own in the worker, so a rank that computes for long keeps it. Only what stops all of its
threads is taken for death: a signal, a machine that froze, code that holds Python's global lock for good.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from elastic_ddp.distributed.sockets import exempt

BEATS_PER_TIMEOUT = 5
PATIENCE_S = 60.0
"""Silence of a worker that nobody waits for yet: imports, and a compiler, may hold Python's global lock for long."""
CONNECT_WITHIN_S = 60.0
"""How long a worker that starts looks for the rendezvous."""
BACKLOG = 4096
"""Workers that may connect at the same time; with asyncio's 100, others of a thousand try again seconds later."""
LOOK_AGAIN_S = 0.1
"""How long beats may take to be read that have come while the rendezvous was busy."""


class Heartbeat:
    """A worker's side. If the connection ends, it looks for the rendezvous again, which may have been restarted.

    Args:
        address: tells that of the rendezvous' `HeartbeatServer`; may wait for it, and raise if there will be none.
        member: whose pulse it is.
        timeout_s: silence that is taken for death.
    """

    def __init__(self, address: Callable[[], tuple[str, int]], member: str, timeout_s: float) -> None:
        self._address, self._member = address, member
        self._interval_s = timeout_s / BEATS_PER_TIMEOUT
        self._stopped, self._stopping = os.pipe()
        self._connection = self._connect_patiently()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self._thread.start()

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self._address(), timeout=30)
        exempt(connection)
        connection.settimeout(None)
        connection.sendall(self._member.encode() + b"\n")
        return connection

    def _connect_patiently(self) -> socket.socket:
        """The rendezvous may have died just now, and be on its way again."""
        end = time.monotonic() + CONNECT_WITHIN_S
        while True:
            try:
                return self._connect()
            except OSError:
                if time.monotonic() >= end:
                    raise
                time.sleep(self._interval_s)

    def _beat(self) -> None:
        while not self._is_stopped_before_it_breaks():
            self._connection.close()
            while True:
                try:
                    self._connection = self._connect()
                    break
                except OSError:  # it is on its way, or its address is an old one
                    if self._wait_for([self._stopped]):
                        return
                except Exception:  # there is none any more, which others will say
                    return

    def _is_stopped_before_it_breaks(self) -> bool:
        with suppress(OSError):
            while not (ready := self._wait_for([self._stopped, self._connection.fileno()])):
                self._connection.sendall(b".")
            return self._stopped in ready
        return False

    def _wait_for(self, descriptors: list[int]) -> list[int]:
        ready = select.poll()  # select.select refuses descriptors from 1024 on
        for each in descriptors:
            ready.register(each, select.POLLIN)
        return [each for each, _ in ready.poll(1000 * self._interval_s)]

    def stop(self) -> None:
        """Ends it in peace: the member leaves, and did not die."""
        os.write(self._stopping, b"!")
        self._thread.join()
        with suppress(OSError):
            self._connection.sendall(b"!")
        self._connection.close()
        os.close(self._stopped)
        os.close(self._stopping)


class HeartbeatServer:
    """The rendezvous' side.

    Args:
        timeout_s: silence that is taken for death.
        on_lost: told of a member that is dead or presumed so, and of how that was seen.
        is_awaited: whether others wait for a member, or would; `PATIENCE_S` is for those for whom they do not.
    """

    def __init__(
        self,
        timeout_s: float,
        on_lost: Callable[[str, str], Awaitable[None]],
        is_awaited: Callable[[str], bool] = lambda member: True,
    ) -> None:
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._is_awaited = is_awaited
        self._server: asyncio.Server | None = None
        self._newest: dict[str, asyncio.StreamReader] = {}
        """The connection of every member whose pulse is heard: the newest, if it has connected again."""

    def hears(self, member: str) -> bool:
        """Whether a member's pulse is heard."""
        return member in self._newest

    async def start(self, host: str) -> tuple[str, int]:
        """Starts listening, the first time; returns the address."""
        if self._server is None:
            self._server = await asyncio.start_server(self._follow, host, backlog=BACKLOG)
        address: tuple[str, int] = self._server.sockets[0].getsockname()[:2]
        return address

    async def _follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                member = (await reader.readline()).decode().strip()
        except (TimeoutError, OSError, ValueError):
            member = ""
        if member:
            self._newest[member] = reader
            how = await self._listen(member, reader)
            if self._newest[member] is reader:  # else it is heard over another one
                del self._newest[member]
                if how is not None:
                    await self._on_lost(member, how)
        writer.close()

    async def _listen(self, member: str, reader: asyncio.StreamReader) -> str | None:
        """How the pulse ended; None if in peace."""
        loop = asyncio.get_running_loop()
        heard = loop.time()
        while True:
            begun = loop.time()
            try:
                try:
                    async with asyncio.timeout(self._timeout_s):
                        beats = await reader.read(1024)
                except TimeoutError:
                    if loop.time() - begun > self._timeout_s * 1.5:
                        continue  # this process was stopped itself, and heard nobody meanwhile
                    # Beats may have come while this process was busy, and the clock was looked at before them.
                    async with asyncio.timeout(LOOK_AGAIN_S):
                        beats = await reader.read(1024)
            except TimeoutError:
                silent_s = self._timeout_s if self._is_awaited(member) else max(self._timeout_s, PATIENCE_S)
                if loop.time() - heard < silent_s:
                    continue
                return f"it was silent for {silent_s:g} s"
            except OSError as error:
                return f"its connection broke: {error}"
            heard = loop.time()
            if beats.endswith(b"!"):
                return None
            if not beats:
                return "its process ended"
