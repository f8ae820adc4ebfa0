"""A storage with a fault at one operation, and savers in threads or in processes that are killed."""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from elastic_ddp.checkpoint import planning, saver
from elastic_ddp.errors import StorageError
from elastic_ddp.storage.folder import Entry
from elastic_ddp.storage.storage import Storage
from tests.saving import FileMailbox, Ranks


class Died(BaseException):
    """Simulates the death of a process: no code after it runs, and nothing may catch it."""


class FaultyStorage(Storage):
    """Injects `fault` at operation number `at`, counted from 0 over all calls that reach the storage.

    - `error before`, `error after`: raises StorageError with nothing done, or with everything done.
    - `dies before`, `dies after`: raises Died likewise, and refuses every later call.
    - `dies within`: a write leaves half its bytes and dies; other operations die before.
    - `lies`: a write stores half its bytes and reports success.
    - `twice`: as a client does that repeats a request whose answer was lost: it has the second answer.
    - `calls before`, `calls after`: `call` is called.
    """

    def __init__(self, uri: str, fault: str, at: int | None, call: Callable[[], object] = lambda: None) -> None:
        super().__init__(uri)
        self.fault, self.at_operation, self.call = fault, at, call
        self.operations = 0
        self.dead = False
        self._lock = threading.Lock()  # a saver writes several objects in parallel

    def _run(self, operation: Callable[[], object], half: Callable[[], object] | None = None) -> object:
        if self.dead:
            raise Died
        with self._lock:
            number, self.operations = self.operations, self.operations + 1
        if number != self.at_operation:
            return operation()
        kind, _, when = self.fault.partition(" ")
        if kind == "lies":
            return (half or operation)()
        if kind == "calls":
            return self._call(operation, when)
        if kind == "twice" or when == "after":
            operation()
        if kind == "twice":
            return operation()
        if kind == "error":
            raise StorageError("injected")
        if when == "within" and half is not None:
            half()
        self.dead = True
        raise Died

    def _call(self, operation: Callable[[], object], when: str) -> object:
        if when == "before":
            self.call()
        result = operation()
        if when == "after":
            self.call()
        return result

    def read(self, key: str) -> bytes:
        return self._run(lambda: super(FaultyStorage, self).read(key))  # type: ignore[return-value]

    def size(self, key: str) -> int:
        return self._run(lambda: super(FaultyStorage, self).size(key))  # type: ignore[return-value]

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        return self._run(lambda: super(FaultyStorage, self).read_into(key, start, buffer))  # type: ignore[return-value]

    def write(self, key: str, data: bytes | memoryview) -> None:
        plain = super()
        self._run(lambda: plain.write(key, data), lambda: plain.write(key, data[: len(data) // 2]))

    def create(self, key: str, data: bytes, **options: Any) -> None:
        plain = super()
        self._run(
            lambda: plain.create(key, data, **options), lambda: plain.create(key, data[: len(data) // 2], **options)
        )

    def listing(self, prefix: str = "") -> dict[str, Entry]:
        return self._run(lambda: super(FaultyStorage, self).listing(prefix))  # type: ignore[return-value]

    def delete(self, key: str) -> None:
        self._run(lambda: super(FaultyStorage, self).delete(key))

    def delete_if(self, key: str, data: bytes) -> bool:
        return self._run(lambda: super(FaultyStorage, self).delete_if(key, data))  # type: ignore[return-value]

    def delete_tree(self, prefix: str) -> None:
        # Object by object, as object stores do it: a killed process leaves some.
        for key in super().list(prefix):
            self._run(lambda key=key: super(FaultyStorage, self).delete(key))  # type: ignore[misc]


EVERY = [pytest.param(2, id="sampled"), pytest.param(1, id="all", marks=pytest.mark.chaos)]
"""Inject the fault at every second operation, or at each one."""
WHEN = ["before", pytest.param("after", marks=pytest.mark.chaos)]
"""Before an operation, or after it: almost the same moment as before the next one."""


def new_folder() -> str:
    """Returns an empty folder in memory, and removes all others: a listing takes time for each."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    return f"memory://{uuid.uuid4().hex}"


def ranks_of_many_blocks(storage: Callable[[int], Storage], world_size: int, *, keep: int = 2) -> Ranks:
    """Returns ranks that write several objects each. Use it with the fixture `quick_ranks`."""
    ranks = Ranks(storage, world_size, keep=keep)
    for rank_saver in ranks.savers:
        rank_saver._writer._blocks._object_bytes = 200
    return ranks


QUICK: list[tuple[Any, str, Any]] = [
    (saver, "MAILBOX_POLL_S", 0.001),
    (saver, "SAVE_HEARTBEAT_S", 0.02),
    (saver, "FAILED_RANK_S", 0.2),
    (planning, "BLOCK_BYTES", 128),
]
"""Patches: short intervals and timeouts of saves, and small blocks."""


def save_until_killed(uri: str, folder: Path, rank: int, attempt: str, when: str, at: int) -> None:
    """Runs one of two ranks in this process, and sends it SIGKILL before or after an operation of its save."""
    for patch in QUICK:
        setattr(*patch)
    faulty = FaultyStorage(uri, f"calls {when}", at, lambda: os.kill(os.getpid(), signal.SIGKILL))
    ranks = ranks_of_many_blocks(lambda _: faulty, 2)
    ranks.mailbox = FileMailbox(folder)
    ranks.begin(3, of=[rank], attempt=attempt)
    ranks.savers[rank].wait()
