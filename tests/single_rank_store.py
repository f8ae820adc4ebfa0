"""Commits of a process that is alone."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from elastic_ddp.checkpoint import CheckpointStore, Commit, Retention
from elastic_ddp.checkpoint.manifest import attempt_prefix, check_record
from elastic_ddp.checkpoint.writer import StateWriter
from elastic_ddp.errors import CheckpointError, StorageError
from elastic_ddp.storage.storage import Storage


class SingleRankStore(CheckpointStore):
    """Saves whole states, in this thread, and loads them."""

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
        """Commit a state that one process holds whole. Returns when the commit is durable.

        A step is committed once: if it is already, by an attempt that verifies, that commit is returned and nothing
        is written.

        Args:
            state: as for `StateWriter.stage`.
            step: Steps that the state has behind it.
            record: Facts to keep in the manifest; JSON values.
            fence: See `complete`.

        Raises:
            CheckpointError: the state or the record holds something that cannot be kept.
            StorageError: the storage failed. The commit may or may not exist; saving again settles it.
        """
        # Refused before anything is written: a state or a record that cannot be kept.
        check_record(record, step=step)
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
        """The newest commit whose contents verify, with its state; None if there is none.

        Raises:
            StorageError: the storage could not be read. That is no reason to fall back: an outage would throw away
                good commits.
        """
        for commit in self.candidates():
            try:
                return commit, self.load(commit)
            except FileNotFoundError:
                continue
            except CheckpointError as error:
                self.reject(commit.key, commit.attempt, error)
        return None
