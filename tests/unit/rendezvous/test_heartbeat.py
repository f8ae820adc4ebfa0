"""Heartbeats: which failures they detect, and what is no failure."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

from elastic_ddp.rendezvous.heartbeat import Heartbeat, HeartbeatServer

LIMIT_S = 20.0
LONG_S = 1000.0
"""A timeout that no test reaches."""
SHORT_S = 0.2
BEATING_S = 0.7
"""A timeout longer than a loaded machine delays a thread."""

HOST = "127.0.0.1"

BEATS_UNTIL_ITS_INPUT_ENDS = """
import sys
from elastic_ddp.rendezvous.heartbeat import Heartbeat
heartbeat = Heartbeat(lambda: (sys.argv[1], int(sys.argv[2])), "worker", float(sys.argv[3]))
print("connected", flush=True)
sys.stdin.read()
"""


WITH_A_CHILD = BEATS_UNTIL_ITS_INPUT_ENDS.replace("print(", "import os; os.fork() and print(")


class Receiver:
    """A heartbeat server and the failures that it reports."""

    def __init__(self, timeout_s: float) -> None:
        self.server = HeartbeatServer(timeout_s, self._on_failure)
        self.failures: list[tuple[str, str]] = []
        self._changed = asyncio.Condition()

    async def _on_failure(self, member: str, how: str) -> None:
        async with self._changed:
            self.failures.append((member, how))
            self._changed.notify_all()

    async def until_failed(self, count: int = 1) -> list[tuple[str, str]]:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.failures) >= count)
        return self.failures


def run_server(timeout_s: float, scenario: Callable[[Receiver, tuple[str, int]], Awaitable[None]]) -> None:
    async def within_time() -> None:
        receiver = Receiver(timeout_s)
        address = await receiver.server.start(HOST)
        try:
            await asyncio.wait_for(scenario(receiver, address), LIMIT_S)
        finally:
            assert receiver.server._server is not None
            receiver.server._server.close()

    asyncio.run(within_time())


async def connected(address: tuple[str, int], member: str) -> asyncio.StreamWriter:
    """Connects as a member that sends no heartbeats."""
    _, writer = await asyncio.open_connection(*address)
    writer.write(member.encode() + b"\n")
    await writer.drain()
    return writer


async def started_process(
    address: tuple[str, int], timeout_s: float, program: str = BEATS_UNTIL_ITS_INPUT_ENDS
) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", program, address[0], str(address[1]), str(timeout_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == "connected\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


# Failures.


def test_a_killed_process_is_detected_at_once_while_a_child_of_it_lives_on() -> None:
    async def scenario(receiver: Receiver, address: tuple[str, int]) -> None:
        process = await started_process(address, LONG_S, WITH_A_CHILD)
        process.kill()
        assert await receiver.until_failed() == [("worker", "its process exited")]
        kill(process)  # closes the input of the child

    run_server(LONG_S, scenario)


def test_a_stopped_process_sends_no_heartbeats() -> None:
    async def scenario(receiver: Receiver, address: tuple[str, int]) -> None:
        process = await started_process(address, SHORT_S)
        process.send_signal(signal.SIGSTOP)
        try:
            assert await receiver.until_failed() == [("worker", f"no heartbeat for {SHORT_S} s")]
        finally:
            kill(process)

    run_server(SHORT_S, scenario)


def test_a_closed_connection_is_a_failure() -> None:
    async def scenario(receiver: Receiver, address: tuple[str, int]) -> None:
        writer = await connected(address, "worker")
        writer.write(b"..")
        writer.close()
        assert await receiver.until_failed() == [("worker", "its process exited")]

    run_server(LONG_S, scenario)


def test_a_reset_connection_is_a_failure() -> None:
    async def scenario(receiver: Receiver, address: tuple[str, int]) -> None:
        connection = socket.create_connection(address)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close() resets the connection
        connection.sendall(b"worker\n")
        other = await connected(address, "other")  # earlier data has been read when this one fails
        other.close()
        await receiver.until_failed()
        connection.close()
        failure = dict(await receiver.until_failed(2))
        assert failure["worker"].startswith(("its connection broke: ", "its process exited"))

    run_server(LONG_S, scenario)


# No failures.


def test_a_stop_is_no_failure() -> None:
    async def scenario(receiver: Receiver, address: tuple[str, int]) -> None:
        heartbeat = await asyncio.to_thread(Heartbeat, lambda: address, "leaving", LONG_S)
        while not receiver.server.is_connected("leaving"):
            await asyncio.sleep(0)
        await asyncio.to_thread(heartbeat.stop)
        while receiver.server.is_connected("leaving"):
            await asyncio.sleep(0)
        assert receiver.failures == []

    run_server(LONG_S, scenario)


def test_a_stop_ends_the_thread_without_a_rendezvous() -> None:
    listener = socket.create_server((HOST, 0))
    heartbeat = Heartbeat(listener.getsockname, "worker", SHORT_S)
    connection, _ = listener.accept()
    connection.close()
    listener.close()
    stopper = threading.Thread(target=heartbeat.stop)
    stopper.start()
    stopper.join(LIMIT_S)
    assert not stopper.is_alive()


def test_a_connection_without_a_member_reports_no_failure() -> None:
    async def scenario(receiver: Receiver, address: tuple[str, int]) -> None:
        _, stranger = await asyncio.open_connection(*address)
        stranger.write(b"\n")
        stranger.close()
        worker = await connected(address, "worker")
        worker.close()
        assert await receiver.until_failed() == [("worker", "its process exited")]

    run_server(LONG_S, scenario)


def test_a_busy_process_sends_heartbeats() -> None:
    async def scenario(receiver: Receiver, address: tuple[str, int]) -> None:
        over = threading.Event()

        def compute() -> None:
            total = 0
            while not over.is_set():
                total = sum(range(10_000))
            assert total

        heartbeat = await asyncio.to_thread(Heartbeat, lambda: address, "busy", BEATING_S)
        computing = threading.Thread(target=compute)
        computing.start()
        try:
            silent = await connected(address, "silent")
            assert [name for name, _ in await receiver.until_failed()] == ["silent"], "after one timeout"
            silent.close()
        finally:
            over.set()
            await asyncio.to_thread(computing.join)
            await asyncio.to_thread(heartbeat.stop)

    run_server(BEATING_S, scenario)


@pytest.mark.parametrize("timeouts", [1.2, 2.0])
def test_a_rendezvous_that_was_stopped_reports_no_failure(timeouts: float) -> None:
    async def scenario(receiver: Receiver, address: tuple[str, int]) -> None:
        heartbeat = await asyncio.to_thread(Heartbeat, lambda: address, "worker", BEATING_S)
        first = await connected(address, "first")
        first.close()
        await receiver.until_failed()  # so the server reads the first worker
        time.sleep(BEATING_S * timeouts)  # blocks the event loop
        silent = await connected(address, "silent")
        assert [name for name, _ in await receiver.until_failed(2)] == ["first", "silent"]
        await asyncio.to_thread(heartbeat.stop)
        silent.close()

    run_server(BEATING_S, scenario)


def test_only_the_newest_connection_of_a_member_counts() -> None:
    async def scenario(receiver: Receiver, address: tuple[str, int]) -> None:
        older = await connected(address, "a")
        while not receiver.server.is_connected("a"):
            await asyncio.sleep(0)
        _, newer = await asyncio.open_connection(*address)
        newer.write(b"a\n.")
        await newer.drain()
        await asyncio.sleep(0.1)
        older.close()
        other = await connected(address, "b")
        other.close()
        assert await receiver.until_failed() == [("b", "its process exited")], "a is connected"
        newer.close()
        assert (await receiver.until_failed(2))[1] == ("a", "its process exited")

    run_server(LONG_S, scenario)


def test_a_worker_that_has_not_joined_or_has_paused_its_heartbeats_has_a_longer_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Imports, compilers and other native code may hold the interpreter lock."""
    monkeypatch.setattr("elastic_ddp.rendezvous.heartbeat.IDLE_TIMEOUT_S", 4 * SHORT_S)

    async def scenario(receiver: Receiver, address: tuple[str, int]) -> None:
        begun = time.monotonic()
        receiver.server._is_awaited = lambda member: member != "starting"
        members = {"starting": b".", "awaited": b".", "paused": b"..<.", "ready": b".<..>"}
        connections = [await connected(address, member) for member in members]
        for connection, heartbeats in zip(connections, members.values(), strict=True):
            connection.write(heartbeats)
        assert {*await receiver.until_failed(2)} == {
            (member, f"no heartbeat for {SHORT_S:g} s") for member in ("awaited", "ready")
        }
        assert {*(await receiver.until_failed(4))[2:]} == {
            (member, f"no heartbeat for {4 * SHORT_S:g} s") for member in ("starting", "paused")
        }
        assert time.monotonic() - begun >= 4 * SHORT_S

    run_server(SHORT_S, scenario)


def test_a_worker_tells_that_its_heartbeats_pause_and_continue() -> None:
    listener = socket.create_server((HOST, 0))
    heartbeat = Heartbeat(listener.getsockname, "worker", LONG_S)
    connection, _ = listener.accept()
    with heartbeat.paused():
        pass
    heartbeat.stop()
    received = b""
    while data := connection.recv(64):
        received += data
    assert received == b"worker\n<>!"
    connection.close()
    listener.close()


def test_a_starting_worker_finds_a_restarted_rendezvous() -> None:
    async def scenario(receiver: Receiver, address: tuple[str, int]) -> None:
        with socket.create_server((HOST, 0)) as gone:
            addresses = iter([gone.getsockname()[:2], address])
        heartbeat = await asyncio.to_thread(Heartbeat, lambda: next(addresses), "a", BEATING_S)
        while not receiver.server.is_connected("a"):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(heartbeat.stop)

    run_server(LONG_S, scenario)


def test_a_process_with_many_open_files_sends_heartbeats() -> None:
    """As with a thousand peers."""
    most, hardest = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(most, 2000), hardest))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    with socket.create_server((HOST, 0)) as listener:
        heartbeat = Heartbeat(listener.getsockname, "worker", SHORT_S)
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(LIMIT_S)
            assert heartbeat._connection.fileno() >= 1024
            while not connection.recv(64).endswith(b"."):
                pass
            heartbeat.stop()
    for file in files:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hardest))
