"""Saves of several ranks, simulated by threads of one process."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from elastic_ddp.checkpoint import CheckpointStore, Commit, Save, Saver
from elastic_ddp.storage.storage import Storage
from elastic_ddp.storage.watchdog import WatchedStorage
from tests.unit.checkpoint.test_checkpoint import keys_of, make_state, restored_step

PART_BYTES = 5 << 20
"""Smallest part of a multipart upload to S3."""


class LocalMailbox:
    """A mailbox for ranks that are threads of one process."""

    def __init__(self) -> None:
        self.messages: dict[str, str] = {}

    def put(self, key: str, text: str) -> None:
        assert len(text.encode()) <= 8 << 20, "the limit of a value in torch's store"
        self.messages[key] = text

    def get(self, key: str) -> str | None:
        return self.messages.get(key)

    def remove(self, key: str) -> None:
        self.messages.pop(key, None)


class FileMailbox:
    """A mailbox for ranks that are threads or processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, key: str, text: str) -> None:
        written = self._folder / f"{uuid.uuid4().hex}.tmp"
        written.write_text(text)
        written.replace(self._file(key))

    def get(self, key: str) -> str | None:
        try:
            return self._file(key).read_text()
        except FileNotFoundError:
            return None

    def remove(self, key: str) -> None:
        self._file(key).unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        return self._folder / key.replace("/", "-")


class Ranks:
    """The savers of several ranks, which save the same states to one storage."""

    def __init__(self, storage: Callable[[int], Storage], world_size: int, *, keep: int = 2) -> None:
        self.storages = [WatchedStorage(storage(rank)) for rank in range(world_size)]
        self.savers = [
            Saver(storage, CheckpointStore(storage, keep=keep), of_rank_0=frozenset({"user"}))
            for storage in self.storages
        ]
        self.mailbox: LocalMailbox | FileMailbox = LocalMailbox()
        self.ended: list[Commit | Exception] = []

    def begin(
        self,
        step: int,
        *,
        of: list[int] | None = None,
        fence: Callable[[], None] = lambda: None,
        state: Any = None,
        attempt: str | None = None,
    ) -> str:
        attempt = attempt or uuid.uuid4().hex
        for rank in of if of is not None else range(len(self.savers)):
            save = Save(
                step=step,
                attempt=attempt,
                world_size=len(self.savers),
                rank=rank,
                mailbox=self.mailbox,
                record={"step": step},
                fence=fence,
                on_end=self.ended.append,
            )
            self.savers[rank].begin(state or make_state(step), save)
        return attempt

    def wait(self) -> Any:
        """Returns the outcome of the newest save."""
        for saver in self.savers:
            saver.wait()
        return self.ended[-1]


def save_on_ranks(storages: Sequence[Storage], step: int, *, state: dict[str, Any] | None = None) -> Commit | Exception:
    """Returns the outcome of a save by one rank for each storage."""
    ranks = Ranks(lambda rank: storages[rank], len(storages))
    ranks.begin(step, state=state)
    outcome: Commit | Exception = ranks.wait()
    return outcome


def large_state(step: int, num_parts: int) -> dict[str, Any]:
    """Returns a state like `make_state`, with additional tensors of `PART_BYTES`."""
    generator = torch.Generator().manual_seed(step)
    large = {
        f"tensor{number}": torch.randint(256, (PART_BYTES,), dtype=torch.uint8, generator=generator)
        for number in range(num_parts)
    }
    return {**make_state(step), "large": large}


def check_commits(storage: Storage, *steps: int) -> None:
    """Checks that exactly these commits exist, that the newest is restored, and that no other object exists."""
    assert restored_step(storage) == steps[-1]
    commits = [commit for _, commit in CheckpointStore(storage, keep=9).all_commits()]
    assert all(isinstance(commit, Commit) for commit in commits)
    assert storage.list() == sorted(key for commit in commits for key in keys_of(commit))
    assert [commit.step for commit in commits] == [*reversed(steps)]
