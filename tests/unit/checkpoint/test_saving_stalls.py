"""Saves on a storage that hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ddp.checkpoint import Commit, writer
from elastic_ddp.errors import StorageError
from elastic_ddp.storage import watchdog
from elastic_ddp.storage.folder import Entry
from elastic_ddp.storage.storage import Storage
from tests.saving import Ranks, check_commits
from tests.unit.checkpoint.test_checkpoint import restored_step
from tests.unit.faulty import ranks_of_many_blocks


@pytest.fixture(autouse=True)
def _no_thread_of_another_test() -> None:
    """Renames them: they end with their savers, which may wait for garbage collection."""
    for thread in threading.enumerate():
        if thread.name.startswith("save-"):
            thread.name = "of another test"


class HungStorage(Storage):
    """One kind of operation hangs until `release` is set."""

    def __init__(self, uri: Path, kind: str) -> None:
        super().__init__(uri)
        self.kind = kind
        self.release = threading.Event()

    def _wait(self, kind: str) -> None:
        assert kind != self.kind or self.release.wait(60)

    def write(self, key: str, data: bytes | memoryview) -> None:
        self._wait("write")
        super().write(key, data)

    def create(self, key: str, data: bytes, **options: Any) -> None:
        self._wait("create")
        super().create(key, data, **options)

    def listing(self, prefix: str = "") -> dict[str, Entry]:
        self._wait(f"list {prefix.partition('=')[0]}".rstrip())
        return super().listing(prefix)


def threads_of(step: int) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"save-{step}")]


def save_hung(monkeypatch: pytest.MonkeyPatch, ranks: Ranks, timeout_s: float = 0.3) -> Commit | Exception:
    """Returns the outcome of the save of step 1, with a short stall timeout."""
    with monkeypatch.context() as patch:
        patch.setattr(watchdog, "STALL_TIMEOUT_S", timeout_s)
        ranks.begin(1)
        outcome: Commit | Exception = ranks.wait()
    assert not any(saver.is_busy for saver in ranks.savers)
    assert threads_of(1) and all(thread.daemon for thread in threads_of(1)), "they do not keep the process alive"
    return outcome


def check_later(folder: Path, ranks: Ranks, release: Callable[[], None]) -> None:
    """Checks that later saves succeed, before and after the hung one continues, which changes nothing."""
    num_ended = len(ranks.ended)
    ranks.begin(2)
    assert isinstance(ranks.wait(), Commit) and restored_step(Storage(folder)) == 2
    release()
    for thread in threads_of(1):
        thread.join()
    assert len(ranks.ended) == num_ended + 1 and restored_step(Storage(folder)) == 2
    ranks.begin(3)
    assert isinstance(ranks.wait(), Commit)
    check_commits(Storage(folder), 2, 3)


@pytest.mark.parametrize(("rank", "kind"), [(0, "write"), (1, "write"), (0, "list step"), (0, "create")])
def test_a_save_fails_when_the_storage_hangs_and_later_saves_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, kind: str
) -> None:
    hung = HungStorage(tmp_path, kind)
    ranks = Ranks(lambda number: hung if number == rank else Storage(tmp_path), 2)
    outcome = save_hung(monkeypatch, ranks)
    assert isinstance(outcome, StorageError) and f"{tmp_path} hangs" in str(outcome)
    assert restored_step(Storage(tmp_path)) is None
    hung.kind = ""  # later operations do not hang
    check_later(tmp_path, ranks, hung.release.set)


def test_a_commit_remains_when_the_storage_hangs_during_housekeeping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hung = HungStorage(tmp_path, "list")  # of the whole folder
    ranks = Ranks(lambda rank: hung, 2)
    assert isinstance(save_hung(monkeypatch, ranks, 1.5), Commit) and restored_step(Storage(tmp_path)) == 1
    assert "superseded commits stay until the next commit: StorageError" in caplog.text
    hung.kind = ""
    check_later(tmp_path, ranks, hung.release.set)


def test_a_slow_save_that_makes_progress_does_not_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, clock_read = [0.0], threading.Event()

    def clock() -> float:
        if threading.current_thread().name == "save-1":  # the watchdog
            clock_read.set()
        return now[0]

    class SlowStorage(Storage):
        def write(self, key: str, data: bytes | memoryview) -> None:
            clock_read.clear()
            now[0] += 0.6 * watchdog.STALL_TIMEOUT_S
            clock_read.wait(5)
            super().write(key, data)

    monkeypatch.setattr(writer, "PARALLEL_OBJECTS", 1)
    monkeypatch.setattr(watchdog, "STALL_TIMEOUT_S", 0.01)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=clock))
    ranks = ranks_of_many_blocks(lambda rank: SlowStorage(tmp_path), 1)
    ranks.begin(1)
    assert isinstance(ranks.wait(), Commit) and now[0] > 2 * watchdog.STALL_TIMEOUT_S
