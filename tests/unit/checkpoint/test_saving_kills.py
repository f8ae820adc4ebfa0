"""SIGKILL before and after each operation of each rank in a save."""

from __future__ import annotations

import signal
import uuid
from pathlib import Path

import pytest

from elastic_ddp.checkpoint import Commit
from elastic_ddp.checkpoint.saver import RankFailedError
from elastic_ddp.storage.storage import Storage
from tests.ranks import PROCESSES
from tests.saving import FileMailbox
from tests.unit.checkpoint.test_checkpoint import restored_step, save
from tests.unit.checkpoint.test_saving_faults import CHECK_EVERY, check_next
from tests.unit.faulty import EVERY, WHEN, ranks_of_many_blocks, save_until_killed


@pytest.mark.usefixtures("quick_ranks")
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_kill_at_any_operation_leaves_a_complete_commit(tmp_path: Path, rank: int, when: str, every: int) -> None:
    at, killed = 0, True
    while killed:
        messages, uri = tmp_path / f"messages-{at}", str(tmp_path / f"commits-{at}")
        messages.mkdir()
        save(Storage(uri), 1, 2, keep=2)
        ranks = ranks_of_many_blocks(lambda _: Storage(uri), 2)  # noqa: B023
        ranks.mailbox = FileMailbox(messages)
        attempt = uuid.uuid4().hex
        victim = PROCESSES.Process(target=save_until_killed, args=(uri, messages, rank, attempt, when, at))
        victim.start()
        ranks.begin(3, of=[1 - rank], attempt=attempt)
        victim.join()
        killed = victim.exitcode == -signal.SIGKILL
        assert killed or victim.exitcode == 0
        if killed:
            ranks.savers[1 - rank].generation_broke()  # as the other rank would detect
        ranks.savers[1 - rank].wait()
        restored = restored_step(Storage(uri))
        if rank == 1:
            assert isinstance(ranks.ended[0], RankFailedError if killed else Commit)
            assert restored == (2 if killed else 3)
        assert restored in ((2, 3) if killed else (3,))
        if at % CHECK_EVERY == rank:
            check_next(uri, 2, 2)
        at += every
    assert at > (10 if rank == 0 else 2), "the number of operations of a save"
