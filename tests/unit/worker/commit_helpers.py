"""Helpers for tests of a run's commits on one worker."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ddp.checkpoint import Commit, CommitCatalog
from elastic_ddp.errors import StorageError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.job import COMMITS
from elastic_ddp.worker.run import Run
from elastic_ddp.worker.step import Step
from tests.inside_run import wait_for_save
from tests.single_rank_store import SingleRankStore

RUNNING: Any = SimpleNamespace(aborted=False)
"""The process group of a generation that has not broken."""


def commits_in(folder: Path) -> Storage:
    return Storage(folder / "run").at(COMMITS)


def commit(folder: Path, step: int, **record: Any) -> None:
    """Adds a commit of `step` steps with this record."""
    SingleRankStore(commits_in(folder), keep=2).save({"user": {}}, step=step, record=record)


def newest_record(folder: Path) -> dict[str, Any]:
    newest = CommitCatalog(commits_in(folder)).latest()
    assert newest is not None
    return newest.record


def metrics_by_step(folder: Path) -> dict[int, dict[str, Any]]:
    """The metrics in the record of each commit, newest first."""
    commits = CommitCatalog(commits_in(folder)).all_commits()
    return {step: found.record["metrics"] for step, found in commits if isinstance(found, Commit)}


def wait_for_saves(run: Run, then: Callable[[Step], None] = lambda step: None) -> Callable[[Step], None]:
    """In every step, waits for the save of the step before, and then calls `then`."""

    def in_step(step: Step) -> None:
        wait_for_save(run)
        then(step)

    return in_step


def break_storage(monkeypatch: pytest.MonkeyPatch, is_broken: Callable[[], bool]) -> None:
    """Makes writes of states fail while `is_broken` returns true."""
    write = Storage.write

    def fail(storage: Storage, key: str, data: bytes | memoryview) -> None:
        if key.startswith("step=") and is_broken():
            raise StorageError(f"cannot write {key!r}: no space left") from OSError(errno.ENOSPC, "no space left")
        write(storage, key, data)

    monkeypatch.setattr(Storage, "write", fail)


def delay_writes(monkeypatch: pytest.MonkeyPatch, prefix: str = "step=") -> threading.Event:
    """Makes writes of keys with this prefix wait for the event that it returns."""
    may_write, write = threading.Event(), Storage.write

    def wait_and_write(storage: Storage, key: str, data: bytes | memoryview) -> None:
        assert not key.startswith(prefix) or may_write.wait(60)
        write(storage, key, data)

    monkeypatch.setattr(Storage, "write", wait_and_write)
    return may_write
