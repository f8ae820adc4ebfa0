"""Saves of several ranks, which are threads."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import torch

from elastic_ddp.checkpoint import CheckpointStore, Commit, Save, Saver
from elastic_ddp.storage import Storage
from tests.unit.test_checkpoint import keys_of, make_state, restored_step
from tests.unit.test_saving import LocalMailbox

PART_BYTES = 5 << 20
"""The least that S3 takes for a part of an object."""


def save_on_ranks(
    storages: Sequence[Storage], step: int, *, retry_s: float = 0.0, state: dict[str, Any] | None = None
) -> Commit | Exception:
    """What came of a save that as many ranks made as there are storages."""
    mailbox, attempt = LocalMailbox(), uuid.uuid4().hex
    ended: list[Commit | Exception] = []
    savers = [
        Saver(each, CheckpointStore(each, keep=2), of_rank_0=frozenset({"user"}), retry_s=retry_s) for each in storages
    ]
    for rank, saver in enumerate(savers):
        save = Save(
            step=step,
            attempt=attempt,
            world_size=len(savers),
            rank=rank,
            mailbox=mailbox,
            record={"step": step},
            fence=lambda: None,
            on_end=ended.append,
        )
        saver.begin(state or make_state(step), save)
    for saver in savers:
        saver.wait()
    return ended[0]


def large_state(step: int, num_parts: int) -> dict[str, Any]:
    """As `make_state`, with tensors of a part's size beside."""
    generator = torch.Generator().manual_seed(step)
    large = {
        f"tensor{number}": torch.randint(256, (PART_BYTES,), dtype=torch.uint8, generator=generator)
        for number in range(num_parts)
    }
    return {**make_state(step), "large": large}


def is_whole(storage: Storage, *steps: int) -> None:
    """These are the commits, the last one restores, and nothing lies beside them."""
    assert restored_step(storage) == steps[-1]
    commits = [commit for _, commit in CheckpointStore(storage, keep=9).all_commits()]
    assert all(isinstance(commit, Commit) for commit in commits)
    assert storage.list() == sorted(key for commit in commits for key in keys_of(commit))
    assert [commit.step for commit in commits] == [*reversed(steps)]
