"""Saves of ranks in separate processes, with torch's store as the mailbox."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_ddp.checkpoint import Commit
from elastic_ddp.checkpoint.saver import Save, Saver
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.distributed.sockets import shut_down
from elastic_ddp.distributed.torch_store import StoreConnection, StoreMailbox
from elastic_ddp.storage.storage import Storage
from tests.ranks import PROCESSES, empty_store, run_ranks
from tests.single_rank_store import SingleRankStore
from tests.unit.checkpoint.test_checkpoint import make_state, restored_step


def test_reports_above_the_value_limit_of_the_torch_store_are_sent(tmp_path: Path) -> None:
    address = ("127.0.0.1", empty_store().port)
    storage, ended = Storage(tmp_path), list[Commit | Exception]()
    long_names = {character * (3 << 20): torch.ones(3) for character in "abcd"}  # rank 1 writes all of them
    state = {"model": {"large": torch.ones(1000), **long_names}}
    savers = [Saver(storage, SingleRankStore(storage, keep=1)) for _ in range(2)]
    for rank, saver in enumerate(savers):
        save = Save(
            step=1,
            attempt="0" * 32,
            world_size=2,
            rank=rank,
            mailbox=StoreMailbox(StoreConnection(), address, lambda: address, "saves1"),
            record={},
            fence=lambda: None,
            on_end=ended.append,
        )
        saver.begin(state, save)
    for saver in savers:
        saver.wait()
    assert isinstance(ended[0], Commit) and len(ended[0].tensors) == 5


class Killed(Storage):
    """Kills its process before or after its n-th write."""

    def __init__(self, uri: str, at: int, after: bool) -> None:
        super().__init__(uri)
        self.at, self.after, self.count = at, after, 0

    def write(self, key: str, data: bytes | memoryview) -> None:
        self.count += 1
        if self.count == self.at and not self.after:
            os.kill(os.getpid(), signal.SIGKILL)
        super().write(key, data)
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def store_of(group: ProcessGroup) -> tuple[str, int]:
    return group.assignment.store_host, group.assignment.store_port


def save_with_others(group: ProcessGroup, uri: str, steps: list[int]) -> list[str]:
    """Saves some steps on all ranks of a group. Returns the outcomes on rank 0."""
    storage = Storage(uri)
    saver = Saver(storage, SingleRankStore(storage, keep=2), of_rank_0=frozenset({"user"}))
    ended: list[str] = []
    for step in steps:
        save = Save(
            step=step,
            attempt=f"{step:032x}",
            world_size=group.world_size,
            rank=group.rank,
            mailbox=StoreMailbox(StoreConnection(), store_of(group), lambda: store_of(group), "saves1"),
            record={"step": step},
            fence=lambda: None,
            on_end=lambda outcome: ended.append(type(outcome).__name__),
        )
        saver.begin(make_state(step), save)
    saver.wait()
    return ended


def test_ranks_in_separate_processes_make_one_commit(tmp_path: Path) -> None:
    results = run_ranks(3, save_with_others, str(tmp_path), [4, 5])
    assert results == [["Commit", "Commit"], [], []]
    assert restored_step(Storage(tmp_path)) == 5


def die_in_a_save(rank: int, store: tuple[str, int], uri: str, dies: int, at: int, after: bool, outcomes: Any) -> None:
    storage = Killed(uri, at, after) if rank == dies else Storage(uri)
    saver = Saver(storage, SingleRankStore(Storage(uri), keep=2), of_rank_0=frozenset({"user"}))
    save = Save(
        step=2,
        attempt="0" * 32,
        world_size=2,
        rank=rank,
        mailbox=StoreMailbox(StoreConnection(), store, lambda: store, "saves1"),
        record={"step": 2},
        fence=lambda: None,
        on_end=lambda outcome: outcomes.put(type(outcome).__name__),
    )
    saver.begin(make_state(2), save)
    saver.generation_broke()  # as the other rank would detect
    saver.wait()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("dies", "at"), [(0, 1), (0, 2), (1, 1)], ids=["rank 0, blocks", "rank 0, skeleton", "rank 1"])
def test_after_a_kill_during_a_save_the_commit_before_is_restored(
    tmp_path: Path, dies: int, at: int, after: bool
) -> None:
    storage = Storage(tmp_path)
    SingleRankStore(storage, keep=2).save(make_state(1), step=1, record={"step": 1})
    store = empty_store()
    outcomes = PROCESSES.SimpleQueue()
    arguments = (("127.0.0.1", store.port), str(tmp_path), dies, at, after, outcomes)
    ranks = [PROCESSES.Process(target=die_in_a_save, args=(rank, *arguments)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert ranks[dies].exitcode == -signal.SIGKILL and ranks[1 - dies].exitcode == 0
    assert restored_step(storage) == 1
    assert dies == 0 or outcomes.get() == "RankFailedError"
    newest = SingleRankStore(storage, keep=2).save(make_state(3), step=3, record={"step": 3})
    assert restored_step(storage) == 3 and not storage.list("step=2"), "the attempt has been removed"
    assert newest.step == 3


def test_a_mailbox_uses_the_new_store_after_a_restart_of_the_rendezvous() -> None:
    def new_store() -> dist.TCPStore:
        return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    first = new_store()
    stores = [("127.0.0.1", first.port)]
    mailboxes = [StoreMailbox(StoreConnection(), stores[0], lambda: stores[-1], "saves1") for _ in range(2)]
    mailboxes[0].put("a", "one")
    assert mailboxes[1].get("a") == "one" and mailboxes[1].get("b") is None
    second = new_store()
    stores.append(("127.0.0.1", second.port))
    for mailbox in mailboxes:
        shut_down(mailbox._connection.sockets)  # as if its process had died
    mailboxes[0].put("a", "two")
    assert mailboxes[1].get("a") == "two"
    mailboxes[1].remove("a")
    assert mailboxes[0].get("a") is None
