"""Restores the newest commit that verifies, on all ranks together. Finds the newest commit for a new rank 0."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from elastic_ddp.checkpoint import Commit, CommitCatalog
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import CheckpointError, PeerFailedError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.tensors.state_tree import Layout
from elastic_ddp.worker.agreement import errors_on_all_ranks
from elastic_ddp.worker.shared_read import read_shared


def restore(
    store: CommitCatalog,
    storage: Storage,
    group: ProcessGroup,
    make_layout: Callable[[], Layout | None] = lambda: None,
    *,
    check_same_run: Callable[[Commit], None] = lambda commit: None,
    fence: Callable[[], None] | None = lambda: None,
    tick: Callable[[], None] = lambda: None,
) -> tuple[Commit, dict[str, Any]] | None:
    """Returns the newest commit that verifies and its state on the CPU, or None if there is none. Every rank calls it.

    Newer commits are rejected: rank 0 has them in `store.rejected`. Commits that do not verify are set aside once an
    older commit is restored.

    Args:
        store: the commits; rank 0 decides which are tried.
        storage: the folder that they are in.
        group: the open process group.
        make_layout: called once, when there is a commit to read; returns the tensors of which this rank reads its
            shard only.
        check_same_run: called on rank 0 with each commit; raises CheckpointError if the commit is another run's.
        fence: called on rank 0 before a commit is set aside; raises if this rank may no longer do so. With None, no
            commit is set aside.
        tick: called whenever this rank has a piece.

    Raises:
        ConfigError: a rank has too little memory for the newest commit. The commit may be good and stays.
        StorageError: the storage failed. No older commit is used, because the newest may be good.
        PeerFailedError: a peer failed, or bytes changed on the way between ranks; see also `is_peer_failure`.
    """
    layout = functools.cache(lambda: make_layout() or (lambda name: None))

    def read(commit: Commit, skeleton: bytes) -> dict[str, Any]:
        return read_shared(commit, skeleton, storage, group, layout=layout(), tick=tick)

    restored = first_usable(store, store.manifests(), group, read, check_same_run)
    if restored is not None and group.rank == 0 and fence is not None:
        store.set_aside_rejected(fence)
    return restored


def first_usable(
    store: CommitCatalog,
    candidates: Iterator[Commit],
    group: ProcessGroup,
    read: Callable[[Commit, bytes], dict[str, Any]],
    check_same_run: Callable[[Commit], None] = lambda commit: None,
) -> tuple[Commit, dict[str, Any]] | None:
    """Returns the first candidate of rank 0 that all ranks can read, and its state; None if there is none.

    Earlier candidates are rejected. Collective; an error that `candidates` raises is raised on every rank.

    Args:
        store: where rank 0 rejects commits.
        candidates: the commits to try; only rank 0's are used.
        group: the open process group.
        read: returns the state of a commit, given its skeleton. Collective; it raises CheckpointError on all ranks if
            the commit does not verify.
        check_same_run: as for `restore`.
    """
    while (candidate := _next_candidate(store, candidates, group, check_same_run)) is not None:
        commit, skeleton = candidate
        try:
            return commit, read(commit, skeleton)
        except CheckpointError as error:
            if group.rank == 0:
                store.reject(commit.key, commit.attempt, error)
    return None


def _next_candidate(
    store: CommitCatalog, candidates: Iterator[Commit], group: ProcessGroup, check_same_run: Callable[[Commit], None]
) -> tuple[Commit, bytes] | None:
    """Returns rank 0's next complete commit and its skeleton, on every rank, from the bytes that rank 0 read."""
    candidate: tuple[Commit, bytes] | None = None
    with errors_on_all_ranks(group):
        if group.rank == 0:
            candidate = _next_complete(store, candidates, check_same_run)
    parts: list[bytes | None] = [None, None, None]
    if group.rank == 0:
        parts = [b"", b"", b""]
        if candidate is not None:
            parts = [candidate[0].key.encode(), candidate[0].to_bytes(), candidate[1]]
    key, manifest, skeleton = map(group.broadcast_bytes, parts)
    if candidate is not None or not key:
        return candidate
    try:
        commit = Commit.from_bytes(key.decode(errors="replace"), manifest)
        commit.state.check(skeleton)
    except CheckpointError as raised:
        raise PeerFailedError(f"rank 0 sent a commit that arrived changed: {raised}") from raised
    return commit, skeleton


def _next_complete(
    store: CommitCatalog, candidates: Iterator[Commit], check_same_run: Callable[[Commit], None]
) -> tuple[Commit, bytes] | None:
    """Returns the next complete commit and its skeleton; rejects the candidates before it."""
    for commit in candidates:
        try:
            check_same_run(commit)
            return commit, store.complete_skeleton(commit)
        except FileNotFoundError:
            continue  # removed since it was listed
        except CheckpointError as error:
            store.reject(commit.key, commit.attempt, error)
    return None


def newest_before(storage: Storage, steps_done: int, on_reject: Callable[[str, str], object]) -> Commit | None:
    """Returns the newest commit of at most `steps_done` steps; None if there is none.

    A run that resumed from an older commit may have left later commits. A commit of exactly `steps_done` steps is
    verified, because no rank commits that state again.
    """
    catalog = CommitCatalog(storage, on_reject)
    for commit in catalog.candidates():
        try:
            if commit.step == steps_done:
                catalog.verify(commit)
            if commit.step <= steps_done:
                return commit
        except FileNotFoundError:
            continue
        except CheckpointError as error:
            catalog.reject(commit.key, commit.attempt, error)
    return None


def check_no_commits(name: str, storage: Storage, rejected: list[tuple[str, str]]) -> None:
    """Raises a CheckpointError if starting from step 0 would ignore unusable commits."""
    set_aside = storage.list("set-aside")
    if rejected:
        reasons = "; ".join(f"{key}: {reason}" for key, reason in rejected)
        folders = [f"{storage.uri}/commits", *([f"{storage.uri}/set-aside"] if set_aside else [])]
        raise CheckpointError(
            f"no commit of run {name!r} is usable: {reasons}. Repair them, make them readable, delete "
            f"{' and '.join(folders)} to start over, or use another name. A run does not start over silently."
        )
    if set_aside:
        raise CheckpointError(
            f"run {name!r} has only commits that were set aside because they did not verify: {set_aside}. Repair one "
            "and move it back, as commits/20.json for step 20, delete set-aside/ to start over, or use another name. A "
            "run does not start over silently."
        )
