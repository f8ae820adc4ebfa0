"""Commits that several ranks read together: who reads which piece, and what ranks send each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from elastic_ddp.distributed.process_group import ProcessGroup
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


def test_a_rank_never_has_more_pieces_in_flight_than_the_limit(tmp_path: Path) -> None:
    save(Storage(tmp_path), 1)
    assert run_ranks(2, most_in_flight, str(tmp_path)) == [PIECES_IN_FLIGHT] * 2


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


def restore_over_a_bad_connection(group: ProcessGroup, uri: str) -> str:
    """What a restore raises where a piece arrives changed on rank 1."""
    finish_oldest = TransferWindow._finish_oldest

    def finish_changed(window: TransferWindow[Any]) -> None:
        (shared, data), messages, size = window._items.popleft()
        group.finish(messages)
        if shared.reader != group.rank:
            data[0] ^= 1
        window._items.appendleft(((shared, data), [], size))
        finish_oldest(window)

    if group.rank == 1:
        TransferWindow._finish_oldest = finish_changed  # type: ignore[method-assign]
    store = SingleRankStore(Storage(uri), keep=2)
    with pytest.raises(PeerFailedError) as caught:
        restore(store, Storage(uri), group)
    group.close(intact=False)
    return f"{caught.value}; rejected: {store.rejected}"


def test_a_piece_that_changes_between_ranks_is_a_peer_failure(tmp_path: Path) -> None:
    save(Storage(tmp_path), 1, 2)
    before = Storage(tmp_path).list()
    first, second = run_ranks(2, restore_over_a_bad_connection, str(tmp_path))
    assert first == second and "arrived changed" in second and "rejected: []" in second
    assert Storage(tmp_path).list() == before, "the commit is not to blame"
