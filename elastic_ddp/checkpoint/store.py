"""Saving, finding, verifying and removing commits in a storage."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from typing import Any

from elastic_ddp.checkpoint.commits import (
    Commit,
    attempt_prefix,
    check_record,
    committed_steps,
    manifest_key,
    set_aside_key,
)
from elastic_ddp.checkpoint.housekeeping import Housekeeping
from elastic_ddp.checkpoint.reading import pieces_of, read_manifest, state_of, state_to_fill
from elastic_ddp.checkpoint.retention import Retention
from elastic_ddp.checkpoint.verdicts import confirmed, confirmed_pieces
from elastic_ddp.checkpoint.writing import Part, StateWriter, put_together
from elastic_ddp.errors import CheckpointError, StorageError, UnreadableError, described
from elastic_ddp.storage import Storage

_log = logging.getLogger(__name__)
_PUBLISH_TRIES = 3


@dataclass(frozen=True)
class _Bad:
    """A commit that does not verify, or cannot be read."""

    attempt: str | None
    """None if the manifest does not say which one it is of."""
    error: CheckpointError | UnreadableError


class CheckpointStore:
    """The commits of one run.

    A commit exists once its manifest does, and the manifest is written after everything it lists. Whatever dies or
    fails, at whatever moment, a reader finds one of the states that were saved, whole.

    Args:
        storage: A folder for commits alone.
        keep: Which commits stay when a newer one is complete, or how many of the newest.
    """

    def __init__(self, storage: Storage, *, keep: Retention | int) -> None:
        self._storage = storage
        self._housekeeping = Housekeeping(keep if isinstance(keep, Retention) else Retention(last=keep))
        self._writer = StateWriter()
        self.rejected: list[tuple[str, str]] = []
        """Key of the manifest and the reason for every commit that this store has passed over since it was last asked
        for candidates."""
        self._attempts: dict[str, str | None] = {}
        """Of those that do not verify, by key."""

    def through(self, storage: Storage) -> CheckpointStore:
        """This one, with the same folder asked in another way. Each passes over commits for itself."""
        other = copy(self)
        other._storage, other.rejected, other._attempts = storage, [], {}
        return other

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
        if (existing := self._existing(step, fence)) is not None:
            return existing
        attempt = uuid.uuid4().hex
        prefix = attempt_prefix(step, attempt)
        try:
            part = self._writer.write(self._storage, prefix)
        except StorageError:
            self.discard(prefix)
            raise
        return self.complete(
            step=step, attempt=attempt, parts=[part], names=self._writer.names, record=record, fence=fence
        )

    def complete(
        self,
        *,
        step: int,
        attempt: str,
        parts: Sequence[Part],
        names: Iterable[str],
        record: dict[str, Any],
        fence: Callable[[], None],
        is_current: Callable[[], bool] = lambda: True,
        on_commit: Callable[[Commit], object] = lambda commit: None,
    ) -> Commit:
        """Commits what all ranks have written; one of them calls this. Returns when the commit is durable.

        A step is committed once: another attempt's commit is returned if that came first and verifies, and nothing is
        left of this one. What is not kept is removed afterwards; failing at that is logged and tried again with the
        next commit.

        Args:
            step: Steps that the state has behind it.
            attempt: 32 hexadecimal digits that no other has.
            parts: What was written, by rank.
            names: Of all tensors that should have been.
            record: Facts to keep in the manifest; JSON values.
            fence: Called when all is there but the manifest, right before that is stored and whenever that is tried
                again, and before anything is removed or set aside; raises if this saver may not commit any more, and
                then it does none of that.
            is_current: Whether the generation that has written it goes on. If not, what is not kept is left to those
                that came after it.
            on_commit: Told of the commit as soon as it is durable, before anything is removed.

        Raises:
            CheckpointError: something was not written or is not there any more, or the record cannot be kept.
            StorageError: the storage failed. The commit may or may not exist.
        """
        try:
            check_record(record, step=step)
            objects, tensors = put_together(parts, names)
            state = next((part.state for part in parts if part.state is not None), None)
            if state is None:
                raise CheckpointError("not all that belongs to the state was written: its skeleton is missing")
            commit = Commit(step=step, attempt=attempt, state=state, objects=objects, tensors=tensors, record=record)
            manifest = commit.to_bytes()
            commit = Commit.from_bytes(commit.key, manifest)
            self._check_stored(commit)
            fence()  # last: a listing may take as long as it takes others to go on without this one
        except BaseException:
            self.discard(attempt_prefix(step, attempt))
            raise
        # From here on a failure leaves the objects alone: the manifest may have been stored and its answer lost.
        commit = self._publish(commit, manifest, fence)
        on_commit(commit)
        self._tidy(commit, fence, is_current)
        return commit

    def _check_stored(self, commit: Commit) -> None:
        """All that was written is there. The storage may have said too much, and others, who are at a later step, may
        have removed it."""
        try:
            commit.check_present(self._storage.sizes(commit.prefix))
        except CheckpointError as error:
            raise CheckpointError(f"what was written of step {commit.step} is not all there: {error}") from error

    def discard(self, prefix: str) -> None:
        """Removes what was written of an attempt that failed. Failing at that is no matter: what failed first is to be
        told, and the next commit removes it."""
        with suppress(StorageError):
            self._storage.delete_tree(prefix)

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
            tensors, targets = state_to_fill(commit, components)
            for _ in confirmed_pieces(self._storage, pieces_of(commit, tensors), targets):
                pass
            return state_of(commit, skeleton, tensors, components)

    def verify(self, commit: Commit) -> None:
        """Reads every byte of a commit.

        Raises:
            CheckpointError: names the object that is missing or is not what was committed.
            UnreadableError: names the object that cannot be read, while others can.
            FileNotFoundError: the commit was removed meanwhile.
        """
        with self._unless_removed(commit):
            self.skeleton(commit)
            for _ in confirmed_pieces(self._storage, pieces_of(commit, commit.tensors)):
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
            CheckpointError: it is missing, or is not what was committed.
            UnreadableError: it cannot be read, and others can.
        """

        def read(storage: Storage) -> bytes:
            try:
                data = storage.read(commit.state.key)
            except FileNotFoundError as error:
                raise CheckpointError(f"{commit.state.key} is missing") from error
            commit.state.check(data)
            return data

        return confirmed(self._storage, commit.state.key, read)

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

    def all_commits(self) -> list[tuple[int, Commit | StorageError]]:
        """The steps that have a commit, newest first, each with the commit or with why it is not complete, for all that
        can be read."""
        found = ((step, self._complete(step)) for step in committed_steps(self._storage.list("commits")))
        return [(step, each.error if isinstance(each, _Bad) else each) for step, each in found if each is not None]

    def candidates(self, only: int | None = None) -> Iterator[Commit]:
        """Complete commits, newest first, or the one at a step; looked at one by one, as the first is nearly always the
        one wanted. None counts as rejected when it is called: what could not be read before may be read now."""
        self.rejected, self._attempts = [], {}
        return self._candidates(only)

    def _candidates(self, only: int | None) -> Iterator[Commit]:
        seen: set[int] = set()
        # Listed again when none was good: a saver may have committed and cleaned up behind the first listing.
        while steps := [
            step for step in committed_steps(self._storage.list("commits")) if step not in seen and only in (None, step)
        ]:
            for step in steps:
                seen.add(step)
                found = self._complete(step)
                if isinstance(found, _Bad):
                    self.reject(manifest_key(step), found.attempt, found.error)
                elif found is not None:
                    yield found

    def _complete(self, step: int) -> Commit | _Bad | None:
        """The commit of a step, or why it is not complete; None if it was removed since it was listed."""
        attempt, key = None, manifest_key(step)
        try:
            commit = confirmed(self._storage, key, lambda storage: read_manifest(storage, key))
            attempt = commit.attempt
            with self._unless_removed(commit):
                prefix = commit.prefix
                confirmed(self._storage, prefix, lambda storage: commit.check_present(storage.sizes(prefix)))
        except FileNotFoundError:
            return None
        except (CheckpointError, UnreadableError) as error:
            return _Bad(attempt, error)
        return commit

    def _existing(self, step: int, fence: Callable[[], None]) -> Commit | None:
        """The commit of this step if its contents verify; a bad one is set aside, so that it can be made again.

        Raises:
            UnreadableError: it may be good, and stays.
        """
        found = self._complete(step)
        if isinstance(found, Commit):
            try:
                self.verify(found)
            except FileNotFoundError:
                return None
            except CheckpointError as error:
                found = _Bad(found.attempt, error)
        if isinstance(found, _Bad):
            if isinstance(found.error, UnreadableError):
                raise found.error
            key = manifest_key(step)
            self.reject(key, found.attempt, found.error)
            self.set_aside(key, found.attempt, fence)
            return None
        return found

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
        """The same for all that were passed over, but for what cannot be read and may be good. What the storage fails
        at stays, and that is added to the reason: the next restore finds it again."""
        for place, (key, reason) in enumerate(self.rejected):
            if key not in self._attempts:
                continue
            try:
                self.set_aside(key, self._attempts[key], fence)
            except StorageError as error:
                _log.warning("%s stays where it is: %s", key, error)
                self.rejected[place] = (key, f"{reason}; it stays where it is: {error}")

    def _publish(self, commit: Commit, manifest: bytes, fence: Callable[[], None]) -> Commit:
        """Store the manifest; returns the commit that the step has then, which may be one of another attempt. The fence
        was passed just now."""
        for number in range(_PUBLISH_TRIES):
            if number:
                fence()
            try:
                self._storage.create(commit.key, manifest, before_again=fence)
                return commit
            except FileExistsError:
                existing = self._existing(commit.step, fence)
                if existing is None:
                    continue  # it was bad and is gone now
                if existing.attempt != commit.attempt:
                    _log.info("step %d was committed by another attempt; its commit is kept", commit.step)
                    self._storage.delete_tree(commit.prefix)
                return existing
        raise StorageError(f"{commit.key} exists, cannot be read as a commit, and comes back after it was deleted")

    def _tidy(self, newest: Commit, fence: Callable[[], None], is_current: Callable[[], bool]) -> None:
        try:
            self._housekeeping.tidy(self._storage, newest, fence, is_current)
        except Exception as error:  # whatever it is, the commit stands
            _log.warning("what is not kept is left until the next commit: %s", described(error))

    def reject(self, key: str, attempt: str | None, error: CheckpointError | UnreadableError) -> None:
        """A commit is passed over; of which attempt, if its manifest says so."""
        reason = str(error)
        if isinstance(error, CheckpointError):
            self._attempts[key] = attempt
        if (key, reason) not in self.rejected:
            _log.warning("the commit %s is passed over: %s", key, reason)
            self.rejected.append((key, reason))


def _attempt_in(key: str, manifest: bytes) -> str | None:
    try:
        return Commit.from_bytes(key, manifest).attempt
    except CheckpointError:
        return None
