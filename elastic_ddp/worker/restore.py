"""The newest commit that verifies, on all ranks: each reads a part of it and sends that to those that need it, so that
no byte leaves the storage twice, unless what one process has in memory cannot be read by another that should.
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from elastic_ddp.checkpoint import Commit, CommitCatalog
from elastic_ddp.checkpoint.confirmed_read import confirmed_piece
from elastic_ddp.checkpoint.reader import (
    LEAST_PARALLEL_PIECES,
    PARALLEL_PIECES,
    Piece,
    Reading,
    Spread,
    Targets,
    check,
    pieces_of,
    state_of,
    state_to_fill,
)
from elastic_ddp.distributed.piece_transfer import IN_FLIGHT, Carriage, Carrier
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.errors import CheckpointError, ConfigError, PeerFailedError, StorageError, UnreadableError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.tensors.state_tree import Layout

ERROR_BYTES = 4096
"""Of what is wrong on a rank, at most so much is told to the others."""
_HEAD = struct.Struct("<?I")
"""Whether what follows is an error, and its length."""
_COUNT: dict[str, type[Exception]] = {
    each.__name__: each for each in (ConfigError, StorageError, CheckpointError, UnreadableError, PeerFailedError)
}
"""What a rank tells the others that it met, by name. The first of these that any has met counts for all: what says
nothing of the commit comes first, and what its reader did not find in it last."""

BadCommit = CheckpointError | UnreadableError
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
        PeerFailedError, or what `is_peer_failure` knows: a rank is gone, or bytes came from it as something else. Reads
            that are under way are waited for before.
    """
    layout = functools.cache(lambda: spread() or (lambda name: None))
    found = first_usable(
        store,
        store.manifests(),
        group,
        lambda commit, skeleton, carrier: read_together(
            commit, skeleton, storage, group, carrier, layout=layout(), tick=tick
        ),
        check_ours,
    )
    if found is not None and group.rank == 0:
        store.set_aside_rejected(fence)
    return found


def first_usable(
    store: CommitCatalog,
    candidates: Iterator[Commit],
    group: ProcessGroup,
    read: Callable[[Commit, bytes, Carrier], tuple[dict[str, Any] | None, BadCommit | None]],
    check_ours: Callable[[Commit], None] = lambda commit: None,
) -> tuple[Commit, dict[str, Any]] | None:
    """The first of rank 0's candidates that all ranks can use, and its state; None if there is none. Those before it
    are rejected. What looking for them fails at is raised on every rank.

    Args:
        read: from a commit and its skeleton to the state, or why there is none, on all ranks; given what carries it
            between them.
        check_ours: as for `restore`.

    Raises:
        PeerFailedError: on a rank that does not get what rank 0 sent. The others lose it.
    """
    with Carrier.opened(group) as carrier:
        while True:
            offer = _offer(store, candidates, group, check_ours)
            if offer is None:
                return None
            commit, skeleton = offer
            carrier.look_around(commit.num_blocks)
            state, wrong = read(commit, skeleton, carrier)
            if state is not None:
                return commit, state
            assert wrong is not None
            if group.rank == 0:
                store.reject(commit.key, commit.attempt, wrong)


class _Offer(NamedTuple):
    """A commit that seems to be complete."""

    commit: Commit
    skeleton: bytes


def _offer(
    store: CommitCatalog, candidates: Iterator[Commit], group: ProcessGroup, check_ours: Callable[[Commit], None]
) -> _Offer | None:
    """Rank 0's next one, on every rank: from the bytes that are stored, so that all find the same in it."""
    offer: _Offer | None = None
    head: dict[str, Any] | None = None
    contents = b""
    if group.rank == 0:
        try:
            offer = _next(store, candidates, check_ours)
        except (ConfigError, StorageError) as error:
            head = {"kind": _kind(error), "error": str(error)}
        if offer is not None:
            head = {"key": offer.commit.key, "manifest_bytes": len(offer.commit.manifest)}
            contents = offer.commit.manifest + offer.skeleton
        contents = json.dumps(head).encode() + b"\n" + contents
    text, _, contents = _as_sent(contents, group).partition(b"\n")
    head = json.loads(text)
    if head is not None and "error" in head:
        raise _COUNT[head["kind"]](head["error"])
    if head is None or offer is not None:
        return offer
    manifest, skeleton = contents[: head["manifest_bytes"]], contents[head["manifest_bytes"] :]
    try:
        return _Offer(Commit.from_bytes(head["key"], manifest), skeleton)
    except CheckpointError as error:
        raise PeerFailedError(f"rank 0 found a commit in what is none here: {error}") from error


def _as_sent(data: bytes, group: ProcessGroup) -> bytes:
    """What rank 0 has, on every rank, as it was there: nothing else tells whether a number in it is another one."""
    sent = group.broadcast_bytes(hashlib.sha256(data).digest() + data if group.rank == 0 else None)
    if hashlib.sha256(sent[32:]).digest() != sent[:32]:
        raise PeerFailedError("what rank 0 sent of a commit came as something else")
    return sent[32:]


def _next(store: CommitCatalog, candidates: Iterator[Commit], check_ours: Callable[[Commit], None]) -> _Offer | None:
    """Of those that rank 0 knows; what is found wrong with one before it is why that is rejected.

    Raises:
        ConfigError, StorageError: what looking for it failed at.
    """
    for commit in candidates:
        try:
            check_ours(commit)
            return _Offer(commit, store.whole(commit))
        except FileNotFoundError:
            continue  # removed since it was listed
        except (CheckpointError, UnreadableError) as error:
            store.reject(commit.key, commit.attempt, error)
    return None


@dataclass(frozen=True)
class _Piece:
    """A piece that this rank needs, and others may."""

    piece: Piece
    number: int
    """Of all that some rank needs."""
    ranks: list[int]
    """Those that need it."""

    @classmethod
    def all_of(
        cls, commit: Commit, names: Collection[str], needs: Sequence[bytes], rank: int, are_short: bool
    ) -> list[_Piece]:
        """Those that this rank needs, of which whoever needs one needs all of its blocks: what all ranks hold may lie
        beside their shards. What several need is in one order on all of them.

        Args:
            needs: of every rank, whether it needs the blocks of these tensors, in their order.
            are_short: on all ranks the same.
        """
        blocks = ((name, block.offsets) for name in names for block in commit.tensors[name].blocks)
        needed_by = dict(zip(blocks, map(bytes, zip(*needs, strict=True)), strict=True))
        pieces = []
        found = pieces_of(commit, names, lambda name, block: needed_by[name, block.offsets], are_short)
        for number, piece in enumerate(found):
            name, block = piece.blocks[0]
            ranks = [other for other, need in enumerate(needed_by[name, block.offsets]) if need]
            if rank in ranks:
                pieces.append(cls(piece, number, ranks))
        # What several wait for comes first: each would get to it at another time else, and the first wait for the last.
        return sorted(pieces, key=lambda each: len(each.ranks) == 1)

    @property
    def reader(self) -> int:
        """The one of them that reads it from the storage."""
        return self.ranks[self.number % len(self.ranks)]


def read_together(
    commit: Commit,
    skeleton: bytes,
    storage: Storage,
    group: ProcessGroup,
    carrier: Carrier,
    components: Collection[str] | None = None,
    layout: Layout = lambda name: None,
    *,
    tick: Callable[[], None],
) -> tuple[dict[str, Any] | None, BadCommit | None]:
    """The state of a commit, or some components of it, or why there is none: the same on all ranks.

    Raises:
        ConfigError, StorageError: as `agree_on_error`.
        PeerFailedError: what was good where it was read came to another rank as something else. That is a fault of the
            connection between them, and says nothing of the commit.
    """
    no_room: CheckpointError | ConfigError | None = None
    needed = b""
    try:
        tensors, targets = state_to_fill(commit, components, layout)
        needed = bytes(targets.need(name, block) for name in tensors for block in commit.tensors[name].blocks)
    except (CheckpointError, ConfigError) as error:
        no_room = _itself(error)
    wrong, needs = _told(no_room, needed, group, commit.num_blocks)
    if wrong:
        return None, wrong
    are_short = storage.is_local and group.world_size > 1 and carrier.are_all_near
    pieces = _Piece.all_of(commit, tensors, needs, group.rank, are_short)
    spread = Spread(commit, tensors, layout, [each.piece for each in pieces])
    passing = _Passing(
        carrier, targets, spread, group.rank, lambda piece: confirmed_piece(storage, piece, targets), tick
    )
    unread: CheckpointError | StorageError | None = None
    own = [each for each in pieces if each.reader == group.rank]
    parallel = PARALLEL_PIECES
    if storage.is_local:
        # Where all are asked for at once all come late, and what others wait for then is left to copy when all is read.
        parallel = max(LEAST_PARALLEL_PIECES, parallel // max(1, carrier.num_near))

    shown: dict[int, memoryview] = {}
    """Pieces that others may copy already, by number."""

    def read(each: _Piece) -> memoryview:
        shown[each.number] = data = confirmed_piece(storage, each.piece, targets)
        carrier.show(each.number, data)
        return data

    with closing(Reading(own, read, parallel)) as mine:
        for each in pieces:
            if each.reader == group.rank and unread is None:
                try:
                    next(mine)
                except (CheckpointError, StorageError) as error:
                    # The others are told when all is sent, and get nothing good meanwhile.
                    unread = _itself(error)
            data = shown.pop(each.number, None)
            passing.begin(each, targets.place_of(each.piece) if data is None else data)
        passing.end()
    bad: Exception | None = unread or passing.bad
    state = None
    if bad is None:
        try:
            state = state_of(commit, skeleton, spread.tensors, components)
        except CheckpointError as error:
            bad = _itself(error)
    wrong = agree_on_error(bad, group)
    return (None, wrong) if wrong else (state, None)


class _Passing:
    """Of pieces, from the ranks that read them to those that need them.

    Args:
        read_again: fills the targets with a piece that this rank cannot have from the one that read it.

    Attributes:
        bad: that failed, or a piece came as something else.
    """

    def __init__(
        self,
        carrier: Carrier,
        targets: Targets,
        spread: Spread,
        rank: int,
        read_again: Callable[[Piece], object],
        tick: Callable[[], None],
    ) -> None:
        self.bad: CheckpointError | StorageError | PeerFailedError | None = None
        self._carrier = carrier
        self._targets = targets
        self._spread = spread
        self._rank = rank
        self._read_again = read_again
        self._tick = tick
        self._going: list[tuple[_Piece, memoryview, Carriage]] = []

    def begin(self, each: _Piece, data: memoryview) -> None:
        """With the bytes of a piece, or the place for them. Takes what is ready, waits if too many are under way."""
        self._going.append((each, data, self._carrier.begin(each.number, data, each.reader, each.ranks)))
        while len(self._going) >= IN_FLIGHT or self._next_ready() is not None:
            self._take()

    def end(self) -> None:
        """Waits for all."""
        while self._going:
            self._take()

    def _in_turn(self) -> list[int]:
        """Places of what is under way: what comes to this rank before what goes from it."""
        return sorted(range(len(self._going)), key=lambda place: self._going[place][0].reader == self._rank)

    def _next_ready(self) -> int | None:
        return next((place for place in self._in_turn() if self._going[place][2].is_ready()), None)

    def _take(self) -> None:
        ready = self._next_ready()
        each, data, carriage = self._going.pop(self._in_turn()[0] if ready is None else ready)
        is_there = carriage.wait()
        self._tick()
        if not is_there:
            if self.bad is None:  # else it is of no use, and the storage may be away
                try:
                    self._read_again(each.piece)
                except (CheckpointError, StorageError) as error:
                    self.bad = _itself(error)
        elif each.reader != self._rank:  # else that was done when it was read
            try:
                if carriage.came_over_network:
                    check(each.piece, data)
                self._targets.fill(each.piece, data)
            except CheckpointError as error:
                self.bad = self.bad or PeerFailedError(
                    f"what rank {each.reader} sent of a commit came as something else: {error}"
                )
        self._spread.come(each.piece)


def _itself(error: Met) -> Met:
    """An error without where it came from: frames that keep in memory what is read, while other commits are."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def agree_on_error(error: Exception | None, group: ProcessGroup) -> BadCommit | None:
    """With a commit, as one of the ranks found it; None if none did. The same on all ranks.

    Raises:
        ConfigError, StorageError, PeerFailedError: some rank met one, which says nothing of the commit.
    """
    wrong, _ = _told(error, b"", group)
    return wrong


def _told(
    error: Exception | None, word: bytes, group: ProcessGroup, most: int = 0
) -> tuple[BadCommit | None, list[bytes]]:
    """The same, and if nothing is wrong what every rank has to say besides, in `most` bytes: in one round, as each
    waits for the slowest rank. Of what is wrong that may be the beginning alone."""
    size = max(most, ERROR_BYTES)
    if error is not None:
        word = f"{_kind(error)}\n{error}".encode(errors="backslashreplace")[:size]
    heard = group.begin_all_gather(_HEAD.pack(error is not None, len(word)) + word.ljust(size, b"\0"))()
    heads = [_HEAD.unpack_from(each) for each in heard]
    words = [each[_HEAD.size : _HEAD.size + length] for each, (_, length) in zip(heard, heads, strict=True)]
    errors = [each for each, (is_error, _) in zip(words, heads, strict=True) if is_error]
    met = [each.decode(errors="replace").split("\n", 1) for each in errors]
    for name, kind in _COUNT.items():
        for text in (text for each, text in met if each == name):
            found = kind(text)
            if isinstance(found, CheckpointError | UnreadableError):
                return found, []
            raise found
    return None, words


def _kind(error: Exception) -> str:
    """The name that it goes by in `_COUNT`."""
    return next(name for name, kind in reversed(_COUNT.items()) if isinstance(error, kind))
