"""Makes commits: checks that all objects are written, publishes the manifest last, and removes superseded commits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

from elastic_ddp.checkpoint.catalog import Bad, CommitCatalog
from elastic_ddp.checkpoint.housekeeping import Housekeeping
from elastic_ddp.checkpoint.manifest import Commit, attempt_prefix, manifest_key
from elastic_ddp.checkpoint.parts import Part, TensorKind, assemble
from elastic_ddp.checkpoint.retention import Retention
from elastic_ddp.errors import CheckpointError, ElasticDDPError, StorageError, format_exception
from elastic_ddp.storage.storage import Storage

_log = logging.getLogger(__name__)
_PUBLISH_TRIES = 3
_PUBLISH_PAUSE_S = 0.5
"""On AWS, another request may be creating or deleting the manifest."""


class SupersededError(ElasticDDPError):
    """The generation of a save has ended, and there are commits of later steps: the save is not committed."""


class CheckpointStore(CommitCatalog):
    """The commits of one run, for the process that makes them.

    A commit exists once its manifest does, and the manifest is written after everything that it lists. After any
    failure, at any moment, a reader finds a complete saved state.

    Args:
        storage: a folder for commits only.
        keep: which commits stay when a newer one is complete, or how many of the newest.
    """

    def __init__(self, storage: Storage, *, keep: Retention | int) -> None:
        super().__init__(storage)
        self._housekeeping = Housekeeping(keep if isinstance(keep, Retention) else Retention(last=keep))

    def through(self, storage: Storage, on_reject: Callable[[str, str], object]) -> CheckpointStore:
        """Returns the same store with another access to its folder, which reports rejected commits by itself."""
        other = copy(self)
        other._storage = storage
        other._on_reject = on_reject
        other.rejected = []
        other._attempts = {}
        return other

    def complete(
        self,
        *,
        step: int,
        attempt: str,
        parts: Sequence[Part],
        kinds: Mapping[str, TensorKind],
        record: dict[str, Any],
        fence: Callable[[], None],
        is_current: Callable[[], bool] = lambda: True,
        on_commit: Callable[[Commit], object] = lambda commit: None,
    ) -> Commit:
        """Commits the parts that all ranks have written. Only rank 0 calls it; it returns when the commit is durable.

        A step is committed once: if another attempt was first, and verifies, its commit is returned and this attempt is
        removed. Superseded commits are removed afterwards. A failed removal is logged; the next commit tries again.

        Args:
            step, attempt, record, is_current: as in `Save`.
            parts: the part that each rank wrote, in rank order.
            kinds: all tensors of the state, by name.
            fence: as in `Save`; called right before the manifest is stored, or anything is removed or set aside.
            on_commit: called with the commit once it is durable, before anything is removed.

        Raises:
            CheckpointError: something was not written or has been removed, or the record is invalid.
            ReplicasDifferError: ranks hold different values where they must be equal.
            StorageError: the storage failed. The commit may or may not exist.
            SupersededError: the generation of the save has ended, and there is a commit of a later step.
        """
        try:
            objects, tensors = assemble(parts, kinds)
            state = parts[0].state
            assert state is not None, "rank 0 writes the skeleton"
            manifest = Commit(
                step=step, attempt=attempt, state=state, objects=objects, tensors=tensors, record=record
            ).to_bytes()
            commit = Commit.from_bytes(manifest_key(step), manifest)
            self._check_stored(commit)
            # Later generations remove uncommitted attempts of earlier steps.
            later = [] if is_current() else [committed for committed in self.steps() if committed > step]
            if later:
                raise SupersededError(f"step {step} is not committed: step {max(later)} has been committed meanwhile")
            fence()  # after the listing, during which another generation may have taken over
        except BaseException:
            self.discard(attempt_prefix(step, attempt))
            raise
        # From here on a failure removes no objects: the manifest may be stored, and only the response lost.
        own = commit
        commit = self._publish(commit, manifest, fence)
        if commit is own and not is_current():
            try:  # a later generation may have removed them at the moment of the commit
                self._check_stored(commit)
            except CheckpointError as error:
                self._storage.delete_if(commit.key, manifest)
                raise SupersededError(f"other workers removed step {step} before it was committed") from error
        on_commit(commit)
        try:
            self._housekeeping.tidy(self._storage, commit, fence, is_current)
        except Exception as error:  # of any kind: the commit stands
            _log.warning("superseded commits stay until the next commit: %s", format_exception(error))
        return commit

    def _check_stored(self, commit: Commit) -> None:
        """Lists the objects: the storage may have lost a write, and other workers may have removed the attempt."""
        try:
            commit.check_present(self._storage.listing(commit.prefix))
        except CheckpointError as error:
            raise CheckpointError(f"objects of step {commit.step} are missing: {error}") from error

    def discard(self, prefix: str) -> None:
        """Removes an attempt that failed or was second. A failure is logged; the next commit removes the rest."""
        try:
            self._storage.delete_tree(prefix)
        except StorageError as error:
            _log.warning("%s stays until the next commit: %s", prefix, error)

    def _existing(self, step: int, record: Mapping[str, Any], fence: Callable[[], None]) -> Commit | None:
        """Returns the commit of this step if it verifies. A bad commit, or another run's, is set aside."""
        existing = self.complete_at(step, record=record, verify=True)
        if not isinstance(existing, Bad):
            return existing
        self.reject(manifest_key(step), existing.attempt, existing.error)
        self.set_aside(manifest_key(step), existing.attempt, fence)
        return None

    def _publish(self, commit: Commit, manifest: bytes, fence: Callable[[], None]) -> Commit:
        """Stores the manifest, after the caller's fence. Returns the step's commit, perhaps of another attempt."""
        for number in range(_PUBLISH_TRIES):
            if number:
                time.sleep(_PUBLISH_PAUSE_S)
                fence()
            try:
                self._storage.create(commit.key, manifest)
                return commit
            except FileExistsError:
                existing = self._existing(commit.step, commit.record, fence)
                if existing is None:
                    continue  # it was bad, and has been set aside
                if existing.attempt != commit.attempt:
                    _log.info("another attempt has committed step %d first; its commit is kept", commit.step)
                    self.discard(commit.prefix)
                return existing
        raise StorageError(
            f"{commit.key} cannot be created: in {_PUBLISH_TRIES} tries it was no commit, or another process changed it"
        )
