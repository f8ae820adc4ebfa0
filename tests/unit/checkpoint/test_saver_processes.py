"""Saves of ranks in separate processes, with torch's store as the mailbox."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from elastic_ddp.checkpoint import Commit
from elastic_ddp.checkpoint.saver import Save, Saver
from elastic_ddp.distributed.process_group import ProcessGroup
from elastic_ddp.distributed.sockets import shut_down
from elastic_ddp.distributed.torch_store import StoreConnection, StoreMailbox
from elastic_ddp.storage.storage import Storage
from tests.ranks import empty_store, run_ranks
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
