"""Detects failed workers. Each worker holds a connection to the rendezvous and sends a heartbeat over it.

If a process dies, its connection closes at once. If it is stopped or disconnected, its heartbeats stop. The heartbeat
has its own thread in the worker, so long computations do not delay it. Heartbeats stop only with all threads: after a
signal, on a frozen machine, or while native code holds Python's global interpreter lock.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import select
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

from elastic_ddp.distributed.sockets import exempt
from elastic_ddp.rendezvous.user_place import describe_crash
from elastic_ddp.telemetry.event import EXITED

BEATS_PER_TIMEOUT = 5
IDLE_TIMEOUT_S = 60.0
"""Minimum timeout for a worker that no other waits for yet: imports and compilers may hold the interpreter lock."""
CONNECT_WITHIN_S = 60.0
"""How long a worker that starts tries to connect to the rendezvous."""
BACKLOG = 4096
"""Number of workers that may connect at the same time; asyncio's default is 100."""
REREAD_S = 0.1
"""How long to read heartbeats that arrived while the rendezvous was busy."""
MAX_DUMP_BYTES = 1 << 16
"""How much of a crash's stacks is kept."""
SILENT = "no heartbeat"
_BEAT, _BUSY, _READY, _LEAVES = b".", b"<", b">", b"!"
_STDERR = 2


class Heartbeat:
    """Sends a worker's heartbeats from a thread. It reconnects if the connection breaks.

    `address` returns the address of the `HeartbeatServer`. It may block, and raises if the run has no rendezvous.
    """

    def __init__(self, address: Callable[[], tuple[str, int]], member: str, timeout_s: float) -> None:
        self._address = address
        self._member = member
        self._interval_s = timeout_s / BEATS_PER_TIMEOUT
        self._stopped, self._stopping = os.pipe()
        self._reports_crashes = False
        self._connection = self._connect_with_retries()
        # A child of a killed worker would keep the connection open.
        os.register_at_fork(after_in_child=lambda: self._connection.close())
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def report_crashes(self) -> None:
        """Makes a signal that ends this process (SIGSEGV, for example) send the Python stacks over the connection."""
        self._reports_crashes = True
        faulthandler.enable(self._connection.fileno())
        os.register_at_fork(after_in_child=lambda: faulthandler.enable(_STDERR))

    def report_exits(self, where: Callable[[], str]) -> None:
        """Makes `os._exit` send the stacks and `where()` first. Otherwise it looks like SIGKILL."""
        exit_process = os._exit
        pid = os.getpid()

        def report_and_exit(status: int) -> None:
            if os.getpid() == pid:
                self._tell(f"Exit: os._exit({status}) {where()}\n\n".encode())
                with suppress(OSError, ValueError):  # as in `_tell`, or it is closed
                    faulthandler.dump_traceback(self._connection.fileno())
            exit_process(status)

        os._exit = report_and_exit  # type: ignore[assignment]

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self._address(), timeout=30)
        exempt(connection)
        connection.settimeout(None)
        connection.sendall(self._member.encode() + b"\n")
        return connection

    def _connect_with_retries(self) -> socket.socket:
        end = time.monotonic() + CONNECT_WITHIN_S
        while True:
            try:
                return self._connect()
            except OSError:
                if time.monotonic() >= end:
                    raise
                time.sleep(self._interval_s)

    def _run(self) -> None:
        while not self._beat_until_stopped():
            if self._reports_crashes:
                faulthandler.enable(_STDERR)  # the descriptor may be reused
            self._connection.close()
            while self._connection.fileno() < 0:
                try:
                    self._connection = self._connect()
                except OSError:  # the rendezvous is restarting, or its address is an old one
                    if self._wait_for([self._stopped]):
                        return
                except Exception:  # the run has no rendezvous any more; the client reports that
                    return
            if self._reports_crashes:
                faulthandler.enable(self._connection.fileno())

    def _beat_until_stopped(self) -> bool:
        """Sends heartbeats. Returns True once `stop` is called, False if the connection breaks."""
        with suppress(OSError):
            while not (ready := self._wait_for([self._stopped, self._connection.fileno()])):
                self._connection.sendall(_BEAT)
            return self._stopped in ready
        return False

    def _wait_for(self, descriptors: list[int]) -> list[int]:
        poll = select.poll()  # select.select refuses descriptors from 1024 on
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        return [descriptor for descriptor, _ in poll.poll(1000 * self._interval_s)]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Tells the server that heartbeats may be late, up to `IDLE_TIMEOUT_S`: native code will hold Python's lock."""
        self._tell(_BUSY)
        try:
            yield
        finally:
            self._tell(_READY)

    def _tell(self, state: bytes) -> None:
        with suppress(OSError):  # the connection is broken, and the server waits for another one
            self._connection.sendall(state)

    def stop(self) -> None:
        """Ends the heartbeat and tells the server that the worker leaves."""
        os.write(self._stopping, b"!")
        self._thread.join()
        if self._reports_crashes:
            faulthandler.enable(_STDERR)
        with suppress(OSError):
            self._connection.sendall(_LEAVES)
        self._connection.close()
        os.close(self._stopped)
        os.close(self._stopping)


class HeartbeatServer:
    """Receives the heartbeats of all workers, in the rendezvous.

    It calls `on_failure` with the id of a member without heartbeats for `timeout_s`, and how the member failed. The
    timeout is at least `IDLE_TIMEOUT_S` for members that no other member waits for, or whose heartbeats are paused.
    """

    def __init__(
        self,
        timeout_s: float,
        on_failure: Callable[[str, str], Awaitable[None]],
        is_awaited: Callable[[str], bool] = lambda member: True,
    ) -> None:
        self._timeout_s = timeout_s
        self._on_failure = on_failure
        self._is_awaited = is_awaited
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self._newest: dict[str, asyncio.StreamReader] = {}
        """The newest connection of each connected member."""

    def is_connected(self, member: str) -> bool:
        return member in self._newest

    async def start(self, host: str) -> tuple[str, int]:
        """Starts to listen on the first call. Returns the address."""
        async with self._starting:
            if self._server is None:
                self._server = await asyncio.start_server(self._serve, host, backlog=BACKLOG)
        address: tuple[str, int] = self._server.sockets[0].getsockname()[:2]
        return address

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                member = (await reader.readline()).decode().strip()
        except (TimeoutError, OSError, ValueError):
            member = ""
        if member:
            self._newest[member] = reader
            failure = await self._receive(member, reader)
            if self._newest[member] is reader:  # the member has not reconnected
                del self._newest[member]
                if failure is not None:
                    await self._on_failure(member, failure)
        writer.close()

    async def _receive(self, member: str, reader: asyncio.StreamReader) -> str | None:
        """Reads heartbeats until they end. Returns how the member failed, or None if it left."""
        loop = asyncio.get_running_loop()
        received_at = loop.time()
        dump = b""
        is_busy = False
        while True:
            begun_at = loop.time()
            try:
                try:
                    async with asyncio.timeout(self._timeout_s):
                        beats = await reader.read(1024)
                except TimeoutError:
                    if loop.time() - begun_at > self._timeout_s * 1.5:
                        continue  # this process was stopped itself
                    # The timeout fires before unread data is seen if this process was busy.
                    async with asyncio.timeout(REREAD_S):
                        beats = await reader.read(1024)
            except TimeoutError:
                may_be_late = is_busy or not self._is_awaited(member)
                timeout_s = max(self._timeout_s, IDLE_TIMEOUT_S) if may_be_late else self._timeout_s
                if loop.time() - received_at < timeout_s:
                    continue
                return f"{SILENT} for {timeout_s:g} s"
            except OSError as error:
                return _exited(dump) if dump else f"its connection broke: {error}"
            received_at = loop.time()
            text = beats if dump else beats.lstrip(_BEAT + _BUSY + _READY)
            states = beats.removesuffix(text).replace(_BEAT, b"")
            if states:
                is_busy = states.endswith(_BUSY)
            dump = (dump + text)[:MAX_DUMP_BYTES]
            if dump == _LEAVES:
                return None
            if not beats:
                return _exited(dump)


def _exited(dump: bytes) -> str:
    """Returns how a process ended that closed its connection, after the stacks that it sent."""
    return f"{EXITED}: {describe_crash(dump.decode(errors='replace'))}" if dump else EXITED
