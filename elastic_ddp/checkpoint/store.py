"""Saving, finding, verifying and removing commits in a storage."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import safetensors
import safetensors.torch
import torch

from elastic_ddp.checkpoint.commits import (
    Commit,
    StoredObject,
    attempt_prefix,
    check_record,
    committed_steps,
    manifest_key,
    superseded,
)
from elastic_ddp.errors import CheckpointError, StorageError, described
from elastic_ddp.state import flatten, unflatten
from elastic_ddp.storage import Storage

_log = logging.getLogger(__name__)
_SKELETON = "state.json"
_PUBLISH_TRIES = 3
_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
_NATIVE = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)
"""What every version of safetensors knows; other dtypes are stored as their bytes."""


class CheckpointStore:
    """The commits of one run.

    A commit exists once its manifest does, and the manifest is written after everything it lists. Whatever dies or
    fails, at whatever moment, a reader finds one of the states that were saved, whole.

    Args:
        storage: A folder for commits alone.
        keep: Commits that stay when a newer one is complete.
    """

    def __init__(self, storage: Storage, *, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least the newest commit has to stay; use 1 or more")
        self._storage = storage
        self._keep = keep
        self.rejected: list[tuple[str, str]] = []
        """Key of the manifest and the reason for every commit that this store has passed over."""

    def save(
        self,
        state: dict[str, Any],
        *,
        step: int,
        record: dict[str, Any],
        fence: Callable[[], None] = lambda: None,
    ) -> Commit:
        """Commit a state; only one rank calls this. Returns when the commit is durable.

        A step is committed once: if it is already, by an attempt that verifies, that commit is returned and nothing
        is written. Superseded commits are removed afterwards; failing at that is logged and tried again with the
        next commit.

        Args:
            state: Components by name (letters, digits, `_` and `-`), each a tree for `elastic_ddp.state.flatten`.
            step: Steps that the state has behind it.
            record: Facts to keep in the manifest; JSON values.
            fence: Called when all is written but the manifest; raises if this saver may not commit any more, and then
                nothing was.

        Raises:
            CheckpointError: the state or the record holds something that cannot be kept.
            StorageError: the storage failed. The commit may or may not exist; saving again settles it.
        """
        # Refused before anything is written: a state or a record that cannot be kept.
        skeletons, tensors = _flattened(state)
        check_record(record, step=step)
        if (existing := self._existing(step)) is not None:
            return existing

        attempt = uuid.uuid4().hex
        prefix = attempt_prefix(step, attempt)
        try:
            # One component at a time, so that only one is in memory twice.
            objects = [self._write(f"{prefix}/{name}.safetensors", to_safetensors(tensors[name])) for name in tensors]
            objects.append(self._write(f"{prefix}/{_SKELETON}", json.dumps(skeletons, separators=(",", ":")).encode()))
        except StorageError:
            with suppress(StorageError):  # the first failure is the one to report
                self._storage.delete_tree(prefix)
            raise
        try:
            fence()
        except BaseException:
            with suppress(StorageError):
                self._storage.delete_tree(prefix)
            raise
        # From here on a failure leaves the objects alone: the manifest may have been stored and its answer lost.
        manifest = Commit(step=step, attempt=attempt, objects=tuple(objects), record=record).to_bytes()
        commit = self._publish(Commit.from_bytes(manifest_key(step), manifest), manifest)
        self._remove_superseded(commit)
        return commit

    def latest(self) -> Commit | None:
        """The newest commit that is complete: its manifest verifies and every object has its size."""
        return next(self._complete(), None)

    def load(self, commit: Commit) -> dict[str, Any]:
        """The state of a commit, on the CPU; checksums are verified as it is read.

        Raises:
            CheckpointError: names the object that is missing or is not what was committed.
        """
        objects = {item.key.removeprefix(f"{commit.prefix}/"): item for item in commit.objects}
        try:
            skeletons = json.loads(self._read(objects.pop(_SKELETON)))
            tensors = {
                name.removesuffix(".safetensors"): safetensors.torch.load(self._read(item))
                for name, item in objects.items()
            }
            return {name: unflatten(skeleton, tensors.get(name, {})) for name, skeleton in skeletons.items()}
        except (AttributeError, KeyError, RecursionError, ValueError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{commit.prefix} is not a state: {described(error)}") from error

    def load_latest(self) -> tuple[Commit, dict[str, Any]] | None:
        """The newest commit whose contents verify, with its state; None if there is none.

        Raises:
            StorageError: the storage could not be read. That is no reason to fall back: an outage would throw away
                good commits.
        """
        for commit in self._complete():
            try:
                return commit, self.load(commit)
            except CheckpointError as error:
                self._reject(commit.key, str(error))
        return None

    def _complete(self) -> Iterator[Commit]:
        """Complete commits, newest first; looked at one by one, as the first is nearly always the one wanted."""
        seen: set[int] = set()
        # Listed again when none was good: a saver may have committed and cleaned up behind the first listing.
        while steps := [step for step in committed_steps(self._storage.list("commits")) if step not in seen]:
            for step in steps:
                seen.add(step)
                key = manifest_key(step)
                try:
                    commit = Commit.from_bytes(key, self._storage.read(key))
                    commit.check_present(self._storage.sizes(commit.prefix))
                except FileNotFoundError:
                    continue  # removed since it was listed
                except CheckpointError as error:
                    self._reject(key, str(error))
                    continue
                yield commit

    def _existing(self, step: int) -> Commit | None:
        """The commit of this step if its contents verify; a bad one is removed, so that it can be made again."""
        key = manifest_key(step)
        try:
            commit = Commit.from_bytes(key, self._storage.read(key))
            for item in commit.objects:
                self._read(item)
        except FileNotFoundError:
            return None
        except CheckpointError as error:
            self._reject(key, str(error))
            self._storage.delete(key)
            return None
        return commit

    def _publish(self, commit: Commit, manifest: bytes) -> Commit:
        """Store the manifest; returns the commit that the step has then, which may be one of another attempt."""
        for _ in range(_PUBLISH_TRIES):
            try:
                self._storage.create(commit.key, manifest)
                return commit
            except FileExistsError:
                existing = self._existing(commit.step)
                if existing is None:
                    continue  # it was bad and is gone now
                if existing.attempt != commit.attempt:
                    _log.info("step %d was committed by another attempt; its commit is kept", commit.step)
                    self._storage.delete_tree(commit.prefix)
                return existing
        raise StorageError(f"{commit.key} exists, cannot be read as a commit, and comes back after it was deleted")

    def _remove_superseded(self, newest: Commit) -> None:
        try:
            sizes = self._storage.sizes()
            kept = [newest]
            for step in committed_steps(sizes):
                # Commits of later steps were passed over when this run resumed: they must not push out good ones.
                if step < newest.step and len(kept) < self._keep:
                    with suppress(CheckpointError, FileNotFoundError):
                        commit = Commit.from_bytes(manifest_key(step), self._storage.read(manifest_key(step)))
                        commit.check_present(sizes)
                        kept.append(commit)
            manifests, attempts = superseded(sizes, kept, step=newest.step)
            for key in manifests:
                self._storage.delete(key)
            for prefix in attempts:
                self._storage.delete_tree(prefix)
        except StorageError as error:
            _log.warning("superseded commits are left until the next commit: %s", error)

    def _write(self, key: str, data: bytes) -> StoredObject:
        self._storage.write(key, data)
        return StoredObject(key=key, size=len(data), sha256=hashlib.sha256(data).hexdigest())

    def _read(self, item: StoredObject) -> bytes:
        try:
            data = self._storage.read(item.key)
        except FileNotFoundError as error:
            raise CheckpointError(f"{item.key} is missing") from error
        item.check(data)
        return data

    def _reject(self, key: str, reason: str) -> None:
        if (key, reason) not in self.rejected:
            _log.warning("the commit %s is passed over: %s", key, reason)
            self.rejected.append((key, reason))


def _flattened(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
    """Skeletons, and tensors where there are any, by component."""
    skeletons: dict[str, Any] = {}
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for name, component in state.items():
        if not isinstance(name, str) or not _COMPONENT.fullmatch(name):
            raise CheckpointError(
                f"{name!r:.80} cannot be the name of a component of the state; use letters, digits, _ and -"
            )
        try:
            skeletons[name], found = flatten(component)
        except CheckpointError as error:
            raise CheckpointError(f"{name}.{error}") from error
        if found:
            tensors[name] = found
    return skeletons, tensors


def to_safetensors(tensors: dict[str, torch.Tensor]) -> bytes:
    """The bytes of a safetensors file, with tensors of dtypes that it does not have as uint8."""
    plain: dict[str, torch.Tensor] = {}
    owners: set[int] = set()
    for name, tensor in tensors.items():
        stored = tensor.cpu()
        if stored.dtype not in _NATIVE:
            # The skeleton has the dtype; `unflatten` reads the bytes as that.
            stored = stored.reshape(-1).view(torch.uint8)
        # safetensors refuses tensors that overlap, such as views of one flat buffer.
        owner = stored.untyped_storage().data_ptr()
        plain[name] = stored.clone() if owner in owners else stored
        owners.add(owner)
    return safetensors.torch.save(plain)
