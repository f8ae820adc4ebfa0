"""Commits that several ranks read together: who reads which piece, and what ranks send each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from elastic_ddp.distributed.process_group import ProcessGroup, is_peer_failure
from elastic_ddp.distributed.state_transfer import TransferWindow
from elastic_ddp.errors import PeerFailedError
from elastic_ddp.storage.storage import Storage
from elastic_ddp.worker.restore import restore
from elastic_ddp.worker.shared_read import PIECES_IN_FLIGHT
from tests.ranks import run_ranks
from tests.single_rank_store import SingleRankStore
from tests.unit.checkpoint.test_checkpoint import save, step_of


@pytest.fixture(autouse=True)
def _many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits have many more blocks than a rank may have in flight."""
    monkeypatch.setattr("elastic_ddp.checkpoint.planning.BLOCK_BYTES", 8)


def most_in_flight(group: ProcessGroup, uri: str) -> int:
    """The largest number of pieces that this rank had in flight."""
    finish_oldest, most = TransferWindow._finish_oldest, 0

    def counted(window: TransferWindow[Any]) -> None:
        nonlocal most
        most = max(most, len(window._items))
        finish_oldest(window)

    with (
        mock.patch.object(TransferWindow, "_finish_oldest", counted),
        mock.patch("elastic_ddp.checkpoint.pieces.MAX_PIECE_BYTES", 1),
    ):
        restore(SingleRankStore(Storage(uri), keep=2), Storage(uri), group)
    return most


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rank_never_has_more_pieces_in_flight_than_the_limit(tmp_path: Path, world_size: int) -> None:
    save(Storage(tmp_path), 1)
    assert run_ranks(world_size, most_in_flight, str(tmp_path)) == [PIECES_IN_FLIGHT] * world_size


class BadBlocks(Storage):
    """Some blocks are read with a flipped bit."""

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        count = super().read_into(key, start, buffer)
        if start % 3 == 0:
            buffer[0] ^= 1
        return count


def restore_where_one_rank_reads_bad_blocks(group: ProcessGroup, uri: str) -> tuple[int | None, list[str]]:
    storage = BadBlocks(uri) if group.rank == 1 else Storage(uri)
    store = SingleRankStore(storage, keep=2)
    with mock.patch("elastic_ddp.checkpoint.pieces.MAX_PIECE_BYTES", 1):
        found = restore(store, storage, group)
    return None if found is None else step_of(found[1]), [reason for _, reason in store.rejected]


def test_bad_pieces_on_one_rank_block_no_rank_and_name_the_checksum(tmp_path: Path) -> None:
    save(Storage(tmp_path), 1)
    (step, [reason]), (other_step, _) = run_ranks(2, restore_where_one_rank_reads_bad_blocks, str(tmp_path))
    assert step is None and other_step is None
    assert "checksum" in reason, "not that bytes changed between ranks"


def restore_over_a_bad_connection(group: ProcessGroup, uri: str, what: str) -> str:
    """What a restore raises where bytes arrive changed on rank 1."""
    finish_oldest, broadcast = TransferWindow._finish_oldest, group.broadcast_bytes

    def finish_changed(window: TransferWindow[Any]) -> None:
        (shared, data), messages, size = window._items.popleft()
        group.finish(messages)
        if shared.reader != group.rank:
            data[0] ^= 1
        window._items.appendleft(((shared, data), [], size))
        finish_oldest(window)

    if group.rank == 1 and what == "piece":
        TransferWindow._finish_oldest = finish_changed  # type: ignore[method-assign]
    if group.rank == 1 and what == "skeleton":
        group.broadcast_bytes = lambda data: broadcast(data).replace(b"0.1", b"0.2")  # type: ignore[assignment]
    if group.rank == 1 and what == "manifest":
        group.broadcast_bytes = lambda data: broadcast(data).replace(b'"step":2', b'"step":3')  # type: ignore[assignment]
    store = SingleRankStore(Storage(uri), keep=2)
    try:
        restore(store, Storage(uri), group)
    except PeerFailedError as error:
        group.close(intact=False)
        return f"{error}; rejected: {store.rejected}"
    except RuntimeError as error:
        assert is_peer_failure(error)
        group.close(intact=False)
        return "the peer failed"
    return "restored"


@pytest.mark.parametrize("what", ["piece", "skeleton", "manifest"])
def test_bytes_that_change_between_ranks_are_a_peer_failure(tmp_path: Path, what: str) -> None:
    save(Storage(tmp_path), 1, 2)
    before = Storage(tmp_path).list()
    first, second = run_ranks(2, restore_over_a_bad_connection, str(tmp_path), what)
    assert "arrived changed" in second and "rejected: []" in second
    assert first == (second if what == "piece" else "the peer failed")
    assert Storage(tmp_path).list() == before, "the commit is not to blame"
