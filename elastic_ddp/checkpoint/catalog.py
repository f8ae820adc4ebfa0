"""The commits that there are: found, verified, read, and set aside where they are bad."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from elastic_ddp.checkpoint.confirmed_read import read_twice
from elastic_ddp.checkpoint.manifest import Commit, committed_steps, manifest_key, set_aside_key
from elastic_ddp.checkpoint.pieces import pieces_of
from elastic_ddp.checkpoint.reader import allocate_state, build_state, meta_tensors, read_manifest, read_pieces
from elastic_ddp.errors import CheckpointError, StorageError
from elastic_ddp.storage.storage import Storage

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bad:
    """A commit that does not verify, or cannot be read."""

    attempt: str | None
    """None if the manifest does not say which one it is of."""
    error: CheckpointError


class CommitCatalog:
    """The commits of one run, for whoever reads them.

    Args:
        storage: A folder for commits alone.
        on_reject: Told of the key and the reason of every commit that is passed over, when it is.
    """

    def __init__(self, storage: Storage, on_reject: Callable[[str, str], object] = lambda key, reason: None) -> None:
        self._storage, self._on_reject = storage, on_reject
        self.rejected: list[tuple[str, str]] = []
        """Key of the manifest and the reason for every commit that was passed over since it was last asked for
        candidates."""
        self._attempts: dict[str, str | None] = {}
        """Of those that do not verify, by key."""

    def latest(self) -> Commit | None:
        """The newest commit that is complete: its manifest verifies and every object has its size."""
        return next(self.candidates(), None)

    def load(self, commit: Commit, components: Collection[str] | None = None) -> dict[str, Any]:
        """The state of a commit, or some components of it, on the CPU; checksums are verified as it is read.

        Raises:
            CheckpointError: names the object that is missing or is not what was committed.
            ConfigError: this machine has not the memory for it.
            FileNotFoundError: the commit was removed meanwhile.
        """
        with self._unless_removed(commit):
            skeleton = self.skeleton(commit)
            tensors, targets = allocate_state(commit, components)
            for _ in read_pieces(self._storage, pieces_of(commit, tensors), targets):
                pass
            return build_state(commit, skeleton, tensors, components)

    def verify(self, commit: Commit) -> None:
        """Reads every byte of a commit, and sees that they make up a state.

        Raises:
            CheckpointError: names the object that is missing or is not what was committed, or says what makes it none.
            FileNotFoundError: the commit was removed meanwhile.
        """
        with self._unless_removed(commit):
            build_state(commit, self.skeleton(commit), meta_tensors(commit))
            for _ in read_pieces(self._storage, pieces_of(commit, commit.tensors)):
                pass

    @contextmanager
    def _unless_removed(self, commit: Commit) -> Iterator[None]:
        """What is wrong with a commit says nothing of it if it is not there any more: a live run removes what it does
        not keep, the manifest first."""
        try:
            yield
        except CheckpointError:
            self._storage.size(commit.key)
            raise

    def skeleton(self, commit: Commit) -> bytes:
        """What of a commit's state is no tensor, verified.

        Raises:
            CheckpointError: it is missing, is not what was committed, or cannot be read.
        """

        def read() -> bytes:
            try:
                data = self._storage.read(commit.state.key, commit.state.size)
            except FileNotFoundError as error:
                raise CheckpointError(f"{commit.state.key} is missing") from error
            commit.state.check(data)
            return data

        return read_twice(self._storage, commit.state.key, read)

    def whole(self, commit: Commit) -> bytes:
        """The skeleton of a commit that is complete. Its objects are listed while that is read, as a storage that is
        far away takes its time for each.

        Raises:
            CheckpointError: it is not complete, or as `skeleton`.
            FileNotFoundError: the commit was removed meanwhile.
        """
        with self._unless_removed(commit), ThreadPoolExecutor(1) as beside:
            skeleton = beside.submit(self.skeleton, commit)
            try:
                self._check_present(commit)
                return skeleton.result()
            finally:
                del skeleton  # it has its error, which has this frame

    def steps(self) -> list[int]:
        """Those that have a commit, newest first, whether it is complete or not."""
        return committed_steps(self._storage.list("commits"))

    def num_set_aside(self) -> int:
        """How many commits were set aside, as they did not verify."""
        return len(self._storage.list("set-aside"))

    def all_commits(self) -> list[tuple[int, Commit | StorageError]]:
        """The steps that have a commit, newest first, each with the commit or with why it is not complete, for all that
        can be read."""
        found = ((step, self.complete_at(step)) for step in self.steps())
        return [(step, each.error if isinstance(each, Bad) else each) for step, each in found if each is not None]

    def candidates(self, only: int | None = None) -> Iterator[Commit]:
        """Complete commits, like `manifests`."""
        found = self.manifests(only)
        return (each for each in found if self._unless_bad(each.step, self._if_complete(each)) is not None)

    def manifests(self, only: int | None = None) -> Iterator[Commit]:
        """Commits whose manifests verify, newest first, or the one at a step; looked at one by one, as the first is
        nearly always the one wanted. None counts as rejected when it is called: what could not be read before may be
        read now."""
        self.rejected, self._attempts = [], {}
        return self._manifests(only)

    def _manifests(self, only: int | None) -> Iterator[Commit]:
        seen: set[int] = set()
        # Listed again when none was good: a saver may have committed and cleaned up behind the first listing.
        while steps := [step for step in self.steps() if step not in seen and only in (None, step)]:
            for step in steps:
                seen.add(step)
                commit = self._unless_bad(step, self._manifest_at(step))
                if commit is not None:
                    yield commit

    def _unless_bad(self, step: int, found: Commit | Bad | None) -> Commit | None:
        """Rejects a bad one."""
        if isinstance(found, Bad):
            self.reject(manifest_key(step), found.attempt, found.error)
            return None
        return found

    def complete_at(self, step: int) -> Commit | Bad | None:
        """The commit of a step, or why it is not complete; None if it was removed since it was listed."""
        found = self._manifest_at(step)
        return self._if_complete(found) if isinstance(found, Commit) else found

    def _manifest_at(self, step: int) -> Commit | Bad | None:
        key = manifest_key(step)
        try:
            return read_twice(self._storage, key, lambda: read_manifest(self._storage, key))
        except FileNotFoundError:
            return None
        except CheckpointError as error:
            return Bad(None, error)

    def _if_complete(self, commit: Commit) -> Commit | Bad | None:
        try:
            with self._unless_removed(commit):
                self._check_present(commit)
        except FileNotFoundError:
            return None
        except CheckpointError as error:
            return Bad(commit.attempt, error)
        return commit

    def _check_present(self, commit: Commit) -> None:
        prefix = commit.prefix
        read_twice(self._storage, prefix, lambda: commit.check_present(self._storage.sizes(prefix)))

    def set_aside(self, key: str, attempt: str | None, fence: Callable[[], None] = lambda: None) -> None:
        """Has a commit that does not verify out of the way, so that its step can be committed again. It is kept, with
        its objects, and found under `set-aside/`.

        What was committed there meanwhile stays: the manifest goes only if it is still the one that was found bad. On
        AWS nothing gets between the last look at it and the removal, which may fail then; elsewhere, a process that
        stood still in just that moment, with the fence behind it, until others had set the same commit aside and made
        it again, would remove theirs. See `Storage.delete_if`.

        Args:
            key: of the manifest.
            attempt: that was found bad; None if the manifest does not say which one it is of.
            fence: called right before it is removed; raises if this process may not do that any more.
        """
        try:
            data = self._storage.read(key)
        except FileNotFoundError:
            return  # it was already
        if _attempt_in(key, data) != attempt:
            return
        [step] = committed_steps([key])
        self._storage.write(set_aside_key(step, attempt, data), data)
        fence()
        self._storage.delete_if(key, data)

    def set_aside_rejected(self, fence: Callable[[], None]) -> None:
        """The same for all that were passed over. What the storage fails at stays, and that is added to the reason: the
        next restore finds it again."""
        for place, (key, reason) in enumerate(self.rejected):
            try:
                self.set_aside(key, self._attempts[key], fence)
            except StorageError as error:
                _log.warning("%s stays where it is: %s", key, error)
                self.rejected[place] = (key, f"{reason}; it stays where it is: {error}")

    def reject(self, key: str, attempt: str | None, error: CheckpointError) -> None:
        """A commit is passed over; of which attempt, if its manifest says so."""
        reason = str(error)
        self._attempts[key] = attempt
        if (key, reason) not in self.rejected:
            _log.warning("the commit %s is passed over: %s", key, reason)
            self.rejected.append((key, reason))
            self._on_reject(key, reason)


def _attempt_in(key: str, manifest: bytes) -> str | None:
    try:
        return Commit.from_bytes(key, manifest).attempt
    except CheckpointError:
        return None
