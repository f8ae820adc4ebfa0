"""Commits of a single process, without a saver."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from elastic_ddp.checkpoint import CheckpointStore, Commit, Retention
from elastic_ddp.checkpoint.manifest import attempt_prefix
from elastic_ddp.checkpoint.writer import StateWriter
from elastic_ddp.errors import CheckpointError, StorageError
from elastic_ddp.storage.storage import Storage


class SingleRankStore(CheckpointStore):
    """Saves complete states in this thread, and loads them."""

    def __init__(self, storage: Storage, *, keep: Retention | int) -> None:
        super().__init__(storage, keep=keep)
        self._writer = StateWriter()

    def save(
        self,
        state: dict[str, Any],
        *,
        step: int,
        record: dict[str, Any],
        fence: Callable[[], None] = lambda: None,
    ) -> Commit:
        """Commits a state that this process holds completely. Returns when the commit is durable.

        If the step has a commit that verifies, it returns that commit and writes nothing.

        Args:
            state: as for `StateWriter.stage`.
            step: number of steps done.
            record: JSON facts to store in the manifest.
            fence: see `complete`.

        Raises:
            CheckpointError: the state or the record has values that cannot be saved.
            StorageError: the storage failed. The commit may or may not exist.
        """
        self._writer.stage(state, rank=0, world_size=1)
        if (existing := self._existing(step, record, fence)) is not None:
            return existing
        attempt = uuid.uuid4().hex
        prefix = attempt_prefix(step, attempt)
        try:
            part = self._writer.write(self._storage, prefix)
        except StorageError:
            self.discard(prefix)
            raise
        return self.complete(
            step=step, attempt=attempt, parts=[part], kinds=self._writer.kinds, record=record, fence=fence
        )

    def load_latest(self) -> tuple[Commit, dict[str, Any]] | None:
        """Returns the newest commit whose contents verify, with its state; None if there is none.

        Raises:
            StorageError: the storage cannot be read.
        """
        for commit in self.candidates():
            try:
                return commit, self.load(commit)
            except FileNotFoundError:
                continue
            except CheckpointError as error:
                self.reject(commit.key, commit.attempt, error)
        return None
