"""The newest commit that verifies, on all ranks: each reads a part of it and sends that to those that need it, so that
no byte leaves the storage twice.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from elastic_ddp.checkpoint import Commit, CommitCatalog
from elastic_ddp.checkpoint.reading import (
    Piece,
    Targets,
    check,
    pieces_of,
    state_of,
    state_to_fill,
)
from elastic_ddp.checkpoint.verdicts import confirmed_pieces
from elastic_ddp.errors import CheckpointError, ConfigError, PeerLostError, StorageError, UnreadableError
from elastic_ddp.parallel.process_group import ProcessGroup
from elastic_ddp.parallel.strategy import Layout
from elastic_ddp.storage import Storage

IN_FLIGHT = 8
"""Pieces that are on their way between ranks."""
_COUNT: dict[str, type[Exception]] = {
    each.__name__: each for each in (ConfigError, StorageError, CheckpointError, UnreadableError, PeerLostError)
}
"""What a rank tells the others that it met, by name. The first of these that any has met counts for all: what says
nothing of the commit comes first, and what its reader did not find in it last."""

Wrong = CheckpointError | UnreadableError
"""With a commit, so that the one before it is used."""
Met = TypeVar("Met", bound=Exception)


def restore(
    store: CommitCatalog,
    storage: Storage,
    group: ProcessGroup,
    spread: Callable[[], Layout | None] = lambda: None,
    *,
    check_ours: Callable[[Commit], None] = lambda commit: None,
    fence: Callable[[], None] = lambda: None,
    tick: Callable[[], None] = lambda: None,
) -> tuple[Commit, dict[str, Any]] | None:
    """The newest commit whose contents verify and its state, on the CPU; None if there is none. Every rank calls it.

    Newer ones, which do not verify or cannot be read, are named in `store.rejected` on rank 0. Those that do not verify
    are set aside; they stay where they are if none does, or if the storage fails at that. What could not be read stays,
    as it may be readable the next time; its step cannot be committed again meanwhile, and later ones can.

    Args:
        store: the commits, of which rank 0's word counts.
        storage: the folder that they are in.
        spread: called once there is a commit to read; tells of which tensors this rank is to have only a shard.
        check_ours: called on rank 0 with what may be read; raises a CheckpointError if it is none of this run's.
        fence: called on rank 0 before anything is set aside; raises if this rank may not do that any more.
        tick: called whenever this rank has one more piece.

    Raises:
        ConfigError: some rank has not the memory for the newest commit. That says nothing of the commit, like the next.
        StorageError: the storage could not be read, or nothing told that from one object that cannot be. That is no
            reason to fall back: an outage would throw away good commits.
    """
    layout = functools.cache(spread)
    found = first_usable(
        store,
        store.candidates(),
        group,
        lambda commit, skeleton: read_together(commit, skeleton, storage, group, layout=layout(), tick=tick),
        check_ours,
    )
    if found is not None and group.rank == 0:
        store.set_aside_rejected(fence)
    return found


def first_usable(
    store: CommitCatalog,
    candidates: Iterator[Commit],
    group: ProcessGroup,
    read: Callable[[Commit, bytes], tuple[dict[str, Any] | None, Wrong | None]],
    check_ours: Callable[[Commit], None] = lambda commit: None,
) -> tuple[Commit, dict[str, Any]] | None:
    """The first of rank 0's candidates that all ranks can use, and its state; None if there is none. Those before it
    are rejected. What looking for them fails at is raised on every rank.

    Args:
        read: from a commit and its skeleton to the state, or why there is none, on all ranks.
        check_ours: as for `restore`.

    Raises:
        PeerLostError: on a rank that does not get what rank 0 sent. The others lose it.
    """
    while True:
        offer = json.loads(_as_sent(_next(store, candidates, check_ours) if group.rank == 0 else None, group))
        if offer is None:
            return None
        if "error" in offer:
            raise _COUNT[offer["kind"]](offer["error"])
        wrong: Wrong | None
        try:
            commit = Commit.from_bytes(offer["key"], offer["manifest"].encode())
        except CheckpointError as error:  # on every rank: what is short enough in the storage may be too long as sent
            state, wrong = None, error
        else:
            state, wrong = read(commit, offer["skeleton"].encode())
        if state is not None:
            return commit, state
        assert wrong is not None
        if group.rank == 0:
            store.reject(offer["key"], offer["attempt"], wrong)


def _as_sent(data: bytes | None, group: ProcessGroup) -> bytes:
    """What rank 0 has, on every rank, as it was there: nothing else tells whether a number in it is another one."""
    sent = group.broadcast_bytes(hashlib.sha256(data).digest() + data if data is not None else None)
    if hashlib.sha256(sent[32:]).digest() != sent[:32]:
        raise PeerLostError("what rank 0 sent of a commit came as something else")
    return sent[32:]


def _next(store: CommitCatalog, candidates: Iterator[Commit], check_ours: Callable[[Commit], None]) -> bytes:
    """The next commit that seems to be complete, for all ranks, if there is one, or what looking for it failed at."""
    offer = None
    try:
        for commit in candidates:
            try:
                check_ours(commit)
                skeleton = store.skeleton(commit).decode()
            except (CheckpointError, UnreadableError) as error:
                store.reject(commit.key, commit.attempt, error)
            except UnicodeDecodeError as error:
                store.reject(commit.key, commit.attempt, CheckpointError(f"{commit.state.key} is no text: {error}"))
            else:
                manifest = commit.to_bytes().decode()
                offer = {"key": commit.key, "attempt": commit.attempt, "manifest": manifest, "skeleton": skeleton}
                break
    except (ConfigError, StorageError) as error:
        offer = {"kind": _kind(error), "error": str(error)}
    return json.dumps(offer).encode()


@dataclass(frozen=True)
class _Piece:
    """A piece that this rank needs, and others may."""

    piece: Piece
    number: int
    """Of all that some rank needs."""
    ranks: list[int]
    """Those that need it."""

    @classmethod
    def all_of(cls, commit: Commit, names: Collection[str], targets: Targets, group: ProcessGroup) -> list[_Piece]:
        """Those that this rank needs, of which whoever needs one needs all of its blocks: what all ranks hold may lie
        beside their shards. What several need is in one order on all of them. Every rank calls it."""
        blocks = [(name, block) for name in names for block in commit.tensors[name].blocks]
        needs = group.all_gather_bytes(bytes(targets.need(*each) for each in blocks))
        by_rank = zip(*needs, strict=True)
        needed_by = {(name, block.offsets): bytes(each) for (name, block), each in zip(blocks, by_rank, strict=True)}
        pieces = []
        for number, piece in enumerate(pieces_of(commit, names, lambda name, block: needed_by[name, block.offsets])):
            name, block = piece.blocks[0]
            ranks = [rank for rank, need in enumerate(needed_by[name, block.offsets]) if need]
            if group.rank in ranks:
                pieces.append(cls(piece, number, ranks))
        # What several wait for comes first: each would get to it at another time else, and the first wait for the last.
        return sorted(pieces, key=lambda each: len(each.ranks) == 1)

    @property
    def reader(self) -> int:
        """The one of them that reads it from the storage."""
        return self.ranks[self.number % len(self.ranks)]

    def send(self, data: memoryview, group: ProcessGroup) -> list[dist.Work]:
        """Begins to carry it from its reader to the others."""
        if len(self.ranks) == 1 or not data:
            return []
        tensor = torch.frombuffer(data, dtype=torch.uint8)
        if len(self.ranks) == group.world_size:
            works = [dist.broadcast(tensor, self.reader, async_op=True)]
        elif group.rank == self.reader:
            works = [dist.isend(tensor, each, tag=self.number) for each in self.ranks if each != group.rank]
        else:
            works = [dist.irecv(tensor, self.reader, tag=self.number)]
        return [work for work in works if work is not None]


def read_together(
    commit: Commit,
    skeleton: bytes,
    storage: Storage,
    group: ProcessGroup,
    components: Collection[str] | None = None,
    layout: Layout | None = None,
    *,
    tick: Callable[[], None],
) -> tuple[dict[str, Any] | None, Wrong | None]:
    """The state of a commit, or some components of it, or why there is none: the same on all ranks.

    Raises:
        ConfigError, StorageError: as `what_is_wrong`.
        PeerLostError: what was good where it was read came to another rank as something else. That is a fault of the
            connection between them, and says nothing of the commit.
    """
    no_room: CheckpointError | ConfigError | None = None
    try:
        tensors, targets = state_to_fill(commit, components, layout or (lambda name: None))
    except (CheckpointError, ConfigError) as error:
        no_room = _itself(error)
    if wrong := what_is_wrong(no_room, group):
        return None, wrong
    pieces = _Piece.all_of(commit, tensors, targets, group)
    going: deque[tuple[_Piece, memoryview, list[dist.Work]]] = deque()
    unread: CheckpointError | StorageError | None = None
    garbled: PeerLostError | None = None

    def take() -> None:
        nonlocal garbled
        each, data, works = going.popleft()
        for work in works:
            work.wait()
        tick()
        if each.reader != group.rank:  # or that was done when it was read
            try:
                check(each.piece, data)
            except CheckpointError as error:
                garbled = garbled or PeerLostError(
                    f"what rank {each.reader} sent of a commit came as something else: {error}"
                )
            else:
                targets.fill(each.piece, data)

    own = [each.piece for each in pieces if each.reader == group.rank]
    with closing(confirmed_pieces(storage, own, targets)) as mine:
        for each in pieces:
            data = None
            if each.reader == group.rank and unread is None:
                try:
                    _, data = next(mine)
                except (CheckpointError, StorageError) as error:
                    # The others are told when all is sent, and get nothing good meanwhile.
                    unread = _itself(error)
            data = targets.place_of(each.piece) if data is None else data
            going.append((each, data, each.send(data, group)))
            while len(going) >= IN_FLIGHT:
                take()
        while going:
            take()
    bad: Exception | None = unread or garbled
    state = None
    if bad is None:
        try:
            state = state_of(commit, skeleton, tensors, components)
        except CheckpointError as error:
            bad = _itself(error)
    wrong = what_is_wrong(bad, group)
    return (None, wrong) if wrong else (state, None)


def _itself(error: Met) -> Met:
    """An error without where it came from: frames that keep in memory what is read, while other commits are."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def what_is_wrong(error: Exception | None, group: ProcessGroup) -> Wrong | None:
    """With a commit, as one of the ranks found it; None if none did. The same on all ranks.

    Raises:
        ConfigError, StorageError, PeerLostError: some rank met one, which says nothing of the commit.
    """
    word = b"" if error is None else f"{_kind(error)}\n{error}".encode(errors="backslashreplace")
    met = [each.decode().split("\n", 1) for each in group.all_gather_bytes(word) if each]
    for name, kind in _COUNT.items():
        for text in (text for each, text in met if each == name):
            found = kind(text)
            if isinstance(found, CheckpointError | UnreadableError):
                return found
            raise found
    return None


def _kind(error: Exception) -> str:
    """The name that it goes by in `_COUNT`."""
    return next(name for name, kind in reversed(_COUNT.items()) if isinstance(error, kind))
