"""A fault is injected at each operation of each rank in a save."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from elastic_ddp.checkpoint import Commit
from elastic_ddp.errors import CheckpointError, StorageError
from elastic_ddp.storage.storage import Storage
from tests.single_rank_store import SingleRankStore
from tests.unit.checkpoint.test_checkpoint import keys_of, make_state, restored_step, save
from tests.unit.faulty import EVERY, FaultyStorage, new_folder, ranks_of_many_blocks

LIMIT_S = 60.0


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


CHECK_EVERY = 3
"""The saves that follow take longer than the fault, so they are checked after each third operation."""


class Save:
    """A save of several ranks after commits 1 and 2, with a fault at an operation of one rank."""

    def __init__(self, uri: str, world_size: int, rank: int, fault: str, at: int, keep: int) -> None:
        self.uri, self.world_size, self.keep = uri, world_size, keep
        save(Storage(uri), 1, 2, keep=keep)
        self.faulty = FaultyStorage(uri, fault, at, self._hold)
        self.ranks = ranks_of_many_blocks(
            lambda other: self.faulty if other == rank else FaultyStorage(uri, "", None), world_size, keep=keep
        )
        self.rank = rank
        self.asked: set[str] = set()
        mailbox = self.ranks.mailbox
        get = mailbox.get
        mailbox.get = lambda key: self.asked.add(key) or get(key)  # type: ignore[func-returns-value,method-assign]

    def run(self) -> Commit | Exception | None:
        """Returns the outcome; None if rank 0 died."""
        self.ranks.begin(3)
        savers = self.ranks.savers
        while any(saver.is_busy for saver in savers):
            if self.faulty.dead:
                for saver in savers:
                    saver.generation_broke()  # as the others would detect
            savers[0].wait(within_s=0.005)
            time.sleep(0.0005)
        return self.ranks.ended[0] if self.ranks.ended else None

    def _hold(self) -> None:
        """Waits until the others can do no more without this rank."""
        if self.rank == 0:
            until(lambda: not any(saver.is_busy for saver in self.ranks.savers[1:]))
        else:
            until(lambda: any(key.endswith(f"/{self.rank}") for key in [*self.asked]))

    @property
    def manifest_is_torn(self) -> bool:
        try:
            Commit.from_bytes("commits/3.json", Storage(self.uri).read("commits/3.json"))
        except CheckpointError:
            return True
        return False


def check_next(uri: str, world_size: int, keep: int) -> None:
    """Checks that the run continues, and that after `keep` + 1 commits no leftovers exist."""
    restored = restored_step(Storage(uri))
    assert restored is not None
    ranks = ranks_of_many_blocks(lambda rank: Storage(uri), world_size, keep=keep)
    newest: list[Any] = []
    for step in range(restored + 1, restored + 2 + keep):
        ranks.begin(step)
        newest.append(ranks.wait())
        assert isinstance(newest[-1], Commit) and restored_step(Storage(uri)) == step
    left, expected = Storage(uri).list(), sorted(key for commit in newest[-keep:] for key in keys_of(commit))
    if Storage(uri).list("set-aside"):  # it stays, with its objects
        left = [key for key in left if not key.startswith(("set-aside/", "step=3/"))]
        expected = [key for key in expected if not key.startswith("step=3/")]
    assert left == expected
    assert [upload for upload in Storage(uri).uploads() if not upload.key.startswith("set-aside/")] == []


FAULTS = [
    *("error before", "error after", "dies before", "dies within", "lies", "twice", "calls before"),
    pytest.param("dies after", marks=pytest.mark.chaos),
]


@pytest.mark.usefixtures("quick_ranks")
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("world_size", "keep"),
    [
        pytest.param(2, 1, id="2 ranks, 1 kept"),
        pytest.param(2, 2, id="2 ranks", marks=pytest.mark.chaos),
        pytest.param(3, 1, id="3 ranks", marks=pytest.mark.chaos),
    ],
)
def test_after_any_fault_of_a_rank_in_a_save_a_complete_commit_is_restored(
    world_size: int, keep: int, fault: str, every: int
) -> None:
    for rank in range(world_size):
        at = 0
        while True:
            saved = Save(new_folder(), world_size, rank, fault, at, keep)
            outcome = saved.run()
            what = f"{fault} at operation {at} of rank {rank}: {outcome!r:.200}"
            restored = restored_step(Storage(saved.uri))
            assert restored in (2, 3), what
            if rank == 0 and saved.faulty.dead:  # it reports only if it died after its commit
                assert outcome is None or isinstance(outcome, Commit), what
            else:
                assert outcome is not None, what
            assert restored == 3 or not isinstance(outcome, Commit) or (fault == "lies" and saved.manifest_is_torn), (
                what
            )
            if fault in ("twice", "calls before"):
                assert isinstance(outcome, Commit), what
            if fault.startswith("dies"):
                assert saved.faulty.dead == (saved.faulty.operations > at), what
            if at % CHECK_EVERY == rank or fault == "lies":
                check_next(saved.uri, world_size, keep)
            if saved.faulty.operations <= at:
                break
            at += every
        assert at >= (9 if rank == 0 else 2), "the number of operations of a save"


def test_losing_the_first_commit_removes_nothing() -> None:
    """There is no other commit, and nothing is removed."""
    count = FaultyStorage(new_folder(), "", None)
    SingleRankStore(count, keep=1).save(make_state(1), step=1, record={"step": 1})
    for at in range(count.operations):
        faulty = FaultyStorage(new_folder(), "lies", at)
        with suppress(StorageError):
            SingleRankStore(faulty, keep=1).save(make_state(1), step=1, record={"step": 1})
        save(Storage(faulty.uri), 1, keep=1)
        assert restored_step(Storage(faulty.uri)) == 1
