"""Making commits complete, and removing those that are not kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

from elastic_ddp.checkpoint.catalog import Bad, CommitCatalog
from elastic_ddp.checkpoint.housekeeping import Housekeeping
from elastic_ddp.checkpoint.manifest import Commit, attempt_prefix, check_record, manifest_key
from elastic_ddp.checkpoint.record import different_runs
from elastic_ddp.checkpoint.retention import Retention
from elastic_ddp.checkpoint.writer import Kind, Part, put_together
from elastic_ddp.errors import (
    CheckpointError,
    ElasticDDPError,
    StorageError,
    format_exception,
    shorten,
)
from elastic_ddp.storage.storage import Storage

_log = logging.getLogger(__name__)
_PUBLISH_TRIES = 3


class SupersededError(ElasticDDPError):
    """The generation of a save is over, and there are commits of later steps: this one is not made any more."""


class CheckpointStore(CommitCatalog):
    """The commits of one run, for whoever makes them.

    A commit exists once its manifest does, and the manifest is written after everything it lists. Whatever dies or
    fails, at whatever moment, a reader finds one of the states that were saved, whole.

    Args:
        storage: A folder for commits alone.
        keep: Which commits stay when a newer one is complete, or how many of the newest.
    """

    def __init__(self, storage: Storage, *, keep: Retention | int) -> None:
        super().__init__(storage)
        self._housekeeping = Housekeeping(keep if isinstance(keep, Retention) else Retention(last=keep))

    def through(self, storage: Storage, on_reject: Callable[[str, str], object]) -> CheckpointStore:
        """This one, with the same folder asked in another way. Each passes over commits for itself, and tells another
        of it."""
        other = copy(self)
        other._storage, other._on_reject, other.rejected, other._attempts = storage, on_reject, [], {}
        return other

    def complete(
        self,
        *,
        step: int,
        attempt: str,
        parts: Sequence[Part],
        kinds: Mapping[str, Kind],
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
            kinds: Of all tensors that should have been, by name.
            record: Facts to keep in the manifest; JSON values.
            fence: Called when all is there but the manifest, right before that is stored and whenever that is tried
                again, and before anything is removed or set aside; raises if this saver may not commit any more, and
                then it does none of that.
            is_current: Whether the generation that has written it goes on. If not, what is not kept is left to those
                that came after it.
            on_commit: Told of the commit as soon as it is durable, before anything is removed.

        Raises:
            CheckpointError: something was not written or is not there any more, or the record cannot be kept.
            ReplicasDifferError: ranks do not hold the same.
            StorageError: the storage failed. The commit may or may not exist.
            SupersededError: the generation that has written it is over, and there is a commit of a later step.
        """
        try:
            check_record(record, step=step)
            objects, tensors = put_together(parts, kinds)
            state = next((part.state for part in parts if part.state is not None), None)
            if state is None:
                raise CheckpointError("not all that belongs to the state was written: its skeleton is missing")
            commit = Commit(step=step, attempt=attempt, state=state, objects=objects, tensors=tensors, record=record)
            manifest = commit.to_bytes()
            commit = Commit.from_bytes(commit.key, manifest)
            self._check_stored(commit)
            if not is_current():
                self._check_newest(step)
            fence()  # last: a listing may take as long as it takes others to go on without this one
        except BaseException:
            self.discard(attempt_prefix(step, attempt))
            raise
        # From here on a failure leaves the objects alone: the manifest may have been stored and its answer lost.
        own, commit = commit, self._publish(commit, manifest, fence)
        if commit is own and not is_current():
            self._check_still_stored(commit, manifest)
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

    def _check_newest(self, step: int) -> None:
        """For a worker that has left: those who go on take what was written of earlier steps for dead once there is a
        commit of a later one."""
        if later := [each for each in self.steps() if each > step]:
            raise SupersededError(
                f"there is a commit of step {max(later)}, and step {step} was to be committed only now"
            )

    def _check_still_stored(self, commit: Commit, manifest: bytes) -> None:
        """As `_check_newest`: they may have done so in the same moment. What they have removed has no manifest then,
        unless they still do between this look and its end."""
        try:
            self._check_stored(commit)
        except CheckpointError as error:
            self._storage.delete_if(commit.key, manifest)
            raise SupersededError(f"others have gone on before step {commit.step} was committed") from error

    def discard(self, prefix: str) -> None:
        """Removes what was written of an attempt that failed, or came second. Failing at that is only logged: what came
        of the attempt is to be told, and the next commit removes it."""
        try:
            self._storage.delete_tree(prefix)
        except StorageError as error:
            _log.warning("%s is left until the next commit: %s", prefix, error)

    def _existing(self, step: int, record: Mapping[str, Any], fence: Callable[[], None]) -> Commit | None:
        """The commit of this step if its contents verify; a bad one is set aside, so that it can be made again, and so
        is one of another run than that with this record.
        """
        found = self.complete_at(step)
        if isinstance(found, Commit):
            try:
                if names := different_runs(record, found.record):
                    raise CheckpointError(f"{found.key} is of another run, which differs in {shorten(names, 5)}")
                self.verify(found)
            except FileNotFoundError:
                return None
            except CheckpointError as error:
                found = Bad(found.attempt, error)
        if isinstance(found, Bad):
            key = manifest_key(step)
            self.reject(key, found.attempt, found.error)
            self.set_aside(key, found.attempt, fence)
            return None
        return found

    def _publish(self, commit: Commit, manifest: bytes, fence: Callable[[], None]) -> Commit:
        """Store the manifest; returns the commit that the step has then, which may be one of another attempt. The fence
        was passed just now."""
        for number in range(_PUBLISH_TRIES):
            if number:
                fence()
            try:
                self._storage.create(commit.key, manifest, before_retry=fence)
                return commit
            except FileExistsError:
                existing = self._existing(commit.step, commit.record, fence)
                if existing is None:
                    continue  # it was bad and is gone now
                if existing.attempt != commit.attempt:
                    _log.info("step %d was committed by another attempt; its commit is kept", commit.step)
                    self.discard(commit.prefix)
                return existing
        raise StorageError(f"{commit.key} exists, cannot be read as a commit, and comes back after it was deleted")

    def _tidy(self, newest: Commit, fence: Callable[[], None], is_current: Callable[[], bool]) -> None:
        try:
            self._housekeeping.tidy(self._storage, newest, fence, is_current)
        except Exception as error:  # whatever it is, the commit stands
            _log.warning("what is not kept is left until the next commit: %s", format_exception(error))
