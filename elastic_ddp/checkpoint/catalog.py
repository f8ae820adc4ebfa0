"""Finds, verifies and reads commits, and sets bad ones aside."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from elastic_ddp.checkpoint.manifest import Commit, committed_steps, manifest_key, set_aside_key
from elastic_ddp.checkpoint.pieces import pieces_of
from elastic_ddp.checkpoint.reader import allocate_state, build_state, read_pieces, read_twice
from elastic_ddp.checkpoint.record import different_runs
from elastic_ddp.errors import CheckpointError, StorageError, shorten
from elastic_ddp.storage.folder import Entry
from elastic_ddp.storage.storage import Storage

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bad:
    """A commit that fails verification or cannot be read. `attempt` is None if the manifest does not name it."""

    attempt: str | None
    error: CheckpointError
    may_be_good: bool
    """Whether the commit cannot be read, or belongs to another run."""


class CommitCatalog:
    """The commits of one run, for a process that reads them.

    Args:
        storage: a folder for commits only.
        on_reject: called with the key of each rejected commit, and the reason.

    Attributes:
        rejected: keys and reasons of the commits that were rejected since candidates were last asked for.
    """

    def __init__(self, storage: Storage, on_reject: Callable[[str, str], object] = lambda key, reason: None) -> None:
        self._storage = storage
        self._on_reject = on_reject
        self.rejected: list[tuple[str, str]] = []
        self._attempts: dict[str, str | None] = {}  # of rejected commits, by key

    def latest(self) -> Commit | None:
        """Returns the newest complete commit, or None: its manifest verifies, and every object has its size."""
        return next(self.candidates(), None)

    def load(self, commit: Commit, components: Collection[str] | None = None) -> dict[str, Any]:
        """Returns the state of a commit, or some of its components, on the CPU. Verifies all checksums.

        Raises:
            CheckpointError: an object is missing or does not verify.
            ConfigError: the host has too little memory.
            FileNotFoundError: the commit was removed meanwhile.
        """
        with self._unless_removed(commit):
            skeleton = self.skeleton(commit)
            tensors, targets = allocate_state(commit, components)
            for _ in read_pieces(self._storage, pieces_of(commit, tensors), targets):
                pass
            return build_state(skeleton, tensors, components)

    def verify(self, commit: Commit) -> None:
        """Reads and verifies every byte of a commit.

        Raises:
            CheckpointError: an object is missing or does not verify.
            FileNotFoundError: the commit was removed meanwhile.
        """
        with self._unless_removed(commit):
            self.skeleton(commit)
            for _ in read_pieces(self._storage, pieces_of(commit, commit.tensors)):
                pass

    @contextmanager
    def _unless_removed(self, commit: Commit) -> Iterator[None]:
        """Raises FileNotFoundError instead of CheckpointError if the commit has been removed: manifests go first."""
        try:
            yield
        except CheckpointError:
            self._storage.size(commit.key)
            raise

    def skeleton(self, commit: Commit) -> bytes:
        """Returns the bytes of a commit's skeleton, verified.

        Raises:
            CheckpointError: the skeleton is missing, does not verify, or cannot be read.
        """

        def read() -> bytes:
            try:
                data = self._storage.read(commit.state.key)
            except FileNotFoundError as error:
                raise CheckpointError(f"{commit.state.key} is missing") from error
            commit.state.check(data)
            return data

        return read_twice(self._storage, commit.state.key, read)

    def complete_skeleton(self, commit: Commit) -> bytes:
        """Returns the skeleton of a commit, and checks that the commit is complete, both in one round trip.

        Raises:
            CheckpointError: the commit is not complete, or as `skeleton`.
            FileNotFoundError: the commit was removed meanwhile.
        """
        with self._unless_removed(commit), ThreadPoolExecutor(1) as executor:
            skeleton = executor.submit(self.skeleton, commit)
            try:
                self._check_present(commit, {})
                return skeleton.result()
            finally:
                del skeleton  # breaks a cycle: the future holds its error, whose traceback holds this frame

    def steps(self) -> list[int]:
        """Returns the steps that have a manifest, newest first."""
        return committed_steps(self._storage.list("commits"))

    def num_set_aside(self) -> int:
        """Returns the number of bad commits that were set aside."""
        return len(self._storage.list("set-aside"))

    def all_commits(self) -> list[tuple[int, Commit | StorageError]]:
        """Returns the steps with a manifest, newest first, each with its complete commit or why it is bad."""
        commits = ((step, self.complete_at(step)) for step in self.steps())
        return [(step, item.error if isinstance(item, Bad) else item) for step, item in commits if item is not None]

    def candidates(self) -> Iterator[Commit]:
        """Yields complete commits, as `manifests` does."""
        return self._usable(self.complete_at, None)

    def manifests(self, only: int | None = None) -> Iterator[Commit]:
        """Clears `rejected`, and yields commits whose manifests verify, newest first; with `only`, of one step."""
        return self._usable(self._manifest_at, only)

    def _usable(self, read: Callable[[int], Commit | Bad | None], only: int | None) -> Iterator[Commit]:
        self.rejected = []
        self._attempts = {}
        seen: set[int] = set()
        # List again if none was good: a saver may have committed, and removed older commits, since the listing.
        while steps := [step for step in self.steps() if step not in seen and only in (None, step)]:
            for step in steps:
                seen.add(step)
                commit = read(step)
                if isinstance(commit, Bad):
                    self.reject(manifest_key(step), commit.attempt, commit.error)
                elif commit is not None:
                    yield commit

    def complete_at(
        self,
        step: int,
        *,
        listed: Mapping[str, Entry] | None = None,
        record: Mapping[str, Any] | None = None,
        verify: bool = False,
    ) -> Commit | Bad | None:
        """Returns the commit of a step, or why it is not complete; None if it has been removed.

        Args:
            listed: a listing from before. Objects that it lacks are listed again.
            record: a commit of another run than this record's is bad; None for any run.
            verify: whether to verify every byte.
        """
        commit = self._manifest_at(step)
        if not isinstance(commit, Commit):
            return commit
        names = different_runs(record or {}, commit.record)
        if names:
            error = CheckpointError(f"{commit.key} belongs to another run (different {shorten(names, 5)})")
            return Bad(commit.attempt, error, may_be_good=True)
        try:
            with self._unless_removed(commit):
                self._check_present(commit, listed or {})
            if verify:
                self.verify(commit)
        except FileNotFoundError:
            return None
        except CheckpointError as error:
            return Bad(commit.attempt, error, _is_unreadable(error))
        return commit

    def _manifest_at(self, step: int) -> Commit | Bad | None:
        key = manifest_key(step)
        try:
            return read_twice(self._storage, key, lambda: Commit.from_bytes(key, self._storage.read(key)))
        except FileNotFoundError:
            return None
        except CheckpointError as error:
            return Bad(None, error, _is_unreadable(error))

    def _check_present(self, commit: Commit, listed: Mapping[str, Entry]) -> None:
        try:
            commit.check_present(listed)
        except CheckpointError:
            prefix = commit.prefix
            read_twice(self._storage, prefix, lambda: commit.check_present(self._storage.listing(prefix)))

    def set_aside(self, key: str, attempt: str | None, fence: Callable[[], None] = lambda: None) -> None:
        """Moves the manifest of a bad commit to `set-aside/`: its step can be committed again. Its objects stay.

        The manifest is removed only if it is still the bad manifest. A process that is suspended in the removal may
        remove a commit that was made meanwhile.

        Args:
            attempt: the attempt that was found bad; None if the manifest does not name it.
            fence: called right before the removal; raises if this process may no longer remove it.
        """
        try:
            data = self._storage.read(key)
        except FileNotFoundError:
            return  # already set aside
        if _attempt_in(key, data) != attempt:
            return
        [step] = committed_steps([key])
        self._storage.write(set_aside_key(step, attempt, data), data)
        fence()
        self._storage.delete_if(key, data)

    def set_aside_rejected(self, fence: Callable[[], None]) -> None:
        """Sets all rejected commits aside. Where the storage fails, a commit stays, and its reason says so."""
        for number, (key, reason) in enumerate(self.rejected):
            try:
                self.set_aside(key, self._attempts[key], fence)
            except StorageError as error:
                _log.warning("cannot set %s aside: %s", key, error)
                self.rejected[number] = (key, f"{reason}; it cannot be set aside: {error}")

    def reject(self, key: str, attempt: str | None, error: CheckpointError) -> None:
        """Records that a commit is bad; `attempt` is None if its manifest does not name it."""
        reason = str(error)
        self._attempts[key] = attempt
        if (key, reason) not in self.rejected:
            _log.warning("rejected commit %s: %s", key, reason)
            self.rejected.append((key, reason))
            self._on_reject(key, reason)


def _is_unreadable(error: CheckpointError) -> bool:
    return isinstance(error.__cause__, StorageError) and not isinstance(error.__cause__, CheckpointError)


def _attempt_in(key: str, manifest: bytes) -> str | None:
    try:
        return Commit.from_bytes(key, manifest).attempt
    except CheckpointError:
        return None
