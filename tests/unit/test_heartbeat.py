"""How a death is noticed, and what is not taken for one."""

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
"""Silence so long that nobody is lost by it in a test."""
SHORT_S = 0.3
BEATING_S = 1.0
"""Short, but longer than a loaded machine keeps a thread from its turn."""

HOST = "127.0.0.1"

BEATS_UNTIL_ITS_INPUT_ENDS = """
import sys
from elastic_ddp.rendezvous.heartbeat import Heartbeat
pulse = Heartbeat(lambda: (sys.argv[1], int(sys.argv[2])), "worker", float(sys.argv[3]))
print("connected", flush=True)
sys.stdin.read()
"""


class Ear:
    """A pulse server and what it has heard."""

    def __init__(self, timeout_s: float) -> None:
        self.server = HeartbeatServer(timeout_s, self._on_failure)
        self.failure: list[tuple[str, str]] = []
        self._heard = asyncio.Condition()

    async def _on_failure(self, member: str, how: str) -> None:
        async with self._heard:
            self.failure.append((member, how))
            self._heard.notify_all()

    async def until_lost(self, count: int = 1) -> list[tuple[str, str]]:
        async with self._heard:
            await self._heard.wait_for(lambda: len(self.failure) >= count)
        return self.failure


def listening(timeout_s: float, scenario: Callable[[Ear, tuple[str, int]], Awaitable[None]]) -> None:
    async def within_time() -> None:
        ear = Ear(timeout_s)
        address = await ear.server.start(HOST)
        try:
            await asyncio.wait_for(scenario(ear, address), LIMIT_S)
        finally:
            assert ear.server._server is not None
            ear.server._server.close()

    asyncio.run(within_time())


async def connected(address: tuple[str, int], member: str) -> asyncio.StreamWriter:
    """Somebody who says who it is, and then nothing."""
    _, writer = await asyncio.open_connection(*address)
    writer.write(member.encode() + b"\n")
    await writer.drain()
    return writer


async def started_process(address: tuple[str, int], timeout_s: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", BEATS_UNTIL_ITS_INPUT_ENDS, address[0], str(address[1]), str(timeout_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == "connected\n"
    return process


def ended(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


# Deaths.


def test_the_death_of_a_process_is_heard_at_once() -> None:
    async def scenario(ear: Ear, address: tuple[str, int]) -> None:
        process = await started_process(address, LONG_S)
        assert ear.failure == []
        ended(process)
        (failure,) = await ear.until_lost()  # within much less than the silence it may keep
        assert failure[0] == "worker"
        assert failure[1] == "its process exited" or failure[1].startswith("its connection broke: ")

    listening(LONG_S, scenario)


def test_a_process_that_ends_without_a_word_is_dead_however_well_it_ended() -> None:
    async def scenario(ear: Ear, address: tuple[str, int]) -> None:
        process = await started_process(address, LONG_S)
        await asyncio.to_thread(process.communicate)
        assert process.returncode == 0
        assert await ear.until_lost() == [("worker", "its process exited")]

    listening(LONG_S, scenario)


def test_a_process_that_is_stopped_falls_silent() -> None:
    async def scenario(ear: Ear, address: tuple[str, int]) -> None:
        process = await started_process(address, SHORT_S)
        process.send_signal(signal.SIGSTOP)
        try:
            assert await ear.until_lost() == [("worker", f"no heartbeat for {SHORT_S} s")]
        finally:
            ended(process)

    listening(SHORT_S, scenario)


def test_a_connection_that_is_closed_is_a_death() -> None:
    async def scenario(ear: Ear, address: tuple[str, int]) -> None:
        writer = await connected(address, "worker")
        writer.write(b"..")
        writer.close()
        assert await ear.until_lost() == [("worker", "its process exited")]

    listening(LONG_S, scenario)


def test_a_connection_that_is_reset_is_a_death() -> None:
    async def scenario(ear: Ear, address: tuple[str, int]) -> None:
        connection = socket.create_connection(address)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # closing resets
        connection.sendall(b"worker\n")
        other = await connected(address, "other")  # what was sent before has been read when this one is lost
        other.close()
        await ear.until_lost()
        connection.close()
        failure = dict(await ear.until_lost(2))
        assert failure["worker"].startswith(("its connection broke: ", "its process exited"))

    listening(LONG_S, scenario)


def test_silence_is_taken_for_death() -> None:
    async def scenario(ear: Ear, address: tuple[str, int]) -> None:
        began = time.monotonic()
        writer = await connected(address, "worker")
        assert await ear.until_lost() == [("worker", f"no heartbeat for {SHORT_S} s")]
        assert time.monotonic() - began >= SHORT_S * 0.9
        writer.close()

    listening(SHORT_S, scenario)


def test_everybody_who_dies_is_heard_once() -> None:
    async def scenario(ear: Ear, address: tuple[str, int]) -> None:
        writers = [await connected(address, name) for name in ("a", "b", "c")]
        for writer in writers:
            writer.close()
        assert sorted(name for name, _ in await ear.until_lost(3)) == ["a", "b", "c"]

    listening(LONG_S, scenario)


# What is none.


def test_a_peaceful_stop_is_no_loss() -> None:
    async def scenario(ear: Ear, address: tuple[str, int]) -> None:
        pulse = await asyncio.to_thread(Heartbeat, lambda: address, "peaceful", BEATING_S)
        await asyncio.to_thread(pulse.stop)
        other = await connected(address, "silent")  # from now on; it is lost after the other would have been
        assert await ear.until_lost() == [("silent", f"no heartbeat for {BEATING_S:g} s")]
        other.close()

    listening(BEATING_S, scenario)


def test_a_stop_ends_the_thread_whatever_became_of_the_rendezvous() -> None:
    listener = socket.create_server((HOST, 0))
    pulse = Heartbeat(listener.getsockname, "worker", SHORT_S)
    connection, _ = listener.accept()
    connection.close()
    listener.close()
    stopper = threading.Thread(target=pulse.stop)
    stopper.start()
    stopper.join(LIMIT_S)
    assert not stopper.is_alive()


@pytest.mark.parametrize("said", [b"", b"\n"])
def test_a_connection_of_nobody_is_nobodys_death(said: bytes) -> None:
    async def scenario(ear: Ear, address: tuple[str, int]) -> None:
        _, stranger = await asyncio.open_connection(*address)
        stranger.write(said)
        stranger.close()
        worker = await connected(address, "worker")
        worker.close()
        assert await ear.until_lost() == [("worker", "its process exited")]

    listening(LONG_S, scenario)


def test_one_that_computes_for_long_keeps_its_pulse() -> None:
    async def scenario(ear: Ear, address: tuple[str, int]) -> None:
        over = threading.Event()

        def compute() -> None:
            total = 0
            while not over.is_set():
                total = sum(range(10_000))
            assert total

        pulse = await asyncio.to_thread(Heartbeat, lambda: address, "busy", BEATING_S)
        computing = threading.Thread(target=compute)
        computing.start()
        try:
            for name in ("first", "second"):  # each for as long as silence may last
                writer = await connected(address, name)
                while name not in dict(ear.failure):
                    await ear.until_lost(len(ear.failure) + 1)
                writer.close()
            assert [name for name, _ in ear.failure] == ["first", "second"]
        finally:
            over.set()
            await asyncio.to_thread(computing.join)
            await asyncio.to_thread(pulse.stop)

    listening(BEATING_S, scenario)


@pytest.mark.parametrize("timeouts", [1.2, 2.0])
def test_a_rendezvous_that_was_stopped_itself_takes_nobody_for_dead(timeouts: float) -> None:
    async def scenario(ear: Ear, address: tuple[str, int]) -> None:
        pulse = await asyncio.to_thread(Heartbeat, lambda: address, "worker", BEATING_S)
        first = await connected(address, "first")
        first.close()
        await ear.until_lost()  # so the worker, who came before, is listened to
        time.sleep(BEATING_S * timeouts)  # the whole event loop stands still
        silent = await connected(address, "silent")
        assert [name for name, _ in await ear.until_lost(2)] == ["first", "silent"]
        await asyncio.to_thread(pulse.stop)
        silent.close()

    listening(BEATING_S, scenario)


def test_a_server_is_started_once() -> None:
    async def scenario(ear: Ear, address: tuple[str, int]) -> None:
        assert await ear.server.start(HOST) == address

    listening(LONG_S, scenario)


def test_the_end_of_an_older_connection_means_nothing_where_a_newer_one_is_heard() -> None:
    async def scenario(ear: Ear, address: tuple[str, int]) -> None:
        older = await connected(address, "a")
        while not ear.server.is_connected("a"):
            await asyncio.sleep(0)
        _, newer = await asyncio.open_connection(*address)
        newer.write(b"a\n.")
        await newer.drain()
        await asyncio.sleep(0.1)
        older.close()
        other = await connected(address, "b")
        other.close()
        assert await ear.until_lost() == [("b", "its process exited")], "a is heard"
        newer.close()
        assert (await ear.until_lost(2))[1] == ("a", "its process exited")

    listening(LONG_S, scenario)


def test_one_that_nobody_waits_for_yet_may_be_silent_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It imports, or compiles, and holds Python's global lock."""
    monkeypatch.setattr("elastic_ddp.rendezvous.heartbeat.IDLE_TIMEOUT_S", 4 * SHORT_S)
    begun = time.monotonic()

    async def scenario(ear: Ear, address: tuple[str, int]) -> None:
        ear.server._is_awaited = lambda member: member == "awaited"
        connections = [await connected(address, member) for member in ("starting", "awaited")]
        assert await ear.until_lost() == [("awaited", f"no heartbeat for {SHORT_S:g} s")]
        assert (await ear.until_lost(2))[1] == ("starting", f"no heartbeat for {4 * SHORT_S:g} s")
        assert time.monotonic() - begun >= 4 * SHORT_S
        assert len(connections) == 2

    listening(SHORT_S, scenario)


def test_a_worker_that_starts_finds_a_rendezvous_that_was_restarted_just_then() -> None:
    async def scenario(ear: Ear, address: tuple[str, int]) -> None:
        with socket.create_server((HOST, 0)) as gone:
            addresses = iter([gone.getsockname()[:2], address])
        pulse = await asyncio.to_thread(Heartbeat, lambda: next(addresses), "a", BEATING_S)
        while not ear.server.is_connected("a"):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(pulse.stop)

    listening(LONG_S, scenario)


def test_a_process_with_many_files_open_keeps_its_pulse() -> None:
    """As one has whose group has a thousand peers."""

    async def scenario(ear: Ear, address: tuple[str, int]) -> None:
        most, hardest = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(most, 2000), hardest))
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
        try:
            pulse = await asyncio.to_thread(Heartbeat, lambda: address, "worker", BEATING_S)
            assert pulse._connection.fileno() >= 1024
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ear.until_lost(), 2 * BEATING_S)
            await asyncio.to_thread(pulse.stop)
        finally:
            for each in files:
                os.close(each)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hardest))

    listening(BEATING_S, scenario)
