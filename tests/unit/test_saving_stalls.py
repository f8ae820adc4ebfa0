"""Saves on a storage that does not answer any more."""

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
from elastic_ddp.storage.storage import Storage
from tests.saving import Ranks, is_whole
from tests.unit.faulty import ranks_of_many_blocks
from tests.unit.test_checkpoint import restored_step


@pytest.fixture(autouse=True)
def _no_thread_of_another_test() -> None:
    """Those end with their savers, which may be garbage that nobody has collected yet."""
    for each in threading.enumerate():
        if each.name.startswith("save-"):
            each.name = "of another test"


class Hung(Storage):
    """Some kind of operation hangs until it is let go."""

    def __init__(self, uri: Path, kind: str) -> None:
        super().__init__(uri)
        self.kind = kind
        self.go = threading.Event()

    def _ask(self, kind: str) -> None:
        assert kind != self.kind or self.go.wait(60)

    def write(self, key: str, data: bytes | memoryview) -> None:
        self._ask("write")
        super().write(key, data)

    def create(self, key: str, data: bytes, **options: Any) -> None:
        self._ask("create")
        super().create(key, data, **options)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        self._ask(f"list {prefix.partition('=')[0]}".rstrip())
        return super().sizes(prefix)


def threads_of(step: int) -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith(f"save-{step}")]


def save_hung(monkeypatch: pytest.MonkeyPatch, ranks: Ranks, patience_s: float = 0.3) -> Commit | Exception:
    """What comes of the save of step 1, with little patience."""
    with monkeypatch.context() as patch:
        patch.setattr(watchdog, "STALL_TIMEOUT_S", patience_s)
        ranks.begin(1)
        outcome: Commit | Exception = ranks.wait()
    assert not any(saver.is_busy for saver in ranks.savers)
    assert threads_of(1) and all(each.daemon for each in threads_of(1)), "and no process waits for one to end"
    return outcome


def check_later(folder: Path, ranks: Ranks, let_go: Callable[[], None]) -> None:
    """Others are made meanwhile and afterwards, and nothing comes of the one that was given up."""
    told = len(ranks.ended)
    ranks.begin(2)
    assert isinstance(ranks.wait(), Commit) and restored_step(Storage(folder)) == 2
    let_go()
    for each in threads_of(1):
        each.join()
    assert len(ranks.ended) == told + 1 and restored_step(Storage(folder)) == 2
    ranks.begin(3)
    assert isinstance(ranks.wait(), Commit)
    is_whole(Storage(folder), 2, 3)


@pytest.mark.parametrize(("rank", "kind"), [(0, "write"), (1, "write"), (0, "list step"), (0, "create")])
def test_a_save_in_which_the_storage_hangs_fails_and_later_ones_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, kind: str
) -> None:
    hung = Hung(tmp_path, kind)
    ranks = Ranks(lambda each: hung if each == rank else Storage(tmp_path), 2)
    outcome = save_hung(monkeypatch, ranks)
    assert isinstance(outcome, StorageError) and f"{tmp_path} hangs" in str(outcome)
    assert restored_step(Storage(tmp_path)) is None
    hung.kind = ""  # for whoever asks from now on
    check_later(tmp_path, ranks, hung.go.set)


def test_a_commit_stands_when_the_storage_hangs_while_others_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hung = Hung(tmp_path, "list")  # of all that there is
    ranks = Ranks(lambda rank: hung, 2)
    assert isinstance(save_hung(monkeypatch, ranks, 1.5), Commit) and restored_step(Storage(tmp_path)) == 1
    assert "what is not kept is left until the next commit: StalledError" in caplog.text
    hung.kind = ""
    check_later(tmp_path, ranks, hung.go.set)


def test_a_save_that_gets_on_is_not_given_up_however_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, looked = [0.0], threading.Event()

    def clock() -> float:
        if threading.current_thread().name == "save-1":  # it waits for the others
            looked.set()
        return now[0]

    class Slow(Storage):
        def write(self, key: str, data: bytes | memoryview) -> None:
            looked.clear()
            now[0] += 0.6 * watchdog.STALL_TIMEOUT_S
            looked.wait(5)
            super().write(key, data)

    monkeypatch.setattr(writer, "PARALLEL_OBJECTS", 1)
    monkeypatch.setattr(watchdog, "STALL_TIMEOUT_S", 0.01)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=clock))
    ranks = ranks_of_many_blocks(lambda rank: Slow(tmp_path), 1)
    ranks.begin(1)
    assert isinstance(ranks.wait(), Commit) and now[0] > 2 * watchdog.STALL_TIMEOUT_S
