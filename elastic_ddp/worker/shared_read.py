"""Reading a commit with all ranks: each byte leaves the storage once, and ranks exchange the pieces that they need."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from elastic_ddp.checkpoint import Commit
from elastic_ddp.checkpoint.pieces import MAX_PIECE_BYTES, Piece, Targets, pieces_of
from elastic_ddp.checkpoint.reader import ReadAhead, allocate_state, as_sharded, build_state, read_piece
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.distributed.state_transfer import TransferWindow, begin_transfer
from elastic_ddp.errors import CheckpointError, ConfigError, PeerFailedError, StorageError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.tensors.state_tree import Layout
from elastic_ddp.worker.agreement import agree_on_error, without_traceback

PIECES_IN_FLIGHT = 8
"""A rank has at most this many pieces between ranks, which bounds the memory for them."""


@dataclass(frozen=True)
class SharedPiece:
    """A piece of a commit and the ranks that need it."""

    piece: Piece
    number: int
    """The place of the piece among all pieces that some rank needs."""
    ranks: list[int]

    @property
    def reader(self) -> int:
        """The rank that reads the piece from the storage."""
        return self.ranks[self.number % len(self.ranks)]


def plan_pieces(commit: Commit, names: Collection[str], needs: Sequence[bytes], rank: int) -> list[SharedPiece]:
    """Returns the pieces that `rank` needs, in an order that is the same on all ranks.

    A rank that needs a piece needs all blocks in it. Pieces that several ranks need come first: if they came between
    pieces of one rank, ranks would wait for each other's own pieces.

    Args:
        commit: the commit to read.
        names: the tensors to read.
        needs: for each rank, one byte for each block of these tensors: whether the rank needs the block.
        rank: this rank.
    """
    blocks = ((name, block.offsets) for name in names for block in commit.tensors[name].blocks)
    needed_by = dict(zip(blocks, map(bytes, zip(*needs, strict=True)), strict=True))
    planned = []
    pieces = pieces_of(commit, names, lambda name, block: needed_by[name, block.offsets])
    for number, piece in enumerate(pieces):
        name, block = piece.blocks[0]
        ranks = [other for other, is_needed in enumerate(needed_by[name, block.offsets]) if is_needed]
        if rank in ranks:
            planned.append(SharedPiece(piece, number, ranks))
    return sorted(planned, key=lambda shared: len(shared.ranks) == 1)


def read_shared(
    commit: Commit,
    skeleton: bytes,
    storage: Storage,
    group: ProcessGroup,
    *,
    components: Collection[str] | None = None,
    layout: Layout = lambda name: None,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Returns the state of a commit, on the CPU. Every rank calls it, and every rank returns or raises the same.

    Args:
        commit: the commit to read.
        skeleton: its skeleton.
        storage: the folder that it is in.
        group: the open process group.
        components: the components to read; None for all.
        layout: the tensors of which this rank reads its shard only.
        tick: called whenever this rank has a piece.

    Raises:
        CheckpointError: the commit does not verify.
        ConfigError: a rank has too little memory for the commit.
        StorageError: the storage failed.
        PeerFailedError: a peer failed, or bytes that were good on one rank were changed on the way to another.
    """
    error: Exception | None = None
    needed = b""
    try:
        tensors, targets = allocate_state(commit, components, layout)
        needed = bytes(targets.needs(name, block) for name in tensors for block in commit.tensors[name].blocks)
    except ConfigError as raised:
        error = without_traceback(raised)
    needs = agree_on_error(error, group, needed)
    error = _read_pieces(plan_pieces(commit, tensors, needs, group.rank), storage, targets, group, tick)
    agree_on_error(error, group)
    return build_state(skeleton, as_sharded(commit, tensors, layout), components)


def _read_pieces(
    pieces: Sequence[SharedPiece], storage: Storage, targets: Targets, group: ProcessGroup, tick: Callable[[], None]
) -> Exception | None:
    """Fills the targets of this rank and sends the others the pieces that this rank reads. Returns its error, if any.

    After an error the rank still sends and receives all pieces, so that no other rank waits for it.
    """
    error: Exception | None = None

    def finish(item: tuple[SharedPiece, memoryview]) -> None:
        nonlocal error
        shared, data = item
        tick()
        if shared.reader != group.rank and error is None:
            try:
                shared.piece.verify(data)
                targets.fill(shared.piece, data)
            except CheckpointError as raised:
                error = PeerFailedError(f"rank {shared.reader} sent bytes that arrived changed: {raised}")

    window = TransferWindow(group, finish, max_items=PIECES_IN_FLIGHT, max_bytes=PIECES_IN_FLIGHT * MAX_PIECE_BYTES)
    own = [shared for shared in pieces if shared.reader == group.rank]
    with closing(ReadAhead(own, lambda shared: read_piece(storage, shared.piece, targets))) as reading:
        for shared in pieces:
            data = None
            if shared.reader == group.rank and not isinstance(error, StorageError):
                try:
                    _, data = next(reading)
                except (CheckpointError, StorageError) as raised:
                    error = without_traceback(raised)
            if data is None:
                data = targets.buffer_for(shared.piece)
            messages = begin_transfer(data, group, tag=shared.number, source=shared.reader, ranks=shared.ranks)
            window.add((shared, data), messages, len(data))
        window.drain()
    return error
